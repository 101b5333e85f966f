"""Measuring one point of the plan: the load that makes the engine run exactly that step, again and again."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from simmoe.live.measure.engine import MeasuredEngine, Prompt
from simmoe.live.measure.plan import DecodePoint, MixedPoint, PrefillPoint
from simmoe.live.measure.times import TimedStep, timed_steps
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
    if shape.num_decode_seqs != point.num_seqs or not point.context <= mean_context < 3 * point.context:
        return False
    return shape.num_prefill_tokens == (point.num_tokens if isinstance(point, MixedPoint) else 0)


def prompt_lengths(point: PrefillPoint) -> list[int]:
    """Return the tokens of each of the prompts one step computes."""
    each, rest = divmod(point.num_tokens, point.num_prompts)
    return [each + (i < rest) for i in range(point.num_prompts)]


def prompt_pairs(lengths: Iterable[int]) -> int:
    """Return the query-key pairs of whole prompts."""
    return sum(n * (n + 1) // 2 for n in lengths)


def script_steps(ks: Sequence[int], repetitions: int) -> int:
    """Return the steps a population runs, so the tokens each of its sequences grows by, for one decode point."""
    # one warms up, and some are under way when the script ends
    return 1 + (repetitions + 1) * len(ks) + 4


class PointRunner:
    """Runs points on an engine, one pass at a time."""

    def __init__(self, engine: MeasuredEngine, repetitions: int, fill_k: int, seed: int) -> None:
        """Make a runner.

        Args:
            engine: to run on, idle between points.
            repetitions: steps a budget in one pass.
            fill_k: budget that populations are filled at; the engine can execute it.
            seed: of the order of budgets.
        """
        self.engine = engine
        self.repetitions = repetitions
        self.fill_k = fill_k
        self._rng = np.random.default_rng(seed)

    async def prefill(self, points: Mapping[PrefillPoint, Sequence[int]]) -> list[TimedStep]:
        """Run a train of prompts, one step's worth after the other, budgets in random order, for each point."""
        return [timed for point, ks in points.items() for timed in await self._prefill(point, ks)]

    async def decode(self, points: Mapping[DecodePoint, Sequence[int]]) -> list[TimedStep]:
        """Fill the KV cache with one population, change the budget under it, stop some of it, and so on.

        Points that the KV cache cannot hold are left out.

        Args:
            points: of one context and fewer sequences than a step may compute tokens, each with its budgets.
        """
        (context,) = {point.context for point in points}
        orders = {point: self._bursts(ks) for point, ks in points.items()}
        fitting: list[DecodePoint] = []
        length = context
        for point in sorted(points, key=lambda point: -point.num_seqs):
            filled = length if fitting else context + self._fill_steps(point.num_seqs, context)
            grown = filled + script_steps(points[point], self.repetitions)
            if point.num_seqs * grown <= self.engine.kv_tokens:
                fitting.append(point)
                length = grown
        if not fitting:
            return []
        largest = fitting[0].num_seqs
        population = [Prompt(context, self.fill_k, length - context)] * largest
        result: list[TimedStep] = []
        async with self.engine.population(population) as (ids, _):
            step_s = await self._fill(largest)
            for point in fitting:
                stopped, ids = ids[point.num_seqs :], ids[: point.num_seqs]
                if stopped:
                    await self.engine.llm.abort(stopped)
                    while (await self.engine.call("get_request_counts"))[0] > point.num_seqs:
                        await asyncio.sleep(1e-3)
                await self.engine.script(point.num_seqs, orders[point], hold_after=True)
                await self.engine.script_end(len(orders[point]) * step_s)
                timed = await self._timed()
                # the next batch is smaller, so its steps are shorter
                step_s = 0.8 * float(np.median([t.seconds for t in timed if t.clock == "step"] or [step_s]))
                result += [t for t in timed if wanted(point, t.step.k_exec, t.step.shape)]
        return result

    async def mixed(self, points: Mapping[MixedPoint, Sequence[int]]) -> list[TimedStep]:
        """Let trains of prompts go through one population that decodes; nothing where the KV cache cannot hold it.

        Args:
            points: of one batch and context, each with its budgets.
        """
        ((num_seqs, context),) = {(point.num_seqs, point.context) for point in points}
        # beside a train of prompts run its warm-up, and what the client takes to notice its end
        steps = sum(self.repetitions * len(ks) + 40 for ks in points.values())
        steps += self._fill_steps(num_seqs, context)
        longest = max(point.num_tokens for point in points)
        if num_seqs * (context + steps) + longest > self.engine.kv_tokens:
            return []
        population = [Prompt(context, self.fill_k, steps)] * num_seqs
        result: list[TimedStep] = []
        async with self.engine.population(population):
            await self._fill(num_seqs)
            for point, ks in points.items():
                train = [Prompt(point.num_tokens, k) for k in self._order(ks, self.repetitions)]
                await self.engine.drain()
                async with self.engine.population(train) as (_, tasks):
                    await self.engine.script(max_tokens=point.num_tokens + num_seqs)
                    await tasks[-1]
                    await self.engine.call("hold")
                result += [t for t in await self._timed() if wanted(point, t.step.k_exec, t.step.shape)]
        return result

    async def _prefill(self, point: PrefillPoint, ks: Sequence[int]) -> list[TimedStep]:
        lengths = [n * point.num_chunks for n in prompt_lengths(point)]
        train = [Prompt(n, k) for k in self._order(ks, self.repetitions) for n in lengths]
        await self.engine.drain()
        for part in self._fitting(train, len(lengths)):
            await self.engine.run(part, max_tokens=point.num_tokens)
        timed = await self._timed()
        return [t for t in timed if t.step.num_prefill_tokens == point.num_tokens and t.step.k_exec in ks]

    def _fill_steps(self, num_seqs: int, context: int) -> int:
        """Return steps that suffice to compute a population's prompts.

        Each step computes what its budget leaves beside the d sequences that decode already, so it is the integral of
        context / (budget - d) over d, and some.
        """
        budget = self.engine.setup.max_num_batched_tokens
        return math.ceil(context * math.log(budget / (budget - num_seqs))) + 64

    async def _fill(self, num_seqs: int) -> float:
        """Let a gathered population decode, a few steps at its full size, then hold; return the seconds of one."""
        await self.engine.drain()
        await self.engine.script(num_seqs, [self.fill_k] * 3, hold_after=True)
        await self.engine.script_end()
        return min((t.seconds for t in await self._timed() if t.step.num_decode_seqs == num_seqs), default=0.0)

    def _order(self, ks: Sequence[int], passes: int) -> list[int]:
        """Return the budgets once a pass, each pass in an order of its own, after one of the first to warm up."""
        passes_of_ks = [self._rng.permutation(ks).tolist() for _ in range(passes)]
        return [passes_of_ks[0][0], *(k for one_pass in passes_of_ks for k in one_pass)]

    def _bursts(self, ks: Sequence[int]) -> list[int]:
        """Return the budgets in a random order, each for some steps on end, after one step to warm up."""
        order = self._rng.permutation(ks).tolist()
        return [order[0], *(k for k in order for _ in range(self.repetitions + 1))]

    def _fitting(self, train: list[Prompt], a_step: int) -> Iterable[list[Prompt]]:
        """Cut a train into parts of at most 512 requests, whole steps each."""
        length = max(1, 512 // a_step) * a_step
        return (train[i : i + length] for i in range(0, len(train), length))

    async def _timed(self) -> list[TimedStep]:
        return timed_steps(await self.engine.drain(), async_scheduling=self.engine.setup.async_scheduling)
