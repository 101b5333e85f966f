"""One run, live and simulated, and how far apart the two may lie."""

from __future__ import annotations

import math
from dataclasses import dataclass

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
    spread: dict[tuple[str, str], float]
    """Of simulations whose arrivals differ by a millisecond, by (metric, statistic)."""

    @property
    def offline(self) -> bool:
        """Whether all requests arrived at once."""
        return math.isinf(self.cell.rate)

    def error(self, metric: str, statistic: str) -> float:
        """Return simulated less live, relative to live."""
        return next(d.error for d in differences(self.simulated, self.live) if d[:2] == (metric, statistic))

    def limit(self, statistic: str) -> float:
        """Return the largest error allowed."""
        if self.offline:
            return THROUGHPUT_LIMIT
        return (P99_LIMITS if statistic == "p99" else MEAN_LIMITS)[round(self.cell.load, 2) > LIGHT]
