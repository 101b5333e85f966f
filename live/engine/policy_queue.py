"""vLLM's waiting queue in a policy's order, behind the gate of the policy's plan.

It has the methods of vLLM's ``RequestQueue`` and takes that queue's place in the scheduler; it needs no vLLM itself, so
a recording can be replayed through it anywhere. While it is armed, vLLM's own admission loop sees only who may enter:
truth, ``peek_request`` and ``pop_request`` follow the plan, made when the loop first looks, which is when running
requests have had their share of the step. ``len`` and iteration always cover everything that waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any

from simmoe.policies.protocols import ADMIT_ALL, StepPlan
from simmoe.policies.views import RequestView
from simmoe.policies.waiting_queue import WaitingQueue, WaitingView

#: Puts a newcomer in the policy's order, as ``Asker.enqueue`` does: given its view, the queue, and what takes its key.
Enqueue = Callable[[RequestView, Sequence[RequestView], Callable[[Any], object]], None]


class Waiting:
    """A queued request and what places it."""

    __slots__ = ("queue_key", "request", "row", "view")

    def __init__(self, request: Any, view: RequestView, row: int) -> None:
        self.request = request
        """vLLM's request."""
        self.view = view
        self.row = row
        self.queue_key: Any = 0


class PolicyQueue:
    """A policy's waiting queue (see :class:`WaitingQueue`) as vLLM's scheduler knows one.

    Args:
        view_of: returns a request's view, with what it has to compute now.
        enqueue: the policy's order; none: by arrival.
        on_change: told of every change: ``"add"``, ``"preempt"``, ``"return"`` (skipped by vLLM), ``"remove"``.
    """

    def __init__(
        self,
        view_of: Callable[[Any], RequestView],
        enqueue: Enqueue | None = None,
        on_change: Callable[[str, RequestView], None] | None = None,
    ) -> None:
        self._view_of = view_of
        self._enqueue = enqueue
        self._on_change = on_change
        self._num_rows = 0
        self._queue: WaitingQueue[Waiting] = WaitingQueue(has_keys=enqueue is not None)
        self.by_id = self._queue.by_id
        """Everything that waits; read-only outside."""
        self._popped: dict[str, Waiting] = {}
        """Who left while armed: vLLM hands back those it had to skip, and they keep their place."""
        self._choose: Callable[[], StepPlan | None] | None = None
        self._is_idle: Callable[[], bool] = lambda: False
        self._plan: StepPlan | None = None
        self._asked = False
        self._next = 0
        """Position in the plan's order."""
        self.gates_opened = 0
        """Plans overruled because they would have left the engine idle with admissible work."""

    # ------------------------------------------------------------------------------------------------- what it shows

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self) -> Iterator[Any]:
        return iter([waiting.request for waiting in self._queue])  # whoever goes through it may take from it

    @property
    def view(self) -> WaitingView:
        """The queue as a policy sees it, for one call: what a policy does to it is gone with the call."""
        return WaitingView(self._queue)

    @property
    def num_preempted(self) -> int:
        """Requests at the front that wait to be recomputed."""
        return self._queue.num_preempted

    def look_again(self) -> None:
        """Take preempted requests' views anew: a token in flight at the preemption may have arrived since."""
        for waiting in self._queue.preempted:
            waiting.view = self._view_of(waiting.request)

    def oldest(self) -> RequestView | None:
        """Return the waiting request that arrived first."""
        oldest = self._queue.oldest()
        return None if oldest is None else oldest.view

    # ---------------------------------------------------------------------------------------------- vLLM's RequestQueue

    def add_request(self, request: Any) -> None:
        """Queue a request that has just arrived.

        Raises:
            PolicyError: the policy gives it no key that can be ordered; nothing is queued.
        """
        view = self._view_of(request)
        waiting = Waiting(request, view, self._num_rows)
        if self._enqueue is None:
            self._queue.add(waiting)
        else:
            self._enqueue(view, self.view, partial(self._queue.add, waiting))
        self._num_rows += 1
        self._tell("add", view)

    def prepend_request(self, request: Any) -> None:
        """Put a preempted request at the very front."""
        view = self._view_of(request)
        self._queue.add_preempted(Waiting(request, view, self._num_rows))
        self._num_rows += 1
        self._tell("preempt", view)

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        """Take back requests that vLLM popped and had to skip, the first of them last: each to the place it had."""
        for request in requests:
            self.take_back(self._popped.pop(request.request_id))

    def take_back(self, waiting: Waiting) -> None:
        """Return what was removed to the place it had."""
        if waiting.request.num_preemptions:
            self._queue.add_preempted(waiting)
        else:
            self._queue.add(waiting, waiting.queue_key)
        self._tell("return", waiting.view)

    def peek_request(self) -> Any:
        """Return who enters next."""
        waiting = self._candidate()
        if waiting is None:
            raise IndexError("nobody may enter")
        return waiting.request

    def pop_request(self) -> Any:
        """Remove and return who enters next."""
        request = self.peek_request()
        if self._choose is not None:
            self._popped[request.request_id] = self.by_id[request.request_id]
        self.remove_request(request)
        return request

    def remove_request(self, request: Any) -> None:
        """Remove a request."""
        waiting = self.by_id[request.request_id]
        self._queue.remove(waiting)
        self._tell("remove", waiting.view)

    def remove_requests(self, requests: Iterable[Any]) -> None:
        """Remove those of the requests that wait here."""
        for request in requests:
            if request.request_id in self.by_id:
                self.remove_request(request)

    def __bool__(self) -> bool:
        return self._candidate() is not None

    # -------------------------------------------------------------------------------------------------- the plan's gate

    def arm(self, choose: Callable[[], StepPlan | None], is_idle: Callable[[], bool]) -> None:
        """Follow a plan from now on.

        Args:
            choose: called once, when somebody first looks and anybody waits; returns the plan, None to admit nobody.
            is_idle: whether nothing runs, so that a plan that admits nobody is overruled.
        """
        self._choose, self._is_idle = choose, is_idle
        self._plan, self._asked, self._next = None, False, 0

    def disarm(self) -> None:
        """Show everything again."""
        self._choose = self._plan = None
        self._popped.clear()

    def _candidate(self) -> Waiting | None:
        """Return who enters next: the head of the queue unless armed."""
        if not self.by_id:
            return None
        if self._choose is None:
            return self._queue[0]
        if not self._asked:
            self._asked = True
            self._plan = self._choose()
        if self._plan is None:
            return None
        waiting = self._planned(self._plan)
        if waiting is None and _restricts(self._plan) and self._is_idle():
            self.gates_opened += 1
            self._plan = ADMIT_ALL
            return self._queue[0]
        return waiting

    def _planned(self, plan: StepPlan) -> Waiting | None:
        if plan.order is None:
            waiting = self._queue[0]
        else:
            while self._next < len(plan.order) and plan.order[self._next] not in self.by_id:
                self._next += 1
            if self._next == len(plan.order):
                return None
            waiting = self.by_id[plan.order[self._next]]
        return None if plan.k_max is not None and waiting.view.k_qos > plan.k_max else waiting

    def _tell(self, change: str, view: RequestView) -> None:
        if self._on_change is not None:
            self._on_change(change, view)


def _restricts(plan: StepPlan) -> bool:
    return plan.order is not None or plan.k_max is not None
