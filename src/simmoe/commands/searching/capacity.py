"""Each policy's highest rate that holds, seed by seed, all of them searched at once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from simmoe.commands.searching.bisection import Bisection
from simmoe.commands.searching.objective import Objective
from simmoe.commands.sweeping.cells import Cell, Metrics, extrapolated_in
from simmoe.commands.sweeping.executor import Executor
from simmoe.commands.sweeping.gathering import gather
from simmoe.commands.sweeping.progress import Progress
from simmoe.commands.sweeping.saturation import offline_cell, saturation_rate
from simmoe.commands.sweeping.store import SweepStore
from simmoe.simulator.config import SimConfig
from simmoe.traces.spec import WorkloadSpec


@dataclass(slots=True)
class CapacitySearch:
    """Searches by simulation. Equal seeds are equal requests for every policy, at every rate: common random numbers."""

    workload: WorkloadSpec
    """Requests of every cell but for their rate and seed."""
    profile: str
    """As load_profile takes it."""
    config: SimConfig
    """The deployment."""
    objective: Objective
    tolerance: float
    """Width of the final bracket, as a share of the rate."""
    store: SweepStore
    executor: Executor
    progress: Progress
    num_cells: int = 0
    """Cells asked for so far."""
    extrapolated_in: Counter[str] = field(default_factory=Counter)
    """What lay outside the profile's grid -> in how many of them it did."""

    def saturation(self, policies: Sequence[str]) -> dict[str, float]:
        """Return each policy's saturation rate, measured offline at seed 0.

        Raises:
            SimmoeError: a simulation failed, or no request got a first token.
        """
        cells = [offline_cell(self._cell(policy, math.inf, 0)) for policy in policies]
        found = self._gather("finding saturation", cells)
        return {p: saturation_rate(metrics, p) for p, metrics in zip(policies, found, strict=True)}

    def run(self, guesses: Mapping[str, float], seeds: Sequence[int], phase: str) -> dict[str, list[Bisection]]:
        """Return, for each policy of ``guesses`` (policy -> requests/s), its search at each seed, ended.

        Raises:
            SimmoeError: a simulation failed.
        """
        searches = {policy: [Bisection(guess, self.tolerance) for _ in seeds] for policy, guess in guesses.items()}
        placed = [(policy, seed, s) for policy, found in searches.items() for seed, s in zip(seeds, found, strict=True)]
        while asked := [(policy, seed, s, s.rate) for policy, seed, s in placed if s.rate is not None]:
            cells = [self._cell(policy, rate, seed) for policy, seed, _, rate in asked]
            for (_, _, search, _), metrics in zip(asked, self._gather(phase, cells), strict=True):
                search.tell(self.objective.holds(metrics))
        return searches

    def _gather(self, phase: str, cells: Sequence[Cell]) -> list[Metrics]:
        self.num_cells += len(cells)
        self.progress.start(phase, self.num_cells)
        found = gather(cells, self.store, self.executor, self.progress)
        self.extrapolated_in.update(extrapolated_in(found))
        return [result.metrics for result in found]

    def _cell(self, policy: str, rate: float, seed: int) -> Cell:
        workload = replace(self.workload, rate=rate, seed=seed)
        return Cell(workload, policy, self.profile, self.config, self.objective.slo)
