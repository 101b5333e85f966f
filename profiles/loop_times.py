"""The host's part of a step, from when an engine's loop and its device were done with it and its neighbours.

Under asynchronous scheduling the host composes and launches a step once it has taken in the one before last, and waits
for the device to be done with the step before. Workers in processes of their own launch steps one after another, while
the loop goes on: a step may be composed before the one before it is launched.
"""

from __future__ import annotations

from typing import NamedTuple


class LoopTimes(NamedTuple):
    """When each was done with a step, seconds on one clock; None where nothing tells."""

    composed_s: float | None
    """The loop: it had scheduled it."""
    launched_s: float | None
    """The host: it had launched it."""
    device_end_s: float | None
    """The device."""
    taken_in_s: float | None
    """The host: it had taken its output in."""

    @classmethod
    def of(
        cls,
        schedule_end_s: float | None,
        launch_s: float | None,
        device_end_s: float | None,
        update_end_s: float | None,
        before: LoopTimes | None = None,
    ) -> LoopTimes:
        """Return the times of a step as an engine records them.

        Args:
            schedule_end_s: it was composed.
            launch_s: the workers' time to launch it, of the slowest.
            device_end_s: the device was done with it.
            update_end_s: its output was taken in.
            before: the step before, whose launch comes first; None where there was a pause between the two.
        """
        launched_s = None
        if schedule_end_s is not None and launch_s is not None:
            free_s = before.launched_s if before is not None else None
            launched_s = (schedule_end_s if free_s is None else max(schedule_end_s, free_s)) + launch_s
        return cls(schedule_end_s, launched_s, device_end_s, update_end_s)

    def launch_s(self, before_last: LoopTimes) -> float | None:
        """Return what a host that launches in its loop took for this step once it had taken in the one before last."""
        if self.launched_s is None or before_last.taken_in_s is None:
            return None
        return _positive(self.launched_s - before_last.taken_in_s)

    def update_s(self, after: LoopTimes) -> float | None:
        """Return what such a host took to take this step in, once the device was done with it and the next launched."""
        if self.taken_in_s is None or self.device_end_s is None or after.launched_s is None:
            return None
        return _positive(self.taken_in_s - max(self.device_end_s, after.launched_s))

    def turn_s(self, after: LoopTimes, next_but_one: LoopTimes) -> float | None:
        """Return what a loop whose workers launch took to take this step in and compose another.

        It begins once the device is done with this step and the loop has composed the one after it.
        """
        if self.device_end_s is None or after.composed_s is None or next_but_one.composed_s is None:
            return None
        return _positive(next_but_one.composed_s - max(self.device_end_s, after.composed_s))

    def late_s(self, before: LoopTimes) -> float | None:
        """Return how much later than the device was done with the step before this one was launched; may be below 0."""
        if self.launched_s is None or before.device_end_s is None:
            return None
        return float(self.launched_s - before.device_end_s)


def _positive(seconds: float) -> float | None:
    """Return a duration; None where clocks of two processes give none."""
    return float(seconds) if seconds > 0 else None
