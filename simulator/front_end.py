"""The front ends: each request's rank is chosen when it arrives, from counts as stale as vLLM's."""

from __future__ import annotations

from collections.abc import Sequence

from simmoe.policies.asking import Asker
from simmoe.policies.protocols import RoutePolicy
from simmoe.policies.views import RankView, RequestView
from simmoe.simulator.engine import Engine
from simmoe.simulator.publication import Timetable


class FrontEnd:
    """One front end over all ranks.

    What it knows of a rank is its last publication, with what it has sent since counted as waiting (scaled, as vLLM
    does, by the number of front ends), and its own exact count of unfinished requests there. A rank's view is built
    anew when one of these changes, so that a request costs the same however many ranks there are.
    """

    def __init__(
        self,
        policy: RoutePolicy,
        engines: Sequence[Engine],
        num_front_ends: int,
        publish_interval_s: float,
        asker: Asker,
    ) -> None:
        self.policy = policy
        self._engines = engines
        self._num_front_ends = num_front_ends
        self._asker = asker
        self._num_inflight = [0] * len(engines)
        self._num_sent = [0] * len(engines)
        """Requests sent to each rank since its last publication."""
        self._timetable = Timetable(publish_interval_s)
        self._counts = [engine.published(0.0) for engine in engines]
        """Each rank's last publication."""
        self._views = [self._view(rank) for rank in range(len(engines))]
        self._changed: list[int] = []
        """Ranks whose view is out of date until it is built anew."""

    def route(self, request: RequestView, now_s: float) -> int:
        """Choose the rank of a request and count it there."""
        if now_s >= self._timetable.next_s:
            self._timetable.catch_up(now_s)
            self._counts = [engine.published(now_s) for engine in self._engines]
            self._num_sent = [0] * len(self._engines)
            self._views = [self._view(rank) for rank in range(len(self._engines))]
        else:
            for rank in self._changed:
                self._views[rank] = self._view(rank)
        self._changed.clear()
        rank = self._asker.route(self.policy, request, tuple(self._views), now_s)
        self._num_inflight[rank] += 1
        self._num_sent[rank] += self._num_front_ends
        self._changed.append(rank)
        return rank

    def finished(self, rank: int) -> None:
        """Hear that one of this front end's requests has left a rank."""
        self._num_inflight[rank] -= 1
        self._changed.append(rank)

    def _view(self, rank: int) -> RankView:
        num_waiting, num_running, kv_used, k_running = self._counts[rank]
        return RankView(
            rank,
            num_waiting + self._num_sent[rank],
            num_running,
            self._num_inflight[rank],
            self._num_front_ends,
            kv_used,
            k_running,
            self._timetable.last_s,
        )
