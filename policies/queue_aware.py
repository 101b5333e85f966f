"""The shortest queue, by the score of the paper and of vLLM up to 0.26."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from simmoe.policies.views import RankView, RequestView


def queue_score(rank: RankView) -> int:
    """Return 4 W + R: a waiting request weighs as much as four running ones."""
    return 4 * rank.num_waiting + rank.num_running


def least_loaded(ranks: Iterable[RankView]) -> RankView:
    """Return the rank of least 4 W + R, ties to the lower rank."""
    return min(ranks, key=lambda rank: (queue_score(rank), rank.dp_rank))


class QueueAware:
    """The rank of least 4 W + R (W waiting, R running), ties to the lower rank.

    Source: MoE-Prism, Eq. 6; vLLM's own rule up to 0.26.
    """

    def route(self, request: RequestView, ranks: Sequence[RankView], now_s: float, /) -> int:
        """Return the least loaded rank."""
        return least_loaded(ranks).dp_rank
