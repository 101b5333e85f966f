"""From lives and engine steps to the columns of the run record."""

from __future__ import annotations

import gzip
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from simmoe.live.driving.life import Life
from simmoe.live.engine.steps import StepRecord
from simmoe.profiles.loop_times import LoopTimes
from simmoe.records import REQUEST_COLUMNS, STEP_COLUMNS, Columns
from simmoe.traces.workload import Workload

_TIMES = ("dispatched_s", "scheduled_s", "first_token_s", "finished_s")
_CLOCKS = ("sent_s", "received_s", "queued_s", "first_output_s", "last_output_s")
CLOCKS_FILE = "clocks.csv"
"""File of a record with the times that a simulated run has no like of, a row a request, columns as in ``Life``."""
HOST_FILE = "host.csv.gz"
"""File of a record with the seconds the host took for each step, a row a step in the order of ``steps.parquet``."""
HOST_COLUMNS = ("num_prefill_seqs", "launch_s", "update_s")

_AT_ONCE_S = 2e-3
"""A step whose scheduling began later than this after the one before it was free to had to wait for work."""

_DTYPES: dict[str, Any] = {"string": object, "float64": np.float64, "int64": np.int64}


def request_columns(
    workload: Workload, lives: Sequence[Life], start_s: float, steps: Mapping[int, Sequence[StepRecord]]
) -> Columns:
    """Return the table of requests.

    A request that did not finish has no finish time, and its output tokens are those that came. Its arrival is when it
    was due, so that a late sender's lag is in its latency, not hidden. It is scheduled when the first step that
    computes any of it begins, as in the simulator: asynchronous scheduling composes that step while another one runs.

    Args:
        workload: what was replayed.
        lives: what became of each request, in the same order.
        start_s: when the clock began.
        steps: of each rank, in order; where there are none, a request is scheduled when its engine says so.
    """
    begin_s = {rank: _StepStarts(records) for rank, records in steps.items() if records}
    columns: dict[str, list[Any]] = {name: [] for name in REQUEST_COLUMNS}
    for row, life in enumerate(lives):
        is_finished = life.status == "finished"
        columns["request_id"].append(workload.request_id[row])
        columns["arrival_s"].append(float(workload.arrival_s[row]))
        for name in _TIMES:
            time_s = getattr(life, name)
            if name == "scheduled_s" and life.dp_rank in begin_s:
                time_s = begin_s[life.dp_rank].of(time_s)
            seconds = time_s - start_s
            columns[name].append(seconds if name != "finished_s" or is_finished else math.nan)
        columns["prompt_tokens"].append(int(workload.prompt_tokens[row]))
        columns["output_tokens"].append(life.output_tokens if is_finished else int(workload.output_tokens[row]))
        columns["k_qos"].append(int(workload.k_qos[row]))
        columns["dp_rank"].append(life.dp_rank)
        columns["num_preemptions"].append(life.num_preemptions)
        columns["status"].append(life.status)
    return {name: np.array(values, dtype=_DTYPES[REQUEST_COLUMNS[name]]) for name, values in columns.items()}


def clocks_csv(request_ids: Iterable[str], lives: Sequence[Life], start_s: float) -> bytes:
    """Return the further times of requests on the engine's and the front end's clocks, seconds; empty: never came.

    Args:
        request_ids: of the lives, in the same order.
        lives: what became of each request.
        start_s: when the clock began.
    """
    rows: list[Sequence[str]] = [("request_id", *_CLOCKS)]
    for request_id, life in zip(request_ids, lives, strict=True):
        seconds = (getattr(life, name) - start_s for name in _CLOCKS)
        rows.append((request_id, *("" if math.isnan(time_s) else f"{time_s:.6f}" for time_s in seconds)))
    return "".join(",".join(row) + "\n" for row in rows).encode()


def step_columns(
    steps: Mapping[int, Sequence[StepRecord]], start_s: float, replays: Callable[[int, int, int], bool]
) -> Columns:
    """Return the table of steps, by rank.

    A step is taken to last from when it was scheduled, or from the output of the one before if that came later (under
    asynchronous scheduling), to its own output; the end on the device counts as its output where the worker keeps a
    device clock, since the host sees an output late while it launches the next step.

    Args:
        steps: of each rank, in order.
        start_s: when the clock began.
        replays: whether a step of a rank, of so many tokens and at budget k, replays CUDA graphs.
    """
    columns: dict[str, list[Any]] = {name: [] for name in STEP_COLUMNS}
    for rank in sorted(steps):
        for step, (began_s, ended_s) in zip(steps[rank], _spans(steps[rank]), strict=True):
            num_tokens = step.num_prefill_tokens + step.num_decode_seqs
            columns["dp_rank"].append(rank)
            columns["start_s"].append(began_s - start_s)
            columns["duration_s"].append(ended_s - began_s)
            columns["num_prefill_tokens"].append(step.num_prefill_tokens)
            columns["num_decode_tokens"].append(step.num_decode_seqs)
            columns["kv_tokens"].append(step.decode_kv_tokens)
            columns["k_exec"].append(step.k_exec)
            columns["routed_slots"].append(num_tokens * step.k_exec)
            columns["num_waiting"].append(step.num_waiting)
            columns["num_running"].append(step.num_running)
            columns["mode"].append("graphs" if replays(rank, num_tokens, step.k_exec) else "eager")
    return {name: np.array(values, dtype=_DTYPES[STEP_COLUMNS[name]]) for name, values in columns.items()}


def _spans(steps: Iterable[StepRecord]) -> Iterator[tuple[float, float]]:
    """Yield when each step of a rank began and ended."""
    ended_s = -math.inf
    for step in steps:
        began_s = max(step.schedule_start_s, ended_s)
        ended_s = step.output_s if step.device_end_s is None else step.device_end_s
        yield began_s, ended_s


class _StepStarts:
    """When the steps of a rank began, by when they were composed."""

    def __init__(self, steps: Sequence[StepRecord]) -> None:
        self._composed_s = [step.schedule_start_s for step in steps]
        self._began_s = [began_s for began_s, _ in _spans(steps)]

    def of(self, time_s: float) -> float:
        """Return when the step that was being composed at ``time_s`` began; NaN if there was none."""
        position = -1 if math.isnan(time_s) else bisect_right(self._composed_s, time_s) - 1
        return self._began_s[position] if position >= 0 else math.nan


def host_csv_gz(steps: Mapping[int, Sequence[StepRecord]], distributed_executor_backend: str = "uni") -> bytes | None:
    """Return how long the host took for each step, seconds; empty where its engine idled, or it cannot be told.

    ``launch_s`` is from when the step before last was taken in until the step was composed and launched; ``update_s``
    from when the device was done with it and the next was launched until it was taken in. Both are the host's own work:
    it waits for the device between the two. Workers of their own launch while it goes on: ``launch_s`` is theirs then,
    and ``update_s`` the loop's, from when the device was done with the step and the next was composed until the one
    after that was.

    Args:
        steps: of each rank, in order.
        distributed_executor_backend: 'uni', the engine's loop launches; 'mp', workers of their own do.
    Returns:
        The file, gzipped, by rank; None where no worker told when it had launched.
    """
    launches_apart = distributed_executor_backend == "mp"
    rows: list[Sequence[str]] = [HOST_COLUMNS]
    for rank in sorted(steps):
        mine = steps[rank]
        times: list[LoopTimes] = []
        for step in mine:
            times.append(_times(step, times[-1] if times else None))
        for i, step in enumerate(mine):
            launch_s = update_s = None
            if i >= 2 and _is_launched_at_once(mine[i - 2], step):
                launch_s = step.launch_s if launches_apart else times[i].launch_s(times[i - 2])
            if i + 1 < len(mine) and _is_busy(step, mine[i + 1]):
                if not launches_apart:
                    update_s = times[i].update_s(times[i + 1])
                elif i + 2 < len(mine) and _is_launched_at_once(step, mine[i + 2]):
                    update_s = times[i].turn_s(times[i + 1], times[i + 2])
            seconds = ("" if value is None else f"{value:.6f}" for value in (launch_s, update_s))
            rows.append((str(step.num_prefill_seqs), *seconds))
    if not any(row[1] for row in rows[1:]):
        return None
    return gzip.compress("".join(",".join(row) + "\n" for row in rows).encode(), mtime=0)


def _is_launched_at_once(before_last: StepRecord, step: StepRecord) -> bool:
    """Whether the host composed a step as soon as it had taken in the one before last."""
    return 0 <= step.schedule_start_s - before_last.update_end_s < _AT_ONCE_S


def _is_busy(step: StepRecord, after: StepRecord) -> bool:
    return after.schedule_start_s <= step.output_s


def _times(step: StepRecord, before: LoopTimes | None) -> LoopTimes:
    return LoopTimes.of(step.schedule_end_s, step.launch_s, step.device_end_s, step.update_end_s, before)


def rank_totals(
    num_ranks: int, steps: Mapping[int, Sequence[StepRecord]], table: Columns, requests: Columns
) -> list[dict[str, float]]:
    """Return sums over each rank's steps, under the names the simulator gives them.

    Args:
        num_ranks: ranks of the deployment.
        steps: of each rank.
        table: from :func:`step_columns`.
        requests: from :func:`request_columns`.
    """
    totals = []
    for rank in range(num_ranks):
        own = steps.get(rank, ())
        num_preemptions = sum(step.num_preempted for step in own)
        num_prefill_tokens = sum(step.num_prefill_tokens for step in own)
        started = (requests["dp_rank"] == rank) & ~np.isnan(requests["first_token_s"])
        num_again = num_prefill_tokens - int(requests["prompt_tokens"][started].sum())
        totals.append(
            {
                "num_steps": len(own),
                "busy_s": float(table["duration_s"][table["dp_rank"] == rank].sum()),
                "num_prefill_tokens": num_prefill_tokens,
                "num_decode_tokens": sum(step.num_decode_seqs for step in own),
                "routed_slots": int(table["routed_slots"][table["dp_rank"] == rank].sum()),
                "qos_slots": sum(step.qos_slots for step in own),
                "num_preemptions": num_preemptions,
                "num_recomputed_tokens": max(0, num_again) if num_preemptions else 0,
                "num_cached_tokens": max(0, -num_again) if own else 0,
            }
        )
    return totals
