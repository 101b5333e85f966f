"""What has to hold at a rate: latency objectives, met at a percentile or by a share of the requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from simmoe.analysis.metrics import PERCENTILES, Slo
from simmoe.errors import UsageError

#: How a latency over requests is summed up in one number.
STATISTICS = ("mean", *(f"p{p}" for p in PERCENTILES))
DEFAULT_STATISTIC = "p99"


@dataclass(frozen=True, slots=True)
class Objective:
    """Latency objectives and when they count as met.

    Raises:
        UsageError: no objective is given, or the share is out of range.
    """

    slo: Slo
    """Longest TTFT and TPOT allowed; at least one."""
    statistic: str
    """Which statistic over finished requests must keep within each; unused with a share."""
    attainment: float | None
    """Least share of all requests that must keep within every objective themselves."""

    def __post_init__(self) -> None:
        if not self.slo:
            raise UsageError("there is nothing to hold; give --slo-ttft, --slo-tpot or both")
        if self.attainment is not None and not 0 < self.attainment <= 1:
            raise UsageError(f"--attainment is {self.attainment:g}; it must be a share above 0, at most 1")

    def holds(self, metrics: Mapping[str, float]) -> bool:
        """Return whether one run's metrics meet it; a statistic that does not exist does not."""
        if self.attainment is not None:
            return metrics["slo_attainment"] >= self.attainment
        limits = (("ttft", self.slo.ttft_s), ("tpot", self.slo.tpot_s))
        return all(metrics[f"{name}_{self.statistic}_s"] <= limit for name, limit in limits if limit is not None)

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data."""
        slo = {"ttft_s": self.slo.ttft_s, "tpot_s": self.slo.tpot_s}
        how = {"statistic": self.statistic} if self.attainment is None else {"attainment": self.attainment}
        return {"slo": slo, **how}

    def __str__(self) -> str:
        limits = (("TTFT", self.slo.ttft_s), ("TPOT", self.slo.tpot_s))
        terms = [f"{name} <= {limit:g} s" for name, limit in limits if limit is not None]
        if self.attainment is not None:
            return f"{100 * self.attainment:.4g}% of requests within {' and '.join(terms)}"
        return " and ".join(f"{self.statistic} {term}" for term in terms)
