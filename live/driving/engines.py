"""Engines of this machine, each behind a front end of its own, and the route policy that deals requests to them."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from simmoe.errors import LiveError
from simmoe.live.driving.front_end import LINE_BYTES
from simmoe.live.driving.life import Life
from simmoe.live.driving.replay import FIRST_TOKEN_ID
from simmoe.live.engine.device_clock import DeviceTimes
from simmoe.live.engine.steps import StepRecord, with_device_times
from simmoe.live.server.dispatch import Counts, Dispatcher
from simmoe.live.server.launch import EngineLaunch, visible_gpus
from simmoe.policies.protocols import PolicyContext
from simmoe.policies.registry import PolicyChoice
from simmoe.policies.views import RequestView

_STOP_S = 20.0
"""How long a front end may take to stop its engine."""

_WARM_UP_DECODES = 128


class Engine:
    """This process's side of the conversation with one front end (see :mod:`simmoe.live.driving.front_end`)."""

    def __init__(self, rank: int, process: asyncio.subprocess.Process) -> None:
        self.rank = rank
        self.facts: dict[str, Any] = {}
        """The engine's limits, see :func:`simmoe.live.server.state.engine_state`."""
        self.num_sent = 0
        self.on_counts: Callable[[Counts, int], None] = lambda counts, number: None
        """Called with what the engine publishes, and how many requests its front end had received."""
        self._process = process
        # device times of steps whose records have not been drained yet
        self._device_times: dict[int, DeviceTimes] = {}
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._up: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._listening: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def connect(self, connection: socket.socket) -> None:
        """Talk over a socket; return when the engine is up.

        Raises:
            LiveError: it does not start.
        """
        reader, self._writer = await asyncio.open_connection(sock=connection, limit=LINE_BYTES)
        self._listening = asyncio.create_task(self._listen(reader))
        self.facts = await self._up

    async def send(self, life: Life, prompt: list[int], output_tokens: int, k: int) -> None:
        """Send one request and wait for its end."""
        self.num_sent += 1
        number = next(self._numbers)
        try:
            life.hear(await self._ask(number, "send", prompt, output_tokens, k))
        except asyncio.CancelledError:
            self._tell("abort", number)
            raise

    async def drain(self) -> list[StepRecord]:
        """Return the steps since the last call, with the device's times where the worker keeps a clock.

        Raises:
            LiveError: the engine has gone.
        """
        records = [StepRecord(*row) for row in await self.call("drain_steps")]
        if not self.facts["device_clock"]:
            return records
        times = (DeviceTimes(*row) for row in await self.call("drain_device_times", what="call_worker"))
        self._device_times |= {row.step: row for row in times}
        records = with_device_times(records, self._device_times.values())
        if records:
            self._device_times = {n: row for n, row in self._device_times.items() if n > records[-1].step}
        return records

    async def call(self, method: str, *arguments: Any, what: str = "call") -> Any:
        """Call the engine's scheduler, or its worker.

        Raises:
            LiveError: the call failed, or the engine has gone.
        """
        value, error = await self._ask(next(self._numbers), what, method, arguments)
        if error:
            raise LiveError(f"engine {self.rank}: {error}")
        return value

    async def stop(self) -> None:
        """Close the conversation and wait for the process to end; kill it if it does not."""
        if self._writer is not None:
            self._writer.close()
        try:
            await asyncio.wait_for(self._process.wait(), _STOP_S)
        except TimeoutError:
            self._process.kill()
            await self._process.wait()

    async def _ask(self, number: int, what: str, *arguments: Any) -> Any:
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self._tell(what, number, *arguments)
        try:
            return await answer
        finally:
            del self._answers[number]

    def _tell(self, *message: Any) -> None:
        assert self._writer is not None
        if self._writer.is_closing():
            raise LiveError(f"engine {self.rank} has gone")
        self._writer.write(json.dumps(message).encode() + b"\n")

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        gone = f"engine {self.rank} has gone"
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                what, *rest = json.loads(line)
                if what == "counts":
                    self.on_counts(Counts(*rest[:3]), rest[3])
                elif what == "up":
                    self._up.set_result(rest[0])
                elif what == "down":
                    gone = f"engine {self.rank} did not start: {rest[0]}"
                elif (answer := self._answers.get(rest[0])) is not None and not answer.done():
                    answer.set_result(rest[1] if what == "end" else rest[1:])
        assert self._writer is not None
        self._writer.close()
        for waiting in (self._up, *self._answers.values()):
            if not waiting.done():
                waiting.set_exception(LiveError(gone))


class LocalEngines:
    """Engines of this machine behind one route policy; made by :func:`running_engines`."""

    dispatcher: Dispatcher

    def __init__(self, engines: Sequence[Engine], launch: EngineLaunch, prefill_s: Callable[[int, int], float]) -> None:
        self.facts = [engine.facts for engine in engines]
        """Each engine's limits, see :func:`simmoe.live.server.state.engine_state`."""
        self._engines = engines
        self._launch = launch
        self._prefill_s = prefill_s
        self._route(launch.choice, launch.num_ranks)

    async def host(self, choice: PolicyChoice, num_ranks: int) -> None:
        """Have the first ``num_ranks`` engines, idle, serve under another policy from now on.

        Raises:
            LiveError: an engine is not idle, or cannot host it.
        """
        for engine in self._engines[:num_ranks]:
            options = {"policy": choice.batch_part.text, "profile": self._launch.profile}
            await engine.call("host_policy", {**options, "num_ranks": num_ranks, "dp_rank": engine.rank})
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
        """Return the facts and the steps since the last call of each engine that serves."""
        engines = self._engines[: len(self.dispatcher.up)]
        drained = await asyncio.gather(*(engine.drain() for engine in engines))
        return {engine.rank: (engine.facts, steps) for engine, steps in zip(engines, drained, strict=True)}

    async def warm_up(self) -> None:
        """Have every engine run each budget it can step at, over all sizes of a step, and a batch that decodes.

        Else the first steps of a run would wait for the kernels' compiler.

        Raises:
            LiveError: an engine fails at it.
        """
        await asyncio.gather(*(self._warm_up(engine) for engine in self._engines))

    async def _warm_up(self, engine: Engine) -> None:
        facts = engine.facts
        longest = min(facts["max_num_batched_tokens"], facts["max_model_len"] - 2)
        lengths = [1 << power for power in range(longest.bit_length() - 1)] + [longest]
        # without graphs each budget has kernels of its own on a GPU, and none on a CPU
        ks = facts["captured_ks"] or range(1 if visible_gpus() else facts["k_max"], facts["k_max"] + 1)
        for k in ks:
            for length in lengths:
                await self._serve_for_warm_up(engine, length, 2, k)
        shortest = lengths[min(4, len(lengths) - 1)]
        mixed = (self._serve_for_warm_up(engine, shortest, 16, 1 + i % facts["k_max"]) for i in range(_WARM_UP_DECODES))
        await asyncio.gather(*mixed)

    async def _serve_for_warm_up(self, engine: Engine, prompt_tokens: int, output_tokens: int, k: int) -> None:
        tokens = np.random.default_rng(prompt_tokens).integers(
            FIRST_TOKEN_ID, engine.facts["vocab_size"], prompt_tokens
        )
        await engine.send(life := Life(-1), tokens.tolist(), output_tokens, k)
        if life.status != "finished":
            raise LiveError(f"engine {engine.rank} failed to warm up with {prompt_tokens} tokens: {life.reason}")

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
        self.dispatcher = dispatcher = Dispatcher(choice, context)
        dispatcher.set_up(range(num_ranks))
        for engine in self._engines[:num_ranks]:
            engine.on_counts = _publisher(dispatcher, engine)


def _publisher(dispatcher: Dispatcher, engine: Engine) -> Callable[[Counts, int], None]:
    """Return what tells a dispatcher the counts of one engine."""
    rank, sent_before = engine.rank, engine.num_sent

    def publish(counts: Counts, num_received: int) -> None:
        dispatcher.publish(rank, counts, max(0, num_received - sent_before), time.monotonic())

    return publish


@asynccontextmanager
async def running_engines(
    launch: EngineLaunch, prefill_s: Callable[[int, int], float], on_start: Callable[[str], None] = lambda what: None
) -> AsyncIterator[LocalEngines]:
    """Start the engines, all at once, warm them up, and stop them at the end.

    Args:
        launch: what to start.
        prefill_s: T(n, k), for a route policy that asks.
        on_start: told what begins.
    Raises:
        LiveError: an engine does not start.
    """
    engines: list[Engine] = []
    try:
        on_start(f"starting {launch.num_ranks} engine(s)")
        await _start_all(launch, engines)
        local = LocalEngines(engines, launch, prefill_s)
        on_start("warming up")
        await local.warm_up()
        yield local
    finally:
        await asyncio.gather(*(engine.stop() for engine in engines))


async def _start_all(launch: EngineLaunch, engines: list[Engine]) -> None:
    """Start every engine; those begun are in ``engines``, whatever happens."""
    try:
        async with asyncio.TaskGroup() as starting:
            for rank in range(launch.num_ranks):
                ours, theirs = socket.socketpair()
                engines.append(Engine(rank, await _start(launch, rank, theirs)))
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
