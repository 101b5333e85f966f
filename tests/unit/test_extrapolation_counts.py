"""What the profile was asked outside its grid is counted in every command's manifest, and said."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simmoe.cli import run as simmoe
from simmoe.profiles.catalog import load_profile
from simmoe.profiles.table import GridTable
from simmoe.profiles.table_file import write_table
from simmoe.records import read_record, write_record
from tests.support.live_record import as_live

LAST_TOKENS, LAST_SEQS, LAST_K = 256, 1, 16
SAID = "note: the profile was asked outside its measured grid and extrapolated"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    rng = np.random.default_rng(3)
    rows = [f"{0.01 * i},{rng.integers(20, 900)},{rng.integers(2, 60)}" for i in range(40)]
    path = tmp_path / "requests.csv"
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]) + "\n")
    return path


@pytest.fixture
def cut(tmp_path: Path) -> str:
    """The synthetic table without its larger sizes and budgets."""
    table = load_profile("synthetic-olmoe-split4").table

    def less(points: GridTable, last: int) -> GridTable:
        num_sizes, num_ks = sum(size <= last for size in points.sizes), sum(k <= LAST_K for k in points.ks)
        cells = tuple(row[:num_ks] for row in points.cells[:num_sizes])
        return GridTable(points.sizes[:num_sizes], points.ks[:num_ks], cells)

    path = tmp_path / "cut.json"
    write_table(path, replace(table, prefill=less(table.prefill, LAST_TOKENS), decode=less(table.decode, LAST_SEQS)))
    return str(path)


def counted(record: Path) -> dict[str, int]:
    """Return what the steps of a record asked outside the cut table, distinct points by what lay outside."""
    found = read_record(record)
    assert found.steps is not None
    captured = load_profile("synthetic-olmoe-split4").table.captured_sizes
    outside: dict[str, set[tuple[int, int]]] = {}
    columns = (found.steps[name].tolist() for name in ("num_prefill_tokens", "num_decode_tokens", "k_exec"))
    for tokens, decodes, k in zip(*columns, strict=True):
        kind, size, last = (
            ("prefill_tokens", tokens + decodes, LAST_TOKENS) if tokens else ("decode_seqs", decodes, LAST_SEQS)
        )
        size = next((c for c in captured if c >= size), size)
        for what, is_outside in ((kind, size > last), ("k", k > LAST_K)):
            if is_outside:
                outside.setdefault(what, set()).add((size, k))
    return {what: len(points) for what, points in sorted(outside.items())}


def manifest_of(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    return content


def test_a_run_counts_the_distinct_points_of_its_steps(
    trace: Path, cut: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--trace", str(trace), "--policy", "fifo", "--record-steps"]
    assert simmoe(["run", *options, "--profile", cut, "--out", str(tmp_path / "out")]) == 0
    assert SAID in capsys.readouterr().err
    counts = manifest_of(tmp_path / "out")["extrapolated"]
    assert counts == counted(tmp_path / "out") and set(counts) == {"prefill_tokens", "decode_seqs", "k"}
    assert simmoe(["run", *options, "--profile", "synthetic-olmoe-split4", "--out", str(tmp_path / "in")]) == 0
    assert SAID not in capsys.readouterr().err and manifest_of(tmp_path / "in")["extrapolated"] == {}


def test_a_validation_counts_those_of_the_simulated_side(
    trace: Path, cut: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--trace", str(trace), "--policy", "fifo", "--record-steps", "--profile", "synthetic-olmoe-split4"]
    assert simmoe(["run", *options, "--out", str(tmp_path / "was")]) == 0
    write_record(tmp_path / "live", as_live(read_record(tmp_path / "was")))
    capsys.readouterr()
    assert simmoe(["validate", "--live", str(tmp_path / "live"), "--profile", cut, "--out", str(tmp_path / "out")]) == 0
    assert SAID in capsys.readouterr().err
    counts = manifest_of(tmp_path / "out" / "sim")["extrapolated"]
    assert counts == counted(tmp_path / "out" / "sim") and counts


def test_a_sweep_counts_the_cells(trace: Path, cut: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--trace", str(trace), "--requests", "30", "--rates", "5,20", "--seeds", "1", "--jobs", "1"]
    for profile, cells in ((cut, 4), ("synthetic-olmoe-split4", 0)):
        out = tmp_path / f"out{cells}"
        two = ["--policy", "fifo", "--policy", "tiers"]
        assert simmoe(["sweep", *options, *two, "--profile", profile, "--out", str(out)]) == 0
        kinds = ("decode_seqs", "k", "prefill_tokens") if cells else ()
        assert manifest_of(out)["extrapolated_in_cells"] == {kind: cells for kind in kinds}
        assert (SAID in capsys.readouterr().err) == bool(cells)


def test_a_search_counts_every_simulation_it_asked_for_resumed_or_not(
    trace: Path, cut: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--trace", str(trace), "--requests", "30", "--seeds", "1", "--jobs", "1", "--tolerance", "0.2"]
    options += ["--slo-ttft", "0.08", "--policy", "fifo"]
    for profile, is_outside in ((cut, True), ("synthetic-olmoe-split4", False)):
        out = tmp_path / f"out-{is_outside}"
        for _ in range(2):
            assert simmoe(["search", *options, "--profile", profile, "--out", str(out)]) == 0
            manifest = manifest_of(out)
            (row,) = csv.DictReader((out / "search.csv").read_text().splitlines())
            # the bisection's, and the offline one that finds saturation
            assert manifest["cells"] == int(row["num_rates"]) + 1
            kinds = ("decode_seqs", "k", "prefill_tokens") if is_outside else ()
            assert manifest["extrapolated_in_cells"] == {kind: manifest["cells"] for kind in kinds}
            assert (SAID in capsys.readouterr().err) == is_outside
