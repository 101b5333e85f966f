"""The waiting queue of a rank: kept in the policy's order, shown to it read-only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import Any, overload

from simmoe.policies.views import RequestView
from simmoe.simulator.request import SimRequest
from simmoe.simulator.sorted_blocks import SortedBlocks

Entry = tuple[Any, float, int, SimRequest]
"""(queue key, arrival_s, row, request): rows are unique, so requests themselves are never compared."""


class WaitingQueue:
    """Preempted requests first, then by queue key (arrival without one), ties by arrival and workload row.

    Args:
        has_keys: whether requests are added with a key of the policy's.
    """

    def __init__(self, has_keys: bool = False) -> None:
        self.has_keys = has_keys
        self._preempted: list[SimRequest] = []
        """In the order they will resume."""
        self._entries: SortedBlocks[Entry] = SortedBlocks()
        self.by_id: dict[str, SimRequest] = {}
        """Everything that waits, by request id; read-only outside."""
        self._arrivals: list[tuple[float, int, SimRequest]] = []
        """Heap by arrival, only with a queue key; those that have left are dropped when they surface."""

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self) -> Iterator[SimRequest]:
        yield from self._preempted
        for entry in self._entries:
            yield entry[3]

    def __getitem__(self, index: int) -> SimRequest:
        preempted = len(self._preempted)
        if index < preempted:
            return self._preempted[index]
        return self._entries[index - preempted][3]

    @property
    def num_preempted(self) -> int:
        """Requests at the front that wait to be recomputed."""
        return len(self._preempted)

    def add(self, request: SimRequest, key: Any = 0) -> None:
        """Add a request that has just been dispatched; it keeps its key. A key that cannot be compared adds nothing."""
        self._entries.add((key, request.view.arrival_s, request.row, request))
        request.queue_key = key
        self._register(request)

    def add_preempted(self, request: SimRequest) -> None:
        """Put a preempted request at the very front."""
        self._preempted.insert(0, request)
        self._register(request)

    def remove(self, request: SimRequest) -> None:
        """Remove a request that has been admitted; in queue order none is searched for."""
        del self.by_id[request.view.request_id]
        if request.num_preemptions and request in self._preempted:
            self._preempted.remove(request)
            return
        if self._entries[0][3] is request:
            self._entries.remove_first()
        else:
            self._entries.remove((request.queue_key, request.view.arrival_s, request.row, request))

    def oldest(self) -> SimRequest | None:
        """Return the waiting request that arrived first."""
        if not self.by_id:
            return None
        if not self.has_keys:
            if not self._preempted:
                return self._entries[0][3]
            # Entries are by arrival, and preempted requests are older than any of them but in no order themselves.
            return min(self._preempted, key=lambda r: (r.view.arrival_s, r.row))
        while self.by_id.get(self._arrivals[0][2].view.request_id) is not self._arrivals[0][2]:
            heappop(self._arrivals)
        return self._arrivals[0][2]

    def _register(self, request: SimRequest) -> None:
        self.by_id[request.view.request_id] = request
        if self.has_keys:
            heappush(self._arrivals, (request.view.arrival_s, request.row, request))


class WaitingView(Sequence[RequestView]):
    """The queue as a policy sees it: a live, read-only sequence."""

    __slots__ = ("_queue",)

    def __init__(self, queue: WaitingQueue) -> None:
        self._queue = queue

    def __len__(self) -> int:
        return len(self._queue)

    def __iter__(self) -> Iterator[RequestView]:
        return (request.view for request in self._queue)

    @overload
    def __getitem__(self, index: int) -> RequestView: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RequestView]: ...
    def __getitem__(self, index: int | slice) -> RequestView | Sequence[RequestView]:
        size = len(self._queue)
        if isinstance(index, slice):
            return [self._queue[i].view for i in range(*index.indices(size))]
        if index < 0:
            index += size
        if not 0 <= index < size:
            raise IndexError(index)
        return self._queue[index].view
