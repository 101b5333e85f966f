"""Engines of this machine, each behind a front end of its own, and the route policy that deals requests to them."""

from __future__ import annotations

import asyncio
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from simmoe.errors import LiveError
from simmoe.live.driving.conversation import Engine
from simmoe.live.driving.life import Life
from simmoe.live.engine.provenance import Provenance
from simmoe.live.engine.steps import StepRecord
from simmoe.live.server.dispatch import Counts, Dispatcher
from simmoe.live.server.launch import EngineLaunch, visible_gpus
from simmoe.live.server.route_decisions import RouteRecorder, open_recorder
from simmoe.live.server.stall import STALL_TIMEOUT_S
from simmoe.live.server.warm_up import WarmUp, random_prompts, warm_up_batches
from simmoe.policies.protocols import PolicyContext
from simmoe.policies.registry import PolicyChoice
from simmoe.policies.views import RequestView


class LocalEngines:
    """Engines of this machine behind one route policy; made by :func:`running_engines`."""

    dispatcher: Dispatcher

    def __init__(self, engines: Sequence[Engine], launch: EngineLaunch, prefill_s: Callable[[int, int], float]) -> None:
        self.facts = [engine.facts for engine in engines]
        """Each engine's limits, see :func:`simmoe.live.server.state.engine_state`."""
        self._engines = engines
        self._launch = launch
        self._prefill_s = prefill_s
        self._recorder: RouteRecorder | None = None
        self._route(launch.choice, launch.num_ranks)

    async def host(self, choice: PolicyChoice, num_ranks: int) -> None:
        """Have the first ``num_ranks`` engines, idle, serve under another policy from now on.

        Raises:
            LiveError: an engine is not idle, or cannot host it.
        """
        for engine in self._engines[:num_ranks]:
            if engine.facts["hosts_policy"]:
                await engine.call("host_policy", self._launch.policy_options(engine.rank, choice, num_ranks))
        self._route(choice, num_ranks)

    async def send(self, life: Life, prompt: list[int], output_tokens: int, k: int) -> None:
        """Route one request and wait for its end."""
        view = RequestView(f"live-{life.index}", life.sent_s, len(prompt), 0, k)
        ticket = self.dispatcher.route(view, 1, time.monotonic())
        life.dp_rank = ticket.rank
        try:
            await self._engines[ticket.rank].send(life, prompt, output_tokens, k)
        finally:
            self.dispatcher.release(ticket)
        if life.status == "rejected":
            life.dp_rank = -1

    async def drain(self) -> dict[int, tuple[dict[str, Any], list[StepRecord]]]:
        """Return the facts and the steps since the last call of each engine that serves and has not gone."""
        engines = self._engines[: len(self.dispatcher.up)]
        drained = await asyncio.gather(*(_drained(engine) for engine in engines))
        told = zip(engines, drained, strict=True)
        return {engine.rank: (engine.facts, steps) for engine, steps in told if steps is not None}

    async def warm_up(self) -> None:
        """Have every engine run what :mod:`simmoe.live.server.warm_up` says, so that no step of a run is its first.

        Raises:
            LiveError: an engine fails at it.
        """
        await asyncio.gather(*(self._warm_up(engine) for engine in self._engines))

    def close(self) -> None:
        """Finish the recording of the route policy's calls."""
        if self._recorder is not None:
            self._recorder.close()

    async def _warm_up(self, engine: Engine) -> None:
        for batch in warm_up_batches(engine.facts, is_gpu=bool(visible_gpus())):
            prompts = random_prompts(batch, engine.facts["vocab_size"])
            requests = zip(prompts, batch, strict=True)
            await asyncio.gather(*(self._serve_for_warm_up(engine, prompt, request) for prompt, request in requests))

    async def _serve_for_warm_up(self, engine: Engine, prompt: list[int], request: WarmUp) -> None:
        await engine.send(life := Life(-1), prompt, request.output_tokens, request.k)
        if life.status != "finished":
            raise LiveError(f"engine {engine.rank} failed to warm up with {len(prompt)} tokens: {life.reason}")

    def _route(self, choice: PolicyChoice, num_ranks: int) -> None:
        """Deal what comes to the first ``num_ranks`` engines by a policy."""
        facts = self.facts[0]
        context = PolicyContext(
            prefill_s=self._prefill_s,
            k_min=1,
            k_max=self._launch.k_max,
            num_ranks=num_ranks,
            max_num_seqs=facts["max_num_seqs"],
            max_num_batched_tokens=facts["max_num_batched_tokens"],
            enable_chunked_prefill=facts["enable_chunked_prefill"],
        )
        self.close()
        if self._launch.decisions:
            provenance = Provenance.of(choice.route_part, self._launch.profile)
            self._recorder = open_recorder(Path(self._launch.decisions), provenance, context)
        self.dispatcher = dispatcher = Dispatcher(choice, context, self._recorder)
        dispatcher.set_up(range(num_ranks))
        for engine in self._engines[:num_ranks]:
            engine.on_counts = _publisher(dispatcher, engine)


async def _drained(engine: Engine) -> list[StepRecord] | None:
    """Return an engine's steps; None if it has gone, and they with it.

    Raises:
        LiveError: its policy cannot show its state.
    """
    try:
        return await engine.drain()
    except LiveError:
        if engine.has_gone:
            return None
        raise


def _publisher(dispatcher: Dispatcher, engine: Engine) -> Callable[[Counts, int], None]:
    """Return what tells a dispatcher the counts of one engine."""
    rank, sent_before = engine.rank, engine.num_sent

    def publish(counts: Counts, num_received: int) -> None:
        dispatcher.publish(rank, counts, max(0, num_received - sent_before), time.monotonic())

    return publish


@asynccontextmanager
async def running_engines(
    launch: EngineLaunch,
    prefill_s: Callable[[int, int], float],
    on_start: Callable[[str], None] = lambda what: None,
    stall_timeout_s: float = STALL_TIMEOUT_S,
) -> AsyncIterator[LocalEngines]:
    """Start the engines, all at once, warm them up, and stop them at the end.

    Args:
        launch: what to start.
        prefill_s: T(n, k), for a route policy that asks.
        on_start: told what begins.
        stall_timeout_s: an engine is given up once it has requests and has made no step for this long.
    Raises:
        LiveError: an engine does not start.
    """
    engines: list[Engine] = []
    local: LocalEngines | None = None
    try:
        on_start(f"starting {launch.num_ranks} engine(s)")
        await _start_all(launch, engines, stall_timeout_s)
        local = LocalEngines(engines, launch, prefill_s)
        on_start("warming up")
        await local.warm_up()
        await local.host(launch.choice, launch.num_ranks)  # anew: what warmed the engines up is none of its business
        yield local
    finally:
        if local is not None:
            local.close()
        await asyncio.gather(*(engine.stop() for engine in engines))


async def _start_all(launch: EngineLaunch, engines: list[Engine], stall_timeout_s: float) -> None:
    """Start every engine; those begun are in ``engines``, whatever happens."""
    try:
        async with asyncio.TaskGroup() as starting:
            for rank in range(launch.num_ranks):
                ours, theirs = socket.socketpair()
                engines.append(Engine(rank, await _start(launch, rank, theirs), stall_timeout_s))
                starting.create_task(engines[-1].connect(ours))
    except* LiveError as failures:
        raise failures.exceptions[0] from None


async def _start(launch: EngineLaunch, rank: int, connection: socket.socket) -> asyncio.subprocess.Process:
    """Start one front end, in a session of its own: an interrupt is for the one who drives."""
    program = [sys.executable, "-P", "-m", "simmoe.live.driving.front_end", str(connection.fileno())]
    arguments = ["--model", str(launch.model), *launch.arguments(rank)]
    environment = {**launch.environment(rank), "VLLM_LOGGING_STREAM": "ext://sys.stderr"}
    with connection:
        return await asyncio.create_subprocess_exec(
            *program, *arguments, pass_fds=[connection.fileno()], env=environment, start_new_session=True,
            stdout=sys.stderr,
        )  # fmt: skip
