"""What each engine step was and how long it took."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from simmoe.live.engine.device_clock import DeviceTimes
from simmoe.profiles.shape import StepShape


class StepRecord(NamedTuple):
    """One engine step. Times are ``time.monotonic()`` of this machine, the clock of vLLM's own engine timestamps."""

    step: int
    """Counts the steps that computed something, from 0."""
    schedule_start_s: float
    schedule_end_s: float
    output_s: float
    """When the step's tokens were on the host, before the scheduler took them in."""
    update_end_s: float
    num_prefill_tokens: int
    prefill_kv_pairs: int
    num_prefill_seqs: int
    num_decode_seqs: int
    decode_kv_tokens: int
    k_exec: int
    """The budget the step ran at."""
    k_asked: int
    """The largest budget of its requests; below ``k_exec`` when graphs were captured at fewer budgets."""
    qos_slots: int
    """Scheduled tokens, each counted with its own request's budget, summed."""
    num_waiting: int
    num_running: int
    num_preempted: int
    """Requests this step's scheduling preempted."""
    device_start_s: float | None = None
    """When the device came to the step's first work, on the same clock; None: the worker keeps no device clock."""
    device_end_s: float | None = None
    """When it was done with forward pass and sampling. The distance between consecutive steps' is the engine's pace."""
    launch_s: float | None = None
    """The worker's own time to launch the step."""

    @property
    def shape(self) -> StepShape:
        """What the step computed."""
        return StepShape(
            num_prefill_tokens=self.num_prefill_tokens,
            prefill_kv_pairs=self.prefill_kv_pairs,
            num_prefill_seqs=self.num_prefill_seqs,
            num_decode_seqs=self.num_decode_seqs,
            decode_kv_tokens=self.decode_kv_tokens,
            k_exec=self.k_exec,
        )


class TimedSteps:
    """One engine's records with their device times, each drained in turn: a time may be told before its record."""

    def __init__(self) -> None:
        # device times of steps whose records have not been drained yet
        self._times: dict[int, DeviceTimes] = {}

    def join(self, records: Iterable[StepRecord], times: Iterable[DeviceTimes]) -> list[StepRecord]:
        """Return the records with the device times of the steps that have some.

        Args:
            records: as the scheduler drained them.
            times: as the same engine's worker drained them just after; later steps' are kept for later records.
        """
        self._times |= {row.step: row for row in times}
        timed = [
            r._replace(device_start_s=t.start_s, device_end_s=t.end_s, launch_s=t.launch_s)
            if (t := self._times.get(r.step))
            else r
            for r in records
        ]
        if timed:
            self._times = {step: row for step, row in self._times.items() if step > timed[-1].step}
        return timed


class BatchSummary(NamedTuple):
    """Shape and budgets of a scheduled batch, before the step's k is decided."""

    shape: StepShape
    """``k_exec`` holds the largest budget of the batch."""
    qos_slots: int


def summarise(
    num_scheduled_tokens: Mapping[str, int], requests: Mapping[str, Any], ks: Mapping[str, int]
) -> BatchSummary:
    """Return what a batch computes.

    Args:
        num_scheduled_tokens: tokens of each scheduled request.
        requests: vLLM's requests after scheduling, so ``num_computed_tokens`` counts those tokens already.
        ks: every request's budget.
    A request decodes when it computes one token past its prompt; anything else, a preempted request that computes its
    own output again included, is prefill.
    """
    prefill_tokens = kv_pairs = prefill_seqs = decode_seqs = decode_kv = k_asked = qos_slots = 0
    for request_id, count in num_scheduled_tokens.items():
        request = requests[request_id]
        context = request.num_computed_tokens - count
        k = ks[request_id]
        qos_slots += k * count
        if k > k_asked:
            k_asked = k
        if count == 1 and context >= request.num_prompt_tokens:
            decode_seqs += 1
            decode_kv += context + 1
        else:
            prefill_tokens += count
            kv_pairs += count * context + count * (count + 1) // 2
            prefill_seqs += 1
    return BatchSummary(StepShape(prefill_tokens, kv_pairs, prefill_seqs, decode_seqs, decode_kv, k_asked), qos_slots)


@dataclass(slots=True)
class _OpenStep:
    start_s: float
    end_s: float
    batch: BatchSummary
    k_exec: int
    num_waiting: int
    num_running: int
    num_preempted: int


class StepRecorder:
    """Collects :class:`StepRecord` rows until they are drained; several steps may be in flight.

    Args:
        limit: rows kept when nobody drains them; the oldest go first.
    """

    def __init__(self, limit: int = 1 << 20) -> None:
        self._open: dict[int, _OpenStep] = {}
        self._done: deque[StepRecord] = deque(maxlen=limit)

    def scheduled(
        self,
        step: int,
        times_s: tuple[float, float],
        batch: BatchSummary,
        k_exec: int,
        counts: tuple[int, int, int],
    ) -> None:
        """Note a step that was handed to the worker; counts are (waiting, running, preempted) after scheduling."""
        self._open[step] = _OpenStep(*times_s, batch, k_exec, *counts)

    def finished(self, step: int, output_s: float, update_end_s: float) -> None:
        """Note that a step's output was taken in."""
        s = self._open.pop(step)
        shape = s.batch.shape
        self._done.append(
            StepRecord(
                step, s.start_s, s.end_s, output_s, update_end_s, *shape[:5], s.k_exec, shape.k_exec,
                s.batch.qos_slots, s.num_waiting, s.num_running, s.num_preempted,
            )
        )  # fmt: skip

    @property
    def num_open(self) -> int:
        """Steps handed to the worker whose output has not been taken in."""
        return len(self._open)

    def drain(self) -> list[StepRecord]:
        """Return the finished steps recorded since the last call, oldest first, and forget them."""
        rows = list(self._done)
        self._done.clear()
        return rows
