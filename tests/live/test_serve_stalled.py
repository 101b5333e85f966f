"""An engine that makes no step though it has requests, a policy that never returns inside, say: dead in the end."""

from __future__ import annotations

import asyncio
import json
import os
import re
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

if find_spec("httptools") is None:
    pytest.skip("the server is not installed: pip install 'simmoe[serve]'", allow_module_level=True)

from simmoe.errors import LiveError
from simmoe.live.server import state
from simmoe.live.server.probe import STALLED_S, Prober
from simmoe.live.server.replica import LocalReplica, Replica
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
    counts.record(SimpleNamespace(num_running_reqs=1, kv_cache_usage=0.5))
    assert asked(5.0) == pytest.approx(5.0, abs=0.2)
    assert asked(3600.0, every_s=3600.0) == pytest.approx(6.0, abs=0.2), "an hour in which this process stood still"
    left[0] = 0
    assert asked(0.1) == 0.0


def say(**fields: Any) -> dict[str, bytes]:
    return {"/simmoe/state": ok(json.dumps(STATE | fields).encode())}


@pytest.mark.parametrize("stalled_s", [0, 0.0, STALLED_S - 1, float("nan")])
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
            answers.update(say(stalled_s=STALLED_S))
            while (change := await states.get())[0] != "down":
                assert change[0] in ("up", "unresponsive")  # on a machine that keeps it from answering
            assert change[1] == f"it has requests and has made no step for {STALLED_S:g} s"
            answers.update(say())
            while (await states.get())[0] != "up":
                pass
            watching.cancel()
            await asyncio.gather(watching, return_exceptions=True)

    run(test())


STALLS_AT_ONCE = """
import http.server, json, socketserver, sys
STATE, STALLED_S = json.loads(sys.argv[2]), float(sys.argv[3])

class Engine(http.server.BaseHTTPRequestHandler):
    num_asked = 0

    def do_GET(self):
        body = json.dumps(STATE | {"stalled_s": STALLED_S * min(1, Engine.num_asked)}).encode()
        Engine.num_asked += 1
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def address_string(self):
        return "somebody"

socketserver.UnixStreamServer(sys.argv[1], Engine).serve_forever()
"""


def test_one_that_stalls_while_it_is_warmed_up_does_not_start(tmp_path: Path) -> None:
    async def never(address: Address, facts: Mapping[str, Any]) -> None:
        await asyncio.Event().wait()

    async def test() -> None:
        uds = str(tmp_path / "s")
        command = [sys.executable, "-c", STALLS_AT_ONCE, uds, json.dumps(STATE), str(STALLED_S)]
        replica = LocalReplica(0, Address("", uds=uds), command, os.environ, tmp_path / "log", never)
        await asyncio.wait_for(replica.run(), IN_TIME_S)
        reason = (
            f"replica 0 did not start: it has requests and has made no step for {STALLED_S:g} s, while it was warmed up"
        )
        with pytest.raises(LiveError, match=f"^{re.escape(reason)}"):
            await replica.first_up

    asyncio.run(test())
