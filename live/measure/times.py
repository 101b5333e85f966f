"""From step records to samples: how long a step took while the engine was kept busy."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from simmoe.live.engine.steps import StepRecord
from simmoe.profiles.samples import Clock, Kind, Mode, Sample


def busy_steps(records: Sequence[StepRecord], *, async_scheduling: bool) -> Iterator[tuple[StepRecord, float]]:
    """Yield each step that followed another without a pause, with the seconds between their outputs.

    Under asynchronous scheduling a step must have been scheduled before the previous one's output arrived, so that the
    device never waited for it; otherwise the engine must have gone on at once.
    """
    for before, step in itertools.pairwise(records):
        limit_s = before.output_s if async_scheduling else before.update_end_s + 1e-3
        if step.step == before.step + 1 and step.schedule_start_s <= limit_s:
            yield step, step.output_s - before.output_s


def kind_of(step: StepRecord) -> Kind:
    """Return what the step computed."""
    if not step.num_prefill_tokens:
        return "decode"
    return "mixed" if step.num_decode_seqs else "prefill"


def samples(
    timed: Iterable[tuple[StepRecord, float]], clock: Clock, captured_sizes: Sequence[int], least: int = 1
) -> list[Sample]:
    """Group steps of one shape and budget into samples.

    Decode steps are grouped whatever their context, and carry that of the median step.

    Args:
        timed: steps, each with its seconds.
        clock: the clock those seconds are on.
        captured_sizes: as the engine captured them, ascending; empty means eager.
        least: groups of fewer steps are dropped.
    """
    groups: dict[tuple[int, ...], list[tuple[float, StepRecord]]] = defaultdict(list)
    for step, seconds in timed:
        key = (step.num_prefill_tokens, step.prefill_kv_pairs, step.num_prefill_seqs, step.num_decode_seqs, step.k_exec)
        groups[key].append((seconds, step))
    result = []
    largest = captured_sizes[-1] if captured_sizes else 0
    for members in groups.values():
        if len(members) < least:
            continue
        members.sort(key=lambda member: member[0])
        times = np.array([seconds for seconds, _ in members])
        step = members[len(members) // 2][1]
        low, median, high = np.quantile(times, (0.1, 0.5, 0.9)).tolist()
        mode: Mode = "graphs" if step.shape.num_tokens <= largest else "eager"
        result.append(
            Sample(
                kind=kind_of(step),
                num_prefill_tokens=step.num_prefill_tokens,
                num_prefill_seqs=step.num_prefill_seqs,
                prefill_kv_pairs=step.prefill_kv_pairs,
                num_decode_seqs=step.num_decode_seqs,
                decode_kv_tokens=int(np.median([s.decode_kv_tokens for _, s in members])),
                k=step.k_exec,
                mode=mode,
                clock=clock,
                repetitions=len(members),
                median_s=round(median, 7),
                p10_s=round(low, 7),
                p90_s=round(high, 7),
            )
        )
    return result


def clocked(
    records: Sequence[StepRecord], worker_clock: Mapping[int, tuple[float | None, float]]
) -> tuple[list[tuple[StepRecord, float]], list[tuple[StepRecord, float]]]:
    """Return the steps with their device seconds, and with the host's: schedule, launch and update."""
    device, host = [], []
    for step in records:
        device_s, worker_s = worker_clock.get(step.step, (None, None))
        if device_s is not None:
            device.append((step, device_s))
        if worker_s is not None:
            own_s = step.schedule_end_s - step.schedule_start_s + step.update_end_s - step.output_s
            host.append((step, own_s + worker_s))
    return device, host
