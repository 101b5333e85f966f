"""vLLM 0.32's own load balancer between data-parallel engines."""

from __future__ import annotations

from collections.abc import Sequence

from simmoe.policies.protocols import PolicyContext
from simmoe.policies.views import RankView, RequestView


class Vllm032:
    """vLLM 0.32: least max(front ends x in flight, W + R) + 6 W max(0, kv_used - 0.5), ties by a rotating start.

    The in-flight count is exact where W and R may be 100 ms old; the last term turns requests away from queues that
    drain slowly because KV is short. Ties go to the first rank from a start that moves on by one with each request.

    Source: vLLM 0.32.0, ``v1/engine/core_client.py``, ``DPLBAsyncMPClient.get_core_engine_for_request``.
    """

    def __init__(self, context: PolicyContext) -> None:
        self._start = context.num_ranks * context.front_end_index // context.num_front_ends

    def route(self, request: RequestView, ranks: Sequence[RankView], now_s: float, /) -> int:
        """Return the rank of least score."""
        start = self._start % len(ranks)
        self._start = (start + 1) % len(ranks)
        return min([*ranks[start:], *ranks[:start]], key=_score).dp_rank


def _score(rank: RankView) -> float:
    load = max(rank.num_front_ends * rank.num_inflight, rank.num_waiting + rank.num_running)
    return load + rank.num_waiting * 6.0 * max(0.0, rank.kv_used - 0.5)
