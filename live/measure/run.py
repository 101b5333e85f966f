"""One command's worth of measuring: start the engine, prove its k, measure its front end, then stage by stage."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from simmoe.errors import LiveError, ProfileError
from simmoe.live.engine.steps import StepRecord
from simmoe.live.measure import pinning, proof, recording
from simmoe.live.measure.engine import EngineSetup, MeasuredEngine, Prompt, RequestTimes, import_vllm, running
from simmoe.live.measure.header import SETTING, header_of, known_of
from simmoe.live.measure.measuring import Measuring, Progress
from simmoe.live.measure.plan import Plan
from simmoe.live.measure.stages import Stages
from simmoe.profiles.samples import PER_RUN_FIELDS, SampleHeader, SampleWriter, read_samples
from simmoe.profiles.weights import WEIGHTS, weights_of

#: Seconds of a time limit kept for stopping the engine and fitting the table.
STOPPING_S = 15.0

#: Of the largest size, before the card's clocks are read.
WARM_UP_STEPS = 20

#: Stands before what was seen where the proof of k failed. Logits near each other at neighbouring budgets can fail it
#: as well as a wrong k, so the points are measured and kept for whoever looks into it.
NOT_PROVED = "NOT PROVED, "


def measure(run: Measuring, progress: Progress = lambda what, done, total: None) -> list[str]:
    """Measure a plan. Whether the cards are anybody else's, ``card.refuse_busy`` tells before.

    Returns:
        What is still to be measured, in words; empty when all is done.
    Raises:
        LiveError: cores are too few to pin, a stage failed, or the k that ran is not proved to be the k named.
        ProfileError: the file, or the recording beside it, is of another engine or of other weights.
    """
    if run.setup.pin:
        pinning.check_cores(run.setup.tensor_parallel_size)
    import_vllm()
    left = asyncio.run(_measure(run, progress, time.monotonic() + run.time_limit_s - STOPPING_S))
    gc.collect()  # vLLM's client shuts down again when it is collected, and cannot while the interpreter exits
    return left


def write_reference(setup: EngineSetup, ks: Sequence[int], path: Path, batches: Sequence[Sequence[int]]) -> None:
    """Write the probes' logits of an eager engine of the same weights."""

    async def reference() -> None:
        async with running(setup) as engine:
            proof.save(await proof.probe(engine, ks, batches), path)

    if setup.captured_sizes is None or setup.captured_sizes:
        raise LiveError("the reference engine must run eagerly: leave captured_sizes empty")
    import_vllm()
    asyncio.run(reference())


async def _measure(run: Measuring, progress: Progress, deadline_s: float) -> list[str]:
    old = check_begun(run)
    progress("starting the engine", 0, 1)
    async with running(run.setup) as engine:
        await proof.check_captured(engine)
        if run.setup.pin:
            pinned = pinning.pin_engine(run.setup.tensor_parallel_size)
            run = replace(run, plan=replace(run.plan, notes=(*run.plan.notes, pinned)))
        k_check = old.k_check if old is not None else await _check_k(engine, run, progress)
        front_end = old.front_end if old is not None else await _front_end(engine, run.plan)
        await engine.run([Prompt(run.setup.max_num_batched_tokens, run.plan.ks[-1])] * WARM_UP_STEPS)
        header = await header_of(engine, run, k_check, front_end)
        with SampleWriter(run.out, header) as writer:
            left = await Stages(engine, run, writer, header, progress, deadline_s).go()
    if NOT_PROVED in k_check:
        raise LiveError(f"measured, but that the k named is the k that ran is not proved: {k_check}")
    return left


def check_begun(run: Measuring) -> SampleHeader | None:
    """Refuse to go on with files of another engine or of other weights, before one is started for it.

    What is known only once it is up, the writer of the samples refuses then.

    Returns:
        The sample file's header; None where there is no such file.
    Raises:
        ProfileError: names the file and what differs, both ways.
    """
    old = read_samples(run.out, allow_cut_row=True)[0] if run.out.exists() else None
    begun = {} if old is None else {run.out: old.weights}
    if run.recording_path.exists():
        begun[run.recording_path] = weights_of(recording.read_header(run.recording_path))
    for path, weights in begun.items():
        if weights != WEIGHTS:
            raise ProfileError(
                f"'{path}' was begun with the weights '{weights}', engines now have '{WEIGHTS}'; write to another file"
            )
    if old is None:
        return None
    for name, value in known_of(run).items():
        began = getattr(old, name)
        if name == "engine_flags":  # the environment's among them may be the engine's own doing
            began = {flag: given for flag, given in began.items() if not SETTING.match(flag)}
        if name not in PER_RUN_FIELDS and began != value:
            raise ProfileError(
                f"'{run.out}' was measured with {name} {began}, this engine would have {value}; write to another file"
            )
    return old


async def _check_k(engine: MeasuredEngine, run: Measuring, progress: Progress) -> str:
    if len(run.plan.ks) == 1:
        return f"one budget alone was captured, {run.plan.ks[0]}"
    if not engine.captured_sizes and run.reference is None:
        return "the router read k at each step: nothing was captured"
    progress("proving k", 0, 1)
    if run.reference is not None:
        against = "an eager engine of the same weights"
        reference = proof.load(run.reference)
    else:
        against = "the same engine's with its graphs left aside, where the router reads k at each step"
        await engine.call_worker("set_graphs", False)
        reference = await proof.probe(engine, run.plan.ks, run.probe_batches)
        await engine.call_worker("set_graphs", True)
    logits = await proof.probe(engine, list(reference["prefill"]), run.probe_batches)
    proof.save(logits, run.out.with_suffix(".logits.npz"))
    seen = []
    for kind, by_k in logits.items():
        proved, line = proof.verdict(by_k, reference[kind])
        seen.append(f"{kind}: {'' if proved else NOT_PROVED}{line}")
    return f"raw logits of probe prompts against {against}; " + "; ".join(seen)


async def _front_end(engine: MeasuredEngine, plan: Plan) -> dict[str, float]:
    """Return medians over requests sent one at a time to an idle engine."""
    prompt_tokens, output_tokens = plan.front_end_lengths
    k = plan.ks[len(plan.ks) // 2]
    await engine.drain()
    times = [await engine.timed(Prompt(prompt_tokens, k, output_tokens)) for _ in range(plan.front_end_requests + 3)]
    return front_end_medians(times[3:], await engine.drain())  # the first ones warm the client up


def front_end_medians(times: Sequence[RequestTimes], steps: Sequence[StepRecord]) -> dict[str, float]:
    """Return ``SampleHeader.front_end``.

    Args:
        times: of requests that were alone in the engine, one after the other.
        steps: of the engine meanwhile.
    """
    if not times:
        return {}
    found: dict[str, list[float]] = {"ingress_s": [], "egress_s": [], "start_s": []}
    for t in times:
        found["ingress_s"].append(t.queued_s - t.sent_s)
        prefills = [s for s in steps if s.num_prefill_tokens and t.sent_s <= s.schedule_start_s <= t.received_s[0]]
        end_s = t.outputs_s[0]
        if prefills and prefills[-1].device_end_s is not None:
            end_s = prefills[-1].device_end_s
        if prefills and prefills[0].device_start_s is not None:
            found["start_s"].append(prefills[0].device_start_s - prefills[0].schedule_start_s)
        found["egress_s"].append(t.received_s[0] - end_s)
    return {name: round(float(np.median(seconds)), 7) for name, seconds in found.items() if seconds}
