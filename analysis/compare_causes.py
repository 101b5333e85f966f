"""Where the difference between two records of one workload comes from: arrivals, dispatch, queueing, step time.

A request's TTFT is the sum of three intervals of its record: dispatch (arrival to the rank's queue), queueing (to the
first step that computes any of it) and its own steps (to the first token). ``direct_causes`` compares those intervals
and no more. But a queue has causes of its own: bunched arrivals lengthen it, and slower steps do, the more the busier
the rank. Who can repeat the first run with one thing changed at a time (the ``compare`` command can, if the first is
simulated) measures the causes themselves and passes the mean latencies to ``Causes.of_chain``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from simmoe.analysis.compare import Pairing
from simmoe.analysis.metrics import FloatColumn
from simmoe.records import Columns, RunRecord

CAUSES = ("arrivals", "dispatch", "step time", "queueing")
"""In the order they are changed; the last is what no change before it explains: order, decisions, limits."""


class MeanLatency(NamedTuple):
    """Means over the paired requests, in seconds."""

    ttft_s: float
    e2e_s: float


@dataclass(frozen=True, slots=True)
class Causes:
    """The mean difference of paired requests, second less first, by CAUSES; the parts add up to it."""

    ttft_s: dict[str, float]
    e2e_s: dict[str, float]
    counterfactual: bool
    """Measured by repeating the first run; else its intervals compared, with arrivals in the queueing they cause."""

    @classmethod
    def of_chain(cls, chain: Sequence[MeanLatency]) -> Causes:
        """Return the causes of a chain of runs: the first as it was, with each change of CAUSES, and the second."""
        ttft, e2e = (
            dict(zip(CAUSES, np.diff([getattr(run, name) for run in chain]).tolist(), strict=True))
            for name in MeanLatency._fields
        )
        return cls(ttft, e2e, counterfactual=True)


def direct_causes(first: RunRecord, second: RunRecord, pairing: Pairing) -> Causes:
    """Return the differences of the requests' own intervals."""
    ours, theirs = _intervals(first.requests, pairing.first), _intervals(second.requests, pairing.second)
    dispatch_s, queueing_s, prefill_s, decode_s = (
        float(b.mean() - a.mean()) for a, b in zip(ours, theirs, strict=True)
    )
    ttft = dict(zip(CAUSES, (0.0, dispatch_s, prefill_s, queueing_s), strict=True))
    return Causes(ttft, {**ttft, "step time": prefill_s + decode_s}, counterfactual=False)


def mean_latency(requests: Columns, rows: npt.NDArray[np.int64], arrival_s: FloatColumn) -> MeanLatency:
    """Return the mean latencies of some rows' requests, counted from ``arrival_s``."""
    first_token_s, finished_s = requests["first_token_s"][rows], requests["finished_s"][rows]
    return MeanLatency(float((first_token_s - arrival_s).mean()), float((finished_s - arrival_s).mean()))


def _intervals(requests: Columns, rows: npt.NDArray[np.int64]) -> list[FloatColumn]:
    names = ("arrival_s", "dispatched_s", "scheduled_s", "first_token_s", "finished_s")
    times = [requests[name][rows] for name in names]
    return [later - earlier for earlier, later in pairwise(times)]


class StepRatios:
    """How long the second record's steps take over the first's, like for like.

    Steps are alike if their prompt tokens, decoding sequences and KV tokens each round up to the same power of two and
    their k is equal. Within that, each step's time is taken relative to what ``expected_s`` says it should be, so that
    two records whose steps lie differently inside one kind still compare.

    Args:
        first, second: columns as records.STEP_COLUMNS.
        expected_s: seconds that a cost model gives the steps of a table, [num_steps]; none: the same for all of a kind.
    """

    def __init__(
        self, first: Columns, second: Columns, expected_s: Callable[[Columns], FloatColumn] | None = None
    ) -> None:
        ours, theirs = (_relative_times(steps, expected_s) for steps in (first, second))
        self._by_kind = {kind: theirs[kind].relative / one.relative for kind, one in ours.items() if kind in theirs}
        compared_s = sum(ours[kind].seconds for kind in self._by_kind)
        weighted_s = sum(ours[kind].seconds * ratio for kind, ratio in self._by_kind.items())
        spent_s = float(step_periods(first).sum())
        self.compared_share = compared_s / spent_s if spent_s else 0.0
        """Share of the first record's step time that is in kinds of step the second has too."""
        self.overall = weighted_s / compared_s if compared_s else 1.0
        """Over all kinds that both have, by the time the first spends in each; 1 if there are none."""

    def ratio(self, num_prefill_tokens: int, num_decode_seqs: int, kv_tokens: int, k_exec: int) -> float:
        """Return the ratio for a step like this one; the overall one where the records have no such step in common."""
        kind = (num_prefill_tokens.bit_length(), num_decode_seqs.bit_length(), kv_tokens.bit_length(), k_exec)
        return self._by_kind.get(kind, self.overall)


def step_periods(steps: Columns) -> FloatColumn:
    """Return the time from each step's start to the next one's, [num_steps] seconds; its duration before a pause.

    An engine that has somebody to decode for goes on at once, so what lies between two such steps is the host's time,
    which a live record's durations may leave out.
    """
    periods = steps["duration_s"].astype(np.float64)
    goes_on = (steps["dp_rank"][1:] == steps["dp_rank"][:-1]) & (steps["num_decode_tokens"][1:] > 0)
    periods[:-1][goes_on] = np.diff(steps["start_s"])[goes_on]
    return periods


class _KindTimes(NamedTuple):
    seconds: float
    relative: float
    """Those seconds over the expected ones."""


def _relative_times(
    steps: Columns, expected_s: Callable[[Columns], FloatColumn] | None
) -> dict[tuple[int, ...], _KindTimes]:
    names = ("num_prefill_tokens", "num_decode_tokens", "kv_tokens")
    sizes = [np.frexp(steps[name].astype(np.float64))[1].astype(np.int64) for name in names]  # int.bit_length
    kinds, index = np.unique(np.stack([*sizes, steps["k_exec"]], axis=1), axis=0, return_inverse=True)
    index = index.reshape(-1)
    expected = np.ones(len(index)) if expected_s is None else expected_s(steps)
    seconds = np.bincount(index, weights=step_periods(steps), minlength=len(kinds)).tolist()
    norms = np.bincount(index, weights=expected, minlength=len(kinds)).tolist()
    return {
        tuple(kind): _KindTimes(spent, spent / norm)
        for kind, spent, norm in zip(kinds.tolist(), seconds, norms, strict=True)
        if spent > 0
    }
