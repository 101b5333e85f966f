"""The stages of measuring on a running engine, each skipped where its result is there already.

A first pass over all points; recordings; points with the device held; the MoE layer alone; points without graphs;
further passes. What there is no time for is left to the next call.
"""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from simmoe.errors import LiveError
from simmoe.live.measure import moe_layer, recording
from simmoe.live.measure.engine import MeasuredEngine
from simmoe.live.measure.held import HeldPoints
from simmoe.live.measure.loads import Loads, record_loads
from simmoe.live.measure.measuring import Measuring, Progress
from simmoe.live.measure.plan import DecodePoint, MixedPoint, PrefillPoint
from simmoe.live.measure.points import PointRunner, script_steps, wanted
from simmoe.live.measure.times import TimedStep, samples
from simmoe.profiles.layer_times import LayerTime, LayerTimes, write_layer_times
from simmoe.profiles.samples import Clock, SampleHeader, SampleWriter
from simmoe.profiles.shape import StepShape

P = TypeVar("P", PrefillPoint, DecodePoint, MixedPoint, PrefillPoint | DecodePoint)

#: Of the time left, at most, that a first pass leaves for recordings.
RECORDINGS_SHARE = 0.4

#: Share of its context, and tokens at least, a population of decoding sequences may grow by: to fill the KV cache anew
#: takes longer than the steps of most points, and steps of three times the context would belong to the next.
GROWTH_SHARE, LEAST_GROWTH = 0.5, 128


class Stages:
    """What is done with a running engine and an open sample file."""

    def __init__(
        self,
        engine: MeasuredEngine,
        run: Measuring,
        writer: SampleWriter,
        header: SampleHeader,
        progress: Progress,
        deadline_s: float,
    ) -> None:
        self._engine, self._run, self._plan = engine, run, run.plan
        self._writer, self._header, self._progress = writer, header, progress
        self._deadline_s = deadline_s
        self._runner = PointRunner(engine, self._plan.repetitions, self._plan.ks[0], self._plan.seed)
        self._held = HeldPoints(engine)
        self._left: list[str] = []
        points = len(self._plan.prefill) + len(self._plan.decode) + len(self._plan.mixed)
        self._done, self._total = 0, points * self._plan.passes + len(self._plan.eager)
        self._total += len(self._plan.held) + len(self._plan.held_eager)

    async def go(self) -> list[str]:
        """Run the stages; one that fails does not keep the others from running.

        Raises:
            LiveError: names the stages that failed.
        """
        failed: list[str] = []

        async def stage(name: str, work: Awaitable[None]) -> None:
            try:
                await work
            except Exception as error:
                failed.append(f"{name}: {type(error).__name__}: {error}")
                self._say(f"{name} failed: {error}")

        # where time is short, points have the larger part of it
        reserve_s = min(self._recording_s(), RECORDINGS_SHARE * self._time_left_s())
        await stage("pass 1", self._pass(1, reserve_s=reserve_s))
        if self._run.loads is not None:
            await stage("recordings", self._recordings(self._run.loads))
        # a synchronous engine launches a step when the one before is done: its device clock shows nothing else anyway
        if self._header.async_scheduling:
            await stage("held device", self._device_held())
        if self._run.layer and not self._run.layer_path.exists():
            await stage("MoE layer", self._layer())
        if self._plan.eager and self._engine.captured_sizes:
            await stage("without graphs", self._eager())
        for number in range(2, self._plan.passes + 1):
            await stage(f"pass {number}", self._pass(number))
        if failed:
            raise LiveError(f"measured what could be measured, but {'; '.join(failed)}")
        return self._left

    def _say(self, what: str) -> None:
        self._progress(what, self._done, self._total)

    def _time_left_s(self) -> float:
        return self._deadline_s - time.monotonic()

    def _recording_s(self) -> float:
        """Seconds that recordings not yet made take, about."""
        if self._run.loads is None:
            return 0.0
        made = {r.name for r in recording.read(self._run.recording_path)}
        left_s = sum(poisson.seconds + 6.0 for poisson in self._run.loads.poisson if poisson.name not in made)
        return left_s if "burst" in made else left_s + 20.0

    def _missing(self, points: Sequence[P], mode: str, rows: int, clock: Clock = "step") -> dict[P, list[int]]:
        """Return the points that have fewer rows than that under a clock, with the budgets they lack."""
        # have[prompt tokens, decoding sequences, k] are the shapes measured, a row each
        have: dict[tuple[int, int, int], list[StepShape]] = defaultdict(list)
        for (shape, measured_mode, row_clock), number in self._writer.done.items():
            if row_clock == clock and (mode == "eager") == (measured_mode == "eager" and self._is_captured(shape)):
                have[shape.num_prefill_tokens, shape.num_decode_seqs, shape.k_exec] += [shape] * number
        missing: dict[P, list[int]] = {}
        for point in points:
            tokens, seqs = getattr(point, "num_tokens", 0), getattr(point, "num_seqs", 0)
            ks = point.ks or self._plan.ks
            lacking = [k for k in ks if sum(wanted(point, k, s) for s in have.get((tokens, seqs, k), ())) < rows]
            if lacking:
                missing[point] = lacking
        return missing

    def _is_captured(self, shape: StepShape) -> bool:
        sizes = self._engine.captured_sizes
        return bool(sizes) and shape.num_tokens <= sizes[-1]

    async def _pass(self, number: int, reserve_s: float = 0.0) -> None:
        """Measure every point that has fewer rows than passes were made."""
        plan = self._plan
        prefill = self._missing(plan.prefill, "graphs", number)
        decode = self._missing(plan.decode, "graphs", number)
        mixed = self._missing(plan.mixed, "graphs", number)
        every = len(plan.prefill) + len(plan.decode) + len(plan.mixed)
        self._done = max(self._done, number * every - len(prefill) - len(decode) - len(mixed))
        await self._points(prefill, decode, mixed, what=f"pass {number} of {plan.passes}", reserve_s=reserve_s)

    async def _eager(self) -> None:
        """Measure points with the graphs left aside."""
        todo = self._missing(self._plan.eager, "eager", 1)
        async with self._graphs_left_aside():
            await self._points(*by_kind(todo), what="without graphs", eager=True)

    async def _device_held(self) -> None:
        """Measure points with the device held until their steps are launched."""
        await self._points(*by_kind(self._missing(self._plan.held, "graphs", 1, "held")), what="held device", held=True)
        todo = self._missing(self._plan.held_eager, "eager", 1, "held")
        if todo and self._engine.captured_sizes:
            async with self._graphs_left_aside():
                await self._points(*by_kind(todo), what="held device without graphs", eager=True, held=True)

    @asynccontextmanager
    async def _graphs_left_aside(self) -> AsyncIterator[None]:
        await self._engine.call_worker("set_graphs", False)
        try:
            yield
        finally:
            await self._engine.call_worker("set_graphs", True)

    async def _points(
        self,
        prefill: Mapping[PrefillPoint, list[int]],
        decode: Mapping[DecodePoint, list[int]],
        mixed: Mapping[MixedPoint, list[int]],
        *,
        what: str,
        reserve_s: float = 0.0,
        eager: bool = False,
        held: bool = False,
    ) -> None:
        """Run points and write their samples, until time is up."""
        runner, skipped = self._runner, 0
        work: list[tuple[str, Mapping[Any, list[int]], Callable[..., Awaitable[list[TimedStep]]]]] = [
            *(("prefill", {point: ks}, runner.prefill) for point, ks in prefill.items()),
            *(("decode", group, runner.decode) for group in populations(decode, self._plan.repetitions)),
            *(("mixed", group, runner.mixed) for group in beside(mixed)),
        ]
        for name, group, measured in work:
            if self._time_left_s() < reserve_s:
                skipped += len(group)
                continue
            self._say(f"{what}: {name} {_words(group)}")
            timed = await (self._held.measure(group, measured, eager=eager) if held else measured(group))
            for sample in samples(timed, self._engine.captured_sizes, eager=eager):
                self._writer.write(sample)
            self._done += len(group)
        if skipped:
            self._left.append(f"{skipped} points of {what}")

    async def _recordings(self, loads: Loads) -> None:
        facts = ("model", "weights", "k_max", "card", "num_cards", "driver", "versions", "date", "captured_sizes",
                 "captured_ks", "num_gpu_blocks", "block_size", "async_scheduling", "engine_flags")  # fmt: skip
        header = {name: getattr(self._header, name) for name in facts}
        path = self._run.recording_path
        await record_loads(self._engine, loads, self._header.k_max, path, header, self._time_left_s, self._say)
        missing = {"burst", *(p.name for p in loads.poisson)} - {r.name for r in recording.read(path)}
        if missing:
            self._left.append(f"recordings {', '.join(sorted(missing))}")

    async def _layer(self) -> None:
        if self._time_left_s() < 30.0:
            self._left.append("the MoE layer")
            return
        self._say("the MoE layer alone")
        head = self._header
        # of the budgets measured, whose kernels are compiled already
        ks = moe_layer.timed_ks(self._plan.ks, head.k_max)
        answer = await self._engine.call_worker("time_moe_layers", list(moe_layer.SIZES), ks)
        times = LayerTimes(
            model=head.model,
            model_config=head.model_config,
            dtype=head.dtype,
            card=head.card,
            date=head.date,
            versions=head.versions,
            kernel=str(head.kernels.get("moe", "")),
            **answer["ceilings"],
            rows=tuple(LayerTime(*row) for row in answer["rows"]),
            num_cards=head.num_cards,
            expert_parallel=self._run.setup.expert_parallel,
            num_layers=answer["num_layers"],
        )
        write_layer_times(self._run.layer_path, times)


def by_kind(
    points: Mapping[Any, list[int]],
) -> tuple[dict[PrefillPoint, list[int]], dict[DecodePoint, list[int]], dict[MixedPoint, list[int]]]:
    """Return the prefill, decode and mixed points apart."""

    def of(kind: type[P]) -> dict[P, list[int]]:
        return {point: ks for point, ks in points.items() if isinstance(point, kind)}

    return of(PrefillPoint), of(DecodePoint), of(MixedPoint)


def populations(points: Mapping[DecodePoint, list[int]], repetitions: int) -> Iterator[dict[DecodePoint, list[int]]]:
    """Group decode points that one population serves: of one context, the largest batches first.

    Args:
        points: with their budgets.
        repetitions: ``Plan.repetitions``.
    """
    ordered = sorted(points, key=lambda point: (point.context, -point.num_seqs))
    for context, members in itertools.groupby(ordered, key=lambda point: point.context):
        group: dict[DecodePoint, list[int]] = {}
        growth = 0
        for point in members:
            steps = script_steps(points[point], repetitions)
            if group and growth + steps > max(LEAST_GROWTH, GROWTH_SHARE * context):
                yield group
                group, growth = {}, 0
            group[point] = points[point]
            growth += steps
        yield group


def beside(points: Mapping[MixedPoint, list[int]]) -> Iterator[dict[MixedPoint, list[int]]]:
    """Group mixed points beside one population, of one batch and context, in the order these first come."""
    groups: dict[tuple[int, int], dict[MixedPoint, list[int]]] = {}
    for point, ks in points.items():
        groups.setdefault((point.num_seqs, point.context), {})[point] = ks
    yield from groups.values()


def _words(group: Mapping[Any, Any]) -> str:
    first, *others = group
    text = ", ".join(f"{name} {value}" for name, value in vars(first).items() if name != "ks")
    return f"{text} and {len(others)} more" if others else text
