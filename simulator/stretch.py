"""A run of steps through which the same sequences decode and nobody enters, advanced as one event.

It begins with the steps already composed, whatever they compute. Those that follow differ only in the KV they attend
to: their durations lie on the cost model's decode line, and the times at which they end are a running sum. Both are
computed in the order and with the operations of the step-by-step mode, so they are equal to the last bit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from simmoe.profiles.shape import DecodeLine
from simmoe.simulator.decode_set import DecodeSet
from simmoe.simulator.step import Step

SHORT = 40
"""Up to this many steps a loop is faster than arrays."""


class Stretch:
    """Steps at positions 0 .. ``num_skipped``; the last is left for the engine to end by itself."""

    __slots__ = ("_decodes", "_kv_start", "_line", "ends", "first_index", "k_exec", "num_skipped")

    def __init__(
        self, composed: Sequence[Step], num_skipped: int, decodes: DecodeSet, k_exec: int, line: DecodeLine
    ) -> None:
        """Begin a stretch.

        Args:
            composed: the executing step and, with asynchronous scheduling, the next.
            num_skipped: boundaries to pass without stopping, the ends of the first ``num_skipped`` steps.
            decodes: the sequences of every further step; must stay as they are.
            k_exec: budget of every further step.
            line: seconds of every further step.
        """
        self.first_index = first = composed[0].index
        self.num_skipped = num_skipped
        self._decodes = decodes
        self.k_exec = k_exec
        self._line = line
        self._kv_start = decodes.kv_tokens(first)
        ends = [composed[0].start_s + composed[0].duration_s]
        if len(composed) == 2:
            ends.append(ends[0] + composed[1].duration_s)
        self.ends: list[float] | npt.NDArray[np.float64] = self._extended(ends, num_skipped + 1)
        """[num_skipped + 1] when each step ends."""

    def _extended(self, ends: list[float], num_steps: int) -> list[float] | npt.NDArray[np.float64]:
        seqs = self._decodes.num_seqs
        base, slope, floor = self._line
        kv, kv_end = self.kv_tokens(len(ends)), self.kv_tokens(num_steps)
        now = ends[-1]
        if num_steps < SHORT:
            for kv_tokens in range(kv, kv_end, seqs):
                duration = base + slope * kv_tokens
                now += duration if duration > floor else floor
                ends.append(now)
            return ends
        times = np.arange(kv - seqs * len(ends), kv_end, seqs, dtype=np.float64)
        times *= slope
        times += base
        np.maximum(times, floor, out=times)
        times[: len(ends)] = ends
        running_sum = times[len(ends) - 1 :]
        np.add.accumulate(running_sum, out=running_sum)
        return times

    def kv_tokens(self, position: int) -> int:
        """Return the KV tokens that the step at this position, not yet composed at the start, attends to."""
        return self._kv_start + self._decodes.num_seqs * position

    def duration_s(self, position: int) -> float:
        """Return the time that the step at this position, not yet composed at the start, takes."""
        base, slope, floor = self._line
        return max(base + slope * self.kv_tokens(position), floor)

    def step(self, position: int, like: Step) -> Step:
        """Return the step at this position, composed while as many wait and run as when ``like`` was."""
        decodes = self._decodes
        step = Step(
            self.first_index + position,
            self.duration_s(position),
            self.k_exec,
            decodes.sum_k_qos,
            decodes.num_seqs,
            self.kv_tokens(position),
            like.num_waiting,
            like.num_running,
        )
        step.start_s = float(self.ends[position - 1])
        return step

    def passed_before(self, time_s: float) -> int:
        """Return how many of the steps to skip end strictly before ``time_s``."""
        return bisect_left(self.ends, time_s, 0, self.num_skipped)

    def stop_at(self, time_s: float) -> bool:
        """Stop at the first step end at or after ``time_s``; return whether that shortens the stretch."""
        position = self.passed_before(time_s)
        if position >= self.num_skipped:
            return False
        self.num_skipped = position
        return True

    @property
    def last_end_s(self) -> float:
        """When the step left to the engine ends."""
        return float(self.ends[self.num_skipped])
