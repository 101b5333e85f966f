"""Write a workload's trace columns as plain CSV, JSONL (either gzipped) or Parquet; read back, they are the same."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from simmoe.errors import UsageError
from simmoe.traces.columns import NumberedIds
from simmoe.traces.formats import PLAIN
from simmoe.traces.workload import Workload
from simmoe.writing import whole_file

SUFFIXES = (".csv", ".csv.gz", ".jsonl", ".jsonl.gz", ".parquet")


def write_trace(path: Path, workload: Workload, with_k_qos: bool) -> None:
    """Write ``workload`` to ``path`` in the plain format, the layout by the suffix; complete or not at all.

    Columns: arrival_s, prompt_tokens, output_tokens; request_id where the trace names its requests; k_qos if asked for;
    prefix_hashes where the trace has them (in CSV, ids with blanks between).

    Raises:
        UsageError: the suffix is none of SUFFIXES.
        OutputError: the file cannot be written.
    """
    layout = next((suffix for suffix in SUFFIXES if path.name.endswith(suffix)), None)
    if layout is None:
        raise UsageError(f"'{path}' names no format; end it in one of {', '.join(SUFFIXES)}")
    columns = _columns(workload, with_k_qos)
    with whole_file(path, "the trace") as partial:
        if layout == ".parquet":
            _write_parquet(partial, columns)
            return
        with partial.open("wb") as raw:
            # An empty name and time: equal traces give equal bytes.
            packed = gzip.GzipFile("", "wb", fileobj=raw, mtime=0) if layout.endswith(".gz") else None
            with io.TextIOWrapper(packed or raw, encoding="utf-8", newline="") as stream:
                (_write_csv if layout.startswith(".csv") else _write_jsonl)(stream, columns)


def _columns(workload: Workload, with_k_qos: bool) -> dict[str, Sequence[Any]]:
    columns: dict[str, Sequence[Any]] = {}
    if not isinstance(workload.request_id, NumberedIds):
        columns[PLAIN.request_id] = workload.request_id
    columns[PLAIN.arrival] = workload.arrival_s.tolist()
    columns[PLAIN.prompt] = workload.prompt_tokens.tolist()
    columns[PLAIN.output] = workload.output_tokens.tolist()
    if with_k_qos:
        columns[PLAIN.k_qos] = workload.k_qos.tolist()
    if workload.prefix_hashes is not None:
        columns[PLAIN.prefix_hashes] = workload.prefix_hashes
    return columns


def _rows(columns: dict[str, Sequence[Any]]) -> Iterable[tuple[Any, ...]]:
    return zip(*columns.values(), strict=True)


def _write_csv(stream: io.TextIOWrapper, columns: dict[str, Sequence[Any]]) -> None:
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(columns)
    for row in _rows(columns):
        writer.writerow([" ".join(map(str, cell)) if isinstance(cell, tuple) else cell for cell in row])


def _write_jsonl(stream: io.TextIOWrapper, columns: dict[str, Sequence[Any]]) -> None:
    for row in _rows(columns):
        stream.write(json.dumps(dict(zip(columns, row, strict=True))) + "\n")


def _write_parquet(path: Path, columns: dict[str, Sequence[Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    arrays = {name: pa.array(list(column)) for name, column in columns.items()}
    pq.write_table(pa.table(arrays), path, compression="zstd")
