"""A run's metrics as text for a terminal."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from simmoe.analysis.metrics import LATENCIES, PERCENTILES, Slo
from simmoe.records import STATUSES
from simmoe.simulator.result import RankTotals

_SHOWN = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "end to end", "queueing": "queueing"}


def format_summary(title: str, summary: Mapping[str, float], ranks: Sequence[RankTotals], slo: Slo) -> str:
    """Return the lines ``simmoe run`` prints: latencies, rates, budgets, and always the counts.

    Args:
        title: what ran.
        summary: as :func:`simmoe.analysis.metrics.summarise` returns.
        ranks: totals of each rank.
        slo: objectives of goodput.
    """
    statistics = ("mean", *(f"p{p}" for p in PERCENTILES))
    lines = [title, "", f"{'ms':<12}" + "".join(f"{name:>12}" for name in statistics)]
    for name in LATENCIES:
        values = (summary[f"{name}_{statistic}_s"] for statistic in statistics)
        lines.append(f"{_SHOWN[name]:<12}" + "".join(f"{_number(1e3 * value):>12}" for value in values))
    requests, tokens = summary["request_throughput_per_s"], summary["output_tokens_per_s"]
    lines += ["", _line("throughput", f"{_number(requests)} requests/s, {_number(tokens)} output tokens/s")]
    if slo:
        goodput, share = summary["goodput_per_s"], summary["slo_attainment"]
        lines.append(_line("goodput", f"{_number(goodput)} requests/s, {_percent(share)} of requests ({_terms(slo)})"))
    lines.append(
        _line(
            "budget k",
            f"{_number(summary['executed_k'])} executed, {_number(summary['requested_k'])} requested: "
            f"over-serving {_number(summary['over_serving'])}",
        )
    )
    span_s, steps = summary["makespan_s"], sum(rank.num_steps for rank in ranks)
    busy = _busy([rank.busy_s for rank in ranks], span_s)
    lines.append(_line("busy", f"{busy} of {_number(span_s)} s, {steps:,} steps"))
    preempted, recomputed = summary["num_preemptions"], summary["num_recomputed_tokens"]
    cached = f"{summary['num_cached_tokens']:,.0f} from the prefix cache"
    lines.append(_line("KV", f"{preempted:,.0f} preemptions, {recomputed:,.0f} tokens recomputed, {cached}"))
    counts = " + ".join(f"{summary[status]:,.0f} {status}" for status in STATUSES)
    lines.append(_line("requests", f"{summary['injected']:,.0f} injected = {counts}"))
    return "\n".join(lines)


def _busy(busy_s: Sequence[float], span_s: float) -> str:
    """Name each rank's share of the time, or, of many ranks, the least, the mean and the largest."""
    if not span_s:
        return "-"
    shares = [seconds / span_s for seconds in busy_s]
    if len(shares) <= 8:
        return ", ".join(map(_percent, shares))
    mean = sum(shares) / len(shares)
    return f"{_percent(min(shares))} to {_percent(max(shares))}, mean {_percent(mean)}, on {len(shares)} ranks,"


def _line(name: str, text: str) -> str:
    return f"{name:<12}{text}"


def _number(value: float) -> str:
    """Show a value to four significant digits, whole from a thousand up."""
    if math.isnan(value):
        return "-"
    if value >= 1000 or value == 0:
        return f"{value:z,.0f}"
    return f"{value:.{max(0, 3 - math.floor(math.log10(abs(value))))}f}"


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{100 * share:.1f} %"


def _terms(slo: Slo) -> str:
    terms = (("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s))
    return ", ".join(f"{name} <= {value:g} s" for name, value in terms if value is not None)
