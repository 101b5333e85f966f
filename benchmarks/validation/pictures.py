"""Pictures of simulated against live."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from compared import Compared
from plan import POLICIES

from simmoe.analysis.compare import ttft_refusal
from simmoe.analysis.metrics import request_latencies
from simmoe.analysis.picture import picture
from simmoe.records import RunRecord

_COLOURS = dict(zip(POLICIES, ("#7a7a7a", "#c8553d", "#2b6ca3"), strict=True))
_PANELS = (("ttft", "mean", "mean TTFT, ms"), ("ttft", "p99", "p99 TTFT, ms"), ("tpot", "mean", "mean TPOT, ms"))


def draw_loads(path: Path, runs: Sequence[Compared]) -> None:
    """Draw latencies over offered load, a line a system simulated, its live runs as dots; no TTFT that is not to be
    reported."""
    with picture(path, (11.0, 3.6)) as figure:
        for axes, (metric, statistic, title) in zip(figure.subplots(1, 3), _PANELS, strict=True):
            for system, colour in _COLOURS.items():
                own = sorted((run for run in runs if run.cell.system == system), key=lambda run: run.cell.rate)
                rates = [run.cell.rate for run in own]
                simulated, live = (
                    [1e3 * _statistic(record, metric, statistic) for record in records]
                    for records in ((run.simulated for run in own), (run.live for run in own))
                )
                axes.plot(rates, simulated, color=colour, label=f"{system}, simulated")
                axes.plot(rates, live, "o", color=colour, markerfacecolor="white", label=f"{system}, live")
            axes.set_title(title)
            axes.set_xlabel("offered load, requests/s")
            axes.set_ylim(bottom=0)
        figure.axes[0].legend(fontsize=8)


def draw_distributions(path: Path, runs: Sequence[Compared]) -> None:
    """Draw, at each system's highest load, the distributions of TTFT and TPOT and the executed budget over time."""
    with picture(path, (11.0, 8.0)) as figure:
        grid: Any = figure.subplots(3, 3)
        for row, (system, colour) in zip(grid, _COLOURS.items(), strict=True):
            run = max((run for run in runs if run.cell.system == system), key=lambda run: run.cell.rate, default=None)
            if run is None:
                continue
            for axes, metric in zip(row, ("ttft", "tpot"), strict=False):
                for record, style in ((run.simulated, "-"), (run.live, "--")):
                    if metric == "ttft" and ttft_refusal(record):
                        continue
                    values = np.sort(1e3 * request_latencies(record.requests)[metric])
                    values = values[~np.isnan(values)]
                    label = "simulated" if style == "-" else "live"
                    axes.plot(values, np.arange(1, len(values) + 1) / len(values), style, color=colour, label=label)
                axes.set_title(f"{system} at {run.cell.rate:g}/s: {metric.upper()}, ms")
            row[0].legend(fontsize=8)
            for record, style in ((run.simulated, "-"), (run.live, "--")):
                seconds, k = _executed(record)
                row[2].plot(seconds, k, style, color=colour)
            row[2].set_title("executed k, by second")


def _statistic(record: RunRecord, metric: str, statistic: str) -> float:
    if metric == "ttft" and ttft_refusal(record):
        return float("nan")
    values = request_latencies(record.requests)[metric]
    return float(np.nanmean(values) if statistic == "mean" else np.nanpercentile(values, float(statistic[1:])))


def _executed(record: RunRecord) -> tuple[Any, Any]:
    """Return seconds and the token-weighted executed budget in each."""
    steps = record.steps
    assert steps is not None
    second = steps["start_s"].astype(np.int64)
    tokens = np.bincount(second, weights=steps["num_prefill_tokens"] + steps["num_decode_tokens"])
    slots = np.bincount(second, weights=steps["routed_slots"])
    some = tokens > 0
    return np.flatnonzero(some), slots[some] / tokens[some]
