"""The shortest queue, by the score of the paper and of vLLM up to 0.26."""

from __future__ import annotations

from collections.abc import Sequence

from simmoe.policies.views import RankView, RequestView


def queue_scores(ranks: Sequence[RankView]) -> list[int]:
    """Return each rank's 4 W + R: a waiting request weighs as much as four running ones."""
    return [4 * rank.num_waiting + rank.num_running for rank in ranks]


class QueueAware:
    """The rank of least 4 W + R (W waiting, R running), ties to the lower rank.

    Source: MoE-Prism, Eq. 6; vLLM's own rule up to 0.26.
    """

    def route(self, request: RequestView, ranks: Sequence[RankView], now_s: float, /) -> int:
        """Return the least loaded rank."""
        scores = queue_scores(ranks)
        return ranks[scores.index(min(scores))].dp_rank
