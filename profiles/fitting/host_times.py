"""The host's share of a step on one machine, from the times its host took, in place of the one a fit found.

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
from simmoe.profiles.fitting.evidence import LAUNCH_WAITED
from simmoe.profiles.fitting.regression import FloatArray
from simmoe.profiles.table import HostShare, MixedHost, StepTable

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
    """To compose and launch it; of workers of their own, to launch it."""
    update_s: float
    """To take its output in; where workers of their own launch, and to compose the next but one."""


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
    # what is taken in while workers launch is no part of a share
    total_s = np.array([time.launch_s + (0.0 if table.launches_apart else time.update_s) for time in times])
    seqs = np.array([time.num_seqs for time in times], dtype=np.float64)
    decodes = np.array([not time.num_prefill_tokens for time in times], dtype=bool)
    largest = table.captured_sizes[-1] if table.captured_sizes else 0
    taken = np.array([_path(time, largest, table.mixed_host) for time in times])
    alike = (taken == ("full" if largest else "eager")) & decodes
    if alike.sum() < LEAST_STEPS or (~decodes).sum() < LEAST_STEPS // 2:
        raise ProfileError(
            f"the host's times are of {alike.sum()} decode-only steps and {(~decodes).sum()} with prompts; they tell "
            f"of a host from {LEAST_STEPS} and {LEAST_STEPS // 2} on: record some ten seconds of load"
        )
    line = _line(seqs[alike], total_s[alike])

    def share(path: str, fitted: HostShare) -> HostShare:
        mine = taken == path
        if path == "full":
            return line
        if mine.sum() < LEAST_STEPS // 2:
            return HostShare(fitted.base_s, line.per_seq_s)
        return HostShare(_constant(total_s[mine] - line.per_seq_s * seqs[mine]), line.per_seq_s)

    host = {path: share(path, fitted) for path, fitted in table.host.items()}
    mixed = table.mixed_host
    if mixed is not None:
        base_s, per_seq_s = share(APART, mixed.share)
        mixed = mixed._replace(share=HostShare(max(base_s, host["piecewise"].base_s), per_seq_s))
    return replace(table, host=host, mixed_host=mixed, update=_line(seqs, np.array([time.update_s for time in times])))


def _path(time: HostTime, largest_captured: int, mixed: MixedHost | None) -> str:
    """Return how a step's kernels were launched: one of table.PATHS, or APART."""
    if time.num_tokens > largest_captured:
        return "eager"
    if mixed is not None and mixed.is_apart(time.num_prefill_tokens, time.num_tokens - time.num_prefill_tokens):
        return APART
    return "piecewise" if time.num_prefill_tokens else "full"


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
