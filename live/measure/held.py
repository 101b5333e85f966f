"""Points measured with the device held: for how long, and again where that was too short."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import numpy as np

from simmoe.live.measure.device_hold import held_steps
from simmoe.live.measure.engine import MeasuredEngine
from simmoe.live.measure.plan import DecodePoint, PrefillPoint
from simmoe.live.measure.times import TimedStep

#: Seconds the device is held before the first steps of each launch path. About what a slow host takes: what follows is
#: held as long as the points before needed.
FIRST_HOLD_S = {"full": 6e-3, "piecewise": 14e-3, "eager": 50e-3}

#: A hold is this many times what nine in ten of the launches before took, and no longer than the limit, in seconds.
OVER_LAUNCH, LONGEST_HOLD_S = 1.3, 0.15

#: Measured once more where fewer steps than this share were launched in time.
LEAST_SHARE = 0.5

#: Points in a row that fall short of that again, after which their launch path is given up.
GIVEN_UP_AFTER = 2


class HeldPoints:
    """Measures points with the device held.

    A step of more kernels than the device's queue takes, about a thousand, cannot be launched whole before it begins:
    its launch ends after any hold, as does a launch that itself waits for the device. Such a path is given up: where
    none of a point's steps was launched in time twice, or too few at some points in a row.
    """

    def __init__(self, engine: MeasuredEngine) -> None:
        self._engine = engine
        self._hold_s = dict(FIRST_HOLD_S)
        self._short = dict.fromkeys(FIRST_HOLD_S, 0)
        """Points in a row of each path that fell short."""

    async def measure(
        self,
        group: Mapping[Any, list[int]],
        measured: Callable[[Mapping[Any, list[int]]], Awaitable[list[TimedStep]]],
        *,
        eager: bool,
    ) -> list[TimedStep]:
        """Return the steps launched in time, under the clock 'held'.

        Args:
            group: points one load measures, of one launch path.
            measured: runs them.
            eager: graphs are left aside.
        """
        path = self._path(group, eager=eager)
        steps: list[TimedStep] = []
        launched = 0
        if self._short[path] >= GIVEN_UP_AFTER:
            return steps
        for _ in range(2):
            hold_s = self._hold_s[path]
            await self._engine.call_worker("hold_device", hold_s)
            try:
                timed = await measured(group)
            finally:
                await self._engine.call_worker("hold_device", 0.0)
            held = held_steps(timed, hold_s)
            steps += held.steps
            launched += len(held.launches_s)
            if held.launches_s:
                self._hold_s[path] = min(OVER_LAUNCH * float(np.quantile(held.launches_s, 0.9)), LONGEST_HOLD_S)
            if len(held.steps) >= LEAST_SHARE * len(held.launches_s):
                break
        if launched and not steps:
            self._short[path] = GIVEN_UP_AFTER
        elif launched:
            self._short[path] = 0 if len(held.steps) >= LEAST_SHARE * len(held.launches_s) else self._short[path] + 1
        elif all(isinstance(point, PrefillPoint) for point in group):
            # a batch may not have fitted into the KV cache; prompts ran, each waited for until the next was scheduled
            self._short[path] += 1
        return steps

    def _path(self, group: Mapping[Any, list[int]], *, eager: bool) -> str:
        sizes = self._engine.captured_sizes
        if eager or any(size_of(point) > (sizes[-1] if sizes else 0) for point in group):
            return "eager"
        return "full" if all(isinstance(point, DecodePoint) for point in group) else "piecewise"


def size_of(point: Any) -> int:
    """Return the tokens a point's steps compute."""
    return int(getattr(point, "num_tokens", 0)) + int(getattr(point, "num_seqs", 0))
