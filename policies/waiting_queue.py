"""The waiting queue of a rank as every host keeps it: in the policy's order, shown to the policy read-only."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import heappop, heappush
from typing import Any, Generic, Protocol, TypeVar, overload

from simmoe.policies.sorted_blocks import SortedBlocks
from simmoe.policies.views import RequestView


class Queued(Protocol):
    """What the queue knows a host's request by."""

    view: RequestView
    """What the policy is shown of it while it waits."""
    row: int
    """Counts the host's requests in the order they came: no two have the same."""
    queue_key: Any
    """The policy's key of its place; set by the queue."""


Q = TypeVar("Q", bound=Queued)


class WaitingQueue(Generic[Q]):
    """Preempted requests first, the last preempted foremost, then by queue key, ties by arrival and row.

    Args:
        has_keys: whether requests are added with a key of the policy's; without, they queue by arrival.
    """

    def __init__(self, has_keys: bool = False) -> None:
        self.has_keys = has_keys
        self.preempted: list[Q] = []
        """Those at the front, in the order they will resume; read-only outside."""
        # (queue key, arrival_s, row, request): rows are unique, so requests themselves are never compared
        self._entries: SortedBlocks[tuple[Any, float, int, Q]] = SortedBlocks()
        self.by_id: dict[str, Q] = {}
        """Everything that waits, by request id; read-only outside."""
        self._arrivals: list[tuple[float, int, Q]] = []
        """Heap by arrival, only with a queue key; those that have left are dropped when they surface."""

    def __len__(self) -> int:
        return len(self.by_id)

    def __iter__(self) -> Iterator[Q]:
        yield from self.preempted
        for entry in self._entries:
            yield entry[3]

    def __getitem__(self, index: int) -> Q:
        """Return the request at a position from 0 on; IndexError beyond the end."""
        num_preempted = len(self.preempted)
        if index < num_preempted:
            return self.preempted[index]
        return self._entries[index - num_preempted][3]

    @property
    def num_preempted(self) -> int:
        """Requests at the front that wait to be recomputed."""
        return len(self.preempted)

    def add(self, request: Q, key: Any = 0) -> None:
        """Add a request at the place of its key, which it keeps. A key that cannot be compared adds nothing."""
        self._entries.add((key, request.view.arrival_s, request.row, request))
        request.queue_key = key
        self._register(request)

    def add_preempted(self, request: Q) -> None:
        """Put a preempted request at the very front."""
        self.preempted.insert(0, request)
        self._register(request)

    def remove(self, request: Q) -> None:
        """Remove a request that waits; the first in queue order is not searched for."""
        del self.by_id[request.view.request_id]
        if self.preempted and request in self.preempted:
            self.preempted.remove(request)
        elif self._entries[0][3] is request:
            self._entries.remove_first()
        else:
            self._entries.remove((request.queue_key, request.view.arrival_s, request.row, request))

    def oldest(self) -> Q | None:
        """Return the waiting request that arrived first."""
        if not self.by_id:
            return None
        if self.has_keys:
            while self.by_id.get(self._arrivals[0][2].view.request_id) is not self._arrivals[0][2]:
                heappop(self._arrivals)
            return self._arrivals[0][2]
        if not self.preempted:
            return self._entries[0][3]
        first = [self._entries[0][3]] if self._entries else []
        return min([*self.preempted, *first], key=lambda request: (request.view.arrival_s, request.row))

    def _register(self, request: Q) -> None:
        self.by_id[request.view.request_id] = request
        if self.has_keys:
            heappush(self._arrivals, (request.view.arrival_s, request.row, request))


class WaitingView(Sequence[RequestView]):
    """The queue as a policy sees it: a live, read-only sequence."""

    __slots__ = ("_queue",)

    def __init__(self, queue: WaitingQueue[Any]) -> None:
        self._queue = queue

    def __len__(self) -> int:
        return len(self._queue.by_id)

    def __iter__(self) -> Iterator[RequestView]:
        return (request.view for request in self._queue)

    @overload
    def __getitem__(self, index: int) -> RequestView: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RequestView]: ...
    def __getitem__(self, index: int | slice) -> RequestView | Sequence[RequestView]:
        queue = self._queue
        if type(index) is int and index >= 0 and not queue.preempted:  # what policies search by, at least cost
            blocks = queue._entries.blocks
            entry = blocks[0][index] if blocks and index < len(blocks[0]) else queue._entries[index]
            view: RequestView = entry[3].view
            return view
        size = len(queue)
        if isinstance(index, slice):
            return [queue[i].view for i in range(*index.indices(size))]
        if index < 0:
            index += size
        if not 0 <= index < size:
            raise IndexError(index)
        found: RequestView = queue[index].view
        return found
