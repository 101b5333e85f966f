"""The conformance kit passes what is shipped and catches each kind of policy that breaks the protocol."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from simmoe.policies.loading import GROUPS, installed
from simmoe.policies.protocols import ADMIT_ALL, PolicyContext, StepPlan
from simmoe.policies.registry import parse_part
from simmoe.policies.samples import SAMPLE_CONTEXT, admitted, sample_route_calls, sample_views
from simmoe.policies.testing import assert_conforms, check_policy
from simmoe.policies.views import RankView, RequestView, StepView

VARIANTS = [
    *(name for kind in GROUPS for name in installed(kind)),
    "fixed-k,k=7",
    "tiers,max_wait_s=3",
    "tiers,count_running=true",
    "lanes,lanes=4,window=0",
    "lanes,adaptive=false,bypass=false",
    "lanes,hysteresis=0,min_gap=0,cooldown_s=0",
]


@pytest.mark.parametrize("text", VARIANTS)
@pytest.mark.parametrize("chunked", [True, False])
def test_shipped_policies_conform(text: str, chunked: bool) -> None:
    assert_conforms(parse_part(text).build, replace(SAMPLE_CONTEXT, enable_chunked_prefill=chunked))


class NeedsOutput:
    def plan(self, view: StepView, /) -> StepPlan:
        sum(getattr(request, "output_tokens", 0) for request in view.waiting)
        return ADMIT_ALL


class Drawn:
    def plan(self, view: StepView, /) -> StepPlan:
        return StepPlan(k_max=random.randrange(1, 33))


class Clocked:
    def __init__(self) -> None:
        self.calls = 0

    def plan(self, view: StepView, /) -> StepPlan:
        return StepPlan(wake_at_s=view.now_s + time.perf_counter())


class Writing:
    def plan(self, view: StepView, /) -> StepPlan:
        object.__setattr__(view, "token_budget", 0)
        return ADMIT_ALL


class Emptying:
    def plan(self, view: StepView, /) -> StepPlan:
        view.waiting._items = ()  # type: ignore[attr-defined]
        return ADMIT_ALL


class Sorting:
    def plan(self, view: StepView, /) -> StepPlan:
        view.waiting.sort()  # type: ignore[attr-defined]
        return ADMIT_ALL


class Keeping:
    def __init__(self) -> None:
        self.kept: Sequence[RequestView] = ()

    def plan(self, view: StepView, /) -> StepPlan:
        len(self.kept)
        self.kept = view.waiting
        return ADMIT_ALL


class Nonsense:
    def __init__(self, answer: Callable[[StepView], Any]) -> None:
        self.answer = answer

    def plan(self, view: StepView, /) -> Any:
        return self.answer(view)


class WrongShape:
    def plan(self) -> StepPlan:
        return ADMIT_ALL


class Uncopyable:
    def __init__(self) -> None:
        self.key = lambda request: request.k_qos

    def plan(self, view: StepView, /) -> StepPlan:
        return ADMIT_ALL


class Moody:
    """Its queue order depends on how often it has planned."""

    def __init__(self) -> None:
        self.calls = 0

    def queue_key(self, request: RequestView, /) -> tuple[int]:
        return (self.calls * request.k_qos,)

    def plan(self, view: StepView, /) -> StepPlan:
        self.calls += 1
        return ADMIT_ALL


class HighFloor:
    k_floor = 33

    def plan(self, view: StepView, /) -> StepPlan:
        return ADMIT_ALL


class OpaqueState:
    def plan(self, view: StepView, /) -> StepPlan:
        return ADMIT_ALL

    def snapshot(self) -> dict[str, Any]:
        return {"view": StepView}


class NoRank:
    def route(self, request: RequestView, ranks: Sequence[RankView], now_s: float, /) -> int:
        return len(ranks)


class TwoRanks:
    def route(self, request: RequestView, ranks: Sequence[RankView], now_s: float, /) -> int:
        return ranks[1].dp_rank


VALID = "answers every call validly"


@pytest.mark.parametrize(
    ("make", "fails", "told"),
    [
        (NeedsOutput, "asks for nothing a view does not show", "output_tokens"),
        (Drawn, "imports neither clock nor randomness", "random, time"),
        (Drawn, "answers the same calls alike", "answered call"),
        (Clocked, "answers the same calls alike", "answered call 0 differently"),
        (Writing, VALID, "can't set attribute"),
        (Emptying, "leaves views as they were", "a view was changed"),
        (Sorting, VALID, "no attribute 'sort'"),
        (Keeping, VALID, "read after the call"),
        (lambda: Nonsense(lambda view: None), VALID, "plan returned None"),
        (lambda: Nonsense(lambda view: StepPlan(order=["nobody"])), VALID, "'nobody', which does not wait on rank 0"),
        (lambda: Nonsense(lambda view: StepPlan(order="r1")), VALID, "order 'r1'"),
        (
            lambda: Nonsense(lambda view: StepPlan(order=[r.request_id for r in view.waiting] * 2)),
            VALID,
            "'r1-0' twice",
        ),
        (lambda: Nonsense(lambda view: StepPlan(k_max=2.5)), VALID, "k_max 2.5"),  # type: ignore[arg-type]
        (lambda: Nonsense(lambda view: StepPlan(k_max=-1)), VALID, "k_max -1"),
        (lambda: Nonsense(lambda view: StepPlan(wake_at_s=view.now_s)), VALID, "a later, finite time"),
        (lambda: Nonsense(lambda view: StepPlan(wake_at_s=float("nan"))), VALID, "wake_at_s nan"),
        (lambda: Nonsense(lambda view: StepPlan(wake_at_s=float("inf"))), VALID, "wake_at_s inf"),
        (lambda: Nonsense(lambda view: StepPlan(k_max=view.waiting[0].k_qos)), VALID, "IndexError"),
        (WrongShape, "has plan as the protocol wants it", "plan(view)"),
        (Uncopyable, "goes on from a copy as from itself", "pickle"),
        (Moody, "orders the queue by the request alone", "changed its answer"),
        (HighFloor, "sets a floor within the budgets", "k_floor is 33"),
        (OpaqueState, "shows its state as plain data", "not JSON serializable"),
        (NoRank, VALID, "route returned 4; it must return one of the dp_ranks 0, 1, 2, 3"),
        (TwoRanks, "routes to a single rank", "IndexError"),
    ],
)
def test_a_broken_policy_fails_the_check_made_for_it(make: Callable[[], Any], fails: str, told: str) -> None:
    checks = {check.name: check for check in check_policy(lambda context: make())}
    assert not checks[fails].passed
    assert told in checks[fails].detail and "\n" not in checks[fails].detail
    with pytest.raises(AssertionError, match=fails):
        assert_conforms(lambda context: make())


def test_what_is_no_policy_is_told() -> None:
    (check,) = check_policy(lambda context: object())
    assert not check.passed and "is no policy" in check.detail

    def fails(context: PolicyContext) -> Any:
        raise ValueError("no such depth")

    (check,) = check_policy(fails)
    assert not check.passed and "ValueError: no such depth" in check.detail


def test_samples_cover_what_they_say() -> None:
    views = sample_views(SAMPLE_CONTEXT)
    assert {0, 1} <= {len(view.waiting) for view in views}
    assert any(len({r.k_qos for r in view.waiting}) == 1 and len(view.waiting) > 1 for view in views)
    assert any(len({r.arrival_s for r in view.waiting}) < len(view.waiting) for view in views)
    assert any(view.num_preempted for view in views)
    assert {0} < {view.free_kv_blocks for view in views}
    assert any(r.prompt_tokens > SAMPLE_CONTEXT.max_num_batched_tokens for view in views for r in view.waiting)
    assert all(a.now_s < b.now_s for a, b in pairwise(views))
    calls = sample_route_calls(SAMPLE_CONTEXT)
    assert {call.request.k_qos for call in calls} == set(range(1, 33))
    assert any(all(rank.num_waiting == rank.num_running == 0 for rank in call.ranks) for call in calls)
    assert any(rank.kv_used == 1.0 for call in calls for rank in call.ranks)


def test_the_reference_host_stops_at_the_first_that_does_not_fit() -> None:
    requests = [
        RequestView(f"r{i}", float(i), tokens, 0, k) for i, (tokens, k) in enumerate([(40, 3), (40, 9), (8, 2)])
    ]
    view = StepView(10.0, 0, requests, (), 64, 8, 100, 16, 0, requests[0])
    assert admitted(ADMIT_ALL, view) == [(requests[0], 40), (requests[1], 24)]
    assert admitted(ADMIT_ALL, view, chunked=False) == [(requests[0], 40)]
    assert admitted(StepPlan(k_max=5), view) == [(requests[0], 40)]
    assert admitted(StepPlan(order=["r2", "r0"]), view) == [(requests[2], 8), (requests[0], 40)]
    assert admitted(ADMIT_ALL, view._replace(free_kv_blocks=5)) == [(requests[0], 40)]
    assert admitted(ADMIT_ALL, view._replace(max_num_seqs=1)) == [(requests[0], 40)]
    assert admitted(ADMIT_ALL, view._replace(free_kv_blocks=2)) == []
