"""From step records to samples: how long a step took while the engine was kept busy."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from simmoe.live.engine.steps import StepRecord
from simmoe.profiles.samples import Clock, Kind, Mode, Sample
from simmoe.profiles.shape import StepShape


class TimedStep(NamedTuple):
    """One step's seconds on one clock."""

    step: StepRecord
    clock: Clock
    seconds: float


def busy_steps(records: Sequence[StepRecord], *, async_scheduling: bool) -> Iterator[TimedStep]:
    """Yield each step that followed another without a pause, with the seconds between their outputs.

    Under asynchronous scheduling a step must have been scheduled before the previous one's output arrived, so that the
    device never waited for it; otherwise the engine must have gone on at once.
    """
    for before, step in itertools.pairwise(records):
        limit_s = before.output_s if async_scheduling else before.update_end_s + 1e-3
        if step.step == before.step + 1 and step.schedule_start_s <= limit_s:
            yield TimedStep(step, "step", step.output_s - before.output_s)


def kind_of(shape: StepShape) -> Kind:
    """Return what a step of this shape computes."""
    if not shape.num_prefill_tokens:
        return "decode"
    return "mixed" if shape.num_decode_seqs else "prefill"


def samples(timed: Iterable[TimedStep], captured_sizes: Sequence[int], least: int = 1) -> list[Sample]:
    """Group steps of one shape, budget and clock into samples.

    Decode steps are grouped whatever their context, and carry that of the median step.

    Args:
        timed: steps, in any order.
        captured_sizes: as the engine captured them, ascending; empty means eager.
        least: groups of fewer steps are dropped.
    """
    groups: dict[tuple[StepShape, Clock], list[TimedStep]] = defaultdict(list)
    for member in timed:
        groups[member.step.shape._replace(decode_kv_tokens=0), member.clock].append(member)
    result = []
    largest = captured_sizes[-1] if captured_sizes else 0
    for (shape, clock), members in groups.items():
        if len(members) < least:
            continue
        low, median, high = np.quantile([member.seconds for member in members], (0.1, 0.5, 0.9)).tolist()
        mode: Mode = "graphs" if shape.num_tokens <= largest else "eager"
        result.append(
            Sample(
                kind=kind_of(shape),
                num_prefill_tokens=shape.num_prefill_tokens,
                num_prefill_seqs=shape.num_prefill_seqs,
                prefill_kv_pairs=shape.prefill_kv_pairs,
                num_decode_seqs=shape.num_decode_seqs,
                decode_kv_tokens=int(np.median([member.step.decode_kv_tokens for member in members])),
                k=shape.k_exec,
                mode=mode,
                clock=clock,
                repetitions=len(members),
                median_s=round(median, 7),
                p10_s=round(low, 7),
                p90_s=round(high, 7),
            )
        )
    return result


def clocked(records: Sequence[StepRecord], worker_clock: Mapping[int, tuple[float | None, float]]) -> list[TimedStep]:
    """Return the steps with their device seconds, and with the host's: schedule, launch and update."""
    result: list[TimedStep] = []
    for step in records:
        device_s, worker_s = worker_clock.get(step.step, (None, None))
        if device_s is not None:
            result.append(TimedStep(step, "device", device_s))
        if worker_s is not None:
            own_s = step.schedule_end_s - step.schedule_start_s + step.update_end_s - step.output_s
            result.append(TimedStep(step, "host", own_s + worker_s))
    return result
