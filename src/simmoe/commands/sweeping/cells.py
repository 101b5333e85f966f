"""A sweep's cell: one simulation as pure data, and the function that runs it anywhere."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from simmoe.analysis.metrics import Slo, summarise
from simmoe.policies.registry import parse_policy
from simmoe.profiles.catalog import Profile, load_profile
from simmoe.simulator.config import SimConfig
from simmoe.simulator.simulation import simulate
from simmoe.traces.build import build_workload
from simmoe.traces.spec import WorkloadSpec
from simmoe.traces.workload import Workload

Metrics = dict[str, float]


class CellResult(NamedTuple):
    """What a cell found."""

    metrics: Metrics
    """As :data:`simmoe.analysis.metrics.METRICS` lists them."""
    extrapolated: dict[str, int]
    """Distinct points asked of the profile outside its grid, by what lay outside."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One simulation of a sweep. Running it twice, or elsewhere, gives the same result."""

    workload: WorkloadSpec
    """Requests, with their rate and seed; an infinite rate is an offline run."""
    policy: str
    """As parse_policy takes it."""
    profile: str
    """As load_profile takes it."""
    config: SimConfig
    """The deployment."""
    slo: Slo
    """Objectives of goodput."""

    @property
    def label(self) -> str:
        """Name the cell in a message."""
        rate = self.workload.rate
        load = "offline" if rate is None or math.isinf(rate) else f"rate {rate:g}"
        return f"policy '{self.policy}', {load}, seed {self.workload.seed}"

    def inputs(self) -> dict[str, Any]:
        """Return everything the cell was told, as plain data."""
        return {
            "workload": self.workload.as_dict(),
            "policy": self.policy,
            "profile": self.profile,
            "config": self.config.as_dict(),
            "slo": asdict(self.slo),
        }


def run_cell(cell: Cell) -> CellResult:
    """Simulate one cell.

    Raises:
        SimmoeError: whatever the trace, the profile or the policy is at fault for.
    """
    policy = parse_policy(cell.policy)
    cost = _profile(cell.profile).cost(async_scheduling=cell.config.engine.async_scheduling)
    result = simulate(workload_of(cell.workload), cell.config, cost, policy.batch, policy.route)
    metrics = summarise(result.requests, [asdict(rank) for rank in result.ranks], result.end_s, cell.slo)
    return CellResult(metrics, dict(cost.extrapolated))


def extrapolated_in(cells: Iterable[CellResult]) -> dict[str, int]:
    """Return, by what lay outside the profile's grid, in how many cells it did."""
    return dict(sorted(Counter(axis for cell in cells for axis, count in cell.extrapolated.items() if count).items()))


@lru_cache(maxsize=4)
def workload_of(spec: WorkloadSpec) -> Workload:
    """Return the workload of a specification; neighbouring cells share one."""
    return build_workload(spec)


@lru_cache(maxsize=4)
def _profile(name: str) -> Profile:
    return load_profile(name)
