"""An engine that makes no step though it has requests, a policy that never returns inside, say: dead in the end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

if find_spec("httptools") is None:
    pytest.skip("the server is not installed: pip install 'simmoe[serve]'", allow_module_level=True)

from simmoe.errors import LiveError
from simmoe.live.server import replica as replica_module
from simmoe.live.server import stall, state
from simmoe.live.server.exchange import Exchange
from simmoe.live.server.probe import Prober
from simmoe.live.server.replica import LocalReplica, Replica
from simmoe.live.server.stall import STALL_TIMEOUT_S, StallWatch
from simmoe.live.server.state import EngineCounts
from simmoe.live.server.upstream import Address
from tests.live.test_serve_hostile import STATE, engine, ok, run, saying
from tests.support.deployment import IN_TIME_S


class Clock:
    """Time as the test has it."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


def test_steps_idleness_and_standing_still_are_no_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, left = Clock(), [0]
    monkeypatch.setattr(state, "time", clock)
    processor = SimpleNamespace(get_num_unfinished_requests=lambda: left[0])
    counts = EngineCounts(SimpleNamespace(output_processor=processor))

    def asked(seconds: float, every_s: float = 0.1) -> float:
        end_s, stalled_s = clock.now_s + seconds, 0.0
        while clock.now_s < end_s:
            clock.now_s += every_s
            stalled_s = counts.stalled_s()
        return stalled_s

    assert asked(1000.0) == 0.0
    left[0] = 1
    assert asked(10.0) == pytest.approx(10.0, abs=0.2)
    counts.record(SimpleNamespace(num_running_reqs=1, kv_cache_usage=0.5, running_lora_adapters={}))
    assert asked(5.0) == pytest.approx(5.0, abs=0.2)
    assert asked(3600.0, every_s=3600.0) == pytest.approx(6.0, abs=0.2), "an hour in which this process stood still"
    left[0] = 0
    assert asked(0.1) == 0.0


def say(**fields: Any) -> dict[str, bytes]:
    return {"/simmoe/state": ok(json.dumps(STATE | fields).encode())}


@pytest.mark.parametrize("stalled_s", [0, 0.0, STALL_TIMEOUT_S - 1, float("nan")])
def test_one_that_may_still_move_is_well(stalled_s: float) -> None:
    async def test() -> None:
        async with engine(saying(say(stalled_s=stalled_s))) as address:
            answer = await Prober(address).ask(IN_TIME_S)
            assert answer.is_healthy and "stalled_s" not in answer.facts

    run(test())


def test_one_that_makes_no_step_is_down_until_it_does() -> None:
    answers = say()
    states: asyncio.Queue[tuple[str, str]] = asyncio.Queue()

    async def test() -> None:
        async with engine(saying(answers)) as address:
            replica = Replica(0, address)
            replica.on_change = lambda replica, why: states.put_nowait((replica.state, why))
            watching = asyncio.create_task(replica.run())
            assert (await states.get())[0] == "up"
            answers.update(say(stalled_s=STALL_TIMEOUT_S))
            while (change := await states.get())[0] != "down":
                assert change[0] in ("up", "unresponsive")  # on a machine that keeps it from answering
            assert change[1] == f"it has requests and has made no step for {STALL_TIMEOUT_S:g} s"
            answers.update(say())
            while (await states.get())[0] != "up":
                pass
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    run(test())


STALLS_ONCE_WARMED = """
import http.server, json, os, socketserver, sys
STATE, STALLED_S, WARMED = json.loads(sys.argv[2]), float(sys.argv[3]), sys.argv[4]

class Engine(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps(STATE | {"stalled_s": STALLED_S * os.path.exists(WARMED)}).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def address_string(self):
        return "somebody"

socketserver.UnixStreamServer(sys.argv[1], Engine).serve_forever()
"""


def test_one_that_stalls_while_it_is_warmed_up_does_not_start(tmp_path: Path) -> None:
    warmed = tmp_path / "warmed"

    async def never(address: Address, facts: Mapping[str, Any]) -> None:
        warmed.touch()
        await asyncio.Event().wait()

    async def test() -> None:
        uds = str(tmp_path / "s")
        command = [sys.executable, "-c", STALLS_ONCE_WARMED, uds, json.dumps(STATE), str(STALL_TIMEOUT_S), str(warmed)]
        replica = LocalReplica(0, Address("", uds=uds), command, os.environ, tmp_path / "log", never)
        await asyncio.wait_for(replica.run(), IN_TIME_S)
        stalled = f"it has requests and has made no step for {STALL_TIMEOUT_S:g} s"
        reason = f"replica 0 did not start: {stalled}, while it was warmed up"
        with pytest.raises(LiveError, match=f"^{re.escape(reason)}"):
            await replica.first_up

    asyncio.run(test())


LIMIT_S = 20.0
GAPS_S = st.lists(st.floats(0.0, 3.0), min_size=1, max_size=60)


def watched(gaps_s: list[float], look: Callable[[StallWatch, int], bool]) -> list[bool]:
    """Return what a watch says at each look, so many seconds apart."""
    clock = Clock()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stall, "time", clock)
        watch = StallWatch(LIMIT_S)
        told = []
        for number, gap_s in enumerate(gaps_s):
            clock.now_s += gap_s
            told.append(look(watch, number))
        return told


@given(GAPS_S)
def test_one_that_is_awaited_and_shows_no_work_is_stalled_after_the_limit(gaps_s: list[float]) -> None:
    """Of a gap longer than a second in which nobody looked, a second counts; the first look has nothing to compare."""
    told = watched(gaps_s, lambda watch, _: watch.look(has_answered=False, is_awaited=True, metrics="vllm:x 1\nhttp 1"))
    seen_s = [sum(min(gap_s, 1.0) for gap_s in gaps_s[1 : number + 1]) for number in range(len(gaps_s))]
    near = [abs(s - LIMIT_S) < 1e-9 for s in seen_s]
    assert all(
        is_near or is_stalled == (s >= LIMIT_S) for is_stalled, s, is_near in zip(told, seen_s, near, strict=True)
    )


@given(GAPS_S, st.sampled_from(["its metrics change", "an answer goes on", "it tells no metrics", "nobody waits"]))
def test_what_gets_on_or_cannot_be_judged_is_never_stalled(gaps_s: list[float], why: str) -> None:
    def look(watch: StallWatch, number: int) -> bool:
        shown = number if why == "its metrics change" else 0
        return watch.look(
            has_answered=why == "an answer goes on",
            is_awaited=why != "nobody waits",
            metrics=f"http_requests_total {number}\n" + (f"vllm:x {shown}\n" if why != "it tells no metrics" else ""),
        )

    assert not any(watched(10 * gaps_s, look))


def test_one_that_is_stalled_stays_so_until_it_shows_work() -> None:
    def look(watch: StallWatch, number: int) -> bool:
        return watch.look(has_answered=False, is_awaited=number < 30, metrics=f"vllm:x {number // 50}")

    assert watched([1.0] * 60, look) == [False] * 20 + [True] * 30 + [False] * 10


class Running(Clock):
    """A clock that goes on by a second each time it is read: so fast do looks follow one another."""

    def monotonic(self) -> float:
        self.now_s += 1.0
        return self.now_s


class Client:
    """A client that takes whatever it is sent."""

    is_gone = False

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args: None


def begun(replica: Replica) -> Exchange:
    """Return a stream that the replica has begun to answer."""
    exchange = Exchange(cast(Any, Client()))
    replica.exchanges.add(exchange)
    exchange.head(200, {"content-type": "text/event-stream"})
    exchange.body(b"data: {}\n\n")
    return exchange


class Plain:
    """A plain server, its replica, and what happens at each look."""

    def __init__(self) -> None:
        self.num_looks = 0
        self.shown = b"vllm:kv_cache_usage_perc 0.5\n"
        self.each: Callable[[], object] = lambda: None
        self.states: asyncio.Queue[tuple[str, str]] = asyncio.Queue()
        self.looked: asyncio.Queue[int] = asyncio.Queue()

    async def peer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readline()).split()[1].decode()
        while (await reader.readline()).strip():
            pass
        if path == "/metrics":
            self.num_looks += 1
            self.each()
            self.looked.put_nowait(self.num_looks)
        body = b"http_requests_total %d\n%b" % (self.num_looks, self.shown)
        writer.write(ok(body) if path in ("/health", "/metrics") else b"HTTP/1.1 404 No\r\ncontent-length: 0\r\n\r\n")

    @asynccontextmanager
    async def watched(self, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Replica]:
        """Yield its replica, up and watched by a clock that runs."""
        monkeypatch.setattr(stall, "time", Running())
        async with engine(self.peer) as address:
            replica = Replica(0, address, LIMIT_S)
            replica.on_change = lambda replica, why: self.states.put_nowait((replica.state, why))
            watching = asyncio.create_task(replica.run())
            assert (await self.states.get())[0] == "up"
            yield replica
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    async def becomes(self, state: str) -> str:
        """Return why it came into a state."""
        while (change := await self.states.get())[0] != state:
            assert change[0] in ("up", "unresponsive")  # on a machine that keeps it from answering
        return change[1]


def test_a_plain_server_whose_engine_hangs_is_down_until_it_shows_work(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = Plain()

    async def test() -> None:
        async with plain.watched(monkeypatch) as replica:
            exchange = begun(replica)
            assert await plain.becomes("down") == f"it has requests and has shown no work for {LIMIT_S:g} s"
            assert exchange._is_aborted
            replica.let_go(exchange)
            asked = plain.num_looks
            while await plain.looked.get() < asked + 5:
                assert plain.states.empty(), "it answers, and is still hung"
            plain.shown = b"vllm:kv_cache_usage_perc 0.6\n"
            await plain.becomes("up")

    run(test())


def goes_on(plain: Plain, replica: Replica) -> None:
    begun(replica)
    other = begun(replica)
    plain.each = lambda: other.body(b"data: {}\n\n")


def is_refused(plain: Plain, replica: Replica) -> None:
    begun(replica).client_slow(True)

    def each() -> None:
        """A request is being refused at each look, never the same."""
        for exchange in [exchange for exchange in replica.exchanges if not exchange.has_started]:
            replica.let_go(exchange)
        replica.exchanges.add(Exchange(cast(Any, Client())))

    plain.each = each


def is_worked_on(plain: Plain, replica: Replica) -> None:
    begun(replica)

    def each() -> None:
        plain.shown = b"vllm:kv_cache_usage_perc %f\n" % (plain.num_looks / 1000)

    plain.each = each


def tells_nothing(plain: Plain, replica: Replica) -> None:
    begun(replica)
    plain.shown = b"llama_tokens_total 5\n"


@pytest.mark.parametrize("why", [goes_on, is_refused, is_worked_on, tells_nothing, lambda plain, replica: None])
def test_a_plain_server_that_gets_on_or_cannot_be_judged_stays_up(
    why: Callable[[Plain, Replica], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Plain()

    async def test() -> None:
        async with plain.watched(monkeypatch) as replica:
            why(plain, replica)
            while await plain.looked.get() < 2 * (LIMIT_S + replica_module._SILENT_LOOKS):
                pass
            while not plain.states.empty():
                assert plain.states.get_nowait()[0] != "down"

    run(test())
