"""vLLM's waiting queue in a policy's order, behind the gate of the policy's plan.

It has the methods of vLLM's ``RequestQueue`` and takes that queue's place in the scheduler; it needs no vLLM itself, so
a recording can be replayed through it anywhere. While it is armed, vLLM's own admission loop sees only who may enter:
truth, ``peek_request`` and ``pop_request`` follow the plan, made when the loop first looks, which is when running
requests have had their share of the step. ``len`` and iteration always cover everything that waits.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from heapq import heappop, heappush
from typing import Any, overload

from simmoe.errors import PolicyError
from simmoe.policies.loading import FAILURES, describe
from simmoe.policies.protocols import ADMIT_ALL, StepPlan
from simmoe.policies.validate import check_queue_key
from simmoe.policies.views import RequestView


class Waiting:
    """A queued request and what places it."""

    __slots__ = ("key", "request", "row", "view")

    def __init__(self, request: Any, view: RequestView, key: Any, row: int) -> None:
        self.request = request
        """vLLM's request."""
        self.view = view
        self.key = key
        """(queue key, arrival_s, row): rows are unique, so nothing behind them is compared."""
        self.row = row
        """Counts requests in the order they reached the queue; a request keeps its own."""


class PolicyQueue:
    """Preempted requests first, the last preempted foremost, then by ``queue_key``, ties by arrival and row.

    Args:
        view_of: returns a request's view, with what it has to compute now.
        queue_key: the policy's order; none: by arrival.
        on_change: told of every change: ``"add"``, ``"preempt"``, ``"return"`` (skipped by vLLM), ``"remove"``.
    """

    def __init__(
        self,
        view_of: Callable[[Any], RequestView],
        queue_key: Callable[[RequestView], Any] | None = None,
        on_change: Callable[[str, RequestView], None] | None = None,
    ) -> None:
        self._view_of = view_of
        self._queue_key = queue_key
        self._on_change = on_change
        self._num_rows = 0
        self._preempted: list[Waiting] = []
        self._sorted: list[Waiting] = []
        self._head = 0
        """Items of ``_sorted`` before it have left; they are dropped in bulk."""
        self._by_arrival: list[tuple[float, int, int, Waiting]] = []
        """Heap of (arrival_s, row, push, waiting); those that have left are dropped when they surface. Only with a
        queue key."""
        self._num_pushes = 0
        self.by_id: dict[str, Waiting] = {}
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
        return (waiting.request for waiting in self.in_order())

    def in_order(self) -> Iterator[Waiting]:
        """Yield everything that waits, in queue order."""
        yield from list(self._preempted)
        yield from self._sorted[self._head :]

    def view_at(self, index: int) -> RequestView:
        """Return the view at a position of the queue, from 0; IndexError beyond its end."""
        num_preempted = len(self._preempted)
        if index < num_preempted:
            return self._view_of(self._preempted[index].request)  # its outputs so far may have grown
        return self._sorted[self._head + index - num_preempted].view

    @property
    def num_preempted(self) -> int:
        """Requests at the front that wait to be recomputed."""
        return len(self._preempted)

    def oldest(self) -> RequestView | None:
        """Return the waiting request that arrived first."""
        if not self.by_id:
            return None
        if self._queue_key is None:
            candidates = self._preempted + self._sorted[self._head : self._head + 1]
            oldest = min(candidates, key=lambda w: (w.view.arrival_s, w.row))
        else:
            while self.by_id.get(self._by_arrival[0][3].view.request_id) is not self._by_arrival[0][3]:
                heappop(self._by_arrival)
            oldest = self._by_arrival[0][3]
        return self._view_of(oldest.request) if oldest in self._preempted else oldest.view

    # ---------------------------------------------------------------------------------------------- vLLM's RequestQueue

    def add_request(self, request: Any) -> None:
        """Queue a request that has just arrived.

        Raises:
            PolicyError: the policy's ``queue_key`` raised, or gave what cannot be compared; nothing is queued.
        """
        view = self._view_of(request)
        try:
            key = 0 if self._queue_key is None else check_queue_key(self._queue_key(view))
            waiting = Waiting(request, view, (key, view.arrival_s, self._num_rows), self._num_rows)
            insort(self._sorted, waiting, lo=self._head, key=_key)
        except FAILURES as error:
            raise PolicyError(f"queue_key failed for {view}: {describe(error)}") from error
        self._num_rows += 1
        self._register(waiting)
        self._tell("add", view)

    def prepend_request(self, request: Any) -> None:
        """Put a preempted request at the very front."""
        view = self._view_of(request)
        waiting = Waiting(request, view, (0, view.arrival_s, self._num_rows), self._num_rows)
        self._num_rows += 1
        self._preempted.insert(0, waiting)
        self._register(waiting)
        self._tell("preempt", view)

    def prepend_requests(self, requests: Iterable[Any]) -> None:
        """Take back requests that vLLM popped and had to skip, the first of them last: each to the place it had."""
        for request in requests:
            self.take_back(self._popped.pop(request.request_id))

    def take_back(self, waiting: Waiting) -> None:
        """Return what was removed to the place it had."""
        if waiting.request.num_preemptions:
            self._preempted.insert(0, waiting)
        else:
            insort(self._sorted, waiting, lo=self._head, key=_key)
        self._register(waiting)
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
        """Remove a request: O(1) at the head of the queue, O(log n) comparisons elsewhere."""
        waiting = self.by_id.pop(request.request_id)
        if self._head < len(self._sorted) and self._sorted[self._head] is waiting:
            self._head += 1
            if self._head > 1024 and self._head * 2 > len(self._sorted):
                del self._sorted[: self._head]
                self._head = 0
        elif waiting in self._preempted:
            self._preempted.remove(waiting)
        else:
            index = bisect_left(self._sorted, waiting.key, lo=self._head, key=_key)
            assert self._sorted[index] is waiting
            del self._sorted[index]
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
            return self._first()
        if not self._asked:
            self._asked = True
            self._plan = self._choose()
        if self._plan is None:
            return None
        waiting = self._planned(self._plan)
        if waiting is None and _restricts(self._plan) and self._is_idle():
            self.gates_opened += 1
            self._plan = ADMIT_ALL
            return self._first()
        return waiting

    def _planned(self, plan: StepPlan) -> Waiting | None:
        if plan.order is None:
            waiting = self._first()
        else:
            while self._next < len(plan.order) and plan.order[self._next] not in self.by_id:
                self._next += 1
            if self._next == len(plan.order):
                return None
            waiting = self.by_id[plan.order[self._next]]
        return None if plan.k_max is not None and waiting.view.k_qos > plan.k_max else waiting

    def _first(self) -> Waiting:
        return self._preempted[0] if self._preempted else self._sorted[self._head]

    def _register(self, waiting: Waiting) -> None:
        self.by_id[waiting.view.request_id] = waiting
        if self._queue_key is not None:
            heappush(self._by_arrival, (waiting.view.arrival_s, waiting.row, self._num_pushes, waiting))
            self._num_pushes += 1

    def _tell(self, change: str, view: RequestView) -> None:
        if self._on_change is not None:
            self._on_change(change, view)


def _key(waiting: Waiting) -> Any:
    return waiting.key


def _restricts(plan: StepPlan) -> bool:
    return plan.order is not None or plan.k_max is not None


class WaitingView(Sequence[RequestView]):
    """The queue as a policy sees it: a live, read-only sequence."""

    __slots__ = ("_queue",)

    def __init__(self, queue: PolicyQueue) -> None:
        self._queue = queue

    def __len__(self) -> int:
        return len(self._queue.by_id)

    def __iter__(self) -> Iterator[RequestView]:
        return map(self._queue.view_at, range(len(self._queue)))

    @overload
    def __getitem__(self, index: int) -> RequestView: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RequestView]: ...
    def __getitem__(self, index: int | slice) -> RequestView | Sequence[RequestView]:
        queue = self._queue
        if type(index) is int and index >= 0 and not queue._preempted:  # what policies search by, at least cost
            return queue._sorted[queue._head + index].view
        if isinstance(index, slice):
            return [self._queue.view_at(i) for i in range(*index.indices(len(self._queue)))]
        if index < 0:
            index += len(self._queue)
        if index < 0:
            raise IndexError(index)
        return self._queue.view_at(index)
