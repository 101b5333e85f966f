"""Making the device wait until a step is launched, so that its own time shows where the host is the slower of both.

Before a step's first work the device is given a kernel that only spins, on the same stream. Meanwhile the host launches
all of the step; then the device runs it without once waiting for the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from simmoe.live.measure.times import TimedStep

#: Readings of the rate at which the device spins, and how much faster it is taken to be than the fastest of them: its
#: clock rises and falls, and a hold may be longer than asked for, not shorter.
READINGS, MARGIN = 3, 1.05

#: Spins a reading takes: some milliseconds.
READING_CYCLES = 10_000_000


class DeviceHold:
    """Lets the device wait.

    Args:
        spin: occupies the current stream for a number of the device's cycles.
        seconds_of: seconds the device takes for what a call gives it to do.
    """

    def __init__(self, spin: Callable[[int], None], seconds_of: Callable[[Callable[[], None]], float]) -> None:
        self._spin = spin
        seconds = min(seconds_of(lambda: spin(READING_CYCLES)) for _ in range(READINGS))
        self.cycles_s = MARGIN * READING_CYCLES / seconds
        """Cycles taken for a second."""

    def __call__(self, seconds: float) -> None:
        """Occupy the current stream for at least so long; returns at once."""
        self._spin(int(seconds * self.cycles_s))


def cuda_hold() -> DeviceHold:
    """Return the current CUDA device's."""
    import torch

    def seconds_of(work: Callable[[], None]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        work()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    return DeviceHold(torch.cuda._sleep, seconds_of)


class Held(NamedTuple):
    """What became of steps before each of which the device was held."""

    steps: list[TimedStep]
    """Under the clock 'held', those that were launched in time."""
    launches_s: list[float]
    """What the host took to launch each of them, those launched late too."""


def held_steps(timed: Iterable[TimedStep], hold_s: float) -> Held:
    """Return the steps whose time on the device is their kernels' alone.

    That is so where the host launched all of the step in less time than the device was held, and the device did wait
    so long between the step before and this one.

    Args:
        timed: steps of a busy engine under the step, device and host clocks.
        hold_s: seconds the device was held before each.
    """
    paces = {}
    device = []
    for t in timed:
        if t.clock == "step":
            paces[t.step.step] = t.seconds
        elif t.clock == "device" and t.step.launch_s is not None:
            device.append((t, t.step.launch_s))
    steps = [
        t._replace(clock="held")
        for t, launch_s in device
        if launch_s < hold_s <= paces.get(t.step.step, 0.0) - t.seconds
    ]
    return Held(steps, [launch_s for _, launch_s in device])
