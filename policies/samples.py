"""Calls of every shape a policy must answer, and a reference reading of the plan: material for the conformance kit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Generic, TypeVar, overload

import numpy as np

from simmoe.policies.protocols import PolicyContext, StepPlan
from simmoe.policies.validate import RouteCall
from simmoe.policies.views import RankView, RequestView, StepView

T = TypeVar("T")


def sample_prefill_s(n: int, k: int) -> float:
    """T(n, k) of no card in particular: a launch cost, a cost a token, a cost a token-expert pair."""
    return 4e-3 + 4e-7 * n + 2.5e-7 * n * k


SAMPLE_CONTEXT = PolicyContext(
    prefill_s=sample_prefill_s, k_min=1, k_max=32, num_ranks=4, max_num_seqs=64, max_num_batched_tokens=8192
)
"""The deployment policies are checked for unless another is given."""


class ReadOnly(Sequence[T], Generic[T]):
    """A sequence as hosts pass it: no list, no way to change it, and gone when the call is over."""

    def __init__(self, items: Sequence[T]) -> None:
        self._items: Sequence[T] | None = items

    def __len__(self) -> int:
        return len(self._open())

    def __iter__(self) -> Iterator[T]:
        return iter(self._open())

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        return self._open()[index]

    def close(self) -> None:
        """End the call: whatever reads the sequence from now on is told."""
        self._items = None

    def _open(self) -> Sequence[T]:
        if self._items is None:
            raise RuntimeError("a view's sequence was read after the call it was passed to")
        return self._items


def sample_views(
    context: PolicyContext,
    queue_key: Callable[[RequestView], Any] | None = None,
    make_request: Callable[..., RequestView] = RequestView,
) -> list[StepView]:
    """Return steps of one rank in order of time, queues sorted as a host would.

    Among them: an empty queue, one request, many of one tier and of every tier, equal arrivals, preempted requests,
    nothing and a full house running, prompts above the token budget, no KV block free.
    """
    rng = np.random.default_rng(0)
    views: list[StepView] = []
    now_s = 1.0
    for index in range(60):
        now_s += float(rng.exponential(2.0))
        num_waiting = (0, 1, 2, 7, 80)[index % 5]
        num_running = (0, 3, context.max_num_seqs - 1)[index % 3]
        num_preempted = min(num_waiting, (0, 0, 0, 2)[index % 4])
        one_tier = index % 7 == 0
        size = num_waiting + num_running
        arrivals_s = rng.uniform(0, now_s, size).round(1).tolist()
        prompts = rng.choice([1, 17, 300, 1144, context.max_num_batched_tokens + 5], size).tolist()
        budgets = rng.integers(context.k_min, context.k_max + 1, size).tolist()
        requests = [
            make_request(
                request_id=f"r{index}-{i}",
                arrival_s=arrivals_s[i],
                prompt_tokens=prompts[i],
                num_computed_tokens=0,
                k_qos=context.k_max if one_tier else budgets[i],
            )
            for i in range(size)
        ]
        running = requests[num_waiting:]
        fresh = sorted(
            requests[num_preempted:num_waiting], key=lambda r: (queue_key(r) if queue_key else 0, r.arrival_s)
        )
        waiting = [*requests[:num_preempted], *fresh]
        views.append(
            StepView(
                now_s=now_s,
                dp_rank=0,
                waiting=ReadOnly(waiting),
                running=ReadOnly(running),
                token_budget=context.max_num_batched_tokens - num_running,
                max_num_seqs=context.max_num_seqs,
                free_kv_blocks=(4096, 300, 0)[index % 9 // 3],
                block_size=16,
                k_running=max((request.k_qos for request in running), default=0),
                oldest=min(waiting, key=lambda r: r.arrival_s, default=None),
                num_preempted=num_preempted,
            )
        )
    return views


def sample_route_calls(
    context: PolicyContext, make_request: Callable[..., RequestView] = RequestView
) -> list[RouteCall]:
    """Return requests at one front end in order of time: idle, equal, unequal, full and stale ranks; every budget."""
    rng = np.random.default_rng(0)
    calls: list[RouteCall] = []
    now_s = 0.0
    budgets = range(context.k_min, context.k_max + 1)
    for index in range(3 * len(budgets)):
        now_s += float(rng.exponential(0.2))
        ranks = []
        for dp_rank in range(context.num_ranks):
            waiting, running = ((0, 0), (2, 9), (int(rng.integers(0, 40)), int(rng.integers(0, 64))))[index % 3]
            if index % 4 == 0 and dp_rank == index % context.num_ranks:
                waiting, running = 0, 0
            kv_used = 1.0 if index % 5 == 0 else running / 64
            k_running = context.k_max if running else 0
            inflight = waiting + running
            ranks.append(
                RankView(dp_rank, waiting, running, inflight, 1, kv_used, k_running, now_s - 0.01 * (index % 10))
            )
        request = make_request(
            request_id=f"r{index}",
            arrival_s=now_s,
            prompt_tokens=int(rng.integers(1, 4096)),
            num_computed_tokens=0,
            k_qos=budgets[index % len(budgets)],
        )
        calls.append(RouteCall(request, ReadOnly(ranks), now_s))
    return calls


def admitted(plan: StepPlan, view: StepView, chunked: bool = True) -> list[tuple[RequestView, int]]:
    """Return who a host lets in under a valid plan, with the prompt tokens each computes in the step.

    The reference reading of :class:`StepPlan`: candidates by ``order`` or in queue order, up to the first above the
    gate or that does not fit; a preempted request is cut by the token budget even without chunked prefill. The gate a
    host opens to stay busy is not part of it.
    """
    by_id = {request.request_id: request for request in view.waiting}
    preempted = {request.request_id for request in view.waiting[: view.num_preempted]}
    candidates = view.waiting if plan.order is None else [by_id[request_id] for request_id in plan.order]
    tokens_left, seats_left = view.token_budget, view.max_num_seqs - len(view.running)
    blocks_left = view.free_kv_blocks
    entered: list[tuple[RequestView, int]] = []
    for request in candidates:
        tokens = request.prompt_tokens - request.num_computed_tokens
        blocks = -(-tokens // view.block_size)
        may_cut = chunked or request.request_id in preempted
        if plan.k_max is not None and request.k_qos > plan.k_max:
            break
        if tokens_left <= 0 or seats_left <= 0 or blocks > blocks_left or (tokens > tokens_left and not may_cut):
            break
        entered.append((request, min(tokens, tokens_left)))
        tokens_left -= tokens
        seats_left -= 1
        blocks_left -= blocks
    return entered
