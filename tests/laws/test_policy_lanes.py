"""Lanes: eligibility, boundaries that stay, move and rest as described, and switches that do what they say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simmoe.errors import UsageError
from simmoe.policies.lanes import Lanes
from simmoe.policies.protocols import PolicyContext
from simmoe.policies.queue_aware import QueueAware
from simmoe.policies.samples import SAMPLE_CONTEXT
from simmoe.policies.views import RankView, RequestView


def context(num_ranks: int = 2, k_min: int = 1, k_max: int = 32) -> PolicyContext:
    return replace(SAMPLE_CONTEXT, num_ranks=num_ranks, k_min=k_min, k_max=k_max)


def ranks_of(counts: Sequence[tuple[int, int]]) -> list[RankView]:
    """Fresh views of ranks with these (waiting, running) counts."""
    return [
        RankView(i, waiting, running, waiting + running, 1, 0.0, 0, 0.0) for i, (waiting, running) in enumerate(counts)
    ]


def asking(k: int) -> RequestView:
    return RequestView(f"k{k}", 0.0, 100, 0, k)


def score(rank: RankView) -> int:
    return 4 * rank.num_waiting + rank.num_running


counts = st.tuples(st.integers(0, 12), st.integers(0, 40))
#: (seconds since the last call, budget, counts of up to six ranks)
histories = st.lists(
    st.tuples(st.floats(0, 2), st.integers(1, 32), st.lists(counts, min_size=6, max_size=6)), min_size=1, max_size=12
)
#: Gaps that move boundaries, often.
eager = st.fixed_dictionaries(
    {
        "hysteresis": st.floats(0, 0.5),
        "hysteresis_growth": st.floats(0, 0.5),
        "min_gap": st.floats(0, 12),
        "cooldown_s": st.floats(0, 3),
        "window": st.integers(0, 8),
    }
)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 6), st.integers(1, 26), st.integers(0, 9), st.data())
def test_eligible_lanes_follow_the_window(k_min: int, span: int, window: int, data: st.DataObject) -> None:
    """The window is the w budgets nearest b, the higher of two equally near first, cut at the deployment's range."""
    k_max = k_min + span
    b = data.draw(st.integers(k_min, k_max - 1))
    lanes = Lanes(context(2, k_min, k_max), start=b, window=window)
    nearest = sorted(range(b - 20, b + 21), key=lambda k: (abs(k - b), -k))[:window]
    inside = set(nearest) & set(range(k_min, k_max + 1))
    for k in range(k_min, k_max + 1):
        if k in inside:
            assert lanes.eligible_lanes(k) == (0, 1)
        elif window:
            assert lanes.eligible_lanes(k) == ((0, 0) if k < min(inside) else (1, 1))
        else:
            assert lanes.eligible_lanes(k) == ((0, 0) if k <= b else (1, 1))


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 6), histories, eager, st.booleans(), st.data())
def test_choice_is_the_least_score_of_the_lanes_allowed(
    num_ranks: int, history: list[Any], options: dict[str, Any], bypass: bool, data: st.DataObject
) -> None:
    num_lanes = data.draw(st.integers(2, num_ranks))
    lanes = Lanes(context(num_ranks), lanes=num_lanes, bypass=bypass, **options)
    lane_of = lanes.snapshot()["lane_of_rank"]
    assert lane_of == sorted(lane_of) and set(lane_of) == set(range(num_lanes))
    sizes = [lane_of.count(lane) for lane in range(num_lanes)]
    assert sizes == sorted(sizes) and max(sizes) - min(sizes) <= 1
    now_s = 0.0
    for wait_s, k, rank_counts in history:
        now_s += wait_s
        ranks = ranks_of(rank_counts[:num_ranks])
        chosen = lanes.route(asking(k), ranks, now_s)
        first, last = lanes.eligible_lanes(k)
        eligible = [rank for rank in ranks if first <= lane_of[rank.dp_rank] <= last]
        idle = [rank for rank in ranks if score(rank) == 0]
        if bypass and idle and not any(rank in eligible for rank in idle):
            away = {r.dp_rank: max(first - lane_of[r.dp_rank], lane_of[r.dp_rank] - last) for r in idle}
            assert chosen == min(away, key=lambda rank: (away[rank], rank))
        else:
            best = min(score(rank) for rank in eligible)
            assert chosen == next(rank.dp_rank for rank in eligible if score(rank) == best)


@settings(max_examples=100, deadline=None)
@given(histories, eager, st.integers(1, 31))
def test_two_lanes_move_exactly_as_described(history: list[Any], options: dict[str, Any], start: int) -> None:
    """The description, replayed by hand on one boundary between two ranks."""
    lanes = Lanes(context(2), start=start, **options)
    b, moved_at_s, now_s = start, float("-inf"), 0.0
    for wait_s, k, rank_counts in history:
        now_s += wait_s
        ranks = ranks_of(rank_counts[:2])
        low, high = score(ranks[0]), score(ranks[1])
        share = options["hysteresis"] * (1 + options["hysteresis_growth"] * abs(b - start))
        substantial = low != high and abs(low - high) >= max(options["min_gap"], share * max(low, high))
        if substantial and now_s >= moved_at_s + options["cooldown_s"]:
            moved_to = b + 1 if low < high else b - 1
            if 1 <= moved_to <= 31:
                b, moved_at_s = moved_to, now_s
        lanes.route(asking(k), ranks, now_s)
        assert lanes.snapshot()["boundaries"] == [b]


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 6), histories, eager, st.data())
def test_boundaries_stay_in_order_and_the_history_tells_every_move(
    num_ranks: int, history: list[Any], options: dict[str, Any], data: st.DataObject
) -> None:
    num_lanes = data.draw(st.integers(2, num_ranks))
    k_max = data.draw(st.integers(num_lanes, 32))
    lanes = Lanes(context(num_ranks, 1, k_max), lanes=num_lanes, **options)
    now_s = 0.0
    for wait_s, k, rank_counts in history:
        now_s += wait_s
        lanes.route(asking(min(k, k_max)), ranks_of(rank_counts[:num_ranks]), now_s)
        boundaries = [0, *lanes.snapshot()["boundaries"], k_max]
        assert all(a < b for a, b in pairwise(boundaries)), "a lane lost its last budget"
    state = lanes.snapshot()
    for i, start in enumerate(state["start"]):
        moves = [move for move in state["moves"] if move["boundary"] == i]
        assert [move["moved_from"] for move in moves] == [start, *(move["moved_to"] for move in moves)][: len(moves)]
        assert ([start, *(move["moved_to"] for move in moves)])[-1] == state["boundaries"][i]
        for move in moves:
            lighter_below = move["pressure_below"] < move["pressure_above"]
            assert move["moved_to"] - move["moved_from"] == (1 if lighter_below else -1)
        assert all(b["at_s"] >= a["at_s"] + options["cooldown_s"] for a, b in pairwise(moves))
    assert state["num_routed"] == len(history)


def test_hysteresis_grows_with_the_distance_from_the_start() -> None:
    """A gap of 32% moves a boundary until 0.2 * (1 + 0.25 * drift) has passed it; without growth, on and on."""
    light, heavy = (0, 68), (0, 100)
    growing = Lanes(context(), start=16, hysteresis=0.2, hysteresis_growth=0.25, cooldown_s=0)
    constant = Lanes(context(), start=16, hysteresis=0.2, hysteresis_growth=0, cooldown_s=0)
    for now in range(10):
        for lanes in (growing, constant):
            lanes.route(asking(16), ranks_of([light, heavy]), float(now))
    assert growing.snapshot()["boundaries"] == [19]  # at drift 3 the share is 0.35
    assert constant.snapshot()["boundaries"] == [26]


def test_pressure_is_a_mean_a_rank() -> None:
    """Three ranks make a lane of one and a lane of two: equal ranks are equal pressure."""
    lanes = Lanes(context(3), hysteresis=0, min_gap=0, cooldown_s=0)
    lanes.route(asking(16), ranks_of([(3, 5), (3, 5), (3, 5)]), 0.0)
    assert lanes.snapshot()["moves"] == []


@settings(max_examples=100, deadline=None)
@given(histories)
def test_switches(history: list[Any]) -> None:
    """Each mechanism off: no move, no pause, no margin, no shared budget, no rank of another lane."""
    still = Lanes(context(), adaptive=False)
    hasty = Lanes(context(), cooldown_s=0, hysteresis=0, min_gap=0)
    hard = Lanes(context(), window=0)
    strict = Lanes(context(), bypass=False)
    now_s = 0.0
    for wait_s, k, rank_counts in history:
        now_s += wait_s
        ranks = ranks_of(rank_counts[:2])
        before = hasty.snapshot()["boundaries"][0]
        for lanes in (still, hasty, hard):
            lanes.route(asking(k), ranks, now_s)
        step = (score(ranks[0]) < score(ranks[1])) - (score(ranks[0]) > score(ranks[1]))
        assert hasty.snapshot()["boundaries"][0] == min(31, max(1, before + step))
        assert all(first == last for first, last in map(hard.eligible_lanes, range(1, 33)))
        chosen = strict.route(asking(k), ranks, now_s)
        first, last = strict.eligible_lanes(k)
        assert first <= chosen <= last
    assert still.snapshot()["moves"] == [] and strict.snapshot()["num_bypassed"] == 0


@settings(max_examples=50, deadline=None)
@given(histories)
def test_one_rank_is_queue_aware(history: list[Any]) -> None:
    lanes = Lanes(context(1))
    for now, (_, k, rank_counts) in enumerate(history):
        ranks = ranks_of(rank_counts[:1])
        assert lanes.route(asking(k), ranks, float(now)) == QueueAware().route(asking(k), ranks, float(now))


def test_a_request_on_its_way_makes_a_rank_busy() -> None:
    """Counts may be published before a request arrives; what this front end has sent there is exact."""
    empty, on_its_way = RankView(0, 0, 0, 1, 1, 0.0, 0, 0.0), RankView(1, 5, 5, 10, 1, 0.0, 32, 0.0)
    assert Lanes(context()).route(asking(32), [empty, on_its_way], 0.0) == 1
    assert Lanes(context()).route(asking(32), [empty._replace(num_inflight=0), on_its_way], 0.0) == 0


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"lanes": 1}, "lanes is 1; it must be at least 2"),
        ({"lanes": 3}, "lanes is 3; it must be at most 2"),
        ({"start": 32}, "start is 32; it must be in 1..31"),
        ({"window": -1}, "window is -1"),
        ({"hysteresis": -0.1}, "hysteresis is -0.1"),
        ({"cooldown_s": -1.0}, "cooldown_s is -1.0"),
    ],
)
def test_unusable_options_are_told(options: dict[str, Any], told: str) -> None:
    with pytest.raises(UsageError) as error:
        Lanes(context(), **options)
    assert told in str(error.value)
