"""A run of decode-only steps in which nothing changes, advanced as one event.

While a rank decodes the same sequences and nobody can enter, its steps differ only in the KV they attend to: step
durations lie on the cost model's decode line, and the times at which they end are their running sum. Both are computed
in the order and with the operations of the step-by-step mode, so they are equal to the last bit.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
import numpy.typing as npt

from simmoe.profiles.shape import DecodeLine, StepShape
from simmoe.simulator.decode_set import DecodeSet

SHORT = 24
"""Up to this many steps a loop is faster than arrays."""


class Stretch:
    """Steps ``first_index`` .. ``first_index + num_skipped``; the last is left for the engine to end by itself."""

    __slots__ = ("_kv_start", "durations", "ends", "first_index", "line", "num_skipped", "shape", "start_s")

    def __init__(
        self, start_s: float, first_index: int, num_skipped: int, decodes: DecodeSet, k_exec: int, line: DecodeLine
    ) -> None:
        self.start_s = start_s
        self.first_index = first_index
        self.num_skipped = num_skipped
        """Boundaries passed without stopping: the ends of the first ``num_skipped`` steps."""
        self.shape = StepShape(0, 0, 0, decodes.num_seqs, 0, k_exec)
        """Shape of every step but for its KV tokens."""
        self.line = line
        self._kv_start = decodes.kv_tokens(first_index)
        self.durations: list[float] | npt.NDArray[np.float64]
        """[num_skipped + 1] seconds."""
        self.ends: list[float] | npt.NDArray[np.float64]
        """[num_skipped + 1] when each step ends."""
        base, slope, floor = line
        seqs = decodes.num_seqs
        if num_skipped < SHORT:
            durations, ends, now = [], [], start_s
            for kv in range(self._kv_start, self._kv_start + seqs * (num_skipped + 1), seqs):
                duration = base + slope * kv
                if duration < floor:
                    duration = floor
                now += duration
                durations.append(duration)
                ends.append(now)
            self.durations, self.ends = durations, ends
        else:
            kv_tokens = self._kv_start + seqs * np.arange(num_skipped + 1)
            lengths = np.maximum(base + slope * kv_tokens, floor)
            self.durations = lengths
            self.ends = np.add.accumulate(np.concatenate(([start_s], lengths)))[1:]

    def kv_tokens(self, position: int) -> int:
        """Return the KV tokens that the step at this position attends to."""
        return self._kv_start + self.shape.num_decode_seqs * position

    def shape_at(self, position: int) -> StepShape:
        """Return the shape of the step at this position."""
        return self.shape._replace(decode_kv_tokens=self.kv_tokens(position))

    def duration_s(self, position: int) -> float:
        """Return the time that the step at this position takes, beyond the stretch too."""
        if position < len(self.durations):
            return float(self.durations[position])
        base, slope, floor = self.line
        return max(base + slope * self.kv_tokens(position), floor)

    def passed_before(self, time_s: float) -> int:
        """Return how many steps end strictly before ``time_s``."""
        return bisect_left(self.ends, time_s, 0, self.num_skipped)

    def stop_at(self, time_s: float) -> bool:
        """Stop at the first step end at or after ``time_s``; return whether that shortens the stretch."""
        position = self.passed_before(time_s)
        if position >= self.num_skipped:
            return False
        self.num_skipped = position
        return True

    @property
    def last_start_s(self) -> float:
        """When the step left to the engine starts."""
        return float(self.ends[self.num_skipped - 1]) if self.num_skipped else self.start_s

    @property
    def last_end_s(self) -> float:
        """When the step left to the engine ends."""
        return float(self.ends[self.num_skipped])
