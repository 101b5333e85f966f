"""The files of a finished sweep: a long CSV, a Parquet table of cells, a picture, and a manifest written last."""

from __future__ import annotations

import csv
import io
import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from simmoe.analysis.grid import GridRow, SweepGrid
from simmoe.analysis.metrics import METRICS, PERCENTILES
from simmoe.analysis.plots import plot_sweep
from simmoe.analysis.stats import CONFIDENCE
from simmoe.commands.notes import versions
from simmoe.commands.sweeping.cells import extrapolated_in
from simmoe.commands.sweeping.saturation import LOADS
from simmoe.commands.sweeping.store import SweepStore
from simmoe.commands.sweeping.study import Study, StudyResult

CSV_NAME = "sweep.csv"
PARQUET_NAME = "cells.parquet"
PLOT_NAME = "sweep.png"
MANIFEST_NAME = "manifest.json"


def write_report(store: SweepStore, study: Study, result: StudyResult, title: str, about: dict[str, Any]) -> list[Path]:
    """Write every file and return their paths. Nothing in them depends on when, where or with how many jobs.

    Args:
        store: the sweep's folder.
        study: what was asked.
        result: what was found.
        title: the picture's, one line.
        about: further facts for the manifest (workload, profile, policies).
    Raises:
        OutputError: a file cannot be written.
    """
    paths = [
        store.write(CSV_NAME, _csv(result.grid, about["profile"]["status"])),
        store.write(PARQUET_NAME, _parquet(result)),
        store.folder / PLOT_NAME,
    ]
    plot_sweep(paths[-1], result.grid, title, goodput=bool(study.slo))
    manifest = json.dumps(_manifest(study, result, about), indent=2, sort_keys=True, allow_nan=False) + "\n"
    return [*paths, store.write(MANIFEST_NAME, manifest.encode())]


def total_counts(result: StudyResult) -> dict[str, int]:
    """Return requests by status over all cells of the grid, ``injected`` first."""
    names = [name for name in METRICS if name == "injected" or METRICS[name].startswith("requests that ended")]
    return {name: int(sum(cell.metrics[name] for _, cell in result.cells)) for name in names}


def _csv(grid: SweepGrid, profile_status: str) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow((*GridRow._fields, "profile_status"))
    for row in grid.rows():
        shown = ("" if isinstance(value, float) and math.isnan(value) else value for value in row)
        writer.writerow((*shown, profile_status))
    return text.getvalue().encode()


def _parquet(result: StudyResult) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns: dict[str, Any] = {
        "rate_per_s": pa.array([cell.workload.rate for cell, _ in result.cells], pa.float64()),
        "policy": pa.array([cell.policy for cell, _ in result.cells], pa.string()),
        "seed": pa.array([cell.workload.seed for cell, _ in result.cells], pa.int64()),
    }
    for name in METRICS:
        column = np.array([found.metrics[name] for _, found in result.cells], np.float64)
        columns[name] = pa.array(column, pa.float64(), mask=np.isnan(column))
    sink = io.BytesIO()
    pq.write_table(pa.table(columns), sink, compression="zstd")
    return sink.getvalue()


def _manifest(study: Study, result: StudyResult, about: dict[str, Any]) -> dict[str, Any]:
    grid = result.grid
    return {
        "schema_version": 1,
        "kind": "sweep",
        "inputs": study.inputs(),
        **about,
        "rates_per_s": list(grid.rates),
        "rates_found": study.rates is None,
        "loads": list(LOADS) if study.rates is None else None,
        "saturation_per_s": dict(grid.saturation),
        "counts": total_counts(result),
        "cells": len(result.cells),
        "extrapolated_in_cells": extrapolated_in(cell for _, cell in result.cells),
        "confidence": CONFIDENCE,
        "percentiles": {"reported": list(PERCENTILES), "method": "linear interpolation (Hyndman-Fan type 7)"},
        "metrics": METRICS,
        "versions": versions(),
    }
