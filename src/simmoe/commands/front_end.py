"""A front end's times, from the clocks that a live record keeps of each request.

They are taken from stamps that no queue of the engine's is in: how long a request that is alone in its front end takes
to the engine, how far apart requests that wait for it leave it, how long a first token takes from the engine, having
taken in its step, to the client.

From the front end to the engine are two times: until a step that a busy engine composes takes a request along, and,
longer, until an idle engine has read it and begins to compose.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simmoe.commands.joining import joining_cut
from simmoe.commands.record_times import read_times
from simmoe.errors import RecordError, UsageError
from simmoe.live.driving.recording import CLOCKS_FILE
from simmoe.records import Columns, RunRecord
from simmoe.simulator.config import FrontEndConfig

FloatArray = npt.NDArray[np.float64]

_LEAST = 1.0
"""Per cent: of many times, so many are left out below the least, which may be a clock's jitter."""

_ROUNDS = 50
"""Rounds after which who waited is settled; a few suffice."""


class Handover(NamedTuple):
    """From the front end to the engine, seconds."""

    reach_s: float
    """Until a step that a busy engine composes takes a request along."""
    wakeup_s: float
    """What an idle engine takes besides until it begins to compose."""


def read_clocks(folder: Path) -> Columns | None:
    """Return when a record's requests were queued by their engine and had a first output, in its order; None without.

    Raises:
        RecordError: they cannot be read, or are no times.
    """
    path = folder / CLOCKS_FILE
    try:
        clocks = read_times(path, ("queued_s", "first_output_s"), "requests")
    except FileNotFoundError:
        return None
    if any((column < 0).any() for column in clocks.values()):
        raise RecordError(f"'{path}' has times before the first request's arrival, 0 s")
    return clocks


def front_end_times(
    record: RunRecord,
    clocks: Mapping[str, FloatArray],
    loop: Columns | None = None,
    service_s: float | None = None,
) -> FrontEndConfig:
    """Return what the front ends of a live run added to what its engines took.

    * Requests that come to an idle front end take ``ingress_s`` and ``ingress_service_s`` until the engine can take
      them along: to its process, and what :func:`handover` tells from there; and ``wakeup_s`` more if it idles.
    * The time from when the engine has taken in a step to its first tokens' arrival at the client is a line in the
      step's tokens, through the means of the lower and of the upper half of the tokens.

    Args:
        record: of a live run, its requests' dispatch known.
        clocks: from :func:`read_clocks`.
        loop: from :func:`~simmoe.commands.joining.read_loop`.
        service_s: work on a request; None: that of this run.
    Raises:
        RecordError: the clocks are of another number of requests, or tell of none, or of what no front end takes.
    """
    _require_rows(record, clocks)
    requests = record.requests
    heard = ~np.isnan(clocks["first_output_s"] + clocks["queued_s"] + requests["dispatched_s"])
    heard &= ~np.isnan(requests["first_token_s"])
    if not heard.any():
        raise RecordError(f"{CLOCKS_FILE} tells of no request when it was queued and had its first output")
    if service_s is None:
        service_s = service_time(record)
    handed_s = requests["dispatched_s"] - requests["arrival_s"]
    alone = heard & ~_waited(record, service_s)
    alone_s = handed_s[alone if alone.any() else heard]
    egress_s = (requests["first_token_s"] - clocks["first_output_s"])[heard]
    constant_s, per_token_s = _line(_step_tokens(record, clocks)[heard], egress_s)
    reach_s, wakeup_s = handover(record, clocks, loop)
    try:
        return FrontEndConfig(
            ingress_s=max(0.0, float(np.mean(alone_s)) - service_s + reach_s),
            egress_s=constant_s,
            ingress_service_s=service_s,
            egress_per_token_s=per_token_s,
            wakeup_s=wakeup_s,
        )
    except UsageError as error:
        raise RecordError(f"{CLOCKS_FILE} and the record's times are of no front end: {error}") from None


def handover(record: RunRecord, clocks: Mapping[str, FloatArray], loop: Columns | None = None) -> Handover:
    """Return how long an engine takes a request from the front end.

    An idle one has it in its queue, and composes, after the least time that one takes there: what is more, the engine's
    loop held up. A busy one takes it along sooner, if the record tells when steps were composed; otherwise likewise.

    Args:
        record: of a live run.
        clocks: from :func:`read_clocks`.
        loop: from :func:`~simmoe.commands.joining.read_loop`.
    Raises:
        RecordError: the clocks are of another number of requests.
    """
    _require_rows(record, clocks)
    least_s = handover_time(record, clocks)
    cut = joining_cut(record, loop, least_s)
    reach_s = least_s if cut is None else cut.seconds
    return Handover(reach_s, least_s - reach_s)


def handover_time(record: RunRecord, clocks: Mapping[str, FloatArray]) -> float:
    """Return the least seconds from a front end to its engine's queue.

    Args:
        record: of a live run.
        clocks: from :func:`read_clocks`, of as many requests.
    """
    taken_s = clocks["queued_s"] - record.requests["dispatched_s"]
    known_s = taken_s[~np.isnan(taken_s)]
    return max(0.0, float(np.percentile(known_s, _LEAST))) if len(known_s) else 0.0


def at_engine(record: RunRecord, clocks: Mapping[str, FloatArray], reach_s: float) -> RunRecord:
    """Return a live run's record as if its clock of dispatch were a simulated run's: at the engine, not the front end.

    A request that waits there for the engine's loop to take it in is in its reach by then, in a simulated run too.

    Args:
        record: of a live run.
        clocks: from :func:`read_clocks`.
        reach_s: from the front end to there, as :func:`handover` tells.
    Raises:
        RecordError: the clocks are of another number of requests.
    """
    _require_rows(record, clocks)
    handed_s, scheduled_s = record.requests["dispatched_s"], record.requests["scheduled_s"]
    latest_s = np.fmin(clocks["queued_s"], scheduled_s)
    reached_s = np.maximum(handed_s, np.fmin(handed_s + reach_s, latest_s))
    return replace(record, requests={**record.requests, "dispatched_s": reached_s})


def _require_rows(record: RunRecord, clocks: Mapping[str, FloatArray]) -> None:
    num_rows, num_requests = len(clocks["queued_s"]), len(record.requests["arrival_s"])
    if num_rows != num_requests:
        raise RecordError(f"{CLOCKS_FILE} is of {num_rows} requests; the record has {num_requests}")


def service_time(record: RunRecord) -> float:
    """Return the seconds a front end works on a request: the mean distance of those that wait for it; 0: none did."""
    gaps_s = _gaps(record)
    service_s, before_s = _least_ingress(record), np.inf
    for _ in range(_ROUNDS):
        waited = _waited(record, service_s)
        service_s, before_s = float(np.mean(gaps_s[waited])) if waited.any() else 0.0, service_s
        if service_s == before_s:
            break
    return service_s


def _waited(record: RunRecord, service_s: float) -> npt.NDArray[np.bool_]:
    """[num_requests] whether a request came while its front end worked on the one before."""
    requests = record.requests
    came_s = requests["arrival_s"] + _least_ingress(record) - service_s
    waited: npt.NDArray[np.bool_] = came_s < requests["dispatched_s"] - _gaps(record)
    return waited


def _gaps(record: RunRecord) -> FloatArray:
    """[num_requests] seconds from when the request before left the front end of the rank; infinite for the first."""
    dispatched_s, ranks = record.requests["dispatched_s"], record.requests["dp_rank"]
    gaps_s = np.full(len(ranks), np.inf)
    for rank in np.unique(ranks):
        mine = np.flatnonzero(ranks == rank)
        mine = mine[np.argsort(dispatched_s[mine], kind="stable")]
        gaps_s[mine[1:]] = np.diff(dispatched_s[mine])
    return gaps_s


def _least_ingress(record: RunRecord) -> float:
    return float(np.nanmin(record.requests["dispatched_s"] - record.requests["arrival_s"]))


def _step_tokens(record: RunRecord, clocks: Mapping[str, FloatArray]) -> FloatArray:
    """[num_requests] tokens handed over with each request's first: its step's; 0 where steps are not known."""
    steps, ranks = record.steps, record.requests["dp_rank"]
    tokens = np.zeros(len(ranks))
    if steps is None:
        return tokens
    for rank in np.unique(ranks[ranks >= 0]):
        made = (steps["dp_rank"] == rank) & (steps["num_prefill_tokens"] > 0)
        if not made.any():
            continue
        ends_s = steps["start_s"][made] + steps["duration_s"][made]
        mine = np.flatnonzero(ranks == rank)
        step = np.searchsorted(ends_s, clocks["first_output_s"][mine], side="right") - 1
        tokens[mine] = steps["num_decode_tokens"][made][np.maximum(0, step)] + 1
    return tokens


def _line(tokens: FloatArray, seconds: FloatArray) -> tuple[float, float]:
    """Return the constant and the slope, neither below 0, through the means of both halves of the tokens."""
    few = tokens <= np.median(tokens)
    if few.all():
        return max(0.0, float(np.mean(seconds))), 0.0
    (few_tokens, few_s), (many_tokens, many_s) = ((np.mean(tokens[h]), np.mean(seconds[h])) for h in (few, ~few))
    slope_s = max(0.0, float((many_s - few_s) / (many_tokens - few_tokens)))
    return max(0.0, float(np.mean(seconds) - slope_s * np.mean(tokens))), slope_s
