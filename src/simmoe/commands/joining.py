"""When requests join steps, from the clocks that a live record keeps of its engines' loop.

A busy engine composes a step of what has come to its process by then: while its loop waits for the device, messages are
read. An idle engine waits for the message itself, so that reading it delays the step.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simmoe.commands.record_times import read_times
from simmoe.commands.recorded_config import composes_ahead
from simmoe.live.driving.recording import HOST_COLUMNS, HOST_FILE
from simmoe.records import Columns, RunRecord

FloatArray = npt.NDArray[np.float64]

_CUT_S = 2e-5
"""Cuts are tried so far apart, and"""
_LONGEST_S = 1e-2
"""up to here: no process reads a message for longer."""

_AT_ONCE_S = 1e-6
"""A step that follows another begins at its end, to the bit."""


class Cut(NamedTuple):
    """From dispatch until the next step that is composed takes a request along."""

    seconds: float
    wrong: float
    """Share of steps joined, and of those before them, that this explains wrongly."""
    wrong_at_least: float
    """Likewise of the least time to the engine's queue."""


def read_loop(folder: Path, record: RunRecord) -> Columns | None:
    """Return what the host took for each step, seconds; None where a record keeps no such times, or no steps.

    Args:
        folder: of the record.
        record: what it holds.
    Raises:
        RecordError: it cannot be read, or is of another number of steps.
    """
    num_steps = 0 if record.steps is None else len(record.steps["start_s"])
    if not num_steps:
        return None
    try:
        return read_times(folder / HOST_FILE, HOST_COLUMNS, "steps", num_steps)
    except FileNotFoundError:
        return None


def joining_cut(record: RunRecord, loop: Columns | None, least_s: float) -> Cut | None:
    """Return how long after its dispatch the next step composed takes a request along, as most of them show.

    A step is composed once the one before last is taken in, as the loop of an engine that launches its steps has it.

    Args:
        record: of a live run, its requests' dispatch known.
        loop: from :func:`read_loop`.
        least_s: the least seconds from the front end to the engine's queue, of which it is a part.
    Returns:
        The cut; None where the record does not tell when steps that followed others were composed.
    """
    if loop is None or not composes_ahead(record):
        return None
    offered = _offered(record, loop)
    if not offered:
        return None
    before_s, joined = (np.array(column) for column in zip(*offered, strict=True))
    cuts_s = [*np.arange(0.0, min(least_s, _LONGEST_S), _CUT_S), least_s]
    wrong = [float(np.mean((before_s >= cut_s) != joined)) for cut_s in cuts_s]
    best = int(np.argmin(wrong))
    return Cut(float(cuts_s[best]), wrong[best], wrong[-1])


def _offered(record: RunRecord, loop: Columns) -> list[tuple[float, bool]]:
    """Return, of each request, the step that it joined and the one before: how long it had been dispatched when that
    was composed, and whether it joined it."""
    steps, requests = record.steps, record.requests
    assert steps is not None
    offered = []
    for rank in np.unique(steps["dp_rank"]):
        mine = steps["dp_rank"] == rank
        start_s, duration_s = steps["start_s"][mine], steps["duration_s"][mine]
        composed_s = _composed_s(start_s, start_s + duration_s, loop["launch_s"][mine], loop["update_s"][mine])
        known = (requests["dp_rank"] == rank) & ~np.isnan(requests["dispatched_s"] + requests["scheduled_s"])
        for request in np.flatnonzero(known):
            step = int(np.searchsorted(start_s, requests["scheduled_s"][request] - _AT_ONCE_S))
            for offering in (step - 1, step):
                if 0 <= offering < len(start_s) and not np.isnan(composed_s[offering]):
                    before_s = float(composed_s[offering] - requests["dispatched_s"][request])
                    offered.append((before_s, offering == step))
    return offered


def _composed_s(start_s: FloatArray, end_s: FloatArray, launch_s: FloatArray, update_s: FloatArray) -> FloatArray:
    """[num_steps] when each step of a rank began to be composed; NaN where it did not follow two others at once."""
    composed_s = np.full(len(start_s), np.nan)
    follows = np.concatenate([[False], start_s[1:] - end_s[:-1] < _AT_ONCE_S])
    for i in range(2, len(start_s)):
        if follows[i] and follows[i - 1]:
            launched_s = composed_s[i - 1] + launch_s[i - 1]
            composed_s[i] = np.fmax(end_s[i - 2], launched_s) + update_s[i - 2]
    return composed_s
