"""Engines in this process: an ``AsyncLLM`` a rank, and the route policy that deals requests to them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from simmoe.errors import LiveError
from simmoe.live.driving.life import Life
from simmoe.live.engine.steps import StepRecord
from simmoe.live.engine.transport import K_ARG
from simmoe.live.server.dispatch import Counts, Dispatcher
from simmoe.live.server.launch import EngineLaunch
from simmoe.live.server.state import EngineCounts, engine_state
from simmoe.policies.protocols import PolicyContext
from simmoe.policies.views import RequestView

PUBLISH_INTERVAL_S = 0.1
"""How often engines' counts reach the route policy, as from vLLM's coordinator."""


class LocalEngines:
    """Engines of this process behind one front end; made by :func:`running_engines`."""

    def __init__(self, engines: list[Any], dispatcher: Dispatcher) -> None:
        self.dispatcher = dispatcher
        self.facts = [engine_state(engine) for engine in engines]
        """Each engine's limits, see :func:`simmoe.live.server.state.engine_state`."""
        self._engines = engines
        self._counts = [EngineCounts.of(engine) for engine in engines]

    async def send(self, life: Life, prompt: list[int], output_tokens: int, k: int) -> None:
        """Route one request and wait for its end."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        view = RequestView(f"live-{life.index}", life.sent_s, len(prompt), 0, k)
        ticket = self.dispatcher.route(view, 1, time.monotonic())
        life.dp_rank = ticket.rank
        parameters = SamplingParams(
            max_tokens=output_tokens, min_tokens=output_tokens, ignore_eos=True, temperature=0.0, detokenize=False,
            output_kind=RequestOutputKind.DELTA, extra_args={K_ARG: k},
        )  # fmt: skip
        outputs = self._engines[ticket.rank].generate({"prompt_token_ids": prompt}, parameters, view.request_id)
        last: Any = None
        try:
            async for output in outputs:
                life.finished_s = time.monotonic()
                if last is None:
                    life.first_token_s = life.finished_s
                life.output_tokens += len(output.outputs[0].token_ids)
                last = output
        except ValueError as error:  # a request this engine can never serve
            life.dp_rank = -1
            life.end("rejected", str(error))
            return
        finally:
            self.dispatcher.release(ticket)
            if last is not None and last.metrics is not None:
                life.dispatched_s, life.scheduled_s = last.metrics.queued_ts, last.metrics.scheduled_ts
                life.num_preemptions = last.metrics.num_preemptions
        life.end("finished")

    async def drain(self) -> dict[int, tuple[dict[str, Any], list[StepRecord]]]:
        """Return each engine's facts and its steps since the last call."""
        drained = {}
        for rank, engine in enumerate(self._engines):
            rows = await engine.engine_core.call_utility_async("simmoe_scheduler", "drain_steps", [])
            drained[rank] = self.facts[rank], [StepRecord(*row) for row in rows]
        return drained

    async def publish(self) -> None:
        """Keep publishing the engines' counts to the dispatcher, until cancelled."""
        while True:
            now_s = time.monotonic()
            for rank, counts in enumerate(self._counts):
                seen = Counts(counts.num_waiting, counts.num_running, counts.kv_used)
                self.dispatcher.publish(rank, seen, self.dispatcher.mark(rank), now_s)
            await asyncio.sleep(PUBLISH_INTERVAL_S)


@asynccontextmanager
async def running_engines(
    launch: EngineLaunch, prefill_s: Callable[[int, int], float], on_start: Callable[[int], None] = lambda rank: None
) -> AsyncIterator[LocalEngines]:
    """Start the engines, one after the other, and stop them at the end.

    Args:
        launch: what to start.
        prefill_s: T(n, k), for a route policy that asks.
        on_start: called before each engine's start.
    Raises:
        LiveError: an engine does not start.
    """
    engines: list[Any] = []
    try:
        for rank in range(launch.num_ranks):
            on_start(rank)
            engines.append(_start(launch, rank))
        scheduler = engines[0].vllm_config.scheduler_config
        context = PolicyContext(
            prefill_s=prefill_s,
            k_min=1,
            k_max=launch.k_max,
            num_ranks=launch.num_ranks,
            max_num_seqs=scheduler.max_num_seqs,
            max_num_batched_tokens=scheduler.max_num_batched_tokens,
            enable_chunked_prefill=bool(scheduler.enable_chunked_prefill),
        )
        dispatcher = Dispatcher(launch.choice, context)
        dispatcher.set_up(range(launch.num_ranks))
        local = LocalEngines(engines, dispatcher)
        publishing = asyncio.create_task(local.publish())
        try:
            yield local
        finally:
            publishing.cancel()
    finally:
        for engine in engines:
            engine.shutdown()


def _start(launch: EngineLaunch, rank: int) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    words = ["--model", str(launch.model), *launch.arguments(rank)]
    with _environment(launch.environment(rank)):
        try:
            return AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(parser.parse_args(words)))
        except (Exception, SystemExit) as error:
            raise LiveError(f"engine {rank} did not start: {type(error).__name__}: {error}") from error


@contextlib.contextmanager
def _environment(wanted: Mapping[str, str]) -> Iterator[None]:
    """Have this process's environment be another one while an engine's process starts from it."""
    before = dict(os.environ)
    os.environ.update(wanted)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
