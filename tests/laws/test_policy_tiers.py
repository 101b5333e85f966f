"""Quality-tiered batching against an independent reading of the paper's text, and the laws of its aging."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import overload

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simmoe.policies.protocols import PolicyContext
from simmoe.policies.samples import SAMPLE_CONTEXT, admitted
from simmoe.policies.tiers import Tiers
from simmoe.policies.validate import check_plan
from simmoe.policies.views import RequestView, StepView

Prefill = Callable[[int, int], float]


def request(name: str, arrival_s: float, tokens: int, k: int) -> RequestView:
    return RequestView(name, arrival_s, tokens, 0, k)


def step(waiting: Sequence[RequestView], num_preempted: int = 0, **changes: object) -> StepView:
    """A step with ``waiting`` behind ``num_preempted`` preempted requests, sorted by tier and arrival."""
    fresh = sorted(waiting[num_preempted:], key=lambda r: (r.k_qos, r.arrival_s))
    queue = [*waiting[:num_preempted], *fresh]
    view = StepView(
        now_s=100.0,
        dp_rank=0,
        waiting=queue,
        running=(),
        token_budget=64,
        max_num_seqs=100,
        free_kv_blocks=10_000,
        block_size=16,
        k_running=0,
        oldest=min(queue, key=lambda r: r.arrival_s, default=None),
        num_preempted=num_preempted,
    )
    return view._replace(**changes)  # type: ignore[arg-type]


def context(prefill_s: Prefill, chunked: bool = True) -> PolicyContext:
    return replace(SAMPLE_CONTEXT, prefill_s=prefill_s, enable_chunked_prefill=chunked)


queues = st.lists(st.tuples(st.integers(0, 90), st.integers(1, 40), st.integers(1, 5)), min_size=1, max_size=12).map(
    lambda rows: [request(f"r{i}", float(a), n, k) for i, (a, n, k) in enumerate(rows)]
)

#: T(n, k) without any shape at all (a table looked up by a hash) and with a launch cost and a jump, as measured.
timings = st.one_of(
    st.lists(st.floats(0.1, 10), min_size=7, max_size=7).map(lambda t: lambda n, k: t[(n * 5 + k * 3) % 7]),
    st.tuples(st.floats(0, 50), st.floats(0, 1), st.floats(0.001, 1), st.integers(1, 64), st.floats(0, 50)).map(
        lambda p: lambda n, k: p[0] + p[1] * n + p[2] * n * k + (p[4] if n > p[3] else 0.0)
    ),
)

limits = st.fixed_dictionaries(
    {
        "token_budget": st.integers(1, 250),
        "max_num_seqs": st.one_of(st.just(100), st.integers(1, 6)),
        "free_kv_blocks": st.one_of(st.just(1000), st.integers(0, 15)),
    }
)


def batch_by_the_text(
    view: StepView, prefill_s: Prefill, chunked: bool, k_running: int = 0, max_wait_s: float = float("inf")
) -> list[str]:
    """Section III-C2 read literally: for each number of tiers, compose its batch anew and compare with one tier more.

    Sorted by (k, arrival); what a tier contributes is what fits the budget, sequences and KV blocks left. In front of
    all tiers come preempted requests, as queued, then those that have waited long enough, by arrival.
    """
    preempted = list(view.waiting[: view.num_preempted])
    rest = list(view.waiting[view.num_preempted :])
    aged = sorted((r for r in rest if r.arrival_s + max_wait_s <= view.now_s), key=lambda r: (r.arrival_s, r.k_qos))
    first = preempted + aged
    queue = sorted((r for r in rest if r not in aged), key=lambda r: (r.k_qos, r.arrival_s))
    tiers = sorted({r.k_qos for r in queue})

    def compose(num_tiers: int) -> list[tuple[RequestView, int]]:
        batch: list[tuple[RequestView, int]] = []
        blocks = 0
        for r in first + [r for r in queue if r.k_qos in tiers[:num_tiers]]:
            left = view.token_budget - sum(tokens for _, tokens in batch)
            blocks += (r.prompt_tokens + view.block_size - 1) // view.block_size
            fits = left > 0 and (chunked or r in preempted or r.prompt_tokens <= left)
            if not fits or len(batch) == view.max_num_seqs or blocks > view.free_kv_blocks:
                break
            batch.append((r, min(left, r.prompt_tokens)))
        return batch

    def rate(batch: list[tuple[RequestView, int]]) -> float:
        n = sum(tokens for _, tokens in batch)
        return n / prefill_s(n, max(k_running, *(r.k_qos for r, _ in batch))) if batch else 0.0

    j = 0 if first else 1
    while j < len(tiers) and compose(j + 1) != compose(j) and rate(compose(j + 1)) >= rate(compose(j)):
        j += 1
    return [r.request_id for r, _ in compose(j)]


def enters(policy: Tiers, view: StepView, chunked: bool = True) -> list[str]:
    plan = check_plan(policy.plan(view), view)
    return [r.request_id for r, _ in admitted(plan, view, chunked)]


@settings(max_examples=400, deadline=None)
@given(queues, timings, limits, st.booleans())
def test_batches_are_those_of_the_text(
    queue: list[RequestView], prefill_s: Prefill, limit: dict[str, int], chunked: bool
) -> None:
    view = step(queue, **limit)
    assert enters(Tiers(context(prefill_s, chunked)), view, chunked) == batch_by_the_text(view, prefill_s, chunked)


@settings(max_examples=400, deadline=None)
@given(queues, timings, limits, st.booleans(), st.integers(0, 8), st.integers(0, 3), st.floats(1, 120))
def test_batches_behind_preempted_and_aged_requests_are_those_of_the_text(
    queue: list[RequestView],
    prefill_s: Prefill,
    limit: dict[str, int],
    chunked: bool,
    k_running: int,
    preempted: int,
    max_wait_s: float,
) -> None:
    view = step(queue, min(preempted, len(queue)), k_running=k_running, **limit)
    counting = Tiers(context(prefill_s, chunked), max_wait_s, count_running=True)
    assert enters(counting, view, chunked) == batch_by_the_text(view, prefill_s, chunked, k_running, max_wait_s)
    plain = Tiers(context(prefill_s, chunked), max_wait_s)
    assert enters(plain, view, chunked) == batch_by_the_text(view, prefill_s, chunked, 0, max_wait_s)


@pytest.mark.parametrize(
    ("limit", "names"),
    [
        ({}, ["low", "high0", "high1"]),
        ({"max_num_seqs": 2}, ["low"]),
        ({"free_kv_blocks": 2}, ["low"]),
        ({"token_budget": 20}, ["low"]),
    ],
)
def test_a_tier_contributes_what_can_be_admitted(limit: dict[str, int], names: list[str]) -> None:
    """10 tokens at k=1 in 1 s; with one more prompt at k=2 20 in 2.5 s, with two more 30 in 2.5 s."""
    view = step([request("low", 0, 10, 1), request("high0", 0, 10, 2), request("high1", 1, 10, 2)], **limit)
    assert enters(Tiers(context(lambda n, k: 1.0 if k == 1 else 2.5)), view) == names


def test_a_request_first_in_line_that_does_not_fit_is_named_last() -> None:
    """A host that finds part of it cached may let it in; nothing passes it meanwhile."""
    view = step([request("big", 0, 60, 5), request("small", 99, 5, 1)], free_kv_blocks=2)
    plan = Tiers(context(lambda n, k: 1.0), max_wait_s=50).plan(view)
    assert plan.order == ["big"]


def test_eq_5_merges_on_equality_and_not_below() -> None:
    view = step([request("low", 0, 10, 4), request("high", 0, 10, 8)])
    at_most = Tiers(context(lambda n, k: 1.0 if k == 4 else 2.0))  # 20/2 >= 10/1
    assert enters(at_most, view) == ["low", "high"]
    above = Tiers(context(lambda n, k: 1.0 if k == 4 else 2.001))
    assert enters(above, view) == ["low"]


@settings(max_examples=200, deadline=None)
@given(queues, timings, limits, st.booleans(), st.integers(0, 3), st.one_of(st.none(), st.floats(1, 120)))
def test_order_within_a_tier_is_arrival_and_preempted_come_first(
    queue: list[RequestView],
    prefill_s: Prefill,
    limit: dict[str, int],
    chunked: bool,
    preempted: int,
    max_wait_s: float | None,
) -> None:
    view = step(queue, min(preempted, len(queue)), **limit)
    names = enters(Tiers(context(prefill_s, chunked), max_wait_s=max_wait_s), view, chunked)
    first = [r.request_id for r in view.waiting[: view.num_preempted]]
    assert names[: len(first)] == first[: len(names)]
    for k in {r.k_qos for r in queue}:
        tier = [r.request_id for r in view.waiting[view.num_preempted :] if r.k_qos == k]
        entered = [name for name in names if name in tier]
        assert entered == tier[: len(entered)]
    assert len(set(names)) == len(names)


@settings(max_examples=200, deadline=None)
@given(queues, timings, limits, st.integers(0, 2), st.floats(1, 120))
def test_nothing_passes_an_aged_request(
    queue: list[RequestView], prefill_s: Prefill, limit: dict[str, int], preempted: int, max_wait_s: float
) -> None:
    view = step(queue, min(preempted, len(queue)), **limit)
    names = enters(Tiers(context(prefill_s), max_wait_s=max_wait_s), view)[view.num_preempted :]
    rest = view.waiting[view.num_preempted :]
    arrival_s = {r.request_id: r.arrival_s for r in rest}
    aged = [name for name in arrival_s if arrival_s[name] + max_wait_s <= view.now_s]
    entered = names[: len(aged)]
    assert set(entered) <= set(aged), "a younger request entered before an aged one"
    assert [arrival_s[name] for name in entered] == sorted(arrival_s[name] for name in aged)[: len(entered)]


@settings(max_examples=200, deadline=None)
@given(queues, timings, limits, st.floats(1, 120), st.floats(0.001, 0.999))
def test_wake_at_is_when_the_answer_may_change(
    queue: list[RequestView], prefill_s: Prefill, limit: dict[str, int], max_wait_s: float, fraction: float
) -> None:
    view = step(queue, **limit)
    policy = Tiers(context(prefill_s), max_wait_s=max_wait_s)
    plan = check_plan(policy.plan(view), view)
    end_s = 1e6 if plan.wake_at_s is None else plan.wake_at_s
    later = view._replace(now_s=view.now_s + fraction * (end_s - view.now_s))
    if later.now_s < end_s:
        assert enters(policy, later) == enters(policy, view)


@pytest.mark.parametrize("max_wait_s", [None, 5.0])
def test_aging_bounds_how_long_ascending_tiers_pass_a_high_budget(max_wait_s: float | None) -> None:
    """Each second brings a full step of low budgets; without aging the high one never enters."""
    policy = Tiers(context(lambda n, k: float(k)), max_wait_s=max_wait_s)
    waiting = [request("high", 0.0, 64, 6)]
    for now in range(200):
        waiting.append(request(f"low{now}", float(now), 64, 1))
        view = step(waiting, now_s=float(now))
        names = enters(policy, view)
        waiting = [r for r in waiting if r.request_id not in names]
        if "high" in names:
            assert max_wait_s is not None and now == max_wait_s
            return
    assert max_wait_s is None


class Counting(Sequence[RequestView]):
    """A queue that counts how many items are read."""

    def __init__(self, items: Sequence[RequestView]) -> None:
        self.items = items
        self.reads = 0

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[RequestView]:
        raise AssertionError("the whole queue is walked")

    @overload
    def __getitem__(self, index: int) -> RequestView: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RequestView]: ...
    def __getitem__(self, index: int | slice) -> RequestView | Sequence[RequestView]:
        assert isinstance(index, int)
        self.reads += 1
        return self.items[index]


@pytest.mark.parametrize("max_wait_s", [None, 50.0, 150.0])
def test_a_plan_reads_what_fits_not_the_queue(max_wait_s: float | None) -> None:
    """10,000 waiting in 32 tiers, 8 prompts fit: tiers x log2(queue) reads with aging, a few without."""
    rows = [request(f"r{i}", 100 * i / 10_000, 1000, i * 7919 % 32 + 1) for i in range(10_000)]
    view = step(rows, token_budget=8192, free_kv_blocks=10**6)
    queue = Counting(view.waiting)
    Tiers(context(lambda n, k: 1e-3 + n * k * 1e-6), max_wait_s=max_wait_s).plan(view._replace(waiting=queue))
    assert queue.reads <= (32 * (14 + 4) + 40 if max_wait_s == 50.0 else 40)
