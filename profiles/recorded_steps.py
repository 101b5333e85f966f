"""Steps of a recorded continuous-batching run, as samples; those of its calibration recording alone may be fitted."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from simmoe.errors import ProfileError
from simmoe.profiles.loop_times import LoopTimes
from simmoe.profiles.recording_file import read_rows
from simmoe.profiles.samples import Kind, Mode, Sample

#: A recording of this name is no held-out one: the fit may learn from it how fast the host is while it serves.
CALIBRATION = "calibration"

#: The host saw a step's tokens this soon after the device was done with it: it had been waiting for it.
WAITED_S = 0.6e-3

#: A synchronous engine that is busy composes the next step so soon after it has taken one in.
AT_ONCE_S = 1e-3

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
    """It was scheduled before the output of the step before arrived, or of a synchronous engine at once when that had
    been taken in: the engine was kept busy, and nothing but the loop itself decided when it ended."""
    worker_launch_s: float | None = None
    """What the worker took to launch it."""
    device_bound: bool | None = None
    """Whether the device ran it without waiting for its launch, as the clocks of both tell; None where they do not."""
    launch_s: float | None = None
    """On a busy engine, from when the step before last had been taken in to when this one was launched; of workers of
    their own, what they took."""
    update_s: float | None = None
    """What it took to take it in, once the device was done with it and the next was launched. Where workers of their
    own launch: from when the device was done with it and the next was composed until the next but one was."""
    late_s: float | None = None
    """From when the device was done with the step before to when this one was launched; below 0: it was by then."""

    @property
    def num_seqs(self) -> int:
        """Prompts and decoding sequences of the step."""
        return self.sample.num_prefill_seqs + self.sample.num_decode_seqs


def read_recording(
    path: str | os.PathLike[str],
    captured_sizes: Sequence[int],
    captured_ks: Sequence[int] = (),
    distributed_executor_backend: str = "uni",
    async_scheduling: bool = True,
) -> list[RecordedStep]:
    """Return every step of a file's recordings, in order.

    Ends are taken on the device where the recording has them (``device_end_s``), else when the host saw the output.
    Steps of the recording named ``calibration`` alone are not ``held_out``.

    Args:
        path: JSON lines, gzipped when the name ends in ``.gz``.
        captured_sizes: of the engine that was recorded, ascending.
        captured_ks: budgets its graphs were captured at; a step at any other had its kernels launched one by one.
            Empty: every budget.
        distributed_executor_backend: 'uni', its loop launched; 'mp', workers of their own did.
        async_scheduling: whether it composed a step while the one before ran. Where it did not, what the host took for
            a step is not told apart.
    Raises:
        ProfileError: names the file, the line and what is wrong with it.
    """
    largest = captured_sizes[-1] if captured_sizes else 0
    budgets = set(captured_ks)
    launches_apart = distributed_executor_backend == "mp"
    steps: list[RecordedStep] = []
    train: list[dict[str, Any]] = []
    times: list[LoopTimes] = []
    for number, recording, step in read_rows(path):
        if step is None:
            train, times = [], []
            continue
        follows = bool(train) and step["start_s"] <= _free_s(train[-1], async_scheduling)
        train = [*train[-2:], step] if follows else [step]
        times = [*times[-2:], _times(step, times[-1])] if follows else [_times(step)]
        seconds = _pace_s(train[-2], step) if follows else step["output_s"] - step["start_s"]
        try:
            captured = _num_tokens(step) <= largest and (not budgets or step["k_exec"] in budgets)
            sample = _sample(step, seconds, "graphs" if captured else "eager", recording != CALIBRATION)
        except ProfileError as error:
            raise ProfileError(f"'{os.fspath(path)}' line {number}: {error}") from None
        if not async_scheduling:
            steps.append(RecordedStep(recording, sample, follows, step.get("launch_s")))
            continue
        launch_s = None
        if len(train) == 3:
            launch_s = step.get("launch_s") if launches_apart else times[-1].launch_s(times[0])
        late_s = times[-1].late_s(times[-2]) if follows else None
        bound = _device_bound(train[-2], step, late_s) if follows else None
        worker_launch_s = step.get("launch_s")
        steps.append(RecordedStep(recording, sample, follows, worker_launch_s, bound, launch_s, late_s=late_s))
        if len(train) == 3:
            update_s = times[0].turn_s(times[1], times[2]) if launches_apart else _update_s(train, times)
            steps[-3] = steps[-3]._replace(update_s=update_s)
    return steps


def read_recorded_steps(
    path: str | os.PathLike[str], captured_sizes: Sequence[int], captured_ks: Sequence[int] = ()
) -> list[Sample]:
    """Return the samples of :func:`read_recording` of steps that followed another without a pause."""
    return [step.sample for step in read_recording(path, captured_sizes, captured_ks) if step.follows]


def _free_s(before: Mapping[str, Any], async_scheduling: bool) -> float:
    """Return when a step must have been begun at the latest that followed another without a pause."""
    if async_scheduling:
        return float(before["output_s"])
    taken_in_s = before.get("update_end_s")
    return float(before["output_s"] if taken_in_s is None else taken_in_s) + AT_ONCE_S


def _times(step: Mapping[str, Any], before: LoopTimes | None = None) -> LoopTimes:
    """Return when the loop and the device were done with a step, as far as it was recorded."""
    ends = step.get("schedule_end_s"), step.get("launch_s"), step.get("device_end_s"), step.get("update_end_s")
    return LoopTimes.of(*ends, before)


def _update_s(train: Sequence[Mapping[str, Any]], times: Sequence[LoopTimes]) -> float | None:
    """Return what the host took to take the first of three steps in.

    Recordings that lack the end of that show when the next but one was begun, which follows at once where the host
    waited for the device.
    """
    step, after, next_but_one = train
    if times[0].taken_in_s is not None and times[1].launched_s is not None:
        return times[0].update_s(times[1])
    end_s = times[0].device_end_s
    if end_s is None or after.get("launch_s") is None or step["output_s"] - end_s >= WAITED_S:
        return None
    seconds = next_but_one["start_s"] - end_s
    return float(seconds) if seconds > 0 else None


def _device_bound(before: Mapping[str, Any], step: Mapping[str, Any], late_s: float | None) -> bool | None:
    """Return whether the device, busy until it began a step, ran it without waiting for its launch.

    A graph of a whole decode-only step begins when it is launched, the pieces of a step with prompts as they are.
    """
    ended_s, began_s, end_s = before.get("device_end_s"), step.get("device_start_s"), step.get("device_end_s")
    if ended_s is None or began_s is None or end_s is None or late_s is None:
        return None
    if began_s - ended_s > IDLE_SHARE * (end_s - ended_s):
        return False
    if not step["num_prefill_tokens"]:
        return late_s <= 0
    return bool(late_s <= (1 - LAUNCHED_AHEAD) * (end_s - ended_s))


def _pace_s(before: Mapping[str, Any], step: Mapping[str, Any]) -> float:
    ended_s, end_s = before.get("device_end_s"), step.get("device_end_s")
    if ended_s is None or end_s is None:
        ended_s, end_s = before["output_s"], step["output_s"]
    return float(end_s - ended_s)


def _num_tokens(step: Mapping[str, Any]) -> int:
    return int(step["num_prefill_tokens"] + step["num_decode_seqs"])


def _sample(step: dict[str, Any], seconds: float, mode: Mode, held_out: bool) -> Sample:
    tokens, decodes = step["num_prefill_tokens"], step["num_decode_seqs"]
    kind: Kind = "decode" if not tokens else "mixed" if decodes else "prefill"
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
