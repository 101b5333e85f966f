"""``simmoe profile diff``: which cells, terms and provenance of two tables differ, and by how much."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.table import Table

    from simmoe.profiles.diff import Change, GridDiff

#: Characters of a value shown.
_WIDTH = 60


@click.command(short_help="How two tables differ, and by how much.")
@click.argument("a")
@click.argument("b")
def diff(a: str, b: str) -> int:
    """Show how profile B differs from profile A (names, or tables' paths): b / a - 1 of every cell both have.

    Exits with 0 when they are the same and with 1 when they differ, as diff does; higher codes are failures.
    """
    from rich.console import Console

    from simmoe.profiles.catalog import load_profile
    from simmoe.profiles.diff import diff_tables

    first, second = load_profile(a), load_profile(b)
    found = diff_tables(first.table, second.table)
    console = Console(highlight=False, markup=False)
    if not found.differs:
        console.print(f"{first.label} and {second.label} are the same")
        return 0
    console.print(f"a: {first.label}: {first.table.summary}")
    console.print(f"b: {second.label}: {second.table.summary}")
    note = _weights_note(first.table.provenance, second.table.provenance)
    if note:
        console.print(note)
    for title, changes in (("facts", found.facts), ("terms", found.terms), ("provenance", found.provenance)):
        if title == "terms":
            for name, grid in found.grids.items():
                for line in _grid_lines(name, grid):
                    console.print(line)
        if changes:
            console.print(_change_table(title, changes))
    return 1


def _weights_note(a: Mapping[str, Any], b: Mapping[str, Any]) -> str:
    """Return a line on the weights of two provenances where they differ; '' where they do not."""
    from simmoe.profiles.weights import are_others, described, weights_of_table

    of_a, of_b = weights_of_table(a), weights_of_table(b)
    if of_a is None or of_b is None or not are_others(of_a, of_b):
        return ""
    return f"weights: a {described(of_a)}, b {described(of_b)}; small steps with prompts differ for that alone"


def _grid_lines(name: str, grid: GridDiff) -> Iterator[Table | str]:
    """Yield a grid's differences: what one lacks, how far the rest is, and every cell in percent."""
    import numpy as np

    number = grid.change.size
    if not grid.differs:
        yield f"\n{name}: the same {number:,} cells"
        return
    yield f"\n{name}: {number:,} cells in both"
    for what, of_a, of_b in grid.only:
        yield "  " + "; ".join(f"{what} of {table} alone: {_short(v)}" for table, v in (("a", of_a), ("b", of_b)) if v)
    if grid.measured_otherwise:
        yield f"  {grid.measured_otherwise:,} cells with another spread or other repetitions"
    if grid.change.any():
        size, k = np.unravel_index(np.argmax(np.abs(grid.change)), grid.change.shape)
        yield (
            f"  b / a - 1 of device seconds: mean {grid.change.mean():+z.2%}, median of its size "
            f"{np.median(np.abs(grid.change)):.2%}, largest {grid.change[size, k]:+z.2%} at "
            f"{grid.sizes[size]:,}, k {grid.ks[k]}"
        )
        yield _cell_table(name, grid)


def _cell_table(name: str, grid: GridDiff) -> Table:
    from rich.table import Table

    table = Table(
        title="percent, '.' where equal", title_justify="left", box=None, padding=(0, 2, 0, 0), pad_edge=False
    )
    for column in ("tokens" if name == "prefill" else "seqs", *(f"k={k}" for k in grid.ks)):
        table.add_column(column, justify="right", no_wrap=True)
    rows = [
        (size, [f"{100 * value:+z.1f}" if value else "." for value in row])
        for size, row in zip(grid.sizes, grid.change.tolist(), strict=True)
    ]
    for cells, group in groupby(rows, key=lambda row: row[1]):
        sizes = [f"{size:,}" for size, _ in group]
        table.add_row(sizes[0] if len(sizes) == 1 else f"{sizes[0]}..{sizes[-1]}", *cells)
    return table


def _change_table(title: str, changes: Sequence[Change]) -> Table:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("what", "a", "b"):
        table.add_column(name, overflow="fold")
    table.add_column("b / a - 1", justify="right")
    for name, a, b in changes:
        shown_a, shown_b = _short(a), _short(b)
        if isinstance(a, Mapping) and isinstance(b, Mapping):
            shown_b += f", {sum(a.get(key) != b.get(key) for key in {*a, *b})} differ"
        elif shown_a == shown_b:
            shown_a, shown_b = (
                (repr(a), repr(b)) if isinstance(a, float) else (shown_a, f"{shown_b} (differs further on)")
            )
        table.add_row(name, shown_a, shown_b, _ratio(a, b))
    return table


def _ratio(a: Any, b: Any) -> str:
    numbers = all(isinstance(value, int | float) and not isinstance(value, bool) for value in (a, b))
    return f"{b / a - 1:+z.2%}" if numbers and a else ""


def _short(value: Any) -> str:
    """Return a value in at most _WIDTH characters; '-' for none."""
    if value is None:
        return "-"
    if isinstance(value, Mapping):
        return f"{len(value)} values" if value else "none"
    if isinstance(value, list | tuple):
        if any(isinstance(item, Mapping) for item in value):
            return f"{len(value)} entries"
        text = " ".join(map(_short, value)) or "none"
    else:
        text = f"{value:.6g}" if isinstance(value, float) else str(value)
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 1]}…"
