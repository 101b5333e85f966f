"""Ranks in turn, whatever they are doing."""

from __future__ import annotations

from collections.abc import Sequence

from simmoe.policies.protocols import PolicyContext
from simmoe.policies.views import RankView, RequestView


class RoundRobin:
    """Ranks in turn; front ends that share them start evenly spread."""

    def __init__(self, context: PolicyContext) -> None:
        self._next = context.num_ranks * context.front_end_index // context.num_front_ends

    def route(self, request: RequestView, ranks: Sequence[RankView], now_s: float, /) -> int:
        """Return the next rank."""
        rank = ranks[self._next % len(ranks)]
        self._next = (self._next + 1) % len(ranks)
        return rank.dp_rank
