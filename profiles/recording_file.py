"""The file of a recorded continuous-batching run, and what of its content is checked.

JSON lines: a header that names the columns and the engine, then a line a recording's name, request or step, as
``simmoe.live.measure`` writes them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from simmoe.errors import ProfileError
from simmoe.profiles.reading import NotJson, parse_json, read_first_line, read_text

WHAT = "the recording"

FORMAT = "simmoe-recording"
VERSION = 1

_COLUMNS = (
    "start_s",
    "output_s",
    "num_prefill_tokens",
    "prefill_kv_pairs",
    "num_prefill_seqs",
    "num_decode_seqs",
    "decode_kv_tokens",
    "k_exec",
)

#: Fields of the first line that readers of a recording rest on, where they are there.
_HEADER = {
    "model": str,
    "card": str,
    "num_cards": int,
    "k_max": int,
    "captured_sizes": list,
    "engine_flags": dict,
    "async_scheduling": bool,
}

#: Seconds a recording may lack, or not know of some step.
_OPTIONAL = ("device_start_s", "device_end_s", "launch_s", "schedule_end_s", "update_end_s")


def is_recording(path: str | os.PathLike[str]) -> bool:
    """Whether a file's first line says it is a recording.

    Raises:
        ProfileError: that line cannot be read.
    """
    return _head(path) is not None


def read_header(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the first line of a recording: its columns, and the engine it is of.

    Raises:
        ProfileError: it cannot be read, or is no recording's.
    """
    name, head = os.fspath(path), _head(path)
    if head is None:
        raise ProfileError(
            f"'{name}' is no recording, whose first line says format '{FORMAT}' (the samples a table is fitted to "
            f"cannot check it); recordings are the continuous-batching runs that 'simmoe profile measure' writes"
        )
    return _checked_header(head, name)


def read_rows(path: str | os.PathLike[str]) -> Iterator[tuple[int, str, dict[str, Any] | None]]:
    """Yield each step's line number, recording and columns; None in their place where another recording begins.

    Raises:
        ProfileError: names the file, the line and what is wrong with it.
    """
    name, header = os.fspath(path), read_header(path)
    recording, before_s = "", -math.inf
    for number, line in enumerate(read_text(path, WHAT).split("\n"), start=1):
        where = f"'{name}' line {number}"
        if number == 1 or not line:
            continue
        record = parse_json(line, where)
        if isinstance(record, dict):
            begun, before_s = record.get("recording"), -math.inf
            if not isinstance(begun, str) or not begun.isprintable():
                raise ProfileError(f"{where} has recording {begun!r}; it must be a name")
            recording = begun
            yield number, recording, None
        elif not isinstance(record, list) or not record or record[0] not in ("step", "request"):
            raise ProfileError(f"{where} is neither a recording's name nor a row of a step or request")
        elif record[0] == "step":
            step = _checked_step(record[1:], header, where)
            if step["start_s"] < before_s:
                raise ProfileError(f"{where}: start_s is {step['start_s']}, before the {before_s} of the step before")
            before_s = step["start_s"]
            yield number, recording, step


def _head(path: str | os.PathLike[str]) -> dict[str, Any] | None:
    """Return the first line of a recording; None where the file is another."""
    try:
        head = parse_json(read_first_line(path, WHAT), "")
    except NotJson:
        return None
    return head if isinstance(head, dict) and head.get("format") == FORMAT else None


def _checked_header(head: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a first line after checking what of it is there."""
    if head.get("version") != VERSION:
        raise ProfileError(f"'{name}' is a recording of version {head.get('version')}; this simmoe reads {VERSION}")
    columns = head.get("steps")
    if not isinstance(columns, list) or not all(isinstance(column, str) for column in columns):
        raise ProfileError(f"'{name}' names no columns of its steps in its first line")
    missing = [column for column in _COLUMNS if column not in columns]
    if missing:
        raise ProfileError(f"'{name}' records steps without {', '.join(missing)}")
    if len(set(columns)) < len(columns):
        raise ProfileError(f"'{name}' names a column of its steps twice in its first line")
    for field, kind in _HEADER.items():
        if field in head and (not isinstance(head[field], kind) or (kind is int and isinstance(head[field], bool))):
            raise ProfileError(f"'{name}' line 1: {field} is {head[field]!r}; it must be {kind.__name__}")
    return head


def _checked_step(values: Sequence[Any], header: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return a row by its columns, after checking those that are read."""
    columns = header["steps"]
    if len(values) != len(columns):
        raise ProfileError(f"{where} has {len(values)} values for {len(columns)} columns")
    step = dict(zip(columns, values, strict=True))
    for column in _COLUMNS:
        kind = float if column in ("start_s", "output_s") else int
        if isinstance(step[column], bool) or not isinstance(step[column], int | kind):
            raise ProfileError(f"{where}: {column} is {step[column]!r}, no {kind.__name__}")
    for column in _OPTIONAL:
        value = step.get(column)
        if isinstance(value, bool) or not isinstance(value, int | float | None):
            raise ProfileError(f"{where}: {column} is {value!r}, no float and no null")
    for column in ("start_s", "output_s", *_OPTIONAL):
        value = step.get(column)
        if value is not None and not math.isfinite(value):
            raise ProfileError(f"{where}: {column} is {value}; it must be finite")
    if step["output_s"] < step["start_s"]:
        raise ProfileError(f"{where}: output_s {step['output_s']} is before start_s {step['start_s']}")
    if (step.get("launch_s") or 0.0) < 0:
        raise ProfileError(f"{where}: launch_s is {step['launch_s']}; it must be at least 0")
    if step["k_exec"] > header.get("k_max", step["k_exec"]):
        raise ProfileError(f"{where}: k_exec is {step['k_exec']}; the first line's k_max is {header['k_max']}")
    return step
