"""k-lanes: ranks split by budget, with boundaries that follow the load."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from simmoe.errors import UsageError
from simmoe.policies.boundary import Boundary, BoundaryMove, BoundaryRule
from simmoe.policies.protocols import PolicyContext
from simmoe.policies.queue_aware import queue_scores
from simmoe.policies.views import RankView, RequestView


class Lanes:
    """k-lanes: low budgets to low ranks, high to high, a soft window between, the boundary moved by pressure.

    Ranks are dealt to lanes in consecutive groups, spare ranks to the higher lanes. A request whose budget lies in the
    window of the boundary between two lanes may take either; others prefer the lane of their side. It goes to the rank
    of least 4 W + R of the lanes it may take, ties to the lower rank. If none of those ranks is idle and one elsewhere
    is, that one is taken instead, from the nearest lane. The window is the ``window`` consecutive budgets from
    ``b - (window - 1) // 2`` to ``b + window // 2``, clipped to the deployment's budgets.

    Before each choice, a boundary moves by one budget if one lane's pressure (mean 4 W + R a rank) is below the other's
    by at least ``min_gap`` and at least ``hysteresis * (1 + hysteresis_growth * |b - start|)`` times the heavier one's,
    and it has not moved for ``cooldown_s``: up if the lower lane is the lighter, down if the higher is. Every lane
    keeps at least one budget. One rank is one lane, the same as queue-aware.

    Args:
        lanes: number of lanes, at most one a rank.
        start: b at the start, for two lanes; none: budgets dealt evenly to the lanes.
        window: budgets that may take either lane; 0: none, a hard boundary.
        adaptive: whether boundaries move.
        hysteresis: share of the heavier lane's pressure by which the other must be lighter; 0: any imbalance moves.
        hysteresis_growth: growth of that share with each budget away from the start; 0: constant.
        min_gap: least difference in pressure that moves a boundary (4: one waiting request a rank).
        cooldown_s: least time between moves of one boundary; 0: none.
        bypass: whether an idle rank of another lane may be taken.
    Raises:
        UsageError: an argument out of range, or more lanes than ranks or budgets.
    Source: MoE-Prism, section III-C3, which leaves all of these numbers open.
    """

    def __init__(
        self,
        context: PolicyContext,
        lanes: int = 2,
        start: int | None = None,
        window: int = 4,
        adaptive: bool = True,
        hysteresis: float = 0.25,
        hysteresis_growth: float = 0.1,
        min_gap: float = 4.0,
        cooldown_s: float = 1.0,
        bypass: bool = True,
    ) -> None:
        k_min, k_max, num_ranks = context.k_min, context.k_max, context.num_ranks
        num_budgets = k_max - k_min + 1
        _require(lanes >= 2, "lanes", lanes, "at least 2; for one lane use queue-aware")
        if num_ranks == 1:
            lanes = 1
        _require(lanes <= num_ranks, "lanes", lanes, f"at most {num_ranks}, the deployment's ranks")
        _require(lanes <= num_budgets, "lanes", lanes, f"at most {num_budgets}, the deployment's budgets")
        _require(window >= 0, "window", window, "at least 0")
        _require(hysteresis >= 0, "hysteresis", hysteresis, "at least 0")
        _require(hysteresis_growth >= 0, "hysteresis_growth", hysteresis_growth, "at least 0")
        _require(min_gap >= 0, "min_gap", min_gap, "at least 0")
        _require(cooldown_s >= 0, "cooldown_s", cooldown_s, "at least 0")
        starts = [k_min - 1 + num_budgets * i // lanes for i in range(1, lanes)]
        if start is not None:
            _require(lanes <= 2, "start", start, "none with more than 2 lanes")
            _require(k_min <= start < k_max, "start", start, f"in {k_min}..{k_max - 1}, a budget left for each lane")
            starts = [start for _ in starts]
        rule = BoundaryRule(window, hysteresis, hysteresis_growth, min_gap, cooldown_s)
        self._k_min, self._k_max = k_min, k_max
        size, spare = divmod(num_ranks, lanes)
        self._lane_of = [lane for lane in range(lanes) for _ in range(size + (lane >= lanes - spare))]
        """Lane of each rank."""
        self._ranks_of = [
            slice(bisect_left(self._lane_of, lane), bisect_left(self._lane_of, lane + 1)) for lane in range(lanes)
        ]
        """Ranks of each lane."""
        self._boundaries = [Boundary(b, rule) for b in starts]
        self._adaptive = adaptive
        self._bypass = bypass
        self._moves: list[BoundaryMove] = []
        self._num_routed = 0
        self._num_bypassed = 0

    def route(self, request: RequestView, ranks: Sequence[RankView], now_s: float, /) -> int:
        """Move the boundaries if pressure asks for it, then return the rank."""
        scores = queue_scores(ranks)
        if self._adaptive:
            self._adapt(scores, now_s)
        self._num_routed += 1
        first, last = self.eligible_lanes(request.k_qos)
        begin, end = self._ranks_of[first].start, self._ranks_of[last].stop
        if self._bypass and 0 in scores:
            # Idle: nothing waits, runs, or is on its way there.
            idle = [rank for rank, score in enumerate(scores) if not score and not ranks[rank].num_inflight]
            if idle and not any(begin <= rank < end for rank in idle):
                self._num_bypassed += 1
                return min(idle, key=lambda rank: (self._lanes_away(rank, first, last), rank))
        return scores.index(min(scores[begin:end]), begin)

    def eligible_lanes(self, k_qos: int) -> tuple[int, int]:
        """Return the first and last lane a budget may take: the same one twice outside every window."""
        windows = [boundary.window(self._k_min, self._k_max) for boundary in self._boundaries]
        return sum(high < k_qos for _, high in windows), sum(low <= k_qos for low, _ in windows)

    def snapshot(self) -> Mapping[str, Any]:
        """Return where the boundaries started and stand, each move with its cause, and counts of choices."""
        return {
            "lane_of_rank": list(self._lane_of),
            "start": [boundary.start for boundary in self._boundaries],
            "boundaries": [boundary.value for boundary in self._boundaries],
            "moves": [asdict(move) for move in self._moves],
            "num_routed": self._num_routed,
            "num_bypassed": self._num_bypassed,
        }

    def _adapt(self, scores: Sequence[int], now_s: float) -> None:
        pressure = [sum(scores[ranks]) / (ranks.stop - ranks.start) for ranks in self._ranks_of]
        values = [self._k_min - 1, *(boundary.value for boundary in self._boundaries), self._k_max]
        for i, boundary in enumerate(self._boundaries):
            step = boundary.wanted_step(now_s, pressure[i], pressure[i + 1])
            moved_to = boundary.value + step
            if step and values[i] < moved_to < values[i + 2]:
                self._moves.append(BoundaryMove(now_s, i, boundary.value, moved_to, pressure[i], pressure[i + 1]))
                boundary.value = values[i + 1] = moved_to
                boundary.moved_at_s = now_s

    def _lanes_away(self, rank: int, first: int, last: int) -> int:
        lane = self._lane_of[rank]
        return max(first - lane, lane - last, 0)


def _require(holds: bool, name: str, value: object, must_be: str) -> None:
    if not holds:
        raise UsageError(f"lanes: {name} is {value}; it must be {must_be}")
