"""The simulation clock: SimPy's event heap with absolute times and a written order for what happens at one instant.

At equal times, in this order: counts published to the front ends (implicit: a publication at t holds the state before
anything else at t), arrivals in workload order, then step boundaries and wake-ups by rank. A boundary delivers its
step's outputs first and composes the next step after, so a request that arrives at a boundary's instant can enter it.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

import simpy
from simpy.events import EventPriority

ARRIVAL = EventPriority(1)
"""Priority of arrivals at one instant."""


def boundary_of(dp_rank: int) -> EventPriority:
    """Return the priority of a rank's step boundaries and wake-ups."""
    return EventPriority(2 + dp_rank)


Callback = Callable[[Any], None]
"""Called with the alarm that rings."""


class Alarm(simpy.Event):
    """An event that was decided when it was made; it only carries a callback to its time."""

    _value = None
    _ok = True

    def __init__(self, env: simpy.Environment, time_s: float, callback: Callback) -> None:
        self.env = env
        self.time_s = time_s
        self.callbacks = [callback]


class Clock(simpy.Environment):
    """A SimPy environment that schedules at absolute times.

    SimPy schedules by delay, and ``now + (time - now)`` need not equal ``time`` in floating point, as fast-forward
    needs.
    """

    def at(self, time_s: float, priority: EventPriority, callback: Callback) -> Alarm:
        """Call ``callback`` at ``time_s`` (not before now), after lower priorities of the same instant."""
        assert time_s >= self._now, (time_s, self._now)
        alarm = Alarm(self, time_s, callback)
        heappush(self._queue, (time_s, priority, next(self._eid), alarm))
        return alarm

    def run_before(self, horizon_s: float) -> None:
        """Call back every alarm strictly before ``horizon_s``, those set meanwhile included."""
        queue = self._queue
        while True:  # CPython 3.11 never optimises a loop that has its condition here and runs once
            if not queue or queue[0][0] >= horizon_s:
                return
            self._now, _, _, alarm = heappop(queue)
            for callback in alarm.callbacks:
                callback(alarm)
