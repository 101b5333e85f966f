"""Continuous batching as it happens: every step and every request of a replayed load, to check a cost model against."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from simmoe.errors import LiveError
from simmoe.live.engine.steps import StepRecord
from simmoe.live.measure.engine import MeasuredEngine, Prompt, RequestTimes
from simmoe.writing import write_whole

FORMAT = "simmoe-recording"
VERSION = 1

STEP_COLUMNS = (
    "start_s", "output_s", "num_prefill_tokens", "prefill_kv_pairs", "num_prefill_seqs", "num_decode_seqs",
    "decode_kv_tokens", "k_exec", "k_asked", "qos_slots", "num_waiting", "num_running", "num_preempted",
    "device_start_s", "device_end_s", "launch_s", "schedule_end_s", "update_end_s",
)  # fmt: skip
REQUEST_COLUMNS = (
    "due_s", "sent_s", "queued_s", "scheduled_s", "first_output_s", "first_received_s", "last_output_s",
    "last_received_s", "prompt_tokens", "output_tokens", "k_qos",
)  # fmt: skip


@dataclass(frozen=True)
class Recording:
    """One replayed load. Times are seconds from its start."""

    name: str
    load: str
    """What was sent, in words."""
    steps: list[tuple[float | None, ...]]
    """Rows of STEP_COLUMNS: start_s when scheduling began, output_s when the tokens were on the host, update_end_s when
    the scheduler had taken them in, device_start_s and device_end_s when the device began and ended; launch_s is a
    duration."""
    requests: list[tuple[float, ...]]
    """Rows of REQUEST_COLUMNS: due, sent and received on the client's side, queued, scheduled and output on the
    engine's."""
    monotonic_s: float = 0.0
    """Its start on ``time.monotonic()`` of the machine, to lay what else was logged there beside it; 0: not known."""

    def drain_rate(self) -> float:
        """Return requests finished a second between a fifth and four fifths of all, the engine's clock."""
        done = np.sort([row[REQUEST_COLUMNS.index("last_output_s")] for row in self.requests])
        low, high = len(done) // 5, len(done) * 4 // 5
        return float((high - low) / (done[high] - done[low]))


async def record(engine: MeasuredEngine, name: str, load: str, arrivals: Sequence[tuple[float, Prompt]]) -> Recording:
    """Send each prompt at its time, open loop, and return what happened.

    Args:
        engine: idle.
        name: of the recording.
        load: what is sent, in words.
        arrivals: (seconds from the start, request), ascending.
    """
    await engine.script()
    await engine.drain()
    start_s = time.monotonic() + 0.05
    tasks: list[asyncio.Task[RequestTimes]] = []
    try:
        for due_s, prompt in arrivals:
            await asyncio.sleep(max(0.0, start_s + due_s - time.monotonic()))
            tasks.append(asyncio.create_task(engine.timed(prompt)))
        times = await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()  # none that is done; all where the recording itself is cancelled
    steps = [_step_row(step, start_s) for step in await engine.drain()]
    rows = [_request_row(due_s, t, start_s) for (due_s, _), t in zip(arrivals, times, strict=True)]
    return Recording(name, load, steps, rows, round(start_s, 3))


def poisson(prompts: Sequence[Prompt], rate: float, seed: int) -> list[tuple[float, Prompt]]:
    """Return the prompts with Poisson arrivals, the first at 0."""
    gaps_s = np.random.default_rng(seed).exponential(1 / rate, len(prompts))
    due_s = np.cumsum(gaps_s) - gaps_s[0]
    return list(zip(due_s.tolist(), prompts, strict=True))


def append(recording: Recording, header: dict[str, Any], path: Path) -> None:
    """Add a recording to a file of JSON lines: a header with the columns, then a line a name, request or step.

    The file is replaced as a whole, so that it never holds part of a recording.

    Raises:
        LiveError: the file has other columns, having been begun by another version.
        OutputError: it cannot be written.
    """
    lines = []
    if path.exists():
        lines = path.read_text(encoding="utf-8").splitlines()
        if read_header(path)["steps"] != list(STEP_COLUMNS):
            raise LiveError(f"'{path.name}' was begun with other columns; move it away to record anew")
    else:
        head = {"format": FORMAT, "version": VERSION, "steps": STEP_COLUMNS, "requests": REQUEST_COLUMNS, **header}
        lines = [json.dumps(head)]
    began = {"recording": recording.name, "load": recording.load, "monotonic_s": recording.monotonic_s}
    lines.append(json.dumps(began))
    lines += [json.dumps(["request", *row], separators=(",", ":")) for row in recording.requests]
    lines += [json.dumps(["step", *row], separators=(",", ":")) for row in recording.steps]
    write_whole(path, ("\n".join(lines) + "\n").encode(), "the recording")


def read_header(path: Path) -> dict[str, Any]:
    """Return the first line of a file that :func:`append` wrote: the columns, and what is said of model and engine."""
    with path.open(encoding="utf-8") as file:
        header: dict[str, Any] = json.loads(file.readline())
    return header


def read(path: Path) -> list[Recording]:
    """Return the recordings of a file that :func:`append` wrote; none where there is none."""
    recordings: list[Recording] = []
    for line in path.read_text(encoding="utf-8").splitlines()[1:] if path.exists() else ():
        record = json.loads(line)
        if isinstance(record, dict):
            began_s = record.get("monotonic_s", 0.0)
            recordings.append(Recording(record["recording"], record.get("load", ""), [], [], began_s))
        else:
            kind, *row = record
            rows = recordings[-1].requests if kind == "request" else recordings[-1].steps
            rows.append(tuple(row))
    return recordings


def _step_row(step: StepRecord, start_s: float) -> tuple[float | None, ...]:
    def since(seconds: float | None) -> float | None:
        return None if seconds is None else round(seconds - start_s, 6)

    launch_s = None if step.launch_s is None else round(step.launch_s, 6)
    times = (since(step.schedule_start_s), since(step.output_s))
    device = (since(step.device_start_s), since(step.device_end_s), launch_s)
    return (*times, *step[5:16], *device, since(step.schedule_end_s), since(step.update_end_s))


def _request_row(due_s: float, t: RequestTimes, start_s: float) -> tuple[float, ...]:
    seconds = (t.sent_s, t.queued_s, t.scheduled_s, t.outputs_s[0], t.received_s[0], t.outputs_s[1], t.received_s[1])
    times = (round(due_s, 6), *(round(s - start_s, 6) for s in seconds))
    return (*times, t.prompt.num_tokens, t.prompt.output_tokens, t.prompt.k)
