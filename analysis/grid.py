"""A sweep's results as arrays, rates x policies x seeds, and the answers drawn from them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simmoe.analysis.stats import Estimate, mean_interval, paired_change


class GridRow(NamedTuple):
    """One line of the long table: a metric of a policy at a rate, over seeds."""

    rate_per_s: float
    load: float
    """rate over the baseline's saturation rate."""
    policy: str
    metric: str
    mean: float
    ci95_half_width: float
    num_seeds: int
    """Seeds in which the metric exists."""
    change_vs_baseline: float
    """Mean over seeds of (value - baseline) / baseline, paired by seed."""
    change_ci95_half_width: float


class Winner(NamedTuple):
    """The answer at one rate."""

    policy: str
    """The policy of the least mean."""
    ties: tuple[str, ...]
    """Other policies whose paired interval against it includes no change."""


@dataclass(frozen=True, slots=True, eq=False)
class SweepGrid:
    """Metrics of every cell of a sweep; equal seeds mean equal requests, whatever the policy."""

    rates: tuple[float, ...]
    """[num_rates] offered load, requests a second, ascending."""
    policies: tuple[str, ...]
    """[num_policies] in the order they were asked for."""
    seeds: tuple[int, ...]
    """[num_seeds]."""
    baseline: str
    """The policy others are compared with; one of ``policies``."""
    saturation: Mapping[str, float]
    """Saturation rate of each policy, requests a second."""
    values: Mapping[str, npt.NDArray[np.float64]]
    """metric -> [num_rates, num_policies, num_seeds], NaN where it does not exist."""

    @classmethod
    def build(
        cls,
        cells: Iterable[tuple[float, str, int, Mapping[str, float]]],
        policies: Sequence[str],
        baseline: str,
        saturation: Mapping[str, float],
    ) -> SweepGrid:
        """Arrange cells, given as (rate, policy, seed, metrics) in any order; every combination must be there once."""
        by_place = {(rate, policy, seed): metrics for rate, policy, seed, metrics in cells}
        rates = tuple(sorted({rate for rate, _, _ in by_place}))
        seeds = tuple(sorted({seed for _, _, seed in by_place}))
        names = list(next(iter(by_place.values())))
        values = {
            name: np.array([[[by_place[r, p, s][name] for s in seeds] for p in policies] for r in rates], np.float64)
            for name in names
        }
        return cls(rates, tuple(policies), seeds, baseline, dict(saturation), values)

    @property
    def capacity_per_s(self) -> float:
        """Saturation rate of the baseline: load 1."""
        return self.saturation[self.baseline]

    def estimate(self, metric: str) -> Estimate:
        """Return means and 95% intervals over seeds, [num_rates, num_policies]."""
        return mean_interval(self.values[metric])

    def change(self, metric: str, baseline: str | None = None) -> Estimate:
        """Return the paired relative change from a policy (the sweep's baseline), [num_rates, num_policies]."""
        base = self.policies.index(self.baseline if baseline is None else baseline)
        values = self.values[metric]
        return paired_change(values, values[:, base : base + 1, :])

    def winners(self, metric: str) -> list[Winner | None]:
        """Return, for each rate, the policy of the least mean and those that cannot be told from it.

        None where no policy has the metric.
        """
        mean = self.estimate(metric).mean
        out: list[Winner | None] = []
        for i in range(len(self.rates)):
            if np.isnan(mean[i]).all():
                out.append(None)
                continue
            best = self.policies[int(np.nanargmin(mean[i]))]
            change = self.change(metric, baseline=best)
            distinct = np.abs(change.mean[i]) > change.half_width[i]
            ties = tuple(p for p, far in zip(self.policies, distinct, strict=True) if p != best and not far)
            out.append(Winner(best, ties))
        return out

    def rows(self) -> Iterator[GridRow]:
        """Yield the long table: by rate, then policy, then metric."""
        estimates = {metric: self.estimate(metric) for metric in self.values}
        changes = {metric: self.change(metric) for metric in self.values}
        for i, rate in enumerate(self.rates):
            for j, policy in enumerate(self.policies):
                for metric in self.values:
                    estimate, change = estimates[metric], changes[metric]
                    yield GridRow(
                        rate,
                        rate / self.capacity_per_s,
                        policy,
                        metric,
                        float(estimate.mean[i, j]),
                        float(estimate.half_width[i, j]),
                        int(estimate.num_samples[i, j]),
                        float(change.mean[i, j]),
                        float(change.half_width[i, j]),
                    )
