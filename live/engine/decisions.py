"""Every view a batch policy was shown in a live engine and what it answered, recorded and asked again offline.

After its header (:mod:`simmoe.live.engine.decision_file`) a recording has the changes of the queue and of the running
set as they happened, and at each call only what changes cannot tell. Lines by their first item::

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

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from simmoe.errors import PolicyError
from simmoe.live.engine.decision_file import DecisionReader, DecisionWriter, as_count, as_number, as_text
from simmoe.live.engine.policy_queue import Enqueue, PolicyQueue, Waiting
from simmoe.live.engine.provenance import Provenance
from simmoe.policies.asking import Asker
from simmoe.policies.protocols import BatchPolicy, StepPlan
from simmoe.policies.views import RequestView, StepView

_QUEUE_MARKS = {"preempt": "<", "return": "r", "remove": "-"}


class DecisionRecorder(DecisionWriter):
    """Writes a recording as the engine runs; made as a :class:`DecisionWriter` is."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._computed: dict[str, int] = {}
        """Tokens computed by each request that ran at the last call, as of then."""
        self._decoded = 0

    def queued(self, change: str, view: RequestView) -> None:
        """Note a change of the queue, as :class:`PolicyQueue` tells it."""
        if change == "add":
            self.write(["+", view.request_id, view.arrival_s, view.prompt_tokens, view.k_qos])
        else:
            self.write([_QUEUE_MARKS[change], view.request_id])

    def stepped(self, admitted: list[str]) -> None:
        """Note a composed step and who it admitted."""
        self._decoded += 1
        for request_id in admitted:
            self.write([">", request_id])

    def left(self, request_id: str) -> None:
        """Note that a request left the engine."""
        self.write(["x", request_id])

    def decided(self, view: StepView, plan: StepPlan | str) -> None:
        """Note a call of the policy and its plan, or the text of its failure."""
        computed = {request.request_id: request.num_computed_tokens for request in view.running}
        last, decoded = self._computed, self._decoded
        odd = {name: value for name, value in computed.items() if last.get(name, -1 - decoded) + decoded != value}
        prompts = [view.waiting[i].prompt_tokens for i in range(view.num_preempted)]
        answer = plan if isinstance(plan, str) else _plan_to_json(plan)
        self.write(
            ["?", view.now_s, view.token_budget, view.free_kv_blocks, view.k_running, decoded, odd, prompts, answer]
        )
        self._computed, self._decoded = computed, 0


@dataclass(frozen=True, slots=True)
class Decision:
    """One recorded call: what the policy was shown, and what it answered."""

    view: StepView
    """Valid until the next decision is taken from the recording, as a live view is."""
    plan: StepPlan | str
    """The plan, or the text of the policy's failure."""


class Recording(DecisionReader):
    """A recording of one engine's batch policy."""

    kind = "batch"
    view_numbers = ("dp_rank", "max_num_seqs", "block_size")

    def decisions(self, enqueue: Enqueue | None) -> Iterator[Decision]:
        """Yield every call in order, its view's queue kept in the order that ``enqueue`` gives, see ``PolicyQueue``."""
        mirror = _Mirror(enqueue, self.view)
        for number, line in self.lines():
            try:
                decision = mirror.apply(line)
            except (LookupError, TypeError, ValueError) as error:
                self.refuse(number, error)
            if decision is not None:
                yield decision

    def replay(self, policy: BatchPolicy, now: Provenance | None = None) -> int:
        """Ask a fresh policy every recorded call; return how many plans it gave, all equal to the recorded ones.

        Args:
            policy: built for :meth:`context`.
            now: what it and its profile are, to say why a plan differs.
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
                raise PolicyError(self.differs(count, decision.view.now_s, decision.plan, plan, now))
        return count


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


def _plan_from_json(answer: Any) -> StepPlan:
    order, k_max, wake_at_s = answer
    return StepPlan(
        None if order is None else [as_text(request_id) for request_id in order],
        None if k_max is None else as_count(k_max),
        None if wake_at_s is None else as_number(wake_at_s),
    )


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
        request_id = as_text(rest[0])
        if mark == "+":
            if request_id in self._queue.by_id or request_id in self._running:
                raise ValueError(f"request '{request_id}' is in the engine already")
            _, arrival_s, prompt_tokens, k_qos = rest
            view = RequestView(request_id, as_number(arrival_s), as_count(prompt_tokens), 0, as_count(k_qos))
            request = _Request(view)
            self._requests[request_id] = request
            self._queue.add_request(request)
        elif mark == "-":
            self._left[request_id] = self._queue.by_id[request_id]
            self._queue.remove_request(self._requests[request_id])
        elif mark == "r":
            self._queue.take_back(self._left.pop(request_id))
        elif mark == "<":
            del self._running[request_id]
            self._requests[request_id].num_preemptions += 1
            self._queue.prepend_request(self._requests[request_id])
        elif mark == ">":
            if request_id in self._queue.by_id:
                raise ValueError(f"request '{request_id}' waits")
            self._running[self._requests[request_id].request_id] = None
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
            request.view = request.view._replace(prompt_tokens=as_count(prompt_tokens))
        queue.look_again()
        last = self._computed
        self._computed = {name: as_count(odd[name] if name in odd else last[name] + decoded) for name in self._running}
        view = StepView(
            now_s=as_number(now_s),
            waiting=queue.view,
            running=tuple(self._running_view(name) for name in self._running),
            token_budget=as_count(token_budget),
            free_kv_blocks=as_count(free_kv_blocks),
            k_running=as_count(k_running),
            oldest=queue.oldest(),
            num_preempted=queue.num_preempted,
            **self._constant,
        )
        return Decision(view, answer if isinstance(answer, str) else _plan_from_json(answer))

    def _running_view(self, request_id: str) -> RequestView:
        return self._requests[request_id].view._replace(num_computed_tokens=self._computed[request_id])
