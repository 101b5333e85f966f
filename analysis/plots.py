"""The sweep's picture: every policy against offered load, and who wins where.

Drawn with matplotlib's Agg canvas and its built-in defaults, so neither a display nor a user's matplotlibrc changes a
byte. Colours are Okabe and Ito's, told apart by marker and dash as well.
"""

from __future__ import annotations

import os
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from simmoe.analysis.grid import SweepGrid
from simmoe.analysis.picture import picture

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8B8000")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
_DASHES = ("-", (0, (6, 2)), (0, (1, 1)), (0, (4, 1, 1, 1)))
_SIZE_INCHES = (13.5, 7.6)
_LINE = 140  # characters of the headline that fit the width


@dataclass(frozen=True, slots=True)
class Panel:
    """One metric against load."""

    metric: str
    title: str
    unit: str
    scale: float = 1.0
    log: bool = False
    compared: bool = False
    """Draw the value as a multiple of the baseline's, paired by seed."""


def plot_sweep(path: str | os.PathLike[str], grid: SweepGrid, title: str, goodput: bool = False) -> None:
    """Draw a sweep as PNG; equal grids give equal bytes.

    Args:
        path: the file to write.
        grid: the results.
        title: what was swept, one line.
        goodput: add goodput to the throughput panel (SLOs were given).
    Raises:
        OutputError: the file cannot be written.
    """
    with picture(path, _SIZE_INCHES) as figure:
        _draw(figure, grid, title, goodput)


def _panels(baseline: str) -> list[Panel]:
    return [
        Panel("ttft_mean_s", "TTFT, mean", "s", log=True),
        Panel("ttft_p99_s", "TTFT, 99th percentile", "s", log=True),
        Panel("ttft_mean_s", f"Mean TTFT over {baseline}'s, paired", "ratio", log=True, compared=True),
        Panel("tpot_mean_s", "TPOT, mean", "ms", scale=1e3),
        Panel("request_throughput_per_s", "Throughput", "requests/s"),
        Panel("executed_k", "Executed budget k, token-weighted", "experts a token"),
    ]


def _draw(figure: Figure, grid: SweepGrid, title: str, goodput: bool) -> None:
    axes = figure.subplots(2, 3)
    for ax, panel in zip(axes.flat, _panels(grid.baseline), strict=True):
        _draw_panel(ax, grid, panel)
        if panel.metric == "request_throughput_per_s":
            _draw_throughput_guides(ax, grid, goodput)
        if panel.metric == "executed_k":
            _draw_requested(ax, grid)
        ax.set_title(panel.title, pad=8)
        ax.set_ylabel(panel.unit)
    for ax in axes[1]:
        ax.set_xlabel("offered load, requests/s")
    handles, labels = axes.flat[0].get_legend_handles_labels()
    bands = f"bands: 95% confidence over {len(grid.seeds)} seeds" if len(grid.seeds) > 1 else "one seed: no intervals"
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), fontsize=9.5, title=bands)
    figure.suptitle(
        f"{title}; {grid.baseline} saturates at {grid.capacity_per_s:.3g}/s\n{textwrap.fill(_answer(grid), _LINE)}",
        x=0.012,
        ha="left",
        fontsize=11.5,
    )


def _draw_panel(ax: Axes, grid: SweepGrid, panel: Panel) -> None:
    estimate = grid.change(panel.metric) if panel.compared else grid.estimate(panel.metric)
    x = np.array(grid.rates)
    log = panel.log and _spans_decades(estimate.mean + (1.0 if panel.compared else 0.0))
    offset = 1.0 if panel.compared else 0.0
    for j, policy in enumerate(grid.policies):
        mean = panel.scale * (offset + estimate.mean[:, j])
        half = panel.scale * np.nan_to_num(estimate.half_width[:, j])
        colour, marker, dash = _style(j)
        low = np.maximum(mean - half, mean / 4) if log else mean - half  # a log axis has no room below 0
        ax.fill_between(x, low, mean + half, color=colour, alpha=0.16, linewidth=0)
        ax.plot(x, mean, color=colour, marker=marker, linestyle=dash, label=policy, zorder=3)
    if log:
        _label_log_axis(ax)
    ax.set_xlim(0, x[-1] * 1.05)
    capacity = grid.capacity_per_s
    if capacity <= 1.3 * x[-1]:
        ax.set_xlim(0, max(x[-1], *(rate for rate in grid.saturation.values() if rate <= 1.3 * x[-1])) * 1.05)
        ax.axvline(
            capacity,
            color="#777777",
            linewidth=1,
            linestyle=(0, (2, 2)),
            zorder=1,
            label=f"saturation of {grid.baseline}",
        )


def _spans_decades(values: npt.NDArray[np.float64]) -> bool:
    """Return whether positive values differ so much that only a logarithmic axis shows them all."""
    known = values[np.isfinite(values) & (values > 0)]
    return bool(known.size) and float(known.max() / known.min()) > 3


def _label_log_axis(ax: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    ax.set_yscale("log")
    ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.yaxis.set_minor_formatter(NullFormatter())


def _draw_throughput_guides(ax: Axes, grid: SweepGrid, goodput: bool) -> None:
    x = np.array(grid.rates)
    ax.plot(x, x, color="#aaaaaa", linewidth=1, zorder=1)
    ax.annotate("offered", (x[-1], x[-1]), ha="right", va="bottom", fontsize=8, color="#777777")
    for j, policy in enumerate(grid.policies):
        ax.axvline(grid.saturation[policy], ymax=0.07, color=_style(j)[0], linewidth=2, zorder=4)
    ax.annotate("ticks: each policy's saturation", (0.02, 0.025), xycoords="axes fraction", fontsize=8, color="#555555")
    if goodput:
        mean = grid.estimate("goodput_per_s").mean
        for j in range(len(grid.policies)):
            ax.plot(x, mean[:, j], color=_style(j)[0], linestyle=":", linewidth=1.2, zorder=2)
        ax.annotate("dotted: within the SLOs", (0.02, 0.93), xycoords="axes fraction", fontsize=8, color="#555555")
    ax.set_ylim(bottom=0)


def _draw_requested(ax: Axes, grid: SweepGrid) -> None:
    requested = grid.estimate("requested_k").mean.mean(axis=1)
    x = np.array(grid.rates)
    ax.plot(x, requested, color="#777777", linewidth=1, zorder=1)
    ax.annotate(
        "requested: anything above is over-serving",
        (x[0], requested[0]),
        xytext=(0, -4),
        textcoords="offset points",
        va="top",
        fontsize=8,
        color="#777777",
    )
    ax.margins(y=0.12)


def _answer(grid: SweepGrid) -> str:
    """Say in one line which policy has the least mean TTFT at which load, joining neighbouring rates."""
    change, change_p99 = grid.change("ttft_mean_s").mean, grid.change("ttft_p99_s").mean
    spans: list[tuple[str, bool, list[int]]] = []  # policy, whether it is tied with the baseline, places of the rates
    for i, winner in enumerate(grid.winners("ttft_mean_s")):
        if winner is None:
            continue
        tied = grid.baseline in winner.ties
        if spans and spans[-1][:2] == (winner.policy, tied):
            spans[-1][2].append(i)
        else:
            spans.append((winner.policy, tied, [i]))
    parts = []
    for policy, tied, places in spans:
        j = grid.policies.index(policy)
        mean, p99 = ([100 * float(of[i, j]) for i in places] for of in (change, change_p99))
        gain = f", {_extremes(mean)} % against {grid.baseline} (99th percentile {_extremes(p99)} %)"
        note = f" (tied with {grid.baseline})" if tied else "" if policy == grid.baseline else gain
        parts.append(f"{policy} at {_range([grid.rates[i] for i in places], 'g')}/s{note}")
    return "Least mean TTFT: " + ("; ".join(parts) if parts else "no request finished")


def _extremes(changes: list[float]) -> str:
    low, high = (f"{change:+z.0f}".replace("+0", "0") for change in (min(changes), max(changes)))
    return low if low == high else f"{low} to {high}"


def _range(values: list[float], form: str) -> str:
    low, high = min(values, key=abs), max(values, key=abs)
    return f"{low:{form}}" if f"{low:{form}}" == f"{high:{form}}" else f"{low:{form}} to {high:{form}}"


def _style(index: int) -> tuple[str, str, str | tuple[int, tuple[int, ...]]]:
    return (
        _COLOURS[index % len(_COLOURS)],
        _MARKERS[index % len(_MARKERS)],
        _DASHES[index % len(_DASHES)],
    )
