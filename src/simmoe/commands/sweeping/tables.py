"""The answer on the terminal: who wins at each rate, then every policy at every rate."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

from simmoe.analysis.grid import SweepGrid, Winner
from simmoe.analysis.stats import Estimate

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

#: Width of the tables where stdout is no terminal: wide enough that nothing is cut.
_FILE_WIDTH = 120


def print_tables(grid: SweepGrid, counts: Mapping[str, int], goodput: bool) -> None:
    """Print the verdict a rate, then the full table, then the counts, on stdout.

    Args:
        grid: the results.
        counts: requests by status over all cells, ``injected`` first.
        goodput: whether SLOs were given.
    """
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else _FILE_WIDTH, highlight=False)
    gap = 2 if console.width >= 100 else 1
    question = "Which policy, at which load: least mean TTFT, and its change from"
    console.print(f"[bold]{question} {_escape(grid.baseline)}[/bold]")
    console.print(_verdict(grid, gap))
    console.print("\n[bold]Every policy: mean over seeds ± 95% confidence[/bold]")
    console.print(_full(grid, goodput, gap))
    console.print()
    _print_notes(console, grid, counts)


def _verdict(grid: SweepGrid, gap: int) -> Table:
    table = _table(gap)
    for name in ("rate/s", "load", "policy", "TTFT ms", "change", "TTFT p99", "change", "tied with"):
        justify: Literal["left", "right"] = "left" if name in ("policy", "tied with") else "right"
        table.add_column(name, justify=justify, overflow="fold")
    metrics = ("ttft_mean_s", "ttft_p99_s")
    estimates, changes = [grid.estimate(name) for name in metrics], [grid.change(name) for name in metrics]
    for i, winner in enumerate(grid.winners("ttft_mean_s")):
        row = [f"{grid.rates[i]:g}", f"{grid.rates[i] / grid.capacity_per_s:.2f}"]
        if winner is None:
            table.add_row(*row, "no request finished")
            continue
        j = grid.policies.index(winner.policy)
        row.append(f"[bold]{_escape(winner.policy)}[/bold]")
        for estimate, change in zip(estimates, changes, strict=True):
            row.append(_value(estimate, i, j, 1e3))
            row.append("" if winner.policy == grid.baseline else _percent(change, i, j))
        table.add_row(*row, _ties(winner, grid))
    return table


def _full(grid: SweepGrid, goodput: bool, gap: int) -> Table:
    estimates = {name: grid.estimate(name) for name in grid.values}
    left = estimates["injected"].mean - estimates["finished"].mean
    table = _table(gap)
    columns = ["rate/s", "policy", "TTFT ms", "TTFT p99", "TPOT ms", "done/s"]
    columns += ["good/s"] if goodput else []
    columns += ["k run", "over"]
    columns += ["unfinished"] if left.any() else []
    for name in columns:
        table.add_column(name, justify="left" if name == "policy" else "right", overflow="fold")
    for i, rate in enumerate(grid.rates):
        for j, policy in enumerate(grid.policies):
            cells = [f"{rate:g}" if j == 0 else "", _escape(policy)]
            cells += [_value(estimates[f"{name}_s"], i, j, 1e3) for name in ("ttft_mean", "ttft_p99", "tpot_mean")]
            cells += [_value(estimates["request_throughput_per_s"], i, j)]
            cells += [_value(estimates["goodput_per_s"], i, j)] if goodput else []
            cells += [
                f"{estimates['executed_k'].mean[i, j]:.1f}",
                f"{estimates['over_serving'].mean[i, j]:.2f}",
            ]
            cells += [f"{left[i, j]:g}"] if left.any() else []
            table.add_row(*cells, end_section=j == len(grid.policies) - 1)
    return table


def _print_notes(console: Console, grid: SweepGrid, counts: Mapping[str, int]) -> None:
    saturation = ", ".join(f"{policy} {rate:.4g}" for policy, rate in grid.saturation.items())
    console.print(f"Saturation, requests/s: {_escape(saturation)}. Load 1 is that of {_escape(grid.baseline)}.")
    console.print("tied with: the paired 95% interval of the difference includes 0. over: executed k over requested k.")
    if grid.rates[-1] >= grid.capacity_per_s:
        console.print("From load 1 on queues grow as long as requests arrive: figures there depend on --requests.")
    parts = " + ".join(f"{count:,} {name}" for name, count in counts.items() if name != "injected")
    console.print(f"Requests over all cells: {counts['injected']:,} injected = {parts}.")


def _table(gap: int) -> Table:
    from rich import box
    from rich.table import Table

    return Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, gap - 1, 0, 0))


def _ties(winner: Winner, grid: SweepGrid) -> str:
    if len(grid.seeds) < 2:
        return "one seed: no test"
    return _escape(", ".join(winner.ties)) if winner.ties else "-"


def _value(estimate: Estimate, i: int, j: int, scale: float = 1.0) -> str:
    """Show a mean to three significant digits and its half-width to as many decimals."""
    mean, half = scale * float(estimate.mean[i, j]), scale * float(estimate.half_width[i, j])
    if math.isnan(mean):
        return "-"
    decimals = max(0, 2 - math.floor(math.log10(abs(mean)))) if mean else 0
    spread = "" if math.isnan(half) else f"±{half:,.{decimals}f}"
    return f"{mean:z,.{decimals}f}{spread}"


def _percent(change: Estimate, i: int, j: int) -> str:
    mean, half = 100 * float(change.mean[i, j]), 100 * float(change.half_width[i, j])
    spread = "" if math.isnan(half) else f"±{half:.1f}"
    return f"{mean:+z.1f}{spread}%"


def _escape(text: str) -> str:
    """Keep a policy's own brackets from being read as markup."""
    from rich.markup import escape as rich_escape

    return rich_escape(text)
