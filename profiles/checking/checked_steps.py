"""Recorded steps with the time a table gives each of them, and what most of that time is.

Where the loop of the recorded engine was clocked, the same steps are predicted with what the host took for each as
well: what is off then is not the host.
"""

from __future__ import annotations

import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from simmoe.errors import ProfileError
from simmoe.profiles.checking.same_engine import require_same_engine
from simmoe.profiles.loop import paces, synchronous_paces
from simmoe.profiles.recorded_steps import RecordedStep, read_recording
from simmoe.profiles.recording_file import read_header
from simmoe.profiles.residuals import Predictor
from simmoe.profiles.shape import StepParts, StepShape
from simmoe.profiles.step_cost import ProfileStepCost, Surfaces
from simmoe.profiles.table import StepTable

#: Upper ends of the size classes errors are shown by, in tokens that run.
SIZE_CLASSES = (64, 512, 2048, 8192)

#: Steps with prompt tokens, and steps without.
WITH_PROMPTS, DECODE_ONLY = "prompts", "decode"


class Clocked(NamedTuple):
    """A recorded step whose host was clocked."""

    predicted_s: float
    """With the host's own times, of this step and those before it, in place of the table's."""
    host_s: float
    """What the host took to launch it and to take it in."""
    table_host_s: float
    """The table's share."""


class CheckedStep(NamedTuple):
    """One recorded step."""

    steps: str
    """WITH_PROMPTS or DECODE_ONLY."""
    launch: str
    """'captured' or 'eager'."""
    num_tokens: int
    k: int
    part: str
    """What most of the predicted time is: 'host'; 'grid', what tokens and experts cost; or 'attention'."""
    predicted_s: float
    measured_s: float
    load: str = ""
    """The recording it is of, such as a burst or Poisson arrivals."""
    clocked: Clocked | None = None
    """Where the recording has the host's times."""

    @property
    def size_rank(self) -> int:
        """The place of its tokens among SIZE_CLASSES."""
        return bisect_left(SIZE_CLASSES, self.num_tokens)

    @property
    def size_class(self) -> str:
        """The range of SIZE_CLASSES its tokens lie in."""
        ends = (0, *SIZE_CLASSES)
        if self.size_rank == len(SIZE_CLASSES):
            return f"above {ends[-1]:,}"
        return f"{ends[self.size_rank] + 1:,}-{ends[self.size_rank + 1]:,}"


class Checked(NamedTuple):
    """The steps of recordings."""

    steps: list[CheckedStep]
    """Those that took no part in a fit: what a table is judged by."""
    calibration: list[CheckedStep]
    """Those of calibration recordings, which a fit may have learned the host from."""


def checked_steps(table: StepTable, paths: Iterable[str | os.PathLike[str]]) -> Checked:
    """Return every step of the recordings that followed another without a pause, with the time a table gives it.

    Steps that follow one another are composed as the engine's loop does (:mod:`simmoe.profiles.loop`), from nothing but
    their shapes.

    Args:
        table: a table of the engine that was recorded.
        paths: recordings.
    Raises:
        ProfileError: a file that is no recording, is of another engine, or holds no step of a busy engine that was
            kept out of the fit.
    """
    checked = Checked([], [])
    seen: set[Path] = set()
    for path in paths:
        if Path(path).resolve() in seen:
            raise ProfileError(f"the recording '{os.fspath(path)}' is named twice")
        seen.add(Path(path).resolve())
        header = _header(table, path)
        is_async = bool(header.get("async_scheduling", True))
        backend = table.distributed_executor_backend
        recorded = read_recording(path, table.captured_sizes, table.captured_ks, backend, is_async)
        if not any(step.follows and step.sample.held_out for step in recorded):
            followed = any(step.follows for step in recorded)
            what = "that was kept out of the fit" if followed else "that followed another without a pause"
            raise ProfileError(f"'{os.fspath(path)}' holds no step {what}; a table is checked on steps it never saw")
        for step, held_out in _predicted(table, recorded, is_async):
            (checked.steps if held_out else checked.calibration).append(step)
    return checked


def _predicted(
    table: StepTable, recorded: Sequence[RecordedStep], async_scheduling: bool
) -> Iterator[tuple[CheckedStep, bool]]:
    """Yield the steps that follow another, each with whether it was kept out of the fit."""
    cost = ProfileStepCost(Surfaces.of(table), async_scheduling)
    shapes = [r.sample.shape._replace(k_exec=r.sample.k * table.k_granularity) for r in recorded]
    parts = [cost.parts_s(shape) for shape in shapes]
    follows = [r.follows for r in recorded]
    clocked: list[Clocked | None] = [None] * len(parts)
    if not async_scheduling:
        predicted = list(synchronous_paces(zip(follows, parts, strict=True)))
    else:
        backend = table.distributed_executor_backend
        predicted = list(paces(zip(follows, parts, strict=True), backend))
        own = [_by_clock(r, p) for r, p in zip(recorded, parts, strict=True)]
        known = list(paces(((f, o or p) for f, o, p in zip(follows, own, parts, strict=True)), backend))
        clocked = [Clocked(s, o.host_s, p.host_s) if o else None for s, o, p in zip(known, own, parts, strict=True)]
    part = _classifier(table, async_scheduling)
    for r, shape, predicted_s, known_host in zip(recorded, shapes, predicted, clocked, strict=True):
        if r.follows:
            kind = DECODE_ONLY if r.sample.kind == "decode" else WITH_PROMPTS
            launch = "captured" if r.sample.mode == "graphs" else "eager"
            mostly = part(shape, predicted_s)
            measured_s = r.sample.median_s
            yield (
                CheckedStep(
                    kind, launch, shape.num_tokens, shape.k_exec, mostly, predicted_s, measured_s, r.load, known_host
                ),
                r.sample.held_out,
            )


def _by_clock(step: RecordedStep, parts: StepParts) -> StepParts | None:
    """Return a step's parts with what the host took for it; None where that was not clocked."""
    if step.launch_s is None:
        return None
    update_s = parts.update_s if step.update_s is None else step.update_s
    return parts.on_host(step.launch_s, update_s)


def _classifier(table: StepTable, async_scheduling: bool) -> Callable[[StepShape, float], str]:
    """Return what says of a shape and the seconds predicted for it what most of them are."""
    predictor = Predictor(table, async_scheduling)
    attention_free = replace(
        table,
        attention=table.attention._replace(prefill_pair_s=0.0, prefill_seq_s=0.0, mixed_kv_token_s=0.0),
        decode_kv=tuple((size, 0.0) for size, _ in table.decode_kv),
    )
    grids = Predictor(attention_free, async_scheduling)

    def part(shape: StepShape, predicted_s: float) -> str:
        device_s = predictor.device_s(shape)
        if (predicted_s > device_s) if async_scheduling else (predicted_s > 2 * device_s):
            return "host"
        return "attention" if 2 * grids.device_s(shape) < device_s else "grid"

    return part


def _header(table: StepTable, path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return a recording's first line, after checking that it is of the table's engine."""
    header = read_header(path)
    estimate = table.provenance.get("estimate")
    estimated = [{**estimate, "card": estimate["card"]["driver_name"]}] if estimate else []
    for run in [*table.provenance.get("runs", []), *estimated]:
        require_same_engine(header, run, os.fspath(path), f"'{table.name}'", "check a table on a run of its own engine")
    return header
