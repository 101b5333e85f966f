"""The front ends: each request's rank is chosen when it arrives, from counts as stale as vLLM's."""

from __future__ import annotations

from collections.abc import Sequence

from simmoe.policies.protocols import RoutePolicy
from simmoe.policies.views import RankView, RequestView
from simmoe.simulator.asking import Asker
from simmoe.simulator.engine import Engine


class FrontEnd:
    """One front end over all ranks.

    What it knows of a rank is its last publication, with what it has sent since counted as waiting (scaled, as vLLM
    does, by the number of front ends), and its own exact count of unfinished requests there.
    """

    def __init__(self, policy: RoutePolicy, engines: Sequence[Engine], num_front_ends: int, asker: Asker) -> None:
        self.policy = policy
        self._engines = engines
        self._num_front_ends = num_front_ends
        self._asker = asker
        self._num_inflight = [0] * len(engines)
        self._num_sent = [0] * len(engines)
        """Requests sent to each rank since the publication of _sent_since."""
        self._sent_since = [-1.0] * len(engines)

    def route(self, request: RequestView, now_s: float) -> int:
        """Choose the rank of a request and count it there."""
        views = [self._view(rank, now_s) for rank in range(len(self._engines))]
        rank = self._asker.route(self.policy, request, views, now_s)
        self._num_inflight[rank] += 1
        self._num_sent[rank] += self._num_front_ends
        return rank

    def finished(self, rank: int) -> None:
        """Hear that one of this front end's requests has left a rank."""
        self._num_inflight[rank] -= 1

    def _view(self, rank: int, now_s: float) -> RankView:
        counts, published_s = self._engines[rank].published(now_s)
        if published_s != self._sent_since[rank] or published_s == now_s:
            # A publication at this very instant already counts what was sent before it.
            self._sent_since[rank] = published_s
            self._num_sent[rank] = 0
        return RankView(
            dp_rank=rank,
            num_waiting=counts.num_waiting + self._num_sent[rank],
            num_running=counts.num_running,
            num_inflight=self._num_inflight[rank],
            num_front_ends=self._num_front_ends,
            kv_used=counts.kv_used,
            k_running=counts.k_running,
            age_s=now_s - published_s,
        )
