"""The host's share of a step, from the times a host took: how fast that of one machine is, whose device is a table's.

What the host does for a step shows in no step's own time where the device is slower. Where an engine's loop was clocked
the host's part of every step is known, of long steps too, and its mean is what a queue feels: a host that is at times
slower delays what waits by as much.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from simmoe.errors import ProfileError
from simmoe.profiles.evidence import LAUNCH_WAITED
from simmoe.profiles.regression import FloatArray
from simmoe.profiles.table import PATHS, HostShare, MixedHost, StepTable

APART = "apart"
"""Beside the launch paths, a captured step whose prompts and decodes are launched apart."""

LEAST_STEPS = 100
"""Decode-only steps, and half as many with prompts: fewer tell little of a host that wanders."""


class HostTime(NamedTuple):
    """What the host took for one step."""

    num_prefill_tokens: int
    num_tokens: int
    num_seqs: int
    """Prompts and decoding sequences."""
    launch_s: float
    """To compose and launch it."""
    update_s: float
    """To take its output in."""


def on_host(table: StepTable, times: Sequence[HostTime]) -> StepTable:
    """Return the table of the same engine on another host.

    A sequence takes the host as long however a step's kernels are launched: decode-only steps tell, and steps with
    prompts what each launch path takes besides. A path that no step took keeps its own constant. Steps that took more
    than LAUNCH_WAITED times their share are left out: something was compiled, or the device's queue was full.

    Args:
        table: of the engine that was clocked; its ``captured_sizes`` say which path a step took.
        times: of steps of an engine that schedules asynchronously.
    Raises:
        ProfileError: too few decode-only steps, or none with prompts.
    """
    total_s = np.array([time.launch_s + time.update_s for time in times])
    seqs = np.array([time.num_seqs for time in times], dtype=np.float64)
    decodes = np.array([not time.num_prefill_tokens for time in times], dtype=bool)
    largest = table.captured_sizes[-1] if table.captured_sizes else 0
    mixed = table.mixed_host
    taken = np.array([_path(time, largest, mixed) for time in times])
    first = PATHS[0] if largest else PATHS[2]
    alike = (taken == first) & decodes
    if alike.sum() < LEAST_STEPS or (~decodes).sum() < LEAST_STEPS // 2:
        raise ProfileError(
            f"the host's times are of {alike.sum()} decode-only steps and {(~decodes).sum()} with prompts; they tell "
            f"of a host from {LEAST_STEPS} and {LEAST_STEPS // 2} on: record some ten seconds of load"
        )
    line = _line(seqs[alike], total_s[alike])
    host = {}
    for path, share in table.host.items():
        mine = taken == path
        base_s = share.base_s
        if path == PATHS[0]:
            base_s = line.base_s
        elif mine.sum() >= LEAST_STEPS // 2:
            base_s = _constant(total_s[mine] - line.per_seq_s * seqs[mine])
        host[path] = HostShare(base_s, line.per_seq_s)
    if mixed is not None:
        mine = taken == APART
        base_s = mixed.share.base_s
        if mine.sum() >= LEAST_STEPS // 2:
            base_s = _constant(total_s[mine] - line.per_seq_s * seqs[mine])
        mixed = mixed._replace(share=HostShare(max(base_s, host[PATHS[1]].base_s), line.per_seq_s))
    return replace(table, host=host, mixed_host=mixed, update=_line(seqs, np.array([time.update_s for time in times])))


def _path(time: HostTime, largest_captured: int, mixed: MixedHost | None) -> str:
    if time.num_tokens > largest_captured:
        return PATHS[2]
    if mixed is not None and mixed.above_tokens < time.num_prefill_tokens < time.num_tokens:
        return APART
    return PATHS[1] if time.num_prefill_tokens else PATHS[0]


def _line(seqs: FloatArray, seconds: FloatArray) -> HostShare:
    """Return the line through the means, neither term below 0, of all that is not far above it."""
    from scipy.optimize import nnls

    terms = np.stack([np.ones_like(seqs), seqs], axis=1)
    kept = np.ones(len(seqs), dtype=bool)
    while True:
        base_s, per_seq_s = nnls(terms[kept], seconds[kept])[0].tolist()
        usual = kept & (seconds <= LAUNCH_WAITED * (base_s + per_seq_s * seqs))
        if (usual == kept).all():
            return HostShare(base_s, per_seq_s)
        kept = usual


def _constant(seconds: FloatArray) -> float:
    return float(np.mean(seconds[seconds <= LAUNCH_WAITED * np.median(seconds)]))
