"""What samples are evidence of: the host's share by launch path, and which steps the device surely bounds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from simmoe.profiles.fitting.regression import fit_cells
from simmoe.profiles.recorded_steps import RecordedStep
from simmoe.profiles.samples import Sample
from simmoe.profiles.table import PATHS, HostShare

#: A step this much longer than the host's own time in the same pass, or than the host clock's share where that was not
#: measured, was bound by the device.
DEVICE_BOUND, DEVICE_BOUND_BY_SHARE = 1.15, 1.3

#: A host that took more than this many times its path's share waited for the device while it launched, whose queue was
#: full: its time tells nothing of what bound the step.
LAUNCH_WAITED = 2.0

#: The device's queue is not full of steps of at most so many tokens. What the host took for them, all but the slowest
#: tenth, is what a launch takes of itself, in a slow spell too; what it took for longer steps beyond that is waiting.
QUEUE_NOT_FULL, SLOW_SPELL = 512, 0.9

#: A device that was busy for less of a step's time than this waited for the next one to be launched.
BUSY = 0.97

#: Fewer such steps tell nothing of slow spells.
LEAST_STEPS = 10

#: A step at most this much longer than the least bound on its device time was not held up by the host: one surely bound
#: by the device, or any other. While the host launches a step it sees the output of the one before late, so that one
#: seems longer and this one shorter: of two steps of one shape, even the longer may be right.
TRUST_SURE, TRUST = 1.35, 1.1


class Evidence(NamedTuple):
    """What was measured of one kind of step."""

    kind: str
    steps: list[Sample]
    """Under the step clock."""
    hidden: list[Sample]
    """Under the device clock, shorter than the host's share: the step clock cannot show them."""
    sure: list[Sample]
    """Steps surely bound by the device, and those it was held before."""
    held: list[Sample]
    """Under the held clock: the device's time itself, whatever the host takes."""


def device_bound(
    samples: Sequence[Sample], clock: Mapping[str, HostShare], captured: Sequence[int]
) -> list[tuple[Sample, bool]]:
    """Return the step-clock samples, each with whether it was surely bound by the device.

    The device was busy for all of it, and neither the host's own time in the same pass nor what the host takes in a
    slow spell explains it. The own time alone does not tell: while the queue is full it is the device's.

    Args:
        samples: of every clock. A point's rows are in the order of their passes, so the host and the device row that
            belong to a step row are those that came as often before.
        clock: the host clock's share by launch path, for steps whose host time was not measured.
        captured: sizes graphs were captured at, ascending.
    """
    seen: Counter[tuple[object, ...]] = Counter()
    seconds: dict[tuple[object, ...], float] = {}
    steps: list[tuple[tuple[object, ...], Sample]] = []
    for s in samples:
        place = (*s.key, seen[s.key])
        seen[s.key] += 1
        seconds[s.shape, s.mode, s.clock, place[-1]] = s.median_s
        if s.clock == "step":
            steps.append((place, s))
    slowest = _slow_spells(samples, clock, captured)

    def bound(nth: object, s: Sample) -> bool:
        busy_s = seconds.get((s.shape, s.mode, "device", nth), s.median_s)
        own_s, share_s = seconds.get((s.shape, s.mode, "host", nth)), host_s(clock, s, captured)
        if busy_s < BUSY * s.median_s:
            return False
        if own_s is None:
            return s.median_s > DEVICE_BOUND_BY_SHARE * share_s
        return s.median_s > DEVICE_BOUND * min(own_s, slowest[launch_path(s, captured)] * share_s)

    return [(s, bound(place[-1], s)) for place, s in steps]


def _slow_spells(
    samples: Sequence[Sample], clock: Mapping[str, HostShare], captured: Sequence[int]
) -> dict[str, float]:
    """Return how many times its share the host takes in a slow spell, by launch path, LAUNCH_WAITED at most."""
    over: dict[str, list[float]] = {path: [] for path in PATHS}
    for s in samples:
        if s.clock == "host" and s.shape.num_tokens <= QUEUE_NOT_FULL:
            over[launch_path(s, captured)].append(s.median_s / host_s(clock, s, captured))
    return {
        path: min(float(np.quantile(times, SLOW_SPELL)), LAUNCH_WAITED) if len(times) >= LEAST_STEPS else LAUNCH_WAITED
        for path, times in over.items()
    }


def served_bound(
    recorded: Sequence[RecordedStep], clock: Mapping[str, HostShare], captured: Sequence[int]
) -> list[tuple[Sample, bool]]:
    """Return the steps of a served load that followed another, each with whether it was surely bound by the device.

    The clocks of the loop and the device tell; where they were not recorded, how long the step took does, against what
    the worker took to launch it.

    Args:
        recorded: steps in their order.
        clock: the host clock's share by launch path.
        captured: sizes graphs were captured at, ascending.
    """
    rows = []
    for step in recorded:
        if step.follows:
            rows.append(step.sample)
            if step.worker_launch_s:
                launch_s = step.worker_launch_s
                rows.append(replace(step.sample, clock="host", median_s=launch_s, p10_s=launch_s, p90_s=launch_s))
    told = [step.device_bound for step in recorded if step.follows]
    by_pace = device_bound(rows, clock, captured)
    return [(s, bound if known is None else known) for (s, bound), known in zip(by_pace, told, strict=True)]


def gather(
    kind: str,
    steps: Sequence[tuple[Sample, bool]],
    device: Sequence[Sample],
    clock: Mapping[str, HostShare],
    captured: Sequence[int],
) -> Evidence:
    """Return what the samples say of one kind of step.

    Args:
        kind: 'prefill', 'decode' or 'mixed'.
        steps: step-clock samples of every kind, with whether the device surely bound them.
        device: device-clock and held samples of every kind.
        clock: the host clock's share by launch path.
        captured: sizes graphs were captured at, ascending.
    """
    mine = [s for s, _ in steps if s.kind == kind]
    held = [s for s in device if s.kind == kind and s.clock == "held"]
    shown = [s for s in device if s.kind == kind and s.clock != "held"]
    hidden = [s for s in shown if s.median_s < host_s(clock, s, captured)]
    sure = [s for s, bound in steps if bound and s.kind == kind]
    return Evidence(kind, mine, hidden, [*sure, *held], held)


def not_held_up(bound: Sequence[Sample], steps: Sequence[Sample]) -> list[Sample]:
    """Return the steps bound by the device that took no longer than any of ``steps`` with more of everything.

    Args:
        bound: steps that clocks take to be the device's.
        steps: all of their kind, under the step clock.
    """
    shapes = np.array([s.shape for s in steps], dtype=np.float64)
    seconds = np.array([s.median_s for s in steps])

    def held_up(s: Sample) -> bool:
        more = (shapes >= np.array(s.shape)).all(axis=1)
        return s.clock != "held" and bool((s.median_s > TRUST * seconds[more]).any())

    return [s for s in bound if not held_up(s)]


def host_clock(samples: Sequence[Sample], captured: Sequence[int]) -> dict[str, HostShare]:
    """Return each launch path's share by the host clock; nothing where it was not measured."""
    shares: dict[str, HostShare] = {}
    for path in PATHS:
        mine = [s for s in samples if launch_path(s, captured) == path]
        share = HostShare(0.0, 0.0)
        if mine:
            fit = fit_cells([0] * len(mine), [[num_seqs(s)] for s in mine], [s.median_s for s in mine])
            share = HostShare(fit.cells[0], float(fit.values[0]))
        shares[path] = share
    return shares


def host_s(shares: Mapping[str, HostShare], sample: Sample, captured: Sequence[int]) -> float:
    """Return a step's host seconds."""
    share = shares[launch_path(sample, captured)]
    return share.base_s + share.per_seq_s * num_seqs(sample)


def num_seqs(sample: Sample) -> int:
    """Return the sequences the host handles in a step."""
    return sample.num_prefill_seqs + sample.num_decode_seqs


def launch_path(sample: Sample, captured: Sequence[int]) -> str:
    """Return how a step's kernels were launched, one of table.PATHS."""
    if sample.mode == "eager" or not captured or sample.shape.num_tokens > captured[-1]:
        return "eager"
    return "full" if sample.kind == "decode" else "piecewise"


def left_graphs_aside(sample: Sample, captured: Sequence[int]) -> bool:
    """Return whether a step of a captured size launched its kernels one by one."""
    return sample.mode == "eager" and bool(captured) and sample.shape.num_tokens <= captured[-1]


def runs_at(captured: Sequence[int], size: int) -> int:
    """Return the size a step runs at: the next captured one, or its own above them."""
    return next((c for c in captured if c >= size), size)
