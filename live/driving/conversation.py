"""This process's side of the conversation with one engine's front end (see :mod:`simmoe.live.driving.front_end`)."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import socket
from collections.abc import Callable
from typing import Any

from simmoe.errors import LiveError
from simmoe.live.driving.front_end import LINE_BYTES
from simmoe.live.driving.life import Life
from simmoe.live.engine.device_clock import DeviceTimes, longest_launches
from simmoe.live.engine.steps import StepRecord, TimedSteps
from simmoe.live.server.dispatch import Counts
from simmoe.live.server.stall import STALL_TIMEOUT_S

_STOP_S = 20.0
"""How long a front end may take to stop its engine."""


class Engine:
    """One engine, through its front end's process, which leads a group of its own.

    Args:
        rank: its ``dp_rank``.
        process: the front end's.
        stall_timeout_s: it is given up once it has requests and has made no step for this long.
    """

    def __init__(
        self, rank: int, process: asyncio.subprocess.Process, stall_timeout_s: float = STALL_TIMEOUT_S
    ) -> None:
        self.rank = rank
        self.facts: dict[str, Any] = {}
        """The engine's limits, see :func:`simmoe.live.server.state.engine_state`."""
        self.num_sent = 0
        self.on_counts: Callable[[Counts, int], None] = lambda counts, number: None
        """Called with what the engine publishes, and how many requests its front end had received."""
        self._process = process
        self._stall_timeout_s = stall_timeout_s
        self._timed = TimedSteps()
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._numbers = itertools.count()
        self._up: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._listening: asyncio.Task[None] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._is_dead = False

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

    @property
    def has_gone(self) -> bool:
        """Whether it serves no more: its front end has ended, or told that it died."""
        return self._is_dead or self._is_alone

    @property
    def _is_alone(self) -> bool:
        return self._writer is None or self._writer.is_closing()

    async def drain(self) -> list[StepRecord]:
        """Return the steps since the last call, with the device's times where the worker keeps a clock.

        What its policy has cost until then is in ``facts`` as ``policy``.

        Raises:
            LiveError: the engine has gone, or its policy cannot show its state.
        """
        if self.facts["hosts_policy"]:
            self.facts = {**self.facts, "policy": await self.call("policy_stats")}
        records = [StepRecord(*row) for row in await self.call("drain_steps")]
        if not self.facts["device_clock"]:
            return records
        told = await self.call("drain_device_times", what="call_workers")
        return self._timed.join(records, longest_launches([DeviceTimes(*row) for row in rows] for rows in told))

    async def call(self, method: str, *arguments: Any, what: str = "call") -> Any:
        """Call the engine's scheduler, or each of its workers (``what="call_workers"``).

        Raises:
            LiveError: the call failed, or the engine has gone.
        """
        value, error = await self._ask(next(self._numbers), what, method, arguments)
        if error:
            raise LiveError(f"engine {self.rank}: {error}")
        return value

    async def stop(self) -> None:
        """Close the conversation and wait for the process to end; kill it, and all it started, if it does not.

        One that is still starting does not listen, and has nothing to finish.
        """
        if self._writer is not None:
            self._writer.close()
        if self._up.done():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._process.wait(), _STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        await self._process.wait()

    async def _ask(self, number: int, what: str, *arguments: Any) -> Any:
        answer = self._answers[number] = asyncio.get_running_loop().create_future()
        self._tell(what, number, *arguments)
        try:
            return await answer
        finally:
            del self._answers[number]

    def _tell(self, *message: Any) -> None:
        if self._is_alone or self._writer is None:
            raise LiveError(f"engine {self.rank} has gone")
        self._writer.write(json.dumps(message).encode() + b"\n")

    async def _listen(self, reader: asyncio.StreamReader) -> None:
        gone = f"engine {self.rank} has gone"
        with contextlib.suppress(ConnectionError):
            while line := await reader.readline():
                what, *rest = json.loads(line)
                if what == "counts":
                    self.on_counts(Counts(*rest[0]), rest[1])
                    if rest[2] >= self._stall_timeout_s:
                        gone = f"engine {self.rank} has requests and has made no step for {self._stall_timeout_s:g} s"
                        break
                elif what == "up":
                    self._up.set_result(rest[0])
                elif what == "down":
                    gone = f"engine {self.rank} did not start: {rest[0]}"
                elif what == "dead":
                    self._is_dead = True
                elif (answer := self._answers.get(rest[0])) is not None and not answer.done():
                    answer.set_result(rest[1] if what == "end" else rest[1:])
        assert self._writer is not None
        self._writer.close()
        for waiting in (self._up, *self._answers.values()):
            if not waiting.done():
                waiting.set_exception(LiveError(gone))
