"""One engine behind the endpoint: watched ten times a second; started, and started again, where it is ours."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from simmoe.errors import LiveError
from simmoe.live.server.dispatch import Dispatcher
from simmoe.live.server.engine_log import last_failure
from simmoe.live.server.exchange import Exchange
from simmoe.live.server.probe import Answer, Prober
from simmoe.live.server.process_watch import engine_processes, first_death
from simmoe.live.server.stall import STALL_TIMEOUT_S, StallWatch
from simmoe.live.server.upstream import Address, UnusableServer, described

PUBLISH_INTERVAL_S = 0.1
UNRESPONSIVE_S = 0.75
"""An engine's server that has been silent for this long, though asked, gets no new request."""

_ANSWER_S = UNRESPONSIVE_S - PUBLISH_INTERVAL_S
"""How long it may take over one question: it was last heard an interval before."""

HUNG_S = 10.0
"""One that is silent for this long is dead."""

STOP_S = 20.0
"""How long an engine may take to stop when asked."""

_SILENT_LOOKS = 10
"""A request is waited for once nothing has come of its answer in so many intervals: one that is refused soon ends."""

_MAX_BACKOFF_S = 30.0
_MAX_FAILURE = 400
"""Characters of a log's line in a message."""

_NOBODY_THERE = (ConnectionRefusedError, ConnectionResetError, BrokenPipeError, FileNotFoundError)

log = logging.getLogger(__name__)

State = Literal["starting", "up", "unresponsive", "down"]


class Replica:
    """An engine's server somewhere else: watched, never started.

    Args:
        rank: its ``dp_rank``.
        address: where it listens.
        stall_timeout_s: it is dead once it has requests and has got on with none for this long.
    """

    def __init__(self, rank: int, address: Address, stall_timeout_s: float = STALL_TIMEOUT_S) -> None:
        self.rank = rank
        self.address = address
        self.state: State = "starting"
        self.exchanges: set[Exchange] = set()
        """What it answers now."""
        self.facts: dict[str, Any] = {}
        """Its limits, see :func:`simmoe.live.server.state.engine_state`."""
        self.first_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done once it has been up; its exception says why it never will be."""
        self.dispatcher: Dispatcher | None = None
        """Told of its counts."""
        self.on_change: Callable[[Replica, str], None] = lambda replica, why: None
        """Called when it comes up or stops taking requests, with the reason."""
        self._stall_timeout_s = stall_timeout_s
        self._stall = StallWatch(stall_timeout_s)
        self._has_answered = False
        """Whether a part of an answer that has ended since has come since the last look."""
        self._prober = Prober(address, stall_timeout_s)
        self._wake = asyncio.Event()

    async def run(self) -> None:
        """Watch until cancelled."""
        while True:
            self._left(await self._watch())
            await self._pause(PUBLISH_INTERVAL_S)

    async def is_well(self) -> bool:
        """Return whether the engine answers and says it is well."""
        try:
            return (await self._prober.ask(UNRESPONSIVE_S)).is_healthy
        except OSError:
            return False

    def look(self) -> None:
        """Ask at once how it is: something of it was lost."""
        self._wake.set()

    def let_go(self, exchange: Exchange) -> None:
        """Hear that an answer has ended, in whatever way."""
        self.exchanges.discard(exchange)
        if not exchange.num_silent_looks:
            self._has_answered = True

    async def has_failed(self) -> bool:
        """Look now, since a request was lost; an engine that is not well gets no more while another is up."""
        if await self.is_well():
            return False
        self.look()
        if self.state == "up":
            self._set("unresponsive", "a request was lost")
        return True

    async def stop(self) -> None:
        """Stop the engine, if it is ours."""

    async def _watch(self) -> str:
        """Publish the engine's counts until it is dead; return why it is thought to be.

        What dies is noticed once it has been silent for ``UNRESPONSIVE_S``, or as soon as its connections are lost:
        then it is asked again at once, and a second time, since one lost connection is no proof. Time in which this
        process stood still is not the engine's silence.
        """
        silent_s, is_refused = 0.0, False
        while True:
            self._wake.clear()
            asked_s = time.monotonic()
            mark = self.dispatcher.mark(self.rank) if self.dispatcher else 0
            try:
                answer = await self._prober.ask(_ANSWER_S)
            except _NOBODY_THERE as error:
                if is_refused:
                    self._stall = StallWatch(self._stall_timeout_s)  # who answers there next is another one
                    return f"nobody answers at {self.address} ({type(error).__name__})"
                is_refused = True
                continue
            except OSError as error:  # no answer in time, or no way to ask: no proof of anything
                if isinstance(error, UnusableServer) and self.state in ("starting", "down"):
                    return str(error)  # whom it never answered, or no longer does
                silent_s += PUBLISH_INTERVAL_S + min(_ANSWER_S, time.monotonic() - asked_s)
                if silent_s >= HUNG_S:
                    return f"silent for {silent_s:.0f} s ({described(error)})"
                if self.state == "up" and (isinstance(error, TimeoutError) or silent_s >= UNRESPONSIVE_S):
                    self._set("unresponsive", f"no answer for {silent_s:.1f} s ({described(error)})")
            else:
                if not answer.is_healthy:
                    return answer.reason
                if not answer.facts and self._is_stalled(answer.metrics):
                    return f"it has requests and has shown no work for {self._stall_timeout_s:g} s"
                silent_s, is_refused = 0.0, False
                self._heard(answer, mark)
            await self._pause(PUBLISH_INTERVAL_S)

    def _is_stalled(self, metrics: str) -> bool:
        """Return whether an engine that does not tell by itself is, see :class:`StallWatch`."""
        has_answered = self._has_answered or not all(exchange.num_silent_looks for exchange in self.exchanges)
        self._has_answered = False
        is_awaited = max((exchange.look() for exchange in self.exchanges), default=0) > _SILENT_LOOKS
        return self._stall.look(has_answered=has_answered, is_awaited=is_awaited, metrics=metrics)

    def _heard(self, answer: Answer, mark: int) -> None:
        self.facts = answer.facts
        if self.dispatcher:
            self.dispatcher.publish(self.rank, answer.counts, mark, time.monotonic())
        if self.state != "up":
            self._set("up", "it answers")
        if not self.first_up.done():
            self.first_up.set_result(None)

    def _left(self, why: str) -> None:
        """Note that the engine is dead: what it still answered is lost."""
        if self.state != "down":
            self._set("down", why)
        if self.dispatcher:
            self.dispatcher.forget(self.rank)
        # who answers there next may be another kind of server
        self._prober = Prober(self.address, self._stall_timeout_s)
        for exchange in list(self.exchanges):
            exchange.abort()

    def _set(self, state: State, why: str) -> None:
        self.state = state
        self.on_change(self, why)

    async def _pause(self, seconds: float) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._wake.wait(), seconds)


class LocalReplica(Replica):
    """An engine's server started here, in a process group of its own; a dead one is started again.

    Args:
        rank: its ``dp_rank``.
        address: where it will listen.
        command: starts it.
        environment: its variables.
        log_path: takes its output.
        warm_up: given its address and facts once it answers, before it is sent requests.
        stall_timeout_s: as of any replica.
    """

    def __init__(
        self,
        rank: int,
        address: Address,
        command: Sequence[str],
        environment: Mapping[str, str],
        log_path: Path,
        warm_up: Callable[[Address, Mapping[str, Any]], Awaitable[None]],
        stall_timeout_s: float = STALL_TIMEOUT_S,
    ) -> None:
        super().__init__(rank, address, stall_timeout_s)
        self.num_starts = 0
        self.pid: int | None = None
        self._command = command
        self._environment = environment
        self._log_path = log_path
        self._warm_up = warm_up
        self._process: asyncio.subprocess.Process | None = None

    async def run(self) -> None:
        """Keep an engine running until cancelled."""
        backoff_s = 0.0
        while True:
            began_s = time.monotonic()
            why = await self._live()
            was_up = self.state in ("up", "unresponsive")
            self._left(why)  # before the kernel has taken it apart, which may take seconds
            await self._end()
            if not self.first_up.done():
                self.first_up.set_exception(LiveError(f"replica {self.rank} did not start: {why}{self._last_line()}"))
                return
            # at once after a life that was one, ever more slowly after lives that were none
            backoff_s = 0.0 if was_up and time.monotonic() - began_s > 60 else min(_MAX_BACKOFF_S, 2 * backoff_s + 0.5)
            await asyncio.sleep(backoff_s if self.num_starts > 1 else 0)

    async def stop(self) -> None:
        """Ask the engine to stop; kill it if it does not."""
        process = self._process
        if process is None or process.returncode is not None:
            return
        if self.state != "starting":  # an engine that is not ready has nothing to finish, and may not listen to signals
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            try:
                await asyncio.wait_for(process.wait(), STOP_S)
            except TimeoutError:
                log.warning("replica %d did not stop within %.0f s and is killed", self.rank, STOP_S)
        await self._end()

    async def _live(self) -> str:
        """Start the engine, wait until it answers, watch it until it is dead, and return why."""
        if self.address.uds:
            Path(self.address.uds).unlink(missing_ok=True)
        self.num_starts += 1
        with self._log_path.open("ab") as output:
            process = await asyncio.create_subprocess_exec(
                *self._command,
                env=dict(self._environment),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        self._process, self.pid = process, process.pid
        if self.state != "starting":
            self._set("starting", f"start {self.num_starts}, process {process.pid}")
        exit_task = asyncio.ensure_future(process.wait())
        watch_task = asyncio.ensure_future(self._start_and_watch())
        try:
            await asyncio.wait((exit_task, watch_task), return_when=asyncio.FIRST_COMPLETED)
            if exit_task.done():
                code = exit_task.result()
                return f"its process was killed by signal {-code}" if code < 0 else f"its process exited with {code}"
            return watch_task.result()
        finally:
            watch_task.cancel()
            exit_task.cancel()

    async def _start_and_watch(self) -> str:
        while True:  # loading a model takes as long as it takes; a process that ends is noticed by its exit
            with contextlib.suppress(OSError):
                answer = await self._prober.ask(UNRESPONSIVE_S)
                if answer.is_healthy:
                    break
            await asyncio.sleep(PUBLISH_INTERVAL_S)
        assert self.pid is not None
        serving = asyncio.ensure_future(self._warm_up_and_watch(answer.facts))
        with first_death([self.pid, *engine_processes(self.pid)]) as death:
            try:
                await asyncio.wait((serving, death), return_when=asyncio.FIRST_COMPLETED)
                return f"its process {death.result()} has ended" if death.done() else serving.result()
            finally:
                serving.cancel()

    async def _warm_up_and_watch(self, facts: Mapping[str, Any]) -> str:
        warming = asyncio.ensure_future(self._warm_up(self.address, facts))
        try:
            while not warming.done():
                await asyncio.wait((warming,), timeout=PUBLISH_INTERVAL_S)
                with contextlib.suppress(OSError):  # it has much to do; what ends is noticed by its exit
                    answer = await self._prober.ask(UNRESPONSIVE_S)
                    if not answer.is_healthy:
                        return f"{answer.reason}, while it was warmed up"
            await warming
        except OSError as error:
            return f"it was lost while it was warmed up ({type(error).__name__})"
        finally:
            warming.cancel()
        return await self._watch()

    async def _end(self) -> None:
        assert self._process is not None
        self._kill()
        await self._process.wait()

    def _kill(self) -> None:
        """Kill the process and all it started: an orphaned engine core would keep the GPU's memory."""
        assert self._process is not None
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    def _last_line(self) -> str:
        """Return what the log says of it, as part of a message."""
        failure = last_failure(self._log_path.read_text(errors="replace"))
        return f" ({failure[:_MAX_FAILURE]}); see '{self._log_path}'" if failure else ""
