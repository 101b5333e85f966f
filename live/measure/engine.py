"""An engine set up to be measured: its own process, driven through ``AsyncLLM`` as a server drives it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from simmoe.errors import LiveError
from simmoe.live.engine.device_clock import DeviceTimes, longest_launches
from simmoe.live.engine.steps import StepRecord, TimedSteps
from simmoe.live.engine.transport import CONFIG_KEY, K_ARG
from simmoe.profiles.weights import LOAD_FORMAT

CAPTURED_SIZES: tuple[int, ...] = (
    1, 2, 4, *range(8, 65, 8), 80, 96, 112, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024,
    *range(1280, 2049, 256), *range(2560, 8193, 512),
)  # fmt: skip
"""Token counts graphs are captured at by default: a step is padded by at most a quarter, above 64 tokens an eighth."""

CAPTURED_KS: tuple[int, ...] = (1, 2, 4, 8, 12, 16, 20, 24, 28, 32)
"""Budgets graphs are captured at by default, for a model of ``k_max`` 32."""

#: A population is filled, or a script of a few hundred steps run, in seconds.
SCRIPT_LIMIT_S = 120.0


@dataclass(frozen=True)
class EngineSetup:
    """Everything about an engine that its times depend on."""

    model: Path
    """Folder with the model's config.json."""
    captured_sizes: tuple[int, ...] | None = CAPTURED_SIZES
    """Token counts graphs are captured at; empty runs eagerly, None at those vLLM takes by default."""
    captured_ks: tuple[int, ...] = CAPTURED_KS
    """Budgets graphs are captured at, ascending to the model's largest."""
    tensor_parallel_size: int = 1
    expert_parallel: bool = False
    """Whole experts on each card, instead of a share of every expert."""
    async_scheduling: bool = True
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 1024
    max_model_len: int = 16384
    gpu_memory_utilization: float = 0.9
    dtype: str = "bfloat16"
    seed: int = 0
    pin: bool = False
    """The threads that schedule and launch have physical cores of their own, see ``pinning``."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's ``EngineArgs``, as they are."""

    def engine_args(self) -> dict[str, Any]:
        """Return the keyword arguments of vLLM's ``EngineArgs``."""
        kind = "AsyncScriptedScheduler" if self.async_scheduling else "ScriptedScheduler"
        options: dict[str, Any] = {"record_steps": True}
        graphs: dict[str, Any] = {}
        if self.captured_sizes is None or self.captured_sizes:
            # a step between the captured budgets runs at the next of them: what is recorded is what graphs take
            options |= {"captured_ks": list(self.captured_ks), "uncaptured_k": "next"}
        else:
            graphs = {"enforce_eager": True}
        if self.captured_sizes:
            largest = self.captured_sizes[-1]
            sizes = {"cudagraph_capture_sizes": list(self.captured_sizes), "max_cudagraph_capture_size": largest}
            graphs = {"compilation_config": sizes}
        if self.tensor_parallel_size > 1:
            graphs["tensor_parallel_size"] = self.tensor_parallel_size
            graphs["enable_expert_parallel"] = self.expert_parallel
        return {
            "model": str(self.model),
            "load_format": LOAD_FORMAT,
            "skip_tokenizer_init": True,
            "dtype": self.dtype,
            "seed": self.seed,
            "max_model_len": self.max_model_len,
            "max_num_batched_tokens": self.max_num_batched_tokens,
            "max_num_seqs": self.max_num_seqs,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "enable_prefix_caching": False,
            "logprobs_mode": "raw_logits",
            "async_scheduling": self.async_scheduling,
            "scheduler_cls": f"simmoe.live.measure.scheduler.{kind}",
            "worker_cls": "simmoe.live.measure.worker.MeasuringWorker",
            "additional_config": {CONFIG_KEY: options},
            **graphs,
            **self.overrides,
        }


@dataclass(frozen=True)
class Prompt:
    """One request of the load: random tokens, a budget, an exact number of output tokens."""

    num_tokens: int
    k: int
    output_tokens: int = 1
    """The request runs to exactly this many, unless it is stopped."""


@dataclass(frozen=True)
class RequestTimes:
    """One request's life on two clocks, both ``time.monotonic()`` of this machine."""

    prompt: Prompt
    sent_s: float
    """The client called the engine."""
    received_s: tuple[float, float]
    """The client had the first token, and the last."""
    queued_s: float
    """The engine core had the request in its queue."""
    scheduled_s: float
    """The engine core first scheduled it."""
    outputs_s: tuple[float, float]
    """The engine core had taken in the step of the first token, and of the last."""


class MeasuredEngine:
    """A running engine; made by :func:`running`."""

    def __init__(self, llm: Any, setup: EngineSetup) -> None:
        self.llm = llm
        self.setup = setup
        self._rng = np.random.default_rng(setup.seed)
        self._vocab_size = llm.vllm_config.model_config.get_vocab_size()
        self._count = 0
        self._timed = TimedSteps()
        cache = llm.vllm_config.cache_config
        self.block_size: int = cache.block_size
        self.num_gpu_blocks: int = cache.num_gpu_blocks
        sizes = setup.captured_sizes
        if sizes is None:
            sizes = tuple(sorted(llm.vllm_config.compilation_config.cudagraph_capture_sizes))
        self.captured_sizes: tuple[int, ...] = sizes
        """Token counts graphs were captured at, ascending; empty: none."""

    @property
    def kv_tokens(self) -> int:
        """KV tokens the engine can hold."""
        return self.block_size * (self.num_gpu_blocks - 1)

    async def call(self, method: str, *args: Any) -> Any:
        """Call the scheduler's method of that name."""
        return await self.llm.engine_core.call_utility_async("simmoe_scheduler", method, list(args))

    async def call_worker(self, method: str, *args: Any) -> Any:
        """Call the method of that name on every worker; return the first one's answer."""
        return (await self.llm.collective_rpc(method, args=args))[0]

    async def script(
        self, decode_seqs: int = 0, decode_ks: Sequence[int] = (), max_tokens: int = 0, *, hold_after: bool = False
    ) -> None:
        """Set the scheduler's script, see ``ScriptMixin.script``; without arguments, clear it."""
        await self.call("script", decode_seqs, list(decode_ks), max_tokens, hold_after)

    async def script_end(self, expected_s: float = 0.0) -> None:
        """Wait until a script that holds afterwards has run out and its last step is in.

        Args:
            expected_s: about how long that takes; the engine is not asked before, since answering takes its time.
        Raises:
            LiveError: it does not: the batch it waits for does not come about.
        """
        limit_s = time.monotonic() + SCRIPT_LIMIT_S
        await asyncio.sleep(min(expected_s, SCRIPT_LIMIT_S))
        while left := await self.call("script_left"):
            if time.monotonic() > limit_s:
                raise LiveError(f"{left} steps of a script did not run within {SCRIPT_LIMIT_S:.0f} s")
            await asyncio.sleep(0.01)

    async def drain(self) -> list[StepRecord]:
        """Return the steps since the last call, with when the device ran them."""
        records = [StepRecord(*row) for row in await self.call("drain_steps")]
        told = await self.llm.collective_rpc("drain_device_times")
        return self._timed.join(records, longest_launches([DeviceTimes(*row) for row in rows] for rows in told))

    async def run(
        self, prompts: Sequence[Prompt], decode_seqs: int = 0, decode_ks: Sequence[int] = (), max_tokens: int = 0
    ) -> None:
        """Gather requests in the waiting queue, let them go under a script (see ``ScriptMixin``), await the last one.

        The others are stopped then, where they still run.
        """
        async with self.population(prompts) as (_, tasks):
            await self.script(decode_seqs, decode_ks, max_tokens)
            await tasks[-1]

    @asynccontextmanager
    async def population(self, prompts: Sequence[Prompt]) -> AsyncIterator[tuple[list[str], list[asyncio.Task[None]]]]:
        """Gather requests in the waiting queue; a script lets them go.

        Yields their ids and the tasks that wait for their ends; those that still run at the end of the block are
        stopped, and the engine is left with no script.
        """
        await self.call("hold")
        _, waiting = await self.call("get_request_counts")
        ids = [self._new_id() for _ in prompts]
        tasks = [
            asyncio.create_task(self._finish(self.stream(prompt, request_id)))
            for prompt, request_id in zip(prompts, ids, strict=True)
        ]
        while (await self.call("get_request_counts"))[1] < waiting + len(prompts):
            await asyncio.sleep(1e-3)
        try:
            yield ids, tasks
        finally:
            await self.llm.abort(ids)
            await self.script()
            await asyncio.gather(*tasks)

    async def timed(self, prompt: Prompt) -> RequestTimes:
        """Send one request, streaming, and return its times."""
        sent_s = first_s = time.monotonic()
        last: Any = None
        async for output in self.stream(prompt, every_token=True):
            if last is None:
                first_s = time.monotonic()
            last = output
        m = last.metrics
        received_s, outputs_s = (first_s, time.monotonic()), (m.first_token_ts, m.last_token_ts)
        return RequestTimes(prompt, sent_s, received_s, m.queued_ts, m.scheduled_ts, outputs_s)

    def stream(
        self,
        prompt: Prompt,
        request_id: str = "",
        *,
        tokens: list[int] | None = None,
        every_token: bool = False,
        **sampling: Any,
    ) -> AsyncIterator[Any]:
        """Return the request's outputs; the last one alone unless ``every_token``.

        ``tokens`` replace the random prompt; ``sampling`` overrides fields of ``SamplingParams``.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        if tokens is None:
            tokens = self._rng.integers(2, self._vocab_size, prompt.num_tokens).tolist()
        params = SamplingParams(
            **{
                "max_tokens": prompt.output_tokens,
                "ignore_eos": True,
                "temperature": 1.0,
                "detokenize": False,
                "extra_args": {K_ARG: prompt.k},
                "output_kind": RequestOutputKind.DELTA if every_token else RequestOutputKind.FINAL_ONLY,
                **sampling,
            }
        )
        stream: AsyncIterator[Any] = self.llm.generate(
            {"prompt_token_ids": tokens}, params, request_id or self._new_id()
        )
        return stream

    def _new_id(self) -> str:
        self._count += 1
        return f"r{self._count}"

    @staticmethod
    async def _finish(stream: AsyncIterator[Any]) -> None:
        async for _ in stream:
            pass


def import_vllm() -> None:
    """Import what an engine needs, before there is one and outside a coroutine.

    A frame of torch's import stays alive, and so every frame below it with what those hold; an engine among that would
    never be collected, and end with an exception of its own when the interpreter exits.
    """
    from vllm import AsyncEngineArgs  # noqa: F401
    from vllm.v1.engine.async_llm import AsyncLLM  # noqa: F401


@asynccontextmanager
async def running(setup: EngineSetup) -> AsyncIterator[MeasuredEngine]:
    """Start an engine with dummy weights, and stop it at the end of the block."""
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**setup.engine_args()))
    try:
        yield MeasuredEngine(llm, setup)
    finally:
        llm.shutdown()
        # it shuts down again when it is collected, if that is while the interpreter exits with what that needs gone
        llm.shutdown = lambda timeout=None: None
