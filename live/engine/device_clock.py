"""When the device did what: steps on its own timeline, told on the host's clock.

The host sees a step's output when it gets round to it, which under asynchronous scheduling is while it launches the
next one. The device's timeline has no such delay: a mark at the start of every step's work and one at its end, both
written by the device itself, cost the host a few microseconds each, and are read when the device has passed them.
Nothing here ever waits for a step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol


class Mark(Protocol):
    """A point of the device's work."""

    def query(self) -> bool:
        """Return whether it has."""
        ...

    def elapsed_time(self, later: Any, /) -> float:
        """Return milliseconds from this mark to another; the device has passed both."""
        ...


class Timeline(Protocol):
    """A device that notes times."""

    def mark(self) -> Mark:
        """Return a mark recorded behind all work launched so far."""
        ...

    def readings(self, number: int) -> Iterator[tuple[Mark, float, float]]:
        """Yield marks the device passed between two times of the host's clock, whatever else it is busy with."""
        ...


class Anchor(NamedTuple):
    """One instant on both clocks, seconds."""

    device_s: float
    host_s: float


class DeviceTimes(NamedTuple):
    """One step; times are ``time.monotonic()`` of this machine."""

    step: int
    start_s: float
    """When the device came to the step's first work: it was done with the step before, and the host had begun."""
    end_s: float
    """When it was done with forward pass and sampling."""
    launch_s: float
    """The worker's own time to launch the step."""


def longest_launches(told: Iterable[Sequence[DeviceTimes]]) -> Iterator[DeviceTimes]:
    """Yield the first worker's steps, each with what the slowest of all workers took to launch it: the others wait.

    Args:
        told: each worker's steps.
    """
    first, *others = told
    launches_s: dict[int, float] = {}
    for step in (step for steps in others for step in steps):
        launches_s[step.step] = max(step.launch_s, launches_s.get(step.step, 0.0))
    for step in first:
        yield step._replace(launch_s=max(step.launch_s, launches_s.get(step.step, 0.0)))


@dataclass(slots=True)
class _Step:
    step: int
    start: Mark
    end: Mark
    launch_s: float


class DeviceClock:
    """Marks steps and reads the marks.

    Marks are read oldest first, and only those the device has passed, whenever a step begins; so a few are ever open.
    Seconds between neighbouring marks are added up, each to the clock's resolution of half a microsecond.

    Args:
        timeline: of the device, or a stand-in.
        limit: rows kept when nobody drains them; the oldest go first.
    """

    def __init__(self, timeline: Timeline, limit: int = 1 << 20) -> None:
        self._timeline = timeline
        self._open: deque[_Step] = deque()
        self._current: tuple[int, Mark, float] | None = None
        # rows are on the device's timeline until they are drained
        self._rows: deque[DeviceTimes] = deque(maxlen=limit)
        self._last, self._last_s = timeline.mark(), 0.0
        while not self._last.query():  # once: nothing can be told from a mark that is not passed
            time.sleep(1e-4)
        self._anchor = self._anchored()

    def begin(self, step: int) -> None:
        """Mark the start of a step."""
        self._read()
        start_s = time.perf_counter()
        mark = self._timeline.mark()
        self._current = (step, mark, start_s)

    def end(self) -> None:
        """Mark the end of the step that was begun, if one was."""
        if self._current is None:
            return
        step, start, start_s = self._current
        self._open.append(_Step(step, start, self._timeline.mark(), time.perf_counter() - start_s))
        self._current = None

    def drain(self) -> list[DeviceTimes]:
        """Return the steps the device is done with since the last call, oldest first, on the host's clock.

        Both clocks are read now and were at the last call; the line through both readings takes one to the other.
        """
        self._read()
        before, now = self._anchor, self._anchored()
        self._anchor = now
        rate = 1.0
        if now.device_s - before.device_s > 1.0:
            rate = (now.host_s - before.host_s) / (now.device_s - before.device_s)

        def host_s(device_s: float) -> float:
            return now.host_s + (device_s - now.device_s) * rate

        rows = [row._replace(start_s=host_s(row.start_s), end_s=host_s(row.end_s)) for row in self._rows]
        self._rows.clear()
        return rows

    def _read(self) -> None:
        """Read the marks the device has passed."""
        while self._open and self._open[0].end.query():
            s = self._open.popleft()
            start_s = self._last_s + self._last.elapsed_time(s.start) / 1e3
            end_s = start_s + s.start.elapsed_time(s.end) / 1e3
            self._rows.append(DeviceTimes(s.step, start_s, end_s, s.launch_s))
            self._last, self._last_s = s.end, end_s

    def _anchored(self) -> Anchor:
        """Read both clocks: the tightest of a few readings counts."""
        best, width_s = Anchor(0.0, 0.0), float("inf")
        for mark, before_s, after_s in self._timeline.readings(5):
            if after_s - before_s < width_s:
                width_s = after_s - before_s
                best = Anchor(self._last_s + self._last.elapsed_time(mark) / 1e3, (before_s + after_s) / 2)
        return best


class CudaTimeline:
    """The current CUDA device's: marks are CUDA events on the current stream, readings on a stream of their own."""

    def __init__(self) -> None:
        import torch

        self._event = torch.cuda.Event
        self._idle_stream = torch.cuda.Stream()
        torch.cuda.synchronize()

    def mark(self) -> Mark:
        """Return an event recorded on the current stream."""
        event = self._event(enable_timing=True)
        event.record()
        return event  # type: ignore[no-any-return]

    def readings(self, number: int) -> Iterator[tuple[Mark, float, float]]:
        """Yield events of the idle stream, waited for."""
        for _ in range(number):
            event = self._event(enable_timing=True)
            before_s = time.monotonic()
            event.record(self._idle_stream)
            event.synchronize()
            yield event, before_s, time.monotonic()


class HostTimeline:
    """The CPU as the device: work is done when its call returns."""

    class _Instant:
        def __init__(self) -> None:
            self.seconds = time.monotonic()

        def query(self) -> bool:
            return True

        def elapsed_time(self, later: HostTimeline._Instant, /) -> float:
            return (later.seconds - self.seconds) * 1e3

    def mark(self) -> Mark:
        """Return now."""
        return self._Instant()

    def readings(self, number: int) -> Iterator[tuple[Mark, float, float]]:
        """Yield now."""
        for _ in range(number):
            before_s = time.monotonic()
            yield self._Instant(), before_s, time.monotonic()
