"""Two records of one workload, side by side: how far the first's metrics are from the second's.

By custom the first is simulated and the second live; any two records of the same requests will do.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from simmoe.analysis.metrics import PERCENTILES, FloatColumn, request_latencies
from simmoe.errors import RecordError
from simmoe.records import RunRecord

#: Latencies compared, as :data:`simmoe.analysis.metrics.LATENCIES` names them.
COMPARED = ("ttft", "tpot", "e2e")

STATISTICS = ("mean", *(f"p{p}" for p in PERCENTILES))


class Difference(NamedTuple):
    """One statistic of both records."""

    metric: str
    """``ttft``, ``tpot``, ``e2e`` (seconds), ``request_throughput`` or ``output_throughput`` (per second)."""
    statistic: str
    """One of STATISTICS; ``rate`` for a throughput."""
    first: float
    second: float

    @property
    def error(self) -> float:
        """How far the first is from the second, relative to the second; NaN where that is 0 or either is missing."""
        return (self.first - self.second) / self.second if self.second else float("nan")


def ttft_refusal(record: RunRecord) -> str:
    """Return why a record's TTFT is not to be reported, empty if it is: a live run's requests were sent too late."""
    lag = record.manifest.get("send_lag") or {}
    return "" if lag.get("ttft_reported", True) else str(lag.get("refusal") or "its requests were sent too late")


def differences(first: RunRecord, second: RunRecord) -> list[Difference]:
    """Return every compared statistic, over each record's finished requests; NaN for a TTFT not to be reported."""
    ours, theirs = compared_latencies(first), compared_latencies(second)
    rows = []
    for metric in COMPARED:
        pairs = zip(STATISTICS, _statistics(ours[metric]), _statistics(theirs[metric]), strict=True)
        rows += [Difference(metric, *pair) for pair in pairs]
    for metric, one, other in zip(THROUGHPUTS, _throughputs(first), _throughputs(second), strict=True):
        rows.append(Difference(metric, "rate", one, other))
    return rows


THROUGHPUTS = ("request_throughput", "output_throughput")


def compared_latencies(record: RunRecord) -> dict[str, FloatColumn]:
    """Return each request's latencies, [num_requests] seconds; NaN for a TTFT not to be reported."""
    latencies = request_latencies(record.requests)
    if ttft_refusal(record):
        latencies["ttft"] = np.full_like(latencies["ttft"], np.nan)
    return latencies


def _statistics(values: FloatColumn) -> list[float]:
    known = values[~np.isnan(values)]
    if not len(known):
        return [float("nan")] * len(STATISTICS)
    return [float(known.mean()), *(float(value) for value in np.percentile(known, PERCENTILES))]


def _throughputs(record: RunRecord) -> Iterator[float]:
    """Yield finished requests, then their output tokens, per second from the first arrival to the last finish."""
    finished = record.requests["status"] == "finished"
    span_s = float(record.requests["finished_s"][finished].max()) if finished.any() else 0.0
    tokens = int(record.requests["output_tokens"][finished].sum())
    for amount in (int(finished.sum()), tokens):
        yield amount / span_s if span_s > 0 else float("nan")


@dataclass(frozen=True, slots=True)
class Pairing:
    """The requests that finished in both records, as rows of each: row ``first[i]`` is the request ``second[i]``."""

    first: np.ndarray[tuple[int], np.dtype[np.int64]]
    second: np.ndarray[tuple[int], np.dtype[np.int64]]
    num_other: int
    """Requests that are in one record alone or did not finish in both."""

    @classmethod
    def of(cls, first: RunRecord, second: RunRecord) -> Pairing:
        """Pair by request id.

        Raises:
            RecordError: no request finished in both, or a paired one differs in its tokens or budget.
        """
        ids = [record.requests["request_id"] for record in (first, second)]
        rows = {name: row for row, name in enumerate(ids[1]) if second.requests["status"][row] == "finished"}
        pairs = [
            (row, rows[name])
            for row, name in enumerate(ids[0])
            if name in rows and first.requests["status"][row] == "finished"
        ]
        if not pairs:
            raise RecordError("the two records share no finished request; compare runs of one workload")
        ours, theirs = (np.array(column, dtype=np.int64) for column in zip(*pairs, strict=True))
        for column in ("prompt_tokens", "output_tokens", "k_qos"):
            unlike = first.requests[column][ours] != second.requests[column][theirs]
            if unlike.any():
                row = int(np.argmax(unlike))
                values = first.requests[column][ours[row]], second.requests[column][theirs[row]]
                raise RecordError(
                    f"request '{ids[0][ours[row]]}' has {column} {values[0]} in the first record and {values[1]} in "
                    f"the second ({int(unlike.sum())} such requests); compare runs of one workload"
                )
        return cls(ours, theirs, len(set(ids[0]) | set(ids[1])) - len(pairs))
