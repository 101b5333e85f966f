"""Every view a policy was shown in a live engine and what it answered, recorded compactly and asked again offline.

A recording is a text file, one JSON value a line: a header, then the changes of the queue and of the running set as
they happened, and at each call only what changes cannot tell. Lines by their first item::

    ["+", request_id, arrival_s, prompt_tokens, k_qos]   it arrived
    ["<", request_id]                                    it was preempted: it left the running set for the queue's front
    ["r", request_id]                                    vLLM skipped it and put it back where it was
    ["-", request_id]                                    it left the queue
    [">", request_id]                                    it joined the running set
    ["x", request_id]                                    it left the engine
    ["?", now_s, token_budget, free_kv_blocks, k_running, decoded, {request_id: computed}, [prompt_tokens], plan]

``decoded`` is how many steps were composed since the last call; running requests have computed one more token in each,
save those that the next item names. ``[prompt_tokens]`` are those of preempted requests at the front. ``plan`` is
``[order, k_max, wake_at_s]``, or the failure's text.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from simmoe.errors import DataError, PolicyError
from simmoe.live.engine.policy_queue import Enqueue, PolicyQueue, Waiting
from simmoe.policies.asking import Asker
from simmoe.policies.protocols import BatchPolicy, PolicyContext, StepPlan
from simmoe.policies.views import RequestView, StepView

VERSION = 1
_QUEUE_MARKS = {"preempt": "<", "return": "r", "remove": "-"}

log = logging.getLogger(__name__)


class DecisionRecorder:
    """Writes a recording as the engine runs.

    Args:
        path: the file, replaced if it exists.
        header: what the replay needs to build the same policy: ``policy``, ``profile``, ``async_scheduling``,
            ``deployment``, ``view`` (the numbers of a view that never change).
    """

    def __init__(self, path: Path, header: dict[str, Any]) -> None:
        # line by line: an engine process is often killed, and what it decided is wanted then more than ever
        self._file: IO[str] = path.open("w", buffering=1, encoding="utf-8")
        self._is_open = True
        self._file.write(_line({"decisions": VERSION, **header}))
        self._computed: dict[str, int] = {}
        """Tokens computed by each request that ran at the last call, as of then."""
        self._decoded = 0

    def queued(self, change: str, view: RequestView) -> None:
        """Note a change of the queue, as :class:`PolicyQueue` tells it."""
        if change == "add":
            self._write(["+", view.request_id, view.arrival_s, view.prompt_tokens, view.k_qos])
        else:
            self._write([_QUEUE_MARKS[change], view.request_id])

    def stepped(self, admitted: list[str]) -> None:
        """Note a composed step and who it admitted."""
        self._decoded += 1
        for request_id in admitted:
            self._write([">", request_id])

    def left(self, request_id: str) -> None:
        """Note that a request left the engine."""
        self._write(["x", request_id])

    def decided(self, view: StepView, plan: StepPlan | str) -> None:
        """Note a call of the policy and its plan, or the text of its failure."""
        computed = {request.request_id: request.num_computed_tokens for request in view.running}
        last, decoded = self._computed, self._decoded
        odd = {name: value for name, value in computed.items() if last.get(name, -1 - decoded) + decoded != value}
        prompts = [view.waiting[i].prompt_tokens for i in range(view.num_preempted)]
        answer = plan if isinstance(plan, str) else _plan_to_json(plan)
        self._write(
            ["?", view.now_s, view.token_budget, view.free_kv_blocks, view.k_running, decoded, odd, prompts, answer]
        )
        self._computed, self._decoded = computed, 0

    def close(self) -> None:
        """Finish the file; harmless to call again."""
        self._is_open = False
        with suppress(OSError):  # what could not be written before cannot be now
            self._file.close()

    def _write(self, value: Any) -> None:
        """Write a line. A disk that is full ends the recording, which is good so far, and not the engine."""
        if not self._is_open:
            return
        try:
            self._file.write(_line(value))
        except OSError as error:
            self.close()
            log.error("the recording of decisions in '%s' ends here: %s", self._file.name, error.strerror)


def _line(value: Any) -> str:
    return json.dumps(value, separators=(",", ":")) + "\n"


@dataclass(frozen=True, slots=True)
class Decision:
    """One recorded call: what the policy was shown, and what it answered."""

    view: StepView
    """Valid until the next decision is taken from the recording, as a live view is."""
    plan: StepPlan | str
    """The plan, or the text of the policy's failure."""


class Recording:
    """A recording on disk.

    Raises:
        DataError: the file is none, or is damaged; a last line cut short by a kill is left out.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        header = next(self._lines(), (1, None))[1]
        if not isinstance(header, dict) or header.get("decisions") != VERSION:
            raise DataError(f"'{path}' is no recording of decisions of version {VERSION}")
        self.policy: str = header["policy"]
        """As the engine was given it."""
        self.profile: str = header["profile"]
        """Where T(n, k) came from; empty: nowhere."""
        self.async_scheduling: bool = header["async_scheduling"]
        """Whether that engine composed steps ahead, which the profile's times depend on."""
        self.deployment: dict[str, Any] = header["deployment"]
        """The numbers of the engine's PolicyContext."""
        self._constant: dict[str, Any] = header["view"]

    @staticmethod
    def is_one(path: Path) -> bool:
        """Return whether a file looks like a recording."""
        try:
            with path.open("rb") as file:
                return file.read(13) == b'{"decisions":'
        except OSError:
            return False

    def context(self, prefill_s: Callable[[int, int], float]) -> PolicyContext:
        """Return the deployment of the engine, with T(n, k)."""
        return PolicyContext(prefill_s=prefill_s, **self.deployment)

    def decisions(self, enqueue: Enqueue | None) -> Iterator[Decision]:
        """Yield every call in order, its view's queue kept in the order that ``enqueue`` gives, see ``PolicyQueue``."""
        mirror = _Mirror(enqueue, self._constant)
        for number, line in self._lines(start=2):
            try:
                decision = mirror.apply(line)
            except (KeyError, TypeError, ValueError, IndexError) as error:
                raise DataError(f"'{self.path}' line {number} does not follow from those before: {error!r}") from None
            if decision is not None:
                yield decision

    def replay(self, policy: BatchPolicy) -> int:
        """Ask a fresh policy every recorded call; return how many plans it gave, all equal to the recorded ones.

        Raises:
            PolicyError: a plan differs, and the message names the call; or the policy cannot order its queue.
        """
        asker = Asker(self.context(_no_times))
        enqueue = partial(asker.enqueue, policy) if asker.orders_queue(policy) else None
        count = 0
        for count, decision in enumerate(self.decisions(enqueue), start=1):
            try:
                plan: StepPlan | str = asker.plan(policy, decision.view)
            except PolicyError as error:
                plan = str(error)
            failed = isinstance(plan, str)
            same = isinstance(decision.plan, str) if failed else plan_equal(plan, decision.plan)
            if not same:
                raise PolicyError(
                    f"'{self.path}' call {count} at {decision.view.now_s} s: live {decision.plan}, replayed {plan}"
                )
        return count

    def _lines(self, start: int = 1) -> Iterator[tuple[int, Any]]:
        try:
            with self.path.open(encoding="utf-8") as file:
                for number, text in enumerate(file, start=1):
                    if number < start:
                        continue
                    try:
                        yield number, json.loads(text)
                    except ValueError:
                        if text.endswith("\n"):
                            raise DataError(f"'{self.path}' line {number} is not JSON") from None
        except OSError as error:
            raise DataError(f"cannot read the recording '{self.path}': {error.strerror}") from None


def _no_times(num_tokens: int, k: int) -> float:
    """Stand in for T(n, k), which a policy asks of the context that it was built with."""
    raise AssertionError


def plan_equal(plan: StepPlan | str, other: StepPlan | str) -> bool:
    """Return whether two plans say the same; an order is the same in any sequence type."""
    if isinstance(plan, str) or isinstance(other, str):
        return plan == other
    return _plan_to_json(plan) == _plan_to_json(other)


def _plan_to_json(plan: StepPlan) -> list[Any]:
    order = None if plan.order is None else list(plan.order)
    return [order, plan.k_max, plan.wake_at_s]


class _Request:
    """What the queue asks of a request."""

    def __init__(self, view: RequestView) -> None:
        self.request_id = view.request_id
        self.view = view
        self.num_preemptions = 0


class _Mirror:
    """The queue and the running set as the engine had them."""

    def __init__(self, enqueue: Enqueue | None, constant: dict[str, Any]) -> None:
        self._constant = constant
        self._queue = PolicyQueue(lambda request: request.view, enqueue)
        self._requests: dict[str, _Request] = {}
        self._running: dict[str, None] = {}
        self._computed: dict[str, int] = {}
        self._left: dict[str, Waiting] = {}
        """Where in the queue each request was that has left it and is in the engine."""

    def apply(self, line: list[Any]) -> Decision | None:
        mark, *rest = line
        if mark == "?":
            return self._decision(*rest)
        request_id = rest[0]
        if mark == "+":
            request = _Request(RequestView(request_id, rest[1], rest[2], 0, rest[3]))
            self._requests[request_id] = request
            self._queue.add_request(request)
        elif mark == "-":
            self._left[request_id] = self._queue.by_id[request_id]
            self._queue.remove_request(self._requests[request_id])
        elif mark == "r":
            self._queue.take_back(self._left[request_id])
        elif mark == "<":
            del self._running[request_id]
            self._requests[request_id].num_preemptions += 1
            self._queue.prepend_request(self._requests[request_id])
        elif mark == ">":
            self._running[request_id] = None
        elif mark == "x":
            self._running.pop(request_id, None)
            self._left.pop(request_id, None)
            if request_id not in self._queue.by_id:
                del self._requests[request_id]
        else:
            raise ValueError(f"unknown mark {mark!r}")
        return None

    def _decision(
        self,
        now_s: float,
        token_budget: int,
        free_kv_blocks: int,
        k_running: int,
        decoded: int,
        odd: dict[str, int],
        prompts: list[int],
        answer: Any,
    ) -> Decision:
        queue = self._queue
        for request, prompt_tokens in zip(queue, prompts, strict=False):  # those at the front were preempted
            request.view = request.view._replace(prompt_tokens=prompt_tokens)
        queue.look_again()
        last = self._computed
        self._computed = {name: odd[name] if name in odd else last[name] + decoded for name in self._running}
        view = StepView(
            now_s=now_s,
            waiting=queue.view,
            running=tuple(self._running_view(name) for name in self._running),
            token_budget=token_budget,
            free_kv_blocks=free_kv_blocks,
            k_running=k_running,
            oldest=queue.oldest(),
            num_preempted=queue.num_preempted,
            **self._constant,
        )
        return Decision(view, answer if isinstance(answer, str) else StepPlan(*answer))

    def _running_view(self, request_id: str) -> RequestView:
        return self._requests[request_id].view._replace(num_computed_tokens=self._computed[request_id])
