"""A sweep from its inputs to its grid: saturation first, then rates x policies x seeds, resuming what is on disk."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

from simmoe.analysis.grid import SweepGrid
from simmoe.analysis.metrics import Slo
from simmoe.commands.sweeping.cells import Cell, CellResult
from simmoe.commands.sweeping.executor import Executor
from simmoe.commands.sweeping.gathering import gather
from simmoe.commands.sweeping.progress import Progress
from simmoe.commands.sweeping.saturation import LOADS, offline_cell, rates_around, saturation_rate
from simmoe.commands.sweeping.store import SweepStore
from simmoe.simulator.config import SimConfig
from simmoe.traces.spec import WorkloadSpec


@dataclass(frozen=True, slots=True)
class Study:
    """What a sweep was asked for, resolved; equal studies have equal results."""

    workload: WorkloadSpec
    """Requests of every cell but for their rate and seed."""
    policies: tuple[str, ...]
    """As parse_policy takes them."""
    baseline: str
    """The policy others are compared with; one of ``policies``."""
    rates: tuple[float, ...] | None
    """Offered loads, requests a second; None: found around saturation."""
    num_seeds: int
    """Seeds 0, 1, ...; equal seeds are equal requests for every policy (common random numbers)."""
    profile: str
    """As load_profile takes it."""
    config: SimConfig
    """The deployment."""
    slo: Slo
    """Objectives of goodput."""
    sources: Mapping[str, Any]
    """Hashes of what the rest only names: code, trace, profile."""
    policy_sources: Mapping[str, Mapping[str, str]]
    """Hashes of the files that define each policy."""

    def inputs(self) -> dict[str, Any]:
        """Return the study as plain data."""
        workload = replace(self.workload, rate=1.0).as_dict()
        return {
            "workload": {name: value for name, value in workload.items() if name not in ("rate", "seed")},
            "policies": list(self.policies),
            "baseline": self.baseline,
            "rates_per_s": None if self.rates is None else list(self.rates),
            "seeds": self.num_seeds,
            "profile": self.profile,
            "config": self.config.as_dict(),
            "slo": asdict(self.slo),
            "sources": dict(self.sources),
            "policy_sources": {name: dict(hashes) for name, hashes in self.policy_sources.items()},
        }

    def offline_cells(self) -> list[Cell]:
        """Return one cell a policy, in order, that measures where it saturates (seed 0)."""
        return [offline_cell(self._cell(policy, rate=math.inf, seed=0)) for policy in self.policies]

    def cells(self, rates: Sequence[float]) -> list[Cell]:
        """Return every cell of the grid: by rate, then seed, then policy, so that neighbours share a workload."""
        return [
            self._cell(policy, rate=rate, seed=seed)
            for rate in rates
            for seed in range(self.num_seeds)
            for policy in self.policies
        ]

    def _cell(self, policy: str, rate: float, seed: int) -> Cell:
        workload = replace(self.workload, rate=rate, seed=seed)
        return Cell(workload, policy, self.profile, self.config, self.slo)


class StudyResult(NamedTuple):
    """What a study found."""

    cells: list[tuple[Cell, CellResult]]
    """The grid's cells, in the order of Study.cells."""
    grid: SweepGrid
    """The same as arrays."""


def conduct(study: Study, store: SweepStore, executor: Executor, progress: Progress) -> StudyResult:
    """Run what of a study is not on disk yet and return all of it.

    Raises:
        SimmoeError: of the class of the first failure, naming the cell; the other cells are run and kept.
    """
    offline = study.offline_cells()
    cells_a_rate = len(study.policies) * study.num_seeds
    progress.start("finding saturation", len(offline) + len(study.rates or LOADS) * cells_a_rate)
    found = gather(offline, store, executor, progress)
    saturation = {c.policy: saturation_rate(r.metrics, c.policy) for c, r in zip(offline, found, strict=True)}
    rates = rates_around(saturation[study.baseline]) if study.rates is None else study.rates
    progress.start("simulating", len(offline) + len(rates) * cells_a_rate)
    cells = study.cells(rates)
    results = list(zip(cells, gather(cells, store, executor, progress), strict=True))
    placed = [(c.workload.rate or 0.0, c.policy, c.workload.seed, result.metrics) for c, result in results]
    return StudyResult(results, SweepGrid.build(placed, study.policies, study.baseline, saturation))
