"""The host's part of a step, from when an engine's loop and its device were done with it and its neighbours.

Under asynchronous scheduling the host composes and launches a step once it has taken in the one before last, and waits
for the device to be done with the step before.
"""

from __future__ import annotations

from typing import NamedTuple


class LoopTimes(NamedTuple):
    """When each was done with a step, seconds on one clock; None where nothing tells."""

    launched_s: float | None
    """The host: it had composed and launched it."""
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
    ) -> LoopTimes:
        """Return the times of a step as an engine records them, ``launch_s`` being the worker's time to launch it."""
        launched_s = None if schedule_end_s is None or launch_s is None else schedule_end_s + launch_s
        return cls(launched_s, device_end_s, update_end_s)

    def launch_s(self, before_last: LoopTimes) -> float | None:
        """Return what the host took to compose and launch this step once it had taken in the one before last."""
        if self.launched_s is None or before_last.taken_in_s is None:
            return None
        return _positive(self.launched_s - before_last.taken_in_s)

    def update_s(self, after: LoopTimes) -> float | None:
        """Return what it took to take this step in, once the device was done with it and the next was launched."""
        if self.taken_in_s is None or self.device_end_s is None or after.launched_s is None:
            return None
        return _positive(self.taken_in_s - max(self.device_end_s, after.launched_s))

    def late_s(self, before: LoopTimes) -> float | None:
        """Return how much later than the device was done with the step before this one was launched; may be below 0."""
        if self.launched_s is None or before.device_end_s is None:
            return None
        return float(self.launched_s - before.device_end_s)


def _positive(seconds: float) -> float | None:
    """Return a duration; None where clocks of two processes give none."""
    return float(seconds) if seconds > 0 else None
