"""Predicted against measured: how far a table is from samples, by kind, clock, and whether they were fitted."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from simmoe.profiles.samples import Sample, SampleHeader
from simmoe.profiles.step_cost import ProfileStepCost, Surfaces
from simmoe.profiles.table import HostShare, StepTable


class Residual(NamedTuple):
    """Relative errors, predicted / measured - 1, of one group of samples."""

    kind: str
    clock: str
    held_out: bool
    num_samples: int
    bias: float
    """Mean."""
    median: float
    """Median of the absolute value."""
    p95: float
    """95th percentile of the absolute value."""


def residuals(table: StepTable, runs: Sequence[tuple[SampleHeader, Sequence[Sample]]]) -> list[Residual]:
    """Return one row a group of samples under the device and the step clock."""
    groups: dict[tuple[str, str, bool], list[float]] = {}
    for header, samples in runs:
        predictor = Predictor(table, header.async_scheduling)
        for sample in samples:
            if sample.clock != "host":
                seconds = predictor.device_s(sample) if sample.clock == "device" else predictor.step_s(sample)
                error = seconds / sample.median_s - 1
                groups.setdefault((sample.kind, sample.clock, sample.held_out), []).append(error)
    rows = []
    for (kind, clock, held_out), errors in sorted(groups.items()):
        absolute = np.abs(errors)
        bias, median, p95 = np.mean(errors), np.median(absolute), np.quantile(absolute, 0.95)
        rows.append(Residual(kind, clock, held_out, len(errors), *(round(float(v), 5) for v in (bias, median, p95))))
    return rows


class Predictor:
    """What a table says a sample should have shown, under the sample's clock.

    Args:
        table: the table asked.
        async_scheduling: how the engine ran under the step clock.
    """

    def __init__(self, table: StepTable, async_scheduling: bool) -> None:
        hostless = replace(table, host={path: HostShare(0.0, 0.0, 0.0) for path in table.host})
        self._device = ProfileStepCost(Surfaces.of(hostless), async_scheduling=True)
        self._step = ProfileStepCost(Surfaces.of(table), async_scheduling)

    def device_s(self, sample: Sample) -> float:
        """Return the device's seconds."""
        return self._device.step_s(sample.shape)

    def step_s(self, sample: Sample) -> float:
        """Return the seconds from step to step."""
        return self._step.step_s(sample.shape)
