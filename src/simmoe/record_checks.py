"""What a run record must hold for anybody to rest on it, whoever wrote it."""

from __future__ import annotations

import os
import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from simmoe.errors import RecordError
from simmoe.records import MANIFEST, STATUSES, Columns, RunRecord, read_record

MAX_TIME_S = 1e9
"""Some thirty years: no run lasts so long, and sums of such times lose nothing that counts."""

MAX_COUNT = 2**53
"""The largest whole number up to which a double tells each from the next."""

CLOCKS_APART_S = 0.01
"""A live rank's steps may seem to begin so much before those before them: the host's and the device's clocks differ."""

#: Least values of counts; of others 0.
_LEAST = {"prompt_tokens": 1, "k_qos": 1, "k_exec": 1, "dp_rank": -1}

#: What a manifest may hold, of what type where it holds it; null stands for absent.
_MANIFEST: dict[tuple[str, ...], type] = {
    ("kind",): str,
    ("config",): dict,
    ("config", "engine"): dict,
    ("config", "front_end"): dict,
    ("policy",): dict,
    ("policy", "given"): str,
    ("profile",): dict,
    ("profile", "name"): str,
    ("profile", "sha256"): str,
    ("profile", "status"): str,
    ("policy_profile",): dict,
    ("policy_profile", "name"): str,
    ("policy_profile", "sha256"): str,
    ("send_lag",): dict,
    ("send_lag", "ttft_reported"): bool,
    ("send_lag", "refusal"): str,
    ("engines",): dict,
    ("target",): dict,
    ("target", "weights"): str,
}

_SHOWN_AS = {str: "text", dict: "a JSON object", bool: "true or false"}


def read_checked(path: str | os.PathLike[str]) -> RunRecord:
    """Read a record, and refuse one that no run can have left.

    Raises:
        RecordError: it cannot be read; or names the file, the row or entry, and what is wrong with it.
    """
    record, folder = read_record(path), Path(path)
    _check_manifest(record.manifest, f"'{folder / MANIFEST}'")
    _check_requests(record.requests, f"'{folder / 'requests.parquet'}'")
    if record.steps is not None:
        _check_steps(record.steps, f"'{folder / 'steps.parquet'}'")
    return record


def _check_manifest(manifest: Mapping[str, Any], where: str) -> None:
    """Refuse a manifest whose known entries are of other types."""
    for path, kind in _MANIFEST.items():
        value: Any = manifest
        for name in path:
            value = value.get(name) if isinstance(value, Mapping) else None
        if value is not None and not isinstance(value, kind):
            raise RecordError(f"{where}: {'.'.join(path)} is {reprlib.repr(value)}; it must be {_SHOWN_AS[kind]}")


def _check_requests(columns: Columns, where: str) -> None:
    """Refuse a table, columns as records.REQUEST_COLUMNS, that no run can have left."""
    _check_numbers(columns, where)
    ids, status, arrival_s = (columns[name] for name in ("request_id", "status", "arrival_s"))
    seen: set[str] = set()
    for row, name in enumerate(ids.tolist()):
        if name in seen:
            raise RecordError(f"{where} row {row}: request_id '{name}' is there twice")
        seen.add(name)
    _refuse(~np.isin(status, STATUSES), status, "status", f"one of {', '.join(STATUSES)}", where)
    _refuse(np.isnan(arrival_s), arrival_s, "arrival_s", "known", where)
    _refuse(np.diff(arrival_s, prepend=0.0) < 0, arrival_s, "arrival_s", "no earlier than the one before", where)
    _refuse(arrival_s[:1] != 0, arrival_s, "arrival_s", "0 s, where a record's clock starts", where)
    for name in ("first_token_s", "finished_s"):
        unknown = (status == "finished") & np.isnan(columns[name])
        _refuse(unknown, columns[name], name, "known of a finished request", where)


def _check_steps(columns: Columns, where: str) -> None:
    """Refuse a table, columns as records.STEP_COLUMNS, that no run can have left."""
    _check_numbers(columns, where)
    for name in ("start_s", "duration_s"):
        _refuse(np.isnan(columns[name]), columns[name], name, "known", where)
    ranks, start_s = columns["dp_rank"], columns["start_s"]
    _refuse(np.diff(ranks, prepend=0) < 0, ranks, "dp_rank", "at least 0 and no lower than the one before", where)
    same = np.diff(ranks, prepend=-1) == 0
    early = same & (np.diff(start_s, prepend=-MAX_TIME_S) < -CLOCKS_APART_S)
    _refuse(early, start_s, "start_s", "no earlier than the step before on its rank", where)


def _check_numbers(columns: Columns, where: str) -> None:
    for name, column in columns.items():
        if column.dtype == np.int64:
            least = _LEAST.get(name, 0)
            _refuse((column < least) | (column > MAX_COUNT), column, name, f"{least} to 2**53", where)
        elif column.dtype == np.float64:
            _refuse(np.abs(column) > MAX_TIME_S, column, name, f"within {MAX_TIME_S:g} s", where)


def _refuse(wrong: npt.NDArray[np.bool_], column: npt.NDArray[Any], name: str, must_be: str, where: str) -> None:
    if wrong.any():
        row = int(np.argmax(wrong))
        raise RecordError(f"{where} row {row}: {name} is {column[row]}; it must be {must_be}")
