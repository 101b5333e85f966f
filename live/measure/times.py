"""From step records to samples: how long a step took while the engine was kept busy."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
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
    """Yield each step that followed another without a pause, with the engine's pace: its seconds under the step clock.

    That is the time between the ends of both on the device, where it was taken, and between their outputs on the host
    otherwise. Under asynchronous scheduling a step must have been scheduled before the previous one's output arrived,
    so that the device never waited for it; otherwise the engine must have gone on at once.
    """
    for before, step in itertools.pairwise(records):
        limit_s = before.output_s if async_scheduling else before.update_end_s + 1e-3
        if step.step == before.step + 1 and step.schedule_start_s <= limit_s:
            if step.device_end_s is not None and before.device_end_s is not None:
                yield TimedStep(step, "step", step.device_end_s - before.device_end_s)
            else:
                yield TimedStep(step, "step", step.output_s - before.output_s)


def timed_steps(records: Sequence[StepRecord], *, async_scheduling: bool) -> list[TimedStep]:
    """Return the busy steps under every clock there is: step, device, and the host's schedule, launch and update."""
    result: list[TimedStep] = []
    for timed in busy_steps(records, async_scheduling=async_scheduling):
        step = timed.step
        result.append(timed)
        if step.device_start_s is not None and step.device_end_s is not None:
            result.append(TimedStep(step, "device", step.device_end_s - step.device_start_s))
        if step.launch_s is not None:
            own_s = step.schedule_end_s - step.schedule_start_s + step.update_end_s - step.output_s
            result.append(TimedStep(step, "host", own_s + step.launch_s))
    return result


def kind_of(shape: StepShape) -> Kind:
    """Return what a step of this shape computes."""
    if not shape.num_prefill_tokens:
        return "decode"
    return "mixed" if shape.num_decode_seqs else "prefill"


def samples(
    timed: Iterable[TimedStep], captured_sizes: Sequence[int], least: int = 1, *, eager: bool = False
) -> list[Sample]:
    """Group steps of one shape, budget and clock into samples.

    Decode steps are grouped whatever their context, and carry that of the median step.

    Args:
        timed: steps, in any order.
        captured_sizes: as the engine captured them, ascending; empty means eager.
        least: groups of fewer steps are dropped.
        eager: the graphs were left aside.
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
        mode: Mode = "graphs" if shape.num_tokens <= largest and not eager else "eager"
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
