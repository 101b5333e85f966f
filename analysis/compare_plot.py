"""Two records of one workload as one picture: distributions, TTFT over load, budgets and queues over time, causes.

Drawn like the sweep's picture: Agg, matplotlib's defaults, equal records give equal bytes.
"""

from __future__ import annotations

import math
import os
from typing import TYPE_CHECKING

import numpy as np

from simmoe.analysis.compare import compared_latencies, ttft_refusal
from simmoe.analysis.compare_causes import CAUSES, Causes
from simmoe.analysis.metrics import FloatColumn
from simmoe.analysis.picture import picture
from simmoe.records import Columns, RunRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_STYLES = (("#0072B2", "-"), ("#D55E00", (0, (4, 1.5))))
_NUM_BINS = 120
"""Bins of the traces over time."""
_NUM_LOADS = 10
"""Groups, of equal numbers of requests, of TTFT over load."""


def plot_comparison(
    path: str | os.PathLike[str], records: tuple[RunRecord, RunRecord], names: tuple[str, str], causes: Causes
) -> None:
    """Draw a comparison as PNG.

    Args:
        path: the file to write.
        records: the two.
        names: what to call them.
        causes: of their difference.
    Raises:
        OutputError: the file cannot be written.
    """
    with picture(path, (16, 7.4)) as figure:
        _draw(figure, records, names, causes)


def _draw(figure: Figure, records: tuple[RunRecord, RunRecord], names: tuple[str, str], causes: Causes) -> None:
    axes = figure.subplots(2, 4)
    latencies = [compared_latencies(record) for record in records]
    for ax, metric, title in zip(axes[0], ("ttft", "tpot", "e2e"), ("TTFT", "TPOT", "End to end"), strict=False):
        _draw_distributions(ax, [values[metric] for values in latencies], title)
    _draw_over_load(axes[0, 3], records, [values["ttft"] for values in latencies])
    _draw_steps(axes[1, 0], records, "k_exec", "Executed budget k", "experts a token, mean over tokens")
    _draw_queue(axes[1, 1], records)
    _draw_steps(axes[1, 2], records, "duration_s", "Time of a step", "ms, mean over steps", scale=1e3)
    refused = [bool(ttft_refusal(record)) for record in records]
    for row, (is_refused, (colour, _)) in enumerate(zip(refused, _STYLES, strict=True)):
        if is_refused:
            for ax in (axes[0, 0], axes[0, 3]):
                at = (0.97, 0.05 + 0.08 * row)
                ax.annotate("not reported: sent too late", at, xycoords="axes fraction", ha="right", color=colour)
    if any(refused):
        _draw_causes(axes[1, 3], causes.e2e_s, "Mean end to end")
    else:
        _draw_causes(axes[1, 3], causes.ttft_s, "Mean TTFT")
    handles = [axes[0, 0].plot([], [], color=colour, linestyle=dash)[0] for colour, dash in _STYLES]
    figure.legend(handles, names, loc="outside upper left", ncols=2, fontsize=10.5)


def _draw_distributions(ax: Axes, values: list[FloatColumn], title: str) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    for latency, (colour, dash) in zip(values, _STYLES, strict=True):
        known = np.sort(latency[~np.isnan(latency)]) * 1e3
        if len(known):
            ax.step(known, np.arange(1, len(known) + 1) / len(known), where="post", color=colour, linestyle=dash)
    ax.set_xscale("log")
    low, high = ax.get_xlim()
    ax.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5) if high < 100 * low else (1,)))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:z,g}"))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_ylim(0, 1.01)
    ax.set_title(f"{title}, cumulative")
    ax.set_xlabel("ms")
    ax.set_ylabel("share of requests")


def _draw_over_load(ax: Axes, records: tuple[RunRecord, RunRecord], ttft: list[FloatColumn]) -> None:
    for record, values, (colour, dash) in zip(records, ttft, _STYLES, strict=True):
        known = ~np.isnan(values)
        load = _in_system(record.requests)[known]
        groups = np.array_split(np.argsort(load, kind="stable"), min(_NUM_LOADS, max(1, int(known.sum()))))
        if known.any():
            x = [load[group].mean() for group in groups]
            y = [values[known][group].mean() * 1e3 for group in groups]
            ax.plot(x, y, color=colour, linestyle=dash, marker="o", markersize=3.5)
    ax.set_title("TTFT over load")
    ax.set_xlabel("requests in the system at arrival")
    ax.set_ylabel("ms, mean")
    ax.set_ylim(bottom=0)


def _in_system(requests: Columns) -> FloatColumn:
    """Return how many requests each one found in the system when it arrived."""
    arrival_s = requests["arrival_s"]
    left_s = np.sort(np.where(np.isnan(requests["finished_s"]), np.inf, requests["finished_s"]))
    arrived = np.searchsorted(np.sort(arrival_s), arrival_s, side="left")
    return (arrived - np.searchsorted(left_s, arrival_s, side="right")).astype(np.float64)


def _draw_steps(
    ax: Axes, records: tuple[RunRecord, RunRecord], column: str, title: str, unit: str, scale: float = 1.0
) -> None:
    for record, (colour, dash) in zip(records, _STYLES, strict=True):
        if record.steps is None or not len(record.steps["start_s"]):
            continue
        steps = record.steps
        tokens = (steps["num_prefill_tokens"] + steps["num_decode_tokens"]).astype(np.float64)
        weights = tokens if column == "k_exec" else np.ones(len(tokens))
        edges = np.linspace(0.0, float((steps["start_s"] + steps["duration_s"]).max()), _NUM_BINS + 1)
        total = np.histogram(steps["start_s"], edges, weights=weights)[0]
        summed = np.histogram(steps["start_s"], edges, weights=weights * steps[column])[0]
        means = np.divide(summed, total, out=np.full(_NUM_BINS, np.nan), where=total > 0) * scale
        ax.plot((edges[:-1] + edges[1:]) / 2, means, color=colour, linestyle=dash)
    if not ax.lines:
        ax.text(0.5, 0.5, "no steps recorded", ha="center", va="center", transform=ax.transAxes, color="#666666")
    ax.set_title(title)
    ax.set_xlabel("s")
    ax.set_ylabel(unit)
    ax.set_ylim(bottom=0)


def _draw_queue(ax: Axes, records: tuple[RunRecord, RunRecord]) -> None:
    for record, (colour, dash) in zip(records, _STYLES, strict=True):
        begun = record.requests["dispatched_s"]
        begun = begun[~np.isnan(begun)]
        if not len(begun):
            continue
        ended = record.requests["scheduled_s"]
        ended = ended[~np.isnan(ended)]
        edges = np.linspace(0.0, float(max(begun.max(), ended.max(initial=0.0))), _NUM_BINS + 1)
        # time spent waiting within each bin, from the running integral of the queue's length, over the bin's width
        waited = np.array([np.maximum(t - begun, 0).sum() - np.maximum(t - ended, 0).sum() for t in edges])
        width = max(float(edges[1]), 1e-12)
        ax.plot((edges[:-1] + edges[1:]) / 2, np.diff(waited) / width, color=colour, linestyle=dash)
    ax.set_title("Waiting for a first step, all ranks")
    ax.set_xlabel("s")
    ax.set_ylabel("requests, mean")
    ax.set_ylim(bottom=0)


def _draw_causes(ax: Axes, parts_s: dict[str, float], title: str) -> None:
    values = [parts_s[cause] * 1e3 for cause in CAUSES]
    ax.bar(CAUSES, values, color="#666666", width=0.6)
    for position, value in enumerate(np.nan_to_num(values)):
        text, above = (f"{value:+z.2f}", value > 0) if abs(value) >= 0.005 else ("0", True)
        if math.isnan(values[position]):
            text = "not known"
        shift, align = (2, "bottom") if above else (-2, "top")
        ax.annotate(
            text, (position, value), xytext=(0, shift), textcoords="offset points", ha="center", va=align, fontsize=9
        )
    ax.axhline(0, color="#333333", linewidth=0.8)
    ax.margins(y=0.18)
    ax.set_title(f"{title}: {sum(values):+z.2f} ms, by cause")
    ax.set_ylabel("ms, second less first")
