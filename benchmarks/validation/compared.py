"""One run, live and simulated, and how far apart the two may lie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from plan import Cell
from sensitivity import Drawn

from simmoe.analysis.compare import differences
from simmoe.analysis.compare_causes import Causes
from simmoe.records import RunRecord

#: Largest error allowed, by load: up to 70% of saturation, and from there to 90%.
MEAN_LIMITS, P99_LIMITS = (0.03, 0.08), (0.06, 0.15)
THROUGHPUT_LIMIT = 0.02
LIGHT = 0.7


@dataclass(frozen=True)
class Compared:
    """One run, live and simulated."""

    cell: Cell
    live: RunRecord
    simulated: RunRecord
    hosted: RunRecord
    """Simulated with the host of the machine at hand instead of the profile's, as a run told that is not compared."""
    own_host: RunRecord
    """Simulated with the host as this very run had it on average: what is left is no matter of how fast it was."""
    as_believed: tuple[RunRecord, RunRecord]
    """On either host, with the step times that the live policies had been told in place of the profile's."""
    causes: Causes
    step_ratio: float
    """How long the live run's steps take over like ones of the simulated run."""
    magnification: dict[str, float]
    """Growth of mean TTFT and TPOT over that of every step."""
    spread: Drawn
    """Where simulations on that host lie that differ in what no two live runs have in common."""
    own_moments: Drawn
    """Likewise with the host's faster and slower moments as this very run had them."""
    apart: dict[tuple[str, str], float] = field(default_factory=dict)
    """What two live runs of the same requests lie apart, relative, by (metric, statistic); empty: not known."""

    @property
    def offline(self) -> bool:
        """Whether all requests arrived at once."""
        return math.isinf(self.cell.rate)

    def beyond(self, metric: str, statistic: str) -> float:
        """Return how far the live run lies above what simulations lie between (below 0: below), relative to live."""
        low, high = self.spread[metric, statistic]
        live = next(d.second for d in differences(self.simulated, self.live) if d[:2] == (metric, statistic))
        return (max(0.0, live - high) - max(0.0, low - live)) / live

    def limit(self, metric: str, statistic: str) -> float:
        """Return the largest error allowed: with vLLM's default graphs, where the host's time wanders, at least what
        two live runs lie apart."""
        if self.offline:
            limit = THROUGHPUT_LIMIT
        else:
            limit = (P99_LIMITS if statistic == "p99" else MEAN_LIMITS)[round(self.cell.load, 2) > LIGHT]
        if self.live.manifest["experiment"]["graphs"] == "default":
            limit = max(limit, self.apart.get((metric, statistic), 0.0))
        return limit


def disagreements(runs: Sequence[Compared]) -> list[Compared]:
    """Return the runs with what live runs of the same requests lie apart; another system's, where theirs is unknown."""
    apart: dict[tuple[str, float, float], dict[tuple[str, str], float]] = {}
    for run in runs:
        for other in runs:
            if other.cell.name == f"{run.cell.name}-again":
                found = {d[:2]: abs(d.error) for d in differences(other.live, run.live)}
                apart[run.cell.system, run.cell.rate, run.cell.num_ranks] = found
    by_load = {key[1:]: found for key, found in apart.items()}
    return [
        replace(run, apart=apart.get((run.cell.system, *key)) or by_load.get(key, {}))
        for run in runs
        for key in [(run.cell.rate, run.cell.num_ranks)]
    ]
