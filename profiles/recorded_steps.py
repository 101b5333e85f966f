"""Steps of a recorded continuous-batching run, as samples; those of its calibration recording alone may be fitted.

A recording is JSON lines: a header that names the columns, then a line a recording's name, request or step, as
``simmoe.live.measure`` writes them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from simmoe.errors import ProfileError
from simmoe.profiles.reading import NotJson, parse_json, read_text
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


#: The device was idle before a step where it began later than this share of the pace after the step before.
IDLE_SHARE = 0.02

#: A step whose launch ended sooner than its device, by this share of the pace, was not held up by it.
LAUNCHED_AHEAD = 0.13


class RecordedStep(NamedTuple):
    """One step of a recorded run."""

    load: str
    """The recording it is of, such as a burst or Poisson arrivals."""
    sample: Sample
    """Its shape, and under the step clock the seconds from the end of the step before to its own; where it does not
    follow one, from its scheduling to its output."""
    follows: bool
    """It was scheduled before the output of the step before arrived: the engine was kept busy, its scheduling
    asynchronous, and nothing but the loop itself decided when it ended."""
    worker_launch_s: float | None = None
    """What the worker took to launch it."""
    device_bound: bool | None = None
    """Whether the device ran it without waiting for its launch, as the clocks of both tell; None where they do not."""
    launch_s: float | None = None
    """On a busy engine, from when the step before last had been taken in to when this one was launched."""
    update_s: float | None = None
    """What it took to take it in, once the device was done with it and the next was launched."""
    late_s: float | None = None
    """From when the device was done with the step before to when this one was launched; below 0: it was by then."""

    @property
    def num_seqs(self) -> int:
        """Prompts and decoding sequences of the step."""
        return self.sample.num_prefill_seqs + self.sample.num_decode_seqs


def read_recording(path: str | os.PathLike[str], captured_sizes: Sequence[int]) -> list[RecordedStep]:
    """Return every step of a file's recordings, in order.

    Ends are taken on the device where the recording has them (``device_end_s``), else when the host saw the output.
    Steps of the recording named ``calibration`` alone are not ``held_out``.

    Args:
        path: JSON lines, gzipped when the name ends in ``.gz``.
        captured_sizes: of the engine that was recorded, ascending.
    Raises:
        ProfileError: names the file, the line and what is wrong with it.
    """
    name, header = os.fspath(path), read_header(path)
    largest = captured_sizes[-1] if captured_sizes else 0
    steps: list[RecordedStep] = []
    train: list[dict[str, Any]] = []
    for number, recording, step in _steps(_text(path), name, header):
        if step is None:
            train = []
            continue
        follows = bool(train) and step["start_s"] <= train[-1]["output_s"]
        train = [*train[-2:], step] if follows else [step]
        seconds = _pace_s(train[-2], step) if follows else step["output_s"] - step["start_s"]
        try:
            sample = _sample(step, seconds, largest, recording != CALIBRATION)
        except ProfileError as error:
            raise ProfileError(f"'{name}' line {number}: {error}") from None
        bound = _device_bound(train[-2], step) if follows else None
        launch_s = _launch_s(train[0], step) if len(train) == 3 else None
        late_s = _late_s(train[-2], step) if follows else None
        worker_launch_s = step.get("launch_s")
        steps.append(RecordedStep(recording, sample, follows, worker_launch_s, bound, launch_s, late_s=late_s))
        if len(train) == 3:
            steps[-3] = steps[-3]._replace(update_s=_update_s(*train))
    return steps


def read_recorded_steps(path: str | os.PathLike[str], captured_sizes: Sequence[int]) -> list[Sample]:
    """Return the samples of :func:`read_recording` of steps that followed another without a pause."""
    return [step.sample for step in read_recording(path, captured_sizes) if step.follows]


def is_recording(path: str | os.PathLike[str]) -> bool:
    """Whether a file's first line says it is a recording.

    Raises:
        ProfileError: the file cannot be read.
    """
    try:
        head = parse_json(_text(path).partition("\n")[0], "")
    except NotJson:
        return False
    return isinstance(head, dict) and head.get("format") == FORMAT


def read_header(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return the first line of a recording: its columns, and the engine it is of.

    Raises:
        ProfileError: the file cannot be read, or is no recording.
    """
    name = os.fspath(path)
    if not is_recording(path):
        raise ProfileError(
            f"'{name}' is no recording, whose first line says format '{FORMAT}' (the samples a table is fitted to "
            f"cannot check it); recordings are the continuous-batching runs that 'simmoe profile measure' writes"
        )
    return _checked_header(parse_json(_text(path).partition("\n")[0], f"'{name}' line 1"), name)


def _text(path: str | os.PathLike[str]) -> str:
    return read_text(path, "the recording")


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


def _launch_s(taken_in: Mapping[str, Any], step: Mapping[str, Any]) -> float | None:
    """Return what the host took to compose and launch a step after it had taken in the one before last."""
    began_s, scheduled_s, launch_s = taken_in.get("update_end_s"), step.get("schedule_end_s"), step.get("launch_s")
    if began_s is None or scheduled_s is None or launch_s is None:
        return None
    seconds = scheduled_s + launch_s - began_s
    return float(seconds) if seconds > 0 else None


def _update_s(step: Mapping[str, Any], after: Mapping[str, Any], next_but_one: Mapping[str, Any]) -> float | None:
    """Return what the host took to take a step in.

    Recordings that lack the end of that show when the next but one was begun, which follows at once where the host
    waited for the device.
    """
    end_s, launch_s = step.get("device_end_s"), after.get("launch_s")
    if end_s is None or launch_s is None:
        return None
    if step.get("update_end_s") is not None and after.get("schedule_end_s") is not None:
        seconds = step["update_end_s"] - max(end_s, after["schedule_end_s"] + launch_s)
    elif step["output_s"] - end_s < WAITED_S:
        seconds = next_but_one["start_s"] - end_s
    else:
        return None
    return float(seconds) if seconds > 0 else None


def _late_s(before: Mapping[str, Any], step: Mapping[str, Any]) -> float | None:
    """Return how much later than the device was done with the step before this one was launched."""
    ended_s, scheduled_s, launch_s = before.get("device_end_s"), step.get("schedule_end_s"), step.get("launch_s")
    if ended_s is None or scheduled_s is None or launch_s is None:
        return None
    return float(scheduled_s + launch_s - ended_s)


def _device_bound(before: Mapping[str, Any], step: Mapping[str, Any]) -> bool | None:
    """Return whether the device, busy until it began a step, ran it without waiting for its launch.

    A graph of a whole decode-only step begins when it is launched, the pieces of a step with prompts as they are.
    """
    ended_s, began_s, end_s = before.get("device_end_s"), step.get("device_start_s"), step.get("device_end_s")
    late_s = _late_s(before, step)
    if ended_s is None or began_s is None or end_s is None or late_s is None:
        return None
    if began_s - ended_s > IDLE_SHARE * (end_s - ended_s):
        return False
    if not step["num_prefill_tokens"]:
        return late_s <= 0
    return bool(late_s <= (1 - LAUNCHED_AHEAD) * (end_s - ended_s))


def _steps(text: str, name: str, header: Mapping[str, Any]) -> Iterator[tuple[int, str, dict[str, Any] | None]]:
    """Yield each step's line number, recording and columns; None in their place where another recording begins."""
    recording, before_s = "", -math.inf
    for number, line in enumerate(text.split("\n"), start=1):
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
