"""Steps of a recorded continuous-batching run, as samples; those of its calibration recording alone may be fitted.

A recording is JSON lines: a header that names the columns, then a line a recording's name, request or step, as
``simmoe.live.measure`` writes them.
"""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from simmoe.errors import ProfileError
from simmoe.profiles.samples import Kind, Mode, Sample

FORMAT = "simmoe-recording"
VERSION = 1

#: A recording of this name is no held-out one: the fit may learn from it how fast the host is while it serves.
CALIBRATION = "calibration"

#: The host saw a step's tokens this soon after the device was done with it: it had been waiting for it.
WAITED_S = 0.6e-3

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

#: Seconds a recording may lack, or not know of some step.
_OPTIONAL = ("device_end_s", "launch_s", "schedule_end_s", "update_end_s")


class Update(NamedTuple):
    """How long the host took to take in one step."""

    num_seqs: int
    """Prompts and decoding sequences of the step."""
    seconds: float


def read_recorded_steps(path: str | os.PathLike[str], captured_sizes: Sequence[int]) -> list[Sample]:
    """Return the steps that followed another without a pause, with the engine's pace: the seconds between their ends.

    A step counts when it was scheduled before the output of the one before arrived: the engine was kept busy, its
    scheduling asynchronous, and nothing but the step itself decided when it ended. Ends are taken on the device where
    the recording has them (``device_end_s``), else when the host saw the output.

    Of the calibration recording, the host's time to launch each step follows it as a row under the host clock, where it
    was recorded: no less was the host's share of the step.

    Args:
        path: JSON lines, gzipped when the name ends in ``.gz``.
        captured_sizes: of the engine that was recorded, ascending.
    Raises:
        ProfileError: names the file, the line and what is wrong with it.
    """
    rows: list[Sample] = []
    for _, sample, launch_s in _busy_steps(path, captured_sizes):
        rows.append(sample)
        if launch_s and not sample.held_out:
            rows.append(replace(sample, clock="host", median_s=launch_s, p10_s=launch_s, p90_s=launch_s))
    return rows


def read_recorded_loads(path: str | os.PathLike[str], captured_sizes: Sequence[int]) -> list[tuple[str, Sample]]:
    """Return the steps of :func:`read_recorded_steps`, each with the name of the recording it is of."""
    return [(name, sample) for name, sample, _ in _busy_steps(path, captured_sizes)]


def read_updates(path: str | os.PathLike[str]) -> list[Update]:
    """Return how long the host took to take in the steps of the calibration recording; none where it cannot be told.

    It takes a step in once the device is done with it and the next is launched. Recordings that lack the end of that
    show when the next but one was begun, which follows at once where the host waited for the device.

    Args:
        path: as of :func:`read_recorded_steps`.
    """
    name, text = _text(path)
    train: list[dict[str, Any]] = []
    found: list[Update] = []
    for _, recording, step in _steps(text, name):
        if step is None:
            train = []
        elif recording == CALIBRATION:
            train = [*train[-2:], step]
            if len(train) == 3 and all(b["start_s"] <= a["output_s"] for a, b in pairwise(train)):
                found.extend(_update(*train))
    return found


def is_recording(path: str | os.PathLike[str]) -> bool:
    """Whether a file's first line says it is a recording."""
    source = Path(path)
    try:
        with gzip.open(source, "rt") if source.suffix == ".gz" else source.open() as file:
            return bool(json.loads(file.readline()).get("format") == FORMAT)
    except (OSError, EOFError, ValueError, AttributeError, zlib.error):
        return False


def _busy_steps(
    path: str | os.PathLike[str], captured_sizes: Sequence[int]
) -> Iterator[tuple[str, Sample, float | None]]:
    """Yield the recording's name, the step and the seconds the host took to launch it, where it was recorded."""
    name, text = _text(path)
    largest = captured_sizes[-1] if captured_sizes else 0
    before: dict[str, Any] | None = None
    for number, recording, step in _steps(text, name):
        if step is not None and before is not None and step["start_s"] <= before["output_s"]:
            try:
                sample = _sample(step, _pace_s(before, step), largest, recording != CALIBRATION)
            except ProfileError as error:
                raise ProfileError(f"'{name}' line {number}: {error}") from None
            yield recording, sample, step.get("launch_s")
        before = step


def _text(path: str | os.PathLike[str]) -> tuple[str, str]:
    """Return the file's name and content."""
    name, source = os.fspath(path), Path(path)
    try:
        content = source.read_bytes()
        return name, (gzip.decompress(content) if source.suffix == ".gz" else content).decode()
    except (OSError, EOFError, UnicodeDecodeError, zlib.error) as error:
        raise ProfileError(f"cannot read the recording '{name}': {error}") from None


def _update(step: Mapping[str, Any], after: Mapping[str, Any], next_but_one: Mapping[str, Any]) -> Iterator[Update]:
    end_s, launch_s = step.get("device_end_s"), after.get("launch_s")
    if end_s is None or launch_s is None:
        return
    num_seqs = step["num_prefill_seqs"] + step["num_decode_seqs"]
    if step.get("update_end_s") is not None and after.get("schedule_end_s") is not None:
        seconds = step["update_end_s"] - max(end_s, after["schedule_end_s"] + launch_s)
    elif step["output_s"] - end_s < WAITED_S:
        seconds = next_but_one["start_s"] - end_s
    else:
        return
    if seconds > 0:
        yield Update(num_seqs, seconds)


def _steps(text: str, name: str) -> Iterator[tuple[int, str, dict[str, Any] | None]]:
    """Yield each step's line number, recording and columns; None in their place where another recording begins."""
    columns: list[str] | None = None
    recording = ""
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ProfileError(f"'{name}' line {number} is not JSON: {error}") from None
        if columns is None:
            if not isinstance(record, dict) or record.get("format") != FORMAT or record.get("version") != VERSION:
                raise ProfileError(f"'{name}' is no recording of version {VERSION}: see its first line")
            columns = record.get("steps")
            if not isinstance(columns, list):
                raise ProfileError(f"'{name}' names no columns of its steps in its first line")
            missing = [column for column in _COLUMNS if column not in columns]
            if missing:
                raise ProfileError(f"'{name}' records steps without {', '.join(missing)}")
        elif isinstance(record, dict):
            recording = record.get("recording", "")
            yield number, recording, None
        elif not isinstance(record, list) or not record:
            raise ProfileError(f"'{name}' line {number} is neither a recording's name nor a row")
        elif record[0] == "step":
            if len(record) != len(columns) + 1:
                raise ProfileError(f"'{name}' line {number} has {len(record) - 1} values for {len(columns)} columns")
            step = dict(zip(columns, record[1:], strict=True))
            for column in _COLUMNS:
                kind = float if column in ("start_s", "output_s") else int
                if isinstance(step[column], bool) or not isinstance(step[column], int | kind):
                    raise ProfileError(f"'{name}' line {number}: {column} is {step[column]!r}, no {kind.__name__}")
            for column in _OPTIONAL:
                value = step.get(column)
                if isinstance(value, bool) or not isinstance(value, int | float | None):
                    raise ProfileError(f"'{name}' line {number}: {column} is {value!r}, no float and no null")
            yield number, recording, step


def _pace_s(before: Mapping[str, Any], step: Mapping[str, Any]) -> float:
    ended_s, end_s = before.get("device_end_s"), step.get("device_end_s")
    if ended_s is None or end_s is None:
        ended_s, end_s = before["output_s"], step["output_s"]
    return float(end_s - ended_s)


def _sample(step: dict[str, Any], seconds: float, largest_captured: int, held_out: bool) -> Sample:
    tokens, decodes = step["num_prefill_tokens"], step["num_decode_seqs"]
    kind: Kind = "decode" if not tokens else "mixed" if decodes else "prefill"
    mode: Mode = "graphs" if tokens + decodes <= largest_captured else "eager"
    return Sample(
        kind=kind,
        num_prefill_tokens=tokens,
        num_prefill_seqs=step["num_prefill_seqs"],
        prefill_kv_pairs=step["prefill_kv_pairs"],
        num_decode_seqs=decodes,
        decode_kv_tokens=step["decode_kv_tokens"],
        k=step["k_exec"],
        mode=mode,
        clock="step",
        repetitions=1,
        median_s=seconds,
        p10_s=seconds,
        p90_s=seconds,
        held_out=held_out,
    )
