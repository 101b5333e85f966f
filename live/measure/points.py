"""Measuring one point of the plan: the load that makes the engine run exactly that step, again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from simmoe.live.measure.engine import MeasuredEngine, Prompt
from simmoe.live.measure.plan import DecodePoint, MixedPoint, PrefillPoint
from simmoe.live.measure.times import TimedStep, busy_steps, clocked
from simmoe.profiles.shape import StepShape


def wanted(point: PrefillPoint | DecodePoint | MixedPoint, k: int, shape: StepShape) -> bool:
    """Return whether a sample's shape is one this point measures at k."""
    if shape.k_exec != k:
        return False
    if isinstance(point, PrefillPoint):
        context = (point.num_chunks - 1) * point.num_tokens
        return not shape.num_decode_seqs and (
            (shape.num_prefill_tokens, shape.num_prefill_seqs) == (point.num_tokens, point.num_prompts)
            and shape.prefill_kv_pairs == prompt_pairs(prompt_lengths(point)) + point.num_tokens * context
        )
    mean_context = shape.decode_kv_tokens / max(shape.num_decode_seqs, 1)
    if shape.num_decode_seqs != point.num_seqs or not point.context <= mean_context <= 1.5 * point.context + 128:
        return False
    return shape.num_prefill_tokens == (point.num_tokens if isinstance(point, MixedPoint) else 0)


def prompt_lengths(point: PrefillPoint) -> list[int]:
    """Return the tokens of each of the prompts one step computes."""
    each, rest = divmod(point.num_tokens, point.num_prompts)
    return [each + (i < rest) for i in range(point.num_prompts)]


def prompt_pairs(lengths: Iterable[int]) -> int:
    """Return the query-key pairs of whole prompts."""
    return sum(n * (n + 1) // 2 for n in lengths)


class PointRunner:
    """Runs points on an engine."""

    clock = False
    """Take the worker's clock (device, host) instead of the time between outputs; the engine's must be on then."""

    def __init__(self, engine: MeasuredEngine, repetitions: int, seed: int) -> None:
        self.engine = engine
        self.repetitions = repetitions
        self._rng = np.random.default_rng(seed)

    async def prefill(self, point: PrefillPoint, ks: Sequence[int]) -> list[TimedStep]:
        """Run a train of prompts, one step's worth after the other, budgets in random order."""
        lengths = [n * point.num_chunks for n in prompt_lengths(point)]
        train = [Prompt(n, k) for k in self._order(ks, self.repetitions) for n in lengths]
        await self.engine.drain()
        for part in self._fitting(train, len(lengths)):
            await self.engine.run(part, max_tokens=point.num_tokens)
        return [t for t in await self._timed() if t.step.num_prefill_tokens == point.num_tokens and t.step.k_exec in ks]

    async def decode(self, point: DecodePoint, ks: Sequence[int]) -> list[TimedStep]:
        """Fill the KV cache with a population, then change the budget under it."""
        order = [k for k in self._order(ks, 2) for _ in range(2 * self.repetitions)]
        fill_steps = point.num_seqs * point.context // self.engine.setup.max_num_batched_tokens + point.num_seqs
        others = Prompt(point.context, 1, fill_steps + len(order) + 8)
        prompts = [others] * (point.num_seqs - 1) + [replace(others, output_tokens=len(order) + 2)]
        if point.num_seqs * (point.context + len(order) + 8) > self.engine.kv_tokens:
            return []
        await self.engine.drain()
        await self.engine.run(prompts, point.num_seqs, order)
        return [t for t in await self._timed() if t.step.k_exec in ks and wanted(point, t.step.k_exec, t.step.shape)]

    async def mixed(self, points: Mapping[MixedPoint, Sequence[int]]) -> list[TimedStep]:
        """Let trains of prompts go through one population that decodes.

        Args:
            points: of one batch and context, each with its budgets.
        """
        (num_seqs, context), *others = {(point.num_seqs, point.context) for point in points}
        assert not others
        steps = sum(2 * self.repetitions * len(ks) + 2 for ks in points.values()) + num_seqs * context // 512
        population = [Prompt(context, 1, steps + 256)] * num_seqs
        result: list[TimedStep] = []
        await self.engine.drain()
        async with self.engine.population(population):
            while not any(step.num_decode_seqs == num_seqs for step in await self.engine.drain()):
                await asyncio.sleep(0.02)
            for point, ks in points.items():
                train = [Prompt(point.num_tokens, k) for k in self._order(ks, 2 * self.repetitions)]
                await self.engine.drain()
                await self.engine.run(train, max_tokens=point.num_tokens + num_seqs)
                await self.engine.script()
                result += [t for t in await self._timed() if wanted(point, t.step.k_exec, t.step.shape)]
        return result

    def _order(self, ks: Sequence[int], passes: int) -> list[int]:
        """Return the budgets once a pass, each pass in an order of its own, after one of the first to warm up."""
        passes_of_ks = [self._rng.permutation(ks).tolist() for _ in range(passes)]
        return [passes_of_ks[0][0], *(k for one_pass in passes_of_ks for k in one_pass)]

    def _fitting(self, train: list[Prompt], a_step: int) -> Iterable[list[Prompt]]:
        """Cut a train into parts of at most 512 requests, whole steps each."""
        length = max(1, 512 // a_step) * a_step
        return (train[i : i + length] for i in range(0, len(train), length))

    async def _timed(self) -> list[TimedStep]:
        steps = await self.engine.drain()
        busy = list(busy_steps(steps, async_scheduling=self.engine.setup.async_scheduling))
        return clocked([t.step for t in busy], await self.engine.drain_clock()) if self.clock else busy
