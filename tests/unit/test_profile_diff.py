"""Differences of tables: found where they are, in a fixed order, and nothing of equal tables."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from simmoe.cli import run
from simmoe.profiles.catalog import DEFAULT_PROFILE, load_profile
from simmoe.profiles.diff import Change, diff_tables
from simmoe.profiles.table import GridTable, HostShare, StepTable
from simmoe.profiles.table_file import write_table

SYNTHETIC = "synthetic-olmoe-split4"


@pytest.fixture
def table() -> StepTable:
    return load_profile(SYNTHETIC).table


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "250")


def scaled(grid: GridTable, factor: float) -> GridTable:
    cells = tuple(tuple(cell._replace(device_s=cell.device_s * factor) for cell in row) for row in grid.cells)
    return replace(grid, cells=cells)


def thinned(grid: GridTable) -> GridTable:
    return GridTable(grid.sizes[::2], grid.ks[1:], tuple(row[1:] for row in grid.cells[::2]))


def test_equal_tables_do_not_differ(table: StepTable) -> None:
    found = diff_tables(table, table)
    assert not found.differs
    assert (found.facts, found.terms, found.provenance) == ((), (), ())
    assert found.grids["prefill"].change.size == len(table.prefill.sizes) * len(table.prefill.ks)


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda t: replace(t, k_max=64), "facts"),
        (lambda t: replace(t, prefill=scaled(t.prefill, 1.1)), "prefill"),
        (lambda t: replace(t, decode=scaled(t.decode, 0.9)), "decode"),
        (lambda t: replace(t, decode=thinned(t.decode)), "decode"),
        (lambda t: replace(t, attention=t.attention._replace(mixed_seq_s=1.0)), "terms"),
        (lambda t: replace(t, host={**t.host, "full": HostShare(9.0, 9.0)}), "terms"),
        (lambda t: replace(t, decode_kv=t.decode_kv[:-1]), "terms"),
        (lambda t: replace(t, provenance={**t.provenance, "note": "x"}), "provenance"),
    ],
)
def test_each_difference_shows_in_its_place_alone(
    table: StepTable, change: Callable[[StepTable], StepTable], where: str
) -> None:
    found = diff_tables(table, change(table))
    differing = {name for name in ("facts", "terms", "provenance") if getattr(found, name)}
    differing |= {name for name, grid in found.grids.items() if grid.differs}
    assert differing == {where}
    assert found.differs


def test_cells_differ_by_how_much(table: StepTable) -> None:
    grid = diff_tables(table, replace(table, prefill=scaled(table.prefill, 1.25))).grids["prefill"]
    assert grid.change == pytest.approx(np.full(grid.change.shape, 0.25))


def test_grids_are_compared_where_they_meet(table: StepTable) -> None:
    other = load_profile(DEFAULT_PROFILE).table
    grid = diff_tables(table, other).grids["prefill"]
    assert set(grid.sizes) == set(table.prefill.sizes) & set(other.prefill.sizes)
    assert set(grid.ks) == set(table.prefill.ks) & set(other.prefill.ks)
    sizes, ks = grid.only
    assert set(sizes.a).isdisjoint(other.prefill.sizes) and set(sizes.b).isdisjoint(table.prefill.sizes)
    assert (ks.a, ks.b) == ((), (20, 28))
    i, j = 2, 3
    n, k = grid.sizes[i], grid.ks[j]
    a = table.prefill.cells[table.prefill.sizes.index(n)][table.prefill.ks.index(k)].device_s
    b = other.prefill.cells[other.prefill.sizes.index(n)][other.prefill.ks.index(k)].device_s
    assert grid.change[i, j] == pytest.approx(b / a - 1)


def test_grids_that_never_meet_differ(table: StepTable) -> None:
    shifted = replace(table.prefill, ks=tuple(k + 100 for k in table.prefill.ks))
    grid = diff_tables(table, replace(table, prefill=shifted)).grids["prefill"]
    assert grid.change.size == 0 and grid.differs


def test_nested_provenance_is_taken_apart_in_alphabetical_order(table: StepTable) -> None:
    a = replace(table, provenance={"runs": [{"z": 1, "clocks": {"sm_mhz": 1, "w": 2}}], "b": [1, 2]})
    b = replace(table, provenance={"runs": [{"z": 2, "clocks": {"sm_mhz": 3, "w": 2}}], "b": [1, 2, 3]})
    assert diff_tables(a, b).provenance == (
        Change("b", [1, 2], [1, 2, 3]),
        Change("runs[0].clocks.sm_mhz", 1, 3),
        Change("runs[0].z", 1, 2),
    )


def test_the_command_exits_as_diff_does(table: StepTable, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = tmp_path / "other.json"
    write_table(other, replace(table, prefill=scaled(table.prefill, 1.5), summary="with [bold] words"))
    assert run(["profile", "diff", SYNTHETIC, SYNTHETIC]) == 0
    assert "are the same" in capsys.readouterr().out
    assert run(["profile", "diff", SYNTHETIC, str(other)]) == 1
    out = capsys.readouterr().out
    assert "mean +50.00%" in out and "decode: the same" in out and "with [bold] words" in out
    assert run(["profile", "diff", SYNTHETIC, str(other)]) == 1
    assert capsys.readouterr().out == out
    assert run(["profile", "diff", SYNTHETIC, str(tmp_path / "none.json")]) == 3
    assert run(["profile", "diff", SYNTHETIC, "nothing"]) == 2


def test_values_that_look_alike_are_told_apart(
    table: StepTable, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = tmp_path / "a.json", tmp_path / "b.json"
    long = "x" * 100
    write_table(a, replace(table, ingress_s=0.00412345678, summary=long + "1"))
    write_table(b, replace(table, ingress_s=0.00412345679, summary=long + "2"))
    assert run(["profile", "diff", str(a), str(b)]) == 1
    out = capsys.readouterr().out
    assert "0.00412345678" in out and "0.00412345679" in out and "(differs further on)" in out
