"""How far a table is off recorded runs that took no part in its fit, and within which limits.

Steps with prompt tokens and decode-only steps are judged apart, and of each those that replayed captured graphs apart
from those whose kernels the host launched one by one. The limits hold for captured sizes. Above them the host's own
time varies from run to run, so there the larger of limit and that spread holds.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from simmoe.profiles.checking.checked_steps import DECODE_ONLY, WITH_PROMPTS, CheckedStep
from simmoe.profiles.shape import StepShape
from simmoe.profiles.step_cost import ProfileStepCost, Surfaces
from simmoe.profiles.table import StepTable


@dataclass(frozen=True, slots=True)
class Limits:
    """Largest relative errors allowed."""

    bias: float = 0.01
    """Of the mean of predicted / measured - 1, either way."""
    median: float = 0.03
    """Of the median of its absolute value."""
    p95: float = 0.08
    """Of its 95th percentile."""

    def at_least(self, spread: float) -> Limits:
        """Return these limits, none below a spread."""
        return Limits(max(self.bias, spread), max(self.median, spread), max(self.p95, spread))


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors, predicted / measured - 1, of a group of steps."""

    number: int
    bias: float
    median: float
    p95: float
    predicted_s: float
    """Of all its steps together."""
    measured_s: float

    @classmethod
    def of(cls, steps: Sequence[CheckedStep]) -> Errors:
        """Return the errors of at least one step."""
        predicted = np.array([step.predicted_s for step in steps])
        measured = np.array([step.measured_s for step in steps])
        relative = predicted / measured - 1
        absolute = np.abs(relative)
        return cls(
            len(steps),
            float(relative.mean()),
            float(np.median(absolute)),
            float(np.quantile(absolute, 0.95)),
            float(predicted.sum()),
            float(measured.sum()),
        )

    def above(self, limits: Limits) -> list[str]:
        """Return what is above its limit, in words."""
        return [
            f"{name} {value:+z.1%} above {limit:.1%}" if name == "bias" else f"{name} {value:.1%} above {limit:.1%}"
            for name, value, limit in (
                ("bias", self.bias, limits.bias),
                ("median |error|", self.median, limits.median),
                ("p95 |error|", self.p95, limits.p95),
            )
            if abs(value) > limit
        ]


class Verdict(NamedTuple):
    """What one group of steps was held to."""

    steps: str
    launch: str
    errors: Errors
    limits: Limits
    above: list[str]
    """What exceeds its limit, in words; empty when the group passes."""


def verdicts(steps: Sequence[CheckedStep], limits: Limits, host_spread: float) -> list[Verdict]:
    """Return each group's errors and what exceeds its limits, prompts before decodes and captured before eager.

    Args:
        steps: of :func:`checked_steps`.
        limits: for captured sizes.
        host_spread: of :func:`host_spread`; raises the limits of eager steps.
    """
    rows = []
    for kind in (WITH_PROMPTS, DECODE_ONLY):
        for launch in ("captured", "eager"):
            group = [step for step in steps if step.steps == kind and step.launch == launch]
            if group:
                errors = Errors.of(group)
                held_to = limits if launch == "captured" else limits.at_least(host_spread)
                rows.append(Verdict(kind, launch, errors, held_to, errors.above(held_to)))
    return rows


def errors_by(steps: Iterable[CheckedStep], key: Callable[[CheckedStep], Hashable]) -> dict[Any, Errors]:
    """Return the errors of each group of steps, in the order the groups first appear."""
    groups: dict[Hashable, list[CheckedStep]] = {}
    for step in steps:
        groups.setdefault(key(step), []).append(step)
    return {name: Errors.of(group) for name, group in groups.items()}


def host_spread(table: StepTable, calibration: Sequence[CheckedStep] = ()) -> float:
    """Return how much steps vary where kernels are launched one by one, as a share of their time.

    Args:
        table: its points above the captured sizes tell, (p90 - p10) / step time, the median over them ...
        calibration: ... unless the same machine recorded other such steps that day: p90 - p10 of measured / predicted.
    Returns:
        0 where nothing was measured above the captured sizes.
    """
    ratios = [step.measured_s / step.predicted_s for step in calibration if step.launch == "eager"]
    if ratios:
        return float(np.quantile(ratios, 0.9) - np.quantile(ratios, 0.1))
    cost = ProfileStepCost(Surfaces.of(table), async_scheduling=True)
    largest = table.captured_sizes[-1] if table.captured_sizes else 0
    spreads = [
        cell.spread_s / seconds(size, k)
        for grid, seconds in ((table.prefill, cost.prefill_s), (table.decode, _decode_s(cost)))
        for size, row in zip(grid.sizes, grid.cells, strict=True)
        for k, cell in zip(grid.ks, row, strict=True)
        if size > largest and cell.repetitions > 1
    ]
    return float(np.median(spreads)) if spreads else 0.0


def served_host_spread(calibration: Sequence[CheckedStep]) -> tuple[float, int]:
    """Return how much captured steps that the host decides vary while it serves, and how many steps say so.

    Args:
        calibration: of :func:`checked_steps`.
    Returns:
        p90 - p10 of measured / predicted over the steps the table says are the host's; 0 where there are none.
    """
    ratios = [s.measured_s / s.predicted_s for s in calibration if s.launch == "captured" and s.part == "host"]
    if not ratios:
        return 0.0, 0
    low, high = np.quantile(ratios, (0.1, 0.9)).tolist()
    return high - low, len(ratios)


def _decode_s(cost: ProfileStepCost) -> Callable[[int, int], float]:
    return lambda size, k: cost.step_s(StepShape(num_decode_seqs=size, decode_kv_tokens=size, k_exec=k))
