"""A live run's conversation with its engines' front ends, over real sockets with a stand-in for vLLM at the far end."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from simmoe.errors import LiveError
from simmoe.live.driving.conversation import Engine
from simmoe.live.driving.front_end import LINE_BYTES, FrontEnd
from simmoe.live.driving.life import Life
from simmoe.live.server.dispatch import Counts
from simmoe.live.server.stall import STALL_TIMEOUT_S
from tests.support.deployment import IN_TIME_S

pytestmark = pytest.mark.skipif(
    find_spec("vllm") is None, reason="vLLM is not installed: pip install 'simmoe[live-cpu]'"
)


class Stream:
    """What vLLM hands over of one request: its first token, then the rest at once, or nothing ever."""

    request_id = "internal"

    def __init__(self, num_tokens: int, never: bool) -> None:
        self.left = [self._output(1, num_tokens == 1)]
        if num_tokens > 1:
            self.left.append(self._output(num_tokens - 1, True))
        if never:
            self.left.clear()

    @staticmethod
    def _output(num_tokens: int, finished: bool) -> Any:
        times = {"queued_ts": 2.0, "scheduled_ts": 3.0, "first_token_ts": 4.0, "last_token_ts": 5.0}
        metrics = SimpleNamespace(num_preemptions=1, **times)
        return SimpleNamespace(
            outputs=[SimpleNamespace(token_ids=[7] * num_tokens)], finished=finished, metrics=metrics
        )

    def get_nowait(self) -> Any:
        return self.left.pop(0) if self.left else None

    async def get(self) -> Any:
        await asyncio.Event().wait()


class StandIn:
    """The part of ``AsyncLLM`` that a front end asks. Prompts that begin with 13 are refused, with 0 never answered."""

    def __init__(self) -> None:
        self.aborted: list[str] = []
        self.parameters: list[Any] = []
        self.engine_core = self
        self.errored = False
        self.stalled_s = 0.0

    async def add_request(self, request_id: str, prompt: dict[str, list[int]], parameters: Any) -> Stream:
        from vllm.exceptions import VLLMValidationError

        self.parameters.append(parameters)
        if prompt["prompt_token_ids"][0] == 13:
            raise VLLMValidationError("too long")
        return Stream(parameters.max_tokens, never=prompt["prompt_token_ids"][0] == 0)

    async def abort(self, request_id: str, internal: bool) -> None:
        self.aborted.append(request_id)

    async def call_utility_async(self, utility: str, method: str, arguments: list[Any]) -> Any:
        if method == "nothing":
            raise AttributeError("no 'nothing'")
        return [utility, method, arguments]

    async def collective_rpc(self, method: str, args: tuple[Any, ...]) -> list[Any]:
        return [[method, *args]]


@asynccontextmanager
async def conversation(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[tuple[Engine, StandIn, Callable[[], None]]]:
    """Yield the run's end, vLLM's stand-in at the other end, and what cuts the line."""
    stand_in = StandIn()
    counts = SimpleNamespace(
        num_waiting=1, num_running=2, kv_used=0.5, k_running=3, stalled_s=lambda: stand_in.stalled_s
    )

    async def state(llm: StandIn) -> dict[str, bool]:
        return {"device_clock": False, "hosts_policy": False}

    monkeypatch.setattr("simmoe.live.driving.front_end.engine_state", state)
    monkeypatch.setattr("simmoe.live.driving.front_end.EngineCounts", SimpleNamespace(of=lambda llm: counts))
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=theirs, limit=LINE_BYTES)
    serving = asyncio.create_task(FrontEnd(stand_in, reader, writer).serve())

    process = await asyncio.create_subprocess_exec(sys.executable, "-c", "", start_new_session=True)
    engine = Engine(0, process)
    await engine.connect(ours)
    yield engine, stand_in, writer.close
    await engine.stop()
    await serving
    writer.close()


def test_a_request_comes_back_with_its_times_and_only_its_ends_are_streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with conversation(monkeypatch) as (engine, stand_in, _):
            lives = [Life(row) for row in range(3)]
            prompts = ([5, 6], [13], [7])
            await asyncio.gather(*(engine.send(life, p, 9, 4) for life, p in zip(lives, prompts, strict=True)))
            assert [life.status for life in lives] == ["finished", "rejected", "finished"]
            assert (lives[0].output_tokens, lives[0].num_preemptions, lives[1].reason) == (9, 1, "too long")
            assert (lives[0].queued_s, lives[0].scheduled_s) == (2.0, 3.0)
            assert (lives[0].first_output_s, lives[0].last_output_s) == (4.0, 5.0)
            assert lives[0].received_s <= lives[0].first_token_s <= lives[0].finished_s
            assert lives[0].dispatched_s <= lives[0].queued_s
            (parameters, *_) = stand_in.parameters
            assert (parameters.min_tokens, parameters.stream_interval) == (9, 9)
            assert parameters.extra_args == {"simmoe_k": 4}

    asyncio.run(run())


def test_calls_are_answered_and_failures_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with conversation(monkeypatch) as (engine, *_):
            assert await engine.call("host_policy", {"a": 1}) == ["simmoe_scheduler", "host_policy", [{"a": 1}]]
            assert await engine.call("clock", 3, what="call_workers") == [["clock", 3]]
            with pytest.raises(LiveError, match="engine 0: AttributeError: no 'nothing'"):
                await engine.call("nothing")
            assert not engine.has_gone

    asyncio.run(run())


def test_an_engine_that_dies_before_it_has_told_what_it_is_did_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM would have its front end wait for ever."""

    async def state(llm: StandIn) -> None:
        llm.errored = True
        await asyncio.Event().wait()

    async def run() -> None:
        monkeypatch.setattr("simmoe.live.driving.front_end.engine_state", state)
        ours, theirs = socket.socketpair()
        reader, writer = await asyncio.open_connection(sock=theirs, limit=LINE_BYTES)
        serving = asyncio.create_task(FrontEnd(StandIn(), reader, writer).serve())
        serving.add_done_callback(lambda _: writer.close())  # as its process ends
        engine = Engine(0, await asyncio.create_subprocess_exec(sys.executable, "-c", "", start_new_session=True))
        with pytest.raises(LiveError, match=r"^engine 0 did not start: the engine has died$"):
            await engine.connect(ours)
        await engine.stop()
        await serving

    asyncio.run(asyncio.wait_for(run(), IN_TIME_S))


def test_a_dead_engine_behind_a_front_end_that_lives_has_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with conversation(monkeypatch) as (engine, stand_in, _):
            stand_in.errored = True
            with pytest.raises(LiveError, match="engine 0: AttributeError: no 'nothing'"):
                await engine.call("nothing")
            assert engine.has_gone

    asyncio.run(run())


def test_an_engine_that_makes_no_step_is_given_up_with_all_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with conversation(monkeypatch) as (engine, stand_in, _):
            heard: asyncio.Queue[Counts] = asyncio.Queue()
            engine.on_counts = lambda counts, number: heard.put_nowait(counts)
            sending = asyncio.create_task(engine.send(Life(0), [0], 5, 1))
            stand_in.stalled_s = STALL_TIMEOUT_S - 1
            for _ in range(3):
                await heard.get()
            assert not sending.done() and not engine.has_gone
            stand_in.stalled_s = STALL_TIMEOUT_S
            told = f"^engine 0 has requests and has made no step for {STALL_TIMEOUT_S:g} s$"
            with pytest.raises(LiveError, match=told):
                await sending
            assert engine.has_gone
            with pytest.raises(LiveError, match="engine 0 has gone"):
                await engine.send(Life(1), [5], 1, 1)

    asyncio.run(run())


def test_counts_say_how_many_requests_they_know_of(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with conversation(monkeypatch) as (engine, *_):
            heard: asyncio.Queue[tuple[Counts, int]] = asyncio.Queue()
            await engine.send(Life(0), [5], 1, 1)
            engine.on_counts = lambda counts, number: heard.put_nowait((counts, number))
            assert await heard.get() == (Counts(1, 2, 0.5, 3), 1)

    asyncio.run(run())


def test_a_cancelled_request_is_aborted_in_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with conversation(monkeypatch) as (engine, stand_in, _):
            sending = asyncio.create_task(engine.send(Life(0), [0], 5, 1))
            while not stand_in.parameters:
                await asyncio.sleep(0)
            sending.cancel()
            await asyncio.gather(sending, return_exceptions=True)
            while not stand_in.aborted:
                await asyncio.sleep(0)
            assert stand_in.aborted == ["internal"]

    asyncio.run(run())


def test_an_engine_that_goes_leaves_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> None:
        async with conversation(monkeypatch) as (engine, stand_in, cut):
            sending = asyncio.create_task(engine.send(Life(0), [0], 5, 1))
            while not stand_in.parameters:
                await asyncio.sleep(0)
            cut()
            with pytest.raises(LiveError, match="engine 0 has gone"):
                await sending
            with pytest.raises(LiveError, match="engine 0 has gone"):
                await engine.send(Life(1), [5], 1, 1)

    asyncio.run(run())
