"""The run record: what a simulated and a live run both write, and everything downstream reads.

A record is a folder with ``requests.parquet``, ``manifest.json`` and, when asked for, ``steps.parquet``. All times are
seconds on one clock, which starts at the first arrival; a time that never came is NaN (null in Parquet). Nothing in a
record depends on when, where or with how many jobs it was made, so equal inputs give equal bytes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from simmoe.errors import OutputError, RecordError
from simmoe.reading import what_is_no_file

SCHEMA_VERSION = 1

MANIFEST = "manifest.json"

#: Rows converted and compressed at a time: bounds the memory that writing a table of any length takes.
ROWS_A_GROUP = 65_536

#: How a request can stand when the run ends; injected = the sum of all six.
STATUSES = ("finished", "rejected", "aborted", "failed", "running", "queued")

REQUEST_COLUMNS: dict[str, str] = {
    "request_id": "string",
    "arrival_s": "float64",  # reached the front end
    "dispatched_s": "float64",  # reached the rank it was routed to
    "scheduled_s": "float64",  # the first step that computed any of it began
    "first_token_s": "float64",  # its first output token reached the client
    "finished_s": "float64",  # its last output token reached the client
    "prompt_tokens": "int64",
    "output_tokens": "int64",
    "k_qos": "int64",
    "dp_rank": "int64",  # -1: never routed
    "num_preemptions": "int64",
    "status": "string",
}

STEP_COLUMNS: dict[str, str] = {
    "dp_rank": "int64",
    "start_s": "float64",
    "duration_s": "float64",
    "num_prefill_tokens": "int64",
    "num_decode_tokens": "int64",
    "kv_tokens": "int64",  # KV tokens attended to by the step's decodes
    "k_exec": "int64",
    "routed_slots": "int64",  # token-expert pairs run
    "num_waiting": "int64",  # when the step was composed
    "num_running": "int64",
    "mode": "string",
}

#: What the metrics mean, copied into every manifest.
METRIC_DEFINITIONS = {
    "ttft_s": "first_token_s - arrival_s, on the client's clock",
    "tpot_s": "(finished_s - first_token_s) / (output_tokens - 1); absent for one output token",
    "e2e_s": "finished_s - arrival_s",
    "queueing_s": "scheduled_s - dispatched_s, until the first step that computes any of the request",
    "over_serving": "routed_slots / sum over scheduled tokens of k_qos",
    "executed_k": "routed_slots / scheduled tokens: the token-weighted mean executed budget",
    "goodput": "finished requests that meet every SLO given, per second of makespan",
}

Columns = dict[str, npt.NDArray[Any]]


@dataclass(slots=True)
class RunRecord:
    """One run: a table of requests, optionally a table of steps, and the manifest."""

    requests: Columns
    """Columns as in REQUEST_COLUMNS, all of one length, in order of arrival."""
    manifest: dict[str, Any]
    """Resolved configuration, versions, seeds, profile and its hash, host, totals; plain JSON data."""
    steps: Columns | None = None
    """Columns as in STEP_COLUMNS, by dp_rank then start_s; None when not recorded."""
    files: dict[str, bytes] = field(default_factory=dict)
    """Further small files of the record, by name (a policy's saved view)."""

    def counts(self) -> dict[str, int]:
        """Return the number of requests by status, every status present, and their sum as ``injected``."""
        status = self.requests["status"]
        counts = {name: int((status == name).sum()) for name in STATUSES}
        return {"injected": len(status), **counts}


def write_record(out_dir: str | os.PathLike[str], record: RunRecord) -> Path:
    """Write a record, whole or not at all; an earlier one stays as it was until the new one is in its place.

    Every file is written beside its final name first. Then the earlier record is moved aside, its manifest first, and
    the new files are renamed, the manifest last: a folder with a manifest is whole. A failure at any point undoes what
    was done. One process writes a folder at a time; commands see to that.

    Raises:
        OutputError: the folder cannot be created or written.
        RecordError: a table lacks a column, or the manifest holds something that is not plain JSON data.
    """
    out = Path(out_dir)
    manifest = _encode({"schema_version": SCHEMA_VERSION, **record.manifest, "metrics": METRIC_DEFINITIONS})
    tables = {"requests.parquet": (record.requests, REQUEST_COLUMNS)}
    if record.steps is not None:
        tables["steps.parquet"] = (record.steps, STEP_COLUMNS)
    for name, (columns, schema) in tables.items():
        check_columns(columns, schema, name)
    partials = [_partial(out, name) for name in (*tables, *record.files, MANIFEST)]
    try:
        out.mkdir(parents=True, exist_ok=True)
        for name, (columns, schema) in tables.items():
            _write_parquet(_partial(out, name), columns, schema)
        for name, content in (*record.files.items(), (MANIFEST, manifest)):
            _partial(out, name).write_bytes(content)
        _put_in_place(out, [*tables, *record.files, MANIFEST])
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else error  # pyarrow's own words are longer
        raise OutputError(f"cannot write the record to '{out}': {why}; choose another --out") from error
    finally:
        for partial in partials:
            with suppress(OSError):
                partial.unlink()
    return out


def was_being_replaced(folder: Path) -> bool:
    """Return whether a process was killed between moving a record aside and putting another in its place."""
    return not (folder / MANIFEST).exists() and (
        _partial(folder, MANIFEST).exists() or _aside(folder, MANIFEST).exists()
    )


def read_record(path: str | os.PathLike[str]) -> RunRecord:
    """Read a record written by either host; :func:`simmoe.record_checks.read_checked` refuses one that none can have.

    Raises:
        RecordError: no manifest, another schema version, a missing file or column, or one of another type.
    """
    folder = Path(path)
    manifest = _read_manifest(folder)
    version = manifest.get("schema_version")
    if version != SCHEMA_VERSION:
        raise RecordError(f"'{folder}' has schema version {version}; this simmoe reads {SCHEMA_VERSION}")
    requests = _read_parquet(folder / "requests.parquet", REQUEST_COLUMNS)
    has_steps = os.path.lexists(folder / "steps.parquet")
    steps = _read_parquet(folder / "steps.parquet", STEP_COLUMNS) if has_steps else None
    return RunRecord(requests=requests, manifest=manifest, steps=steps)


def check_columns(
    columns: Mapping[str, Sequence[Any] | npt.NDArray[Any]], schema: Mapping[str, str], what: str
) -> None:
    """Raise RecordError unless ``columns`` has exactly the schema's names, all of one length."""
    missing = [name for name in schema if name not in columns]
    extra = [name for name in columns if name not in schema]
    if missing or extra:
        raise RecordError(f"{what}: missing columns {missing}, unknown columns {extra}")
    lengths = {len(column) for column in columns.values()}
    if len(lengths) > 1:
        raise RecordError(f"{what}: columns of different lengths {sorted(lengths)}")


def _partial(folder: Path, name: str) -> Path:
    return folder / f".{name}.partial"


def _aside(folder: Path, name: str) -> Path:
    return folder / f".{name}.old.partial"


def _encode(manifest: Mapping[str, Any]) -> bytes:
    try:
        return (json.dumps(manifest, indent=2, sort_keys=True) + "\n").encode()
    except (TypeError, ValueError) as error:
        raise RecordError(f"the manifest is not plain JSON data: {error}") from error


def _put_in_place(folder: Path, names: Sequence[str]) -> None:
    """Rename what is written in full, the last name last; on failure put back what was there."""
    former = [name for name in dict.fromkeys((MANIFEST, *names, "steps.parquet")) if (folder / name).exists()]
    for name in (MANIFEST, *names, "steps.parquet"):
        _aside(folder, name).unlink(missing_ok=True)  # a killed process left it
    moved, placed = [], []
    try:
        for name in former:
            moved.append(name)
            os.replace(folder / name, _aside(folder, name))
        for name in names:
            placed.append(name)
            os.replace(_partial(folder, name), folder / name)
    except BaseException:
        for name in placed:
            (folder / name).unlink(missing_ok=True)
        for name in reversed(moved):
            if _aside(folder, name).exists():
                os.replace(_aside(folder, name), folder / name)
        raise
    for name in moved:
        _aside(folder, name).unlink()


def _write_parquet(path: Path, columns: Columns, schema: Mapping[str, str]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    types = {"string": pa.string(), "float64": pa.float64(), "int64": pa.int64()}
    table_schema = pa.schema([(name, types[kind]) for name, kind in schema.items()])
    dictionary = ["status"] if "status" in schema else ["mode"]
    size = len(next(iter(columns.values())))
    with pq.ParquetWriter(path, table_schema, compression="zstd", use_dictionary=dictionary) as writer:
        for start in range(0, max(size, 1), ROWS_A_GROUP):
            stop = start + ROWS_A_GROUP
            arrays = [_arrow_array(columns[name][start:stop], kind) for name, kind in schema.items()]
            writer.write_table(pa.Table.from_arrays(arrays, schema=table_schema))


def _arrow_array(column: npt.NDArray[Any], kind: str) -> Any:
    """Return a column as an Arrow array from buffers: ``pa.array`` would import pandas, a cast all compute kernels."""
    import pyarrow as pa

    if kind == "int64":
        return pa.Array.from_buffers(pa.int64(), len(column), [None, pa.py_buffer(column.astype(np.int64, copy=False))])
    if kind == "float64":
        valid = np.packbits(~np.isnan(column), bitorder="little")
        values = pa.py_buffer(np.ascontiguousarray(column, dtype=np.float64))
        return pa.Array.from_buffers(pa.float64(), len(column), [pa.py_buffer(valid), values])
    encoded = [text.encode() for text in column]
    ends = np.cumsum([len(text) for text in encoded], dtype=np.int64)
    offsets = np.zeros(len(encoded) + 1, dtype=np.int32)
    assert not len(ends) or ends[-1] <= np.iinfo(np.int32).max, "a group of rows holds more text than Arrow can address"
    offsets[1:] = ends
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(b"".join(encoded))]
    return pa.Array.from_buffers(pa.string(), len(encoded), buffers)


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / MANIFEST
    try:
        if kind := what_is_no_file(path):
            raise RecordError(f"cannot read '{path}': it is {kind}, no file")
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise RecordError(f"'{folder}' is no run record: it has no manifest.json") from None
    except OSError as error:
        raise RecordError(f"cannot read '{path}': {error.strerror}") from None
    except ValueError as error:
        raise RecordError(f"'{path}' is not JSON: {error}") from None
    except RecursionError:
        raise RecordError(f"'{path}' is nested too deeply") from None
    if not isinstance(manifest, dict):
        raise RecordError(f"'{path}' is no run record's: it holds no JSON object")
    return manifest


def _read_parquet(path: Path, schema: Mapping[str, str]) -> Columns:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        if kind := what_is_no_file(path):
            raise RecordError(f"cannot read '{path}': it is {kind}, no file")
        table = pq.read_table(path)
    except FileNotFoundError:
        raise RecordError(f"'{path.parent}' is incomplete: it has no {path.name}") from None
    except (pa.ArrowException, OSError) as error:  # OSError: also what a page cut short or spoilt gives
        raise RecordError(f"'{path}' is not Parquet, or spoilt: {error}") from None
    columns: Columns = {}
    for name, kind in schema.items():
        if name not in table.column_names:
            raise RecordError(f"'{path}' has no column '{name}'")
        columns[name] = _numpy_column(table.column(name), kind, f"'{path}': column '{name}'")
    return columns


def _numpy_column(column: Any, kind: str, where: str) -> npt.NDArray[Any]:
    import pyarrow as pa

    wanted = {"string": pa.string(), "float64": pa.float64(), "int64": pa.int64()}[kind]
    is_text = pa.types.is_string(column.type) or pa.types.is_large_string(column.type)
    is_number = pa.types.is_integer(column.type) or pa.types.is_floating(column.type)
    try:
        if not (is_text if kind == "string" else is_number):
            raise RecordError(f"{where} is of type {column.type}; it must be {kind}")
        if column.type != wanted:
            column = column.cast(wanted)
    except pa.ArrowException as error:
        raise RecordError(f"{where} is of type {column.type}; it must be {kind}: {error}") from None
    if kind == "float64":
        return np.asarray(column.fill_null(float("nan")).to_numpy())
    if column.null_count:
        raise RecordError(f"{where} leaves out {column.null_count} of {len(column)} values")
    return np.array(column.to_pylist(), dtype=object) if kind == "string" else np.asarray(column.to_numpy())
