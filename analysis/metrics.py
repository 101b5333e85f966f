"""One run in numbers: latencies, throughput, goodput, executed budget, utilisation and counts, from a record's columns.

Needs numpy alone. Latencies and throughput are of finished requests only, so they are always read beside the counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from simmoe.errors import UsageError
from simmoe.records import STATUSES, Columns, RunRecord

FloatColumn = npt.NDArray[np.float64]
BoolColumn = npt.NDArray[np.bool_]

#: Percentiles of every latency. Method: linear interpolation between order statistics (Hyndman and Fan's type 7,
#: numpy's default), the one vLLM's own benchmark reports.
PERCENTILES = (50, 75, 90, 99)

LATENCIES = {
    "ttft": "time to first token",
    "tpot": "time per output token after the first",
    "e2e": "end-to-end latency",
    "queueing": "time at the rank before the first step that computes any of the request",
}


def _definitions() -> dict[str, str]:
    out = {}
    for name, meaning in LATENCIES.items():
        out[f"{name}_mean_s"] = f"mean {meaning}, finished requests, seconds"
        for p in PERCENTILES:
            out[f"{name}_p{p}_s"] = f"{p}th percentile of {meaning} (linear interpolation), seconds"
    return out | {
        "request_throughput_per_s": "finished requests per second of makespan",
        "steady_throughput_per_s": "requests finished per second between the first and third quartile of finishes",
        "output_tokens_per_s": "output tokens of finished requests per second of makespan",
        "goodput_per_s": "finished requests that meet every SLO given, per second of makespan",
        "slo_attainment": "finished requests that meet every SLO given, as a share of the injected",
        "executed_k": "routed_slots / scheduled tokens: token-weighted mean executed budget",
        "requested_k": "token-weighted mean k_qos of the scheduled tokens",
        "over_serving": "executed_k / requested_k",
        "utilisation": "time ranks spend in steps, as a share of ranks times makespan",
        "makespan_s": "from the first arrival to the last finish; to the run's end if a request is left unfinished",
        "num_preemptions": "evictions for want of KV blocks, over all ranks",
        "num_recomputed_tokens": "tokens computed again after a preemption",
        "num_cached_tokens": "prompt tokens found in the prefix cache",
        "injected": "requests injected: the sum of the six counts that follow",
        **{status: f"requests that ended {status}" for status in STATUSES},
    }


#: Every metric of a run, in the order tables and files list them, and what it means.
METRICS: dict[str, str] = _definitions()


@dataclass(frozen=True, slots=True)
class Slo:
    """Service-level objectives, each on one request's own latency."""

    ttft_s: float | None = None
    """Longest TTFT that meets the objective; None: no objective."""
    tpot_s: float | None = None
    """Longest TPOT that meets the objective; a request of one output token has none and meets it."""

    def __post_init__(self) -> None:
        for name, value in (("--slo-ttft", self.ttft_s), ("--slo-tpot", self.tpot_s)):
            if value is not None and not (np.isfinite(value) and value > 0):
                raise UsageError(f"{name} is {value}; it must be a number of seconds above 0")

    def __bool__(self) -> bool:
        return self.ttft_s is not None or self.tpot_s is not None


def request_latencies(requests: Columns) -> dict[str, FloatColumn]:
    """Return each request's latencies, [num_requests] seconds, by the names of :data:`LATENCIES`.

    NaN where undefined: for requests that did not finish, and TPOT for a single output token.
    """
    finished = requests["status"] == "finished"
    first, last = requests["first_token_s"], requests["finished_s"]
    gaps = requests["output_tokens"] - 1
    latencies = {
        "ttft": first - requests["arrival_s"],
        "tpot": (last - first) / np.where(gaps > 0, gaps, np.nan),
        "e2e": last - requests["arrival_s"],
        "queueing": requests["scheduled_s"] - requests["dispatched_s"],
    }
    return {name: np.where(finished, values, np.nan) for name, values in latencies.items()}


def meets_slo(latencies: Mapping[str, FloatColumn], slo: Slo) -> BoolColumn:
    """Return which requests, [num_requests], finished within every objective given (a latency equal to it is within).

    Args:
        latencies: as :func:`request_latencies` returns.
        slo: the objectives.
    """
    meets = ~np.isnan(latencies["ttft"])
    if slo.ttft_s is not None:
        meets &= latencies["ttft"] <= slo.ttft_s
    if slo.tpot_s is not None:
        meets &= np.isnan(latencies["tpot"]) | (latencies["tpot"] <= slo.tpot_s)
    return meets


def summarise(
    requests: Columns, ranks: Sequence[Mapping[str, float]], end_s: float, slo: Slo | None = None
) -> dict[str, float]:
    """Return every metric of :data:`METRICS`; NaN where a run has none (nothing finished, no step).

    Args:
        requests: columns as records.REQUEST_COLUMNS.
        ranks: totals of each rank's steps: busy_s, num_prefill_tokens, num_decode_tokens, routed_slots, qos_slots,
            num_preemptions, num_recomputed_tokens, num_cached_tokens.
        end_s: when the run's last event happened.
        slo: objectives of goodput; none: every finished request counts.
    """
    latencies = request_latencies(requests)
    counts = RunRecord(requests, manifest={}).counts()
    makespan_s = _makespan_s(requests, counts, end_s)
    good = int(meets_slo(latencies, slo or Slo()).sum())
    finished = requests["status"] == "finished"

    summary: dict[str, float] = {}
    for name, values in latencies.items():
        summary |= _spread(name, values)
    total = {name: sum(rank[name] for rank in ranks) for name in _SUMMED}
    tokens = total["num_prefill_tokens"] + total["num_decode_tokens"]
    summary |= {
        "request_throughput_per_s": _ratio(counts["finished"], makespan_s),
        "steady_throughput_per_s": _steady_throughput_per_s(requests["finished_s"][finished]),
        "output_tokens_per_s": _ratio(int(requests["output_tokens"][finished].sum()), makespan_s),
        "goodput_per_s": _ratio(good, makespan_s),
        "slo_attainment": _ratio(good, counts["injected"]),
        "executed_k": _ratio(total["routed_slots"], tokens),
        "requested_k": _ratio(total["qos_slots"], tokens),
        "over_serving": _ratio(total["routed_slots"], total["qos_slots"]),
        "utilisation": _ratio(total["busy_s"], len(ranks) * makespan_s),
        "makespan_s": makespan_s,
        "num_preemptions": total["num_preemptions"],
        "num_recomputed_tokens": total["num_recomputed_tokens"],
        "num_cached_tokens": total["num_cached_tokens"],
        **counts,
    }
    assert summary.keys() == METRICS.keys()
    return summary


_SUMMED = (
    "busy_s",
    "num_prefill_tokens",
    "num_decode_tokens",
    "routed_slots",
    "qos_slots",
    "num_preemptions",
    "num_recomputed_tokens",
    "num_cached_tokens",
)


def _makespan_s(requests: Columns, counts: Mapping[str, int], end_s: float) -> float:
    left = counts["running"] + counts["queued"] + counts["aborted"] + counts["failed"]
    if left or not counts["finished"]:
        return float(end_s)
    return float(np.nanmax(requests["finished_s"]))


def _steady_throughput_per_s(finished_s: FloatColumn) -> float:
    """Return the rate of the middle half of the finishes, filling and draining left out."""
    times = np.sort(finished_s)
    first, last = len(times) // 4, 3 * len(times) // 4
    return _ratio(last - first, float(times[last] - times[first])) if last > first else float("nan")


def _spread(name: str, values: FloatColumn) -> dict[str, float]:
    known = values[~np.isnan(values)]
    if not len(known):
        return {f"{name}_mean_s": np.nan, **{f"{name}_p{p}_s": np.nan for p in PERCENTILES}}
    percentiles = np.percentile(known, PERCENTILES)
    out = {f"{name}_mean_s": float(known.mean())}
    return out | {f"{name}_p{p}_s": float(value) for p, value in zip(PERCENTILES, percentiles, strict=True)}


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else float("nan")
