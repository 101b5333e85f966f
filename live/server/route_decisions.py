"""Every call of a route policy at a live front end and what it answered, recorded and asked again offline.

After its header (:mod:`simmoe.live.engine.decision_file`) a recording has, by a line's first item::

    ["=", [rank], why_not]   from here on the policy is one built anew for these ranks, its own numbered from 0
    ["?", now_s, [request_id, arrival_s, prompt_tokens, k_qos], [rank_view], answer]

``why_not`` is why the policy cannot be built for them, and least 4 W + R routes; else empty. ``rank_view`` is
``[num_waiting, num_running, num_inflight, kv_used, k_running, published_s]``. ``answer`` is the policy's own number of
the chosen rank, or the failure's text. A call costs a line, in proportion to the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from simmoe.errors import OutputError, PolicyError
from simmoe.live.engine.decision_file import DecisionReader, DecisionWriter, as_count, as_number, as_text
from simmoe.live.engine.provenance import Provenance
from simmoe.live.server.dispatch import NUM_FRONT_ENDS, build_for
from simmoe.policies.protocols import PolicyContext, RoutePolicy
from simmoe.policies.views import RankView, RequestView

FILE_NAME = "decisions-route.jsonl"


class RouteRecorder(DecisionWriter):
    """Writes a recording as the front end runs.

    Args:
        path: the file, replaced if it exists.
        provenance: what decides.
        context: the deployment with every rank up.
    Raises:
        OSError: it cannot be written.
    """

    def __init__(self, path: Path, provenance: Provenance, context: PolicyContext) -> None:
        super().__init__(path, "route", provenance, True, context, {"num_front_ends": NUM_FRONT_ENDS})

    def built(self, ranks: Sequence[int], why_not: str) -> None:
        """Note for which ranks the policy was built anew, and why it could not be where it could not."""
        self.write(["=", list(ranks), why_not])

    def decided(self, request: RequestView, ranks: Sequence[RankView], now_s: float, answer: int | str) -> None:
        """Note a call of the policy and the rank it chose, or the text of its failure."""
        shown = [[v.num_waiting, v.num_running, v.num_inflight, v.kv_used, v.k_running, v.published_s] for v in ranks]
        asked = [request.request_id, request.arrival_s, request.prompt_tokens, request.k_qos]
        self.write(["?", now_s, asked, shown, answer])


def open_recorder(folder: Path, provenance: Provenance, context: PolicyContext) -> RouteRecorder:
    """Return what records in a folder.

    Raises:
        OutputError: it cannot be written.
    """
    try:
        return RouteRecorder(folder / FILE_NAME, provenance, context)
    except OSError as error:
        raise OutputError(f"cannot record decisions in '{folder / FILE_NAME}': {error.strerror}") from None


class Built(NamedTuple):
    """The policy was built anew."""

    ranks: list[int]
    why_not: str


class Choice(NamedTuple):
    """One recorded call: what the policy was shown, and what it answered."""

    request: RequestView
    ranks: tuple[RankView, ...]
    now_s: float
    answer: int | str
    """The rank by the policy's own number, or the text of its failure."""


class RouteRecording(DecisionReader):
    """A recording of one front end's route policy."""

    kind = "route"
    view_numbers = ("num_front_ends",)

    def events(self) -> Iterator[Built | Choice]:
        """Yield what happened, in order."""
        up: list[int] = []
        for number, line in self.lines():
            try:
                event = self._event(line, len(up))
            except (LookupError, TypeError, ValueError) as error:
                self.refuse(number, error)
            if isinstance(event, Built):
                up = event.ranks
            yield event

    def replay(self, build: Callable[[PolicyContext], RoutePolicy], context: PolicyContext, now: Provenance) -> int:
        """Ask fresh policies every recorded call; return how many answers they gave, all equal to the recorded ones.

        Args:
            build: the policy's constructor.
            context: from :meth:`context`.
            now: what the policy and its profile are, to say why an answer differs.
        Raises:
            PolicyError: an answer differs, or the policy can be built where it could not or the other way round.
        """
        count = 0
        for event in self.events():
            if isinstance(event, Built):
                policy, asker, why_not = build_for(build, context, len(event.ranks))
                if bool(why_not) != bool(event.why_not):
                    live, replayed = (why or "the policy is built" for why in (event.why_not, why_not))
                    raise PolicyError(
                        f"'{self.path}' after call {count}: live {live}, replayed {replayed}; "
                        f"{self.provenance.against(now)}"
                    )
                continue
            count += 1
            try:
                answer: int | str = asker.route(policy, event.request, event.ranks, event.now_s)
            except PolicyError as error:
                answer = str(error)
            failed = isinstance(answer, str)
            if not (isinstance(event.answer, str) if failed else answer == event.answer):
                raise PolicyError(self.differs(count, event.now_s, event.answer, answer, now))
        return count

    def _event(self, line: list[Any], num_up: int) -> Built | Choice:
        mark, *rest = line
        if mark == "=":
            ranks, why_not = rest
            num_ranks = self.deployment["num_ranks"]
            if not isinstance(ranks, list) or not ranks or any(as_count(rank) >= num_ranks for rank in ranks):
                raise ValueError(f"the deployment has ranks 0 to {num_ranks - 1}")
            if ranks != sorted(set(ranks)):
                raise ValueError("ranks do not ascend")
            return Built(ranks, as_text(why_not))
        if mark != "?":
            raise ValueError("its first item is neither '=' nor '?'")
        now_s, (request_id, arrival_s, prompt_tokens, k_qos), shown, answer = rest
        request = RequestView(as_text(request_id), as_number(arrival_s), as_count(prompt_tokens), 0, as_count(k_qos))
        if not isinstance(shown, list) or not shown or len(shown) != num_up:
            raise ValueError(f"views of {num_up} ranks are due")
        ranks = tuple(self._rank_view(position, *values) for position, values in enumerate(shown))
        return Choice(request, ranks, as_number(now_s), answer if isinstance(answer, str) else as_count(answer))

    def _rank_view(
        self,
        dp_rank: int,
        num_waiting: int,
        num_running: int,
        num_inflight: int,
        kv_used: float,
        k_running: int,
        published_s: float,
    ) -> RankView:
        return RankView(
            dp_rank,
            as_count(num_waiting),
            as_count(num_running),
            as_count(num_inflight),
            self.view["num_front_ends"],
            as_number(kv_used),
            as_count(k_running),
            as_number(published_s),
        )
