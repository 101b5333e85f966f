"""Predicted against measured: how far a table is from samples, by kind and clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from simmoe.profiles.loop import paces
from simmoe.profiles.recorded_steps import RecordedStep
from simmoe.profiles.samples import Sample
from simmoe.profiles.shape import StepShape
from simmoe.profiles.step_cost import ProfileStepCost, Surfaces
from simmoe.profiles.table import HostShare, StepTable


class Residual(NamedTuple):
    """Relative errors, predicted / measured - 1, of one group of samples."""

    kind: str
    """Of step: prefill, decode or mixed."""
    clock: str
    source: str
    """'fitted': points of the fit; 'held out': points kept from it; 'recorded': steps of a recorded run."""
    num_samples: int
    bias: float
    """Mean."""
    median: float
    """Median of the absolute value."""
    p95: float
    """95th percentile of the absolute value."""


def residuals(table: StepTable, samples: Iterable[Sample], *, async_scheduling: bool, source: str) -> list[Residual]:
    """Return one row a kind and clock; the host clock, whose share is inside the step clock's, is left out."""
    predictor = Predictor(table, async_scheduling)
    groups: dict[tuple[str, str], list[float]] = {}
    for sample in samples:
        if sample.clock != "host":
            predicted_s = predictor.device_s if sample.clock in ("device", "held") else predictor.step_s
            groups.setdefault((sample.kind, sample.clock), []).append(predicted_s(sample.shape) / sample.median_s - 1)
    return _rows(groups, source)


def recorded_residuals(table: StepTable, recorded: Sequence[RecordedStep], *, source: str) -> list[Residual]:
    """Return one row a kind of the steps that follow another and took no part in the fit, composed by the loop."""
    cost = ProfileStepCost(Surfaces.of(table), async_scheduling=True)
    parts = ((step.follows, cost.parts_s(step.sample.shape)) for step in recorded)
    predicted = paces(parts, table.distributed_executor_backend)
    groups: dict[tuple[str, str], list[float]] = {}
    for step, predicted_s in zip(recorded, predicted, strict=True):
        if step.follows and step.sample.held_out:
            key = step.sample.kind, step.sample.clock
            groups.setdefault(key, []).append(predicted_s / step.sample.median_s - 1)
    return _rows(groups, source)


def _rows(groups: Mapping[tuple[str, str], Sequence[float]], source: str) -> list[Residual]:
    rows = []
    for (kind, clock), errors in sorted(groups.items()):
        absolute = np.abs(errors)
        values = (np.mean(errors), np.median(absolute), np.quantile(absolute, 0.95))
        rows.append(Residual(kind, clock, source, len(errors), *(round(float(value), 5) + 0.0 for value in values)))
    return rows


class Predictor:
    """What a table says a step should show, under the device and the step clock.

    Args:
        table: the table asked.
        async_scheduling: how the engine ran under the step clock.
    """

    def __init__(self, table: StepTable, async_scheduling: bool) -> None:
        hostless = replace(table, host={path: HostShare(0.0, 0.0) for path in table.host}, mixed_host=None)
        self._device = ProfileStepCost(Surfaces.of(hostless), async_scheduling=True)
        self._step = ProfileStepCost(Surfaces.of(table), async_scheduling)

    def device_s(self, shape: StepShape) -> float:
        """Return the device's seconds."""
        return self._device.step_s(shape)

    def step_s(self, shape: StepShape) -> float:
        """Return the seconds from step to step."""
        return self._step.step_s(shape)
