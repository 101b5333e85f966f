"""A run of steps through which the same sequences decode and nobody enters, advanced as one event.

It begins with the steps already composed, whatever they compute. Those that follow differ only in the KV they attend
to: their durations lie on the cost model's decode line, and the times at which they end are a running sum. Both are
computed in the order and with the operations of the step-by-step mode, so they are equal to the last bit.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from simmoe.profiles.shape import DecodeLine
from simmoe.simulator.decode_set import DecodeSet
from simmoe.simulator.step import Step

SHORT = 40
"""Up to this many steps a loop is faster than arrays."""


class Stretch:
    """Steps at positions 0 .. ``num_skipped``; the last is left for the engine to end by itself."""

    __slots__ = ("_decodes", "_kv_start", "_line", "ends", "first_index", "k_exec", "num_skipped", "num_steady")

    def __init__(
        self,
        executing: Step,
        composed: Step | None,
        num_steady: int,
        leaves: bool,
        decodes: DecodeSet,
        k_exec: int,
        line: DecodeLine,
    ) -> None:
        """Begin a stretch.

        Args:
            executing: the step that has just started.
            composed: with asynchronous scheduling, the next.
            num_steady: boundaries to pass at which the same sequences go on, the ends of that many steps.
            leaves: whether to pass one more, at which some are composed no further.
            decodes: the sequences of every further step; must stay as they are.
            k_exec: budget of every further step.
            line: seconds of every further step.
        """
        self.first_index = executing.index
        self.num_steady = num_steady
        self.num_skipped = num_steady + leaves
        """Boundaries to pass; may be lowered, to stop earlier."""
        self._decodes = decodes
        self.k_exec = k_exec
        self._line = line
        self._kv_start = decodes.kv_tokens(executing.index)
        self.ends = [executing.start_s + executing.duration_s]
        """[num_skipped + 1] when each step ends."""
        if composed is not None:
            self.ends.append(self.ends[0] + composed.duration_s)
        self._append_ends(self.num_skipped + 1)

    def _append_ends(self, num_steps: int) -> None:
        ends = self.ends
        seqs = self._decodes.num_seqs
        base, slope, floor = self._line
        kv_tokens = self._kv_start + seqs * len(ends)
        kv_end = self._kv_start + seqs * num_steps
        now = ends[-1]
        if num_steps < SHORT:
            for kv in range(kv_tokens, kv_end, seqs):
                duration = base + slope * kv
                now += duration if duration > floor else floor
                ends.append(now)
            return
        times = np.arange(kv_tokens - seqs, kv_end, seqs, dtype=np.float64)
        times *= slope
        times += base
        np.maximum(times, floor, out=times)
        times[0] = now
        ends += np.add.accumulate(times, out=times)[1:].tolist()

    def step(self, position: int, like: Step) -> Step:
        """Return a step not composed at the start, as many waiting and running at its composition as at ``like``'s."""
        decodes = self._decodes
        base, slope, floor = self._line
        num_seqs = decodes.num_seqs
        kv_tokens = self._kv_start + num_seqs * position
        duration = base + slope * kv_tokens
        if duration < floor:
            duration = floor
        index, k_exec = self.first_index + position, self.k_exec
        step = Step(index, duration, k_exec, decodes.sum_k_qos, num_seqs, kv_tokens, like.num_waiting, like.num_running)
        step.start_s = self.ends[position - 1]
        return step

    def passed_before(self, time_s: float) -> int:
        """Return how many of the steps to skip end strictly before ``time_s``."""
        return bisect_left(self.ends, time_s, 0, self.num_skipped)

    @property
    def last_end_s(self) -> float:
        """When the step left to the engine ends."""
        return self.ends[self.num_skipped]
