"""One run, live and simulated, and how far apart the two may lie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from plan import Cell

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
    causes: Causes
    step_ratio: float
    """How long the live run's steps take over like ones of the simulated run."""
    magnification: dict[str, float]
    """Growth of mean TTFT and TPOT over that of every step."""
    spread: dict[tuple[str, str], tuple[float, float]]
    """Where simulations lie whose arrivals differ by a millisecond, 5th to 95th percentile, by (metric, statistic)."""
    apart: dict[tuple[str, str], float] = field(default_factory=dict)
    """What two live runs of the same requests lie apart, relative, by (metric, statistic); empty: not known."""

    @property
    def offline(self) -> bool:
        """Whether all requests arrived at once."""
        return math.isinf(self.cell.rate)

    def error(self, metric: str, statistic: str) -> float:
        """Return simulated less live, relative to live."""
        return next(d.error for d in differences(self.simulated, self.live) if d[:2] == (metric, statistic))

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
