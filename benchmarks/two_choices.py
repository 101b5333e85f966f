"""A route policy for hundreds of ranks: what it costs does not grow with them."""

from __future__ import annotations

from collections.abc import Sequence

from simmoe.policies.protocols import PolicyContext
from simmoe.policies.views import RankView, RequestView


class TwoChoices:
    """The rank of less 4 W + R among two drawn at random in the lane of the request's budget.

    Ranks are dealt to ``lanes`` lanes in consecutive groups of equal size, budgets likewise. The draws come from a
    linear congruential sequence (Knuth's MMIX), so that equal runs are equal.

    Args:
        lanes: groups of ranks; divides their number.
    Source: Mitzenmacher, The Power of Two Choices in Randomized Load Balancing, 2001.
    """

    def __init__(self, context: PolicyContext, lanes: int = 1) -> None:
        self._k_max = context.k_max
        self._lanes = lanes
        self._drawn = context.front_end_index

    def route(self, request: RequestView, ranks: Sequence[RankView], now_s: float, /) -> int:
        """Draw two ranks and return the less loaded."""
        size = len(ranks) // self._lanes
        first = (request.k_qos - 1) * self._lanes // self._k_max * size
        one, other = ranks[first + self._draw(size)], ranks[first + self._draw(size)]
        return min(one, other, key=lambda rank: 4 * rank.num_waiting + rank.num_running).dp_rank

    def _draw(self, below: int) -> int:
        self._drawn = (6364136223846793005 * self._drawn + 1442695040888963407) % 2**64
        return (self._drawn >> 33) % below
