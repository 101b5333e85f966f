"""A run of steps through which the same sequences decode and nobody enters, advanced as one event.

It begins with the steps already composed, whatever they compute. Those that follow differ only in the KV they attend
to: what they take of the device lies on the cost model's decode line, and the times at which they end are a running sum
wherever the host keeps up. All are computed in the order and with the operations of the step-by-step mode, so they are
equal to the last bit.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

from simmoe.profiles.shape import DecodeLine
from simmoe.simulator.decode_set import DecodeSet
from simmoe.simulator.step import Step

SHORT = 40
"""Up to this many steps a loop is faster than arrays."""

MARGIN_S = 1e-6
"""What is slower by this is so whatever rounding does to sums of times up to a century."""


class Stretch:
    """Steps at positions 0 .. ``num_skipped``; the last is left for the engine to end by itself."""

    __slots__ = (
        "_decodes",
        "_device_ends",
        "_kv_start",
        "_launch_begins",
        "_launch_s",
        "_lead",
        "_line",
        "boundaries",
        "first_index",
        "k_exec",
        "num_skipped",
        "num_steady",
    )

    def __init__(
        self,
        executing: Step,
        composed: Step | None,
        host_free_s: float,
        workers_free_s: float | None,
        num_steady: int,
        leaves: bool,
        decodes: DecodeSet,
        k_exec: int,
        line: DecodeLine,
    ) -> None:
        """Begin a stretch.

        Args:
            executing: the step whose output comes next.
            composed: with asynchronous scheduling, the next.
            host_free_s: when the host has launched, or sent to workers, all that is composed.
            workers_free_s: when workers of their own have launched it; None: the host launches.
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
        self._lead = 1 if composed is None else 2
        self._launch_s = line.floor_s - line.update_s
        self._device_ends = [executing.end_s]
        """When each step ends on the device, up to where the device waits for the host, and will from there on."""
        self.boundaries = [max(executing.end_s, host_free_s) + executing.update_s]
        """[num_skipped + 1] when each step's output has been taken in, and the next that is not is composed: with
        asynchronous scheduling, the next but one."""
        self._launch_begins = self.boundaries
        """[num_skipped + 1] when the launch of that begins; of a host that launches, the same list."""
        if composed is None:
            self._append_one_by_one(self.num_skipped + 1)
            return
        self._device_ends.append(composed.end_s)
        if workers_free_s is not None:
            self._launch_begins = [max(self.boundaries[0], workers_free_s)]
        self._append_launched(self.num_skipped + 2, composed.update_s)
        if leaves and workers_free_s is None and not self._host_waits(num_steady):
            self.num_skipped -= 1  # the host decides when, and has less to do once some are composed no further

    def _host_waits(self, position: int) -> bool:
        """Whether what is composed at a boundary has been launched before the next step ends."""
        ends = self._device_ends
        return position + 1 < len(ends) and self.boundaries[position] + self._launch_s <= ends[position + 1]

    def _append_launched(self, num_steps: int, update_s: float) -> None:
        """Add steps that are composed at the boundary two before their own, and launched as soon as that can begin.

        Args:
            num_steps: of the stretch and two more.
            update_s: of the step at position 1.
        """
        ends, boundaries, begins = self._device_ends, self.boundaries, self._launch_begins
        host_launches = begins is boundaries
        seqs = self._decodes.num_seqs
        base, slope, host_s, line_update_s, wait_s = self._line
        launch_s = self._launch_s
        # Steps go back to back once the launch of one begins ahead_s before the step before ends, if each takes least_s
        # or more. Workers of their own need not have launched it by then, only when they are sent the step after.
        ahead_s, least_s = launch_s, host_s + MARGIN_S
        if not host_launches:
            ahead_s = launch_s - line_update_s + MARGIN_S
            least_s = max(launch_s, line_update_s + wait_s) + MARGIN_S
        begin_s, before_s = begins[0], ends[1]
        kv_tokens = self._kv_start + 2 * seqs
        kv_last = self._kv_start + (num_steps - 1) * seqs
        while len(ends) < num_steps:
            device_s = base + slope * kv_tokens
            kv_tokens += seqs
            launched_s = begin_s + launch_s
            ready_s = begin_s + wait_s
            end_s = (ready_s if ready_s > before_s else before_s) + device_s
            if end_s < launched_s:
                end_s = launched_s
            ends.append(end_s)
            if host_launches:
                begin_s = (before_s if before_s > launched_s else launched_s) + update_s
                boundaries.append(begin_s)
            else:
                composed_s = max(before_s, boundaries[-1]) + update_s
                boundaries.append(composed_s)
                begin_s = composed_s if composed_s > launched_s else launched_s
                begins.append(begin_s)
            if begin_s + ahead_s <= end_s and device_s >= least_s:
                self._append_back_to_back(num_steps)
                boundaries += [end_s + line_update_s for end_s in ends[len(boundaries) : num_steps - 1]]
                if not host_launches:
                    begins += boundaries[len(begins) :]
                return
            before_s, update_s = end_s, line_update_s
            if host_launches and begin_s + wait_s >= before_s and base + slope * kv_last <= host_s - MARGIN_S:
                self._append_held_up(num_steps - 1)
                return

    def _append_one_by_one(self, num_steps: int) -> None:
        """Add boundaries of steps that are composed once the one before has been taken in."""
        boundaries, seqs = self.boundaries, self._decodes.num_seqs
        base, slope, _, update_s, wait_s = self._line
        launch_s = self._launch_s
        kv_tokens, kv_end = self._kv_start + seqs, self._kv_start + seqs * num_steps
        if wait_s + (base + slope * (kv_end - seqs)) <= launch_s - MARGIN_S:
            self._append_held_up(num_steps)
            return
        now = boundaries[-1]
        for kv in range(kv_tokens, kv_end, seqs):
            device_s = base + slope * kv
            if wait_s + device_s >= launch_s + MARGIN_S and kv_end - kv >= SHORT * seqs:
                break  # so are all that follow
            launched_s, end_s = now + launch_s, (now + wait_s) + device_s
            now = (launched_s if launched_s > end_s else end_s) + update_s
            boundaries.append(now)
        if len(boundaries) == num_steps:
            return
        kvs = np.arange(self._kv_start + seqs * len(boundaries), kv_end, seqs, dtype=np.float64)
        turns = np.empty(3 * len(kvs) + 1)
        turns[0], turns[1::3], turns[3::3] = now, wait_s, update_s
        turns[2::3] = base + slope * kvs
        boundaries += np.add.accumulate(turns, out=turns)[3::3].tolist()

    def _append_held_up(self, num_steps: int) -> None:
        """Add boundaries of steps for which the device waits: the host launches each when done with the one before.

        Args:
            num_steps: that will have a boundary.
        """
        boundaries = self.boundaries
        launch_s, update_s = self._launch_s, self._line.update_s
        num_boundaries = num_steps - len(boundaries)
        now = boundaries[-1]
        if num_boundaries < SHORT:
            for _ in range(num_boundaries):
                now = (now + launch_s) + update_s
                boundaries.append(now)
            return
        turns = np.empty(2 * num_boundaries + 1)
        turns[0], turns[1::2], turns[2::2] = now, launch_s, update_s
        np.add.accumulate(turns, out=turns)
        boundaries += turns[2::2].tolist()

    def _append_back_to_back(self, num_steps: int) -> None:
        """Add steps that each begin when the one before ends; the device waits for nobody."""
        ends = self._device_ends
        seqs = self._decodes.num_seqs
        base, slope, *_ = self._line
        kv_tokens = self._kv_start + seqs * len(ends)
        kv_end = self._kv_start + seqs * num_steps
        now = ends[-1]
        if num_steps < SHORT:
            for kv in range(kv_tokens, kv_end, seqs):
                now += base + slope * kv
                ends.append(now)
            return
        times = np.arange(kv_tokens - seqs, kv_end, seqs, dtype=np.float64)
        times *= slope
        times += base
        times[0] = now
        ends += np.add.accumulate(times, out=times)[1:].tolist()

    def launched_after(self, num_boundaries: int) -> float:
        """Return when all that is composed is launched once so many boundaries, at least 1, are passed."""
        return self._launch_begins[num_boundaries - 1] + self._launch_s

    def step(self, position: int, like: Step) -> Step:
        """Return a step not composed at the start, as many waiting and running at its composition as at ``like``'s."""
        decodes = self._decodes
        base, slope, host_s, update_s, wait_s = self._line
        num_seqs = decodes.num_seqs
        kv_tokens = self._kv_start + num_seqs * position
        device_s = base + slope * kv_tokens
        step = Step(
            self.first_index + position,
            (device_s, host_s, update_s, wait_s),
            self.k_exec,
            decodes.sum_k_qos,
            num_seqs,
            kv_tokens,
            like.num_waiting,
            like.num_running,
        )
        ends = self._device_ends
        begin_s = self._launch_begins[position - self._lead]
        start_s, launched_s = begin_s + wait_s, begin_s + step.launch_s
        if position <= len(ends) and start_s < ends[position - 1]:
            start_s = ends[position - 1]
        end_s = start_s + device_s
        step.start_s, step.end_s = start_s, end_s if end_s > launched_s else launched_s
        return step

    def passed_before(self, time_s: float) -> int:
        """Return how many of the boundaries to pass lie strictly before ``time_s``."""
        return bisect_left(self.boundaries, time_s, 0, self.num_skipped)

    @property
    def last_boundary_s(self) -> float:
        """When the output of the step left to the engine has been taken in."""
        return self.boundaries[self.num_skipped]
