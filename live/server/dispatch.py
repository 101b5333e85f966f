"""Which rank a request goes to: what is known of each rank, shown to the route policy; the simulator's front end, live.

A policy is built for the ranks that are up, numbered from 0 in their own order, and built anew when one leaves or
returns: what its context promised always holds, and nothing it answers can be a rank that is down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

from simmoe.errors import PolicyError, SimmoeError
from simmoe.policies.asking import Asker
from simmoe.policies.protocols import PolicyContext, RoutePolicy
from simmoe.policies.queue_aware import QueueAware
from simmoe.policies.registry import PolicyChoice
from simmoe.policies.views import RankView, RequestView

if TYPE_CHECKING:
    from simmoe.live.server.route_decisions import RouteRecorder

NUM_FRONT_ENDS = 1


class Counts(NamedTuple):
    """What an engine says of itself."""

    num_waiting: int = 0
    num_running: int = 0
    kv_used: float = 0.0
    """Share of KV blocks in use, 0..1."""
    k_running: int | None = None
    """The largest budget that runs; None: it does not tell."""


class Ticket(NamedTuple):
    """A request counted at a rank until it is given back."""

    rank: int
    k: int
    num_sequences: int


class _Rank:
    """One rank as the front end knows it."""

    def __init__(self) -> None:
        self.counts = Counts()
        self.published_s = 0.0
        self.k_running = 0
        self.num_inflight = 0
        self.num_sent = 0
        """Sequences sent, ever."""
        self.num_known = 0
        """Of those, sent before the last publication was asked for."""
        self.inflight_ks: dict[int, int] = {}
        """Requests in flight by budget."""

    @property
    def k_inflight(self) -> int:
        """The largest budget in flight, of an engine that runs anything."""
        return max(self.inflight_ks, default=0) if self.counts.num_running else 0


class Dispatcher:
    """One front end over ``context.num_ranks`` ranks.

    Args:
        choice: the policy; its route part is asked here.
        context: the deployment with every rank up.
        recorder: told every call of the policy and which ranks it was built for.
    Raises:
        UsageError, PolicyError: the policy cannot be built for the deployment.
    """

    def __init__(self, choice: PolicyChoice, context: PolicyContext, recorder: RouteRecorder | None = None) -> None:
        self._choice = choice
        self._recorder = recorder
        self._context = context
        self._ranks = [_Rank() for _ in range(context.num_ranks)]
        self._up: list[int] = []
        self.fallback_reason = ""
        """Why the policy cannot be built for the ranks that are up, where it cannot: least 4 W + R routes meanwhile."""
        self.policy: RoutePolicy = choice.route(context)
        self._asker = Asker(context)

    @property
    def up(self) -> Sequence[int]:
        """Ranks requests may go to."""
        return self._up

    def set_up(self, ranks: Sequence[int]) -> None:
        """Say which ranks are up; the policy is built anew if that changes which."""
        if list(ranks) == self._up:
            return
        self._up, self.fallback_reason = list(ranks), ""
        if not ranks:
            return
        self.policy, self._asker, self.fallback_reason = build_for(self._choice.route, self._context, len(ranks))
        if self._recorder is not None:
            self._recorder.built(self._up, self.fallback_reason)

    def mark(self, rank: int) -> int:
        """Return what :meth:`publish` wants to know of the moment the engine was asked for its counts."""
        return self._ranks[rank].num_sent

    def publish(self, rank: int, counts: Counts, mark: int, now_s: float) -> None:
        """Take in what an engine says of itself.

        One that does not tell the largest budget it runs is taken to run the largest that is in flight there.

        Args:
            rank: the engine.
            counts: at some time since it was asked.
            mark: from :meth:`mark`, when it was asked: what was sent later still counts as waiting.
            now_s: on the dispatcher's clock.
        """
        state = self._ranks[rank]
        state.counts, state.num_known, state.published_s = counts, mark, now_s
        state.k_running = counts.k_running if counts.k_running is not None else state.k_inflight

    def forget(self, rank: int) -> None:
        """Forget what a rank published: it has gone."""
        state = self._ranks[rank]
        state.counts, state.num_known, state.k_running = Counts(), state.num_sent, 0

    def route(self, request: RequestView, num_sequences: int, now_s: float) -> Ticket:
        """Choose the rank of a request and count it there.

        Raises:
            PolicyError: the policy raised, or named no rank there is.
        """
        views = tuple(self._view(position, rank) for position, rank in enumerate(self._up))
        try:
            position = self._asker.route(self.policy, request, views, now_s)
        except PolicyError as error:
            if self._recorder is not None:
                self._recorder.decided(request, views, now_s, str(error))
            raise
        if self._recorder is not None:
            self._recorder.decided(request, views, now_s, position)
        rank = self._up[position]
        state = self._ranks[rank]
        state.num_inflight += num_sequences
        state.num_sent += num_sequences
        state.inflight_ks[request.k_qos] = state.inflight_ks.get(request.k_qos, 0) + 1
        return Ticket(rank, request.k_qos, num_sequences)

    def release(self, ticket: Ticket) -> None:
        """Hear that a request has left its rank."""
        state = self._ranks[ticket.rank]
        state.num_inflight -= ticket.num_sequences
        state.inflight_ks[ticket.k] -= 1
        if not state.inflight_ks[ticket.k]:
            del state.inflight_ks[ticket.k]

    def num_inflight(self, rank: int) -> int:
        """Return the sequences at a rank that are not finished."""
        return self._ranks[rank].num_inflight

    def counts(self, rank: int) -> Counts:
        """Return what a rank last said of itself."""
        return self._ranks[rank].counts

    def snapshot(self) -> Any:
        """Return the policy's state; None if it shows none.

        Raises:
            PolicyError: it cannot.
        """
        return self._asker.snapshot(self.policy)

    def _view(self, position: int, rank: int) -> RankView:
        state = self._ranks[rank]
        num_waiting, num_running, kv_used, _ = state.counts
        return RankView(
            dp_rank=position,
            num_waiting=num_waiting + state.num_sent - state.num_known,
            num_running=num_running,
            num_inflight=state.num_inflight,
            num_front_ends=NUM_FRONT_ENDS,
            kv_used=kv_used,
            k_running=state.k_running,
            published_s=state.published_s,
        )


def build_for(
    build: Callable[[PolicyContext], RoutePolicy], context: PolicyContext, num_ranks: int
) -> tuple[RoutePolicy, Asker, str]:
    """Return a policy for some of a deployment's ranks, what asks it, and why it is least 4 W + R where it is.

    Args:
        build: the policy's constructor.
        context: the deployment with every rank up.
        num_ranks: how many are.
    """
    context = replace(context, num_ranks=num_ranks)
    try:
        return build(context), Asker(context), ""
    except SimmoeError as error:
        return QueueAware(), Asker(context), str(error)
