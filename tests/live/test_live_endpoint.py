"""Steps fetched over HTTP from engines on a machine whose clock is another."""

from __future__ import annotations

import asyncio
import json
import time
from importlib.util import find_spec
from typing import Any

import pytest

from simmoe.live.engine.steps import StepRecord

pytestmark = pytest.mark.skipif(
    find_spec("httptools") is None, reason="the server is not installed: pip install 'simmoe[serve]'"
)

STEP = StepRecord(0, 10.0, 10.1, 11.0, 11.1, 8, 36, 1, 0, 0, 4, 4, 32, 0, 1, 0)
TIMED = STEP._replace(step=1, device_start_s=10.2, device_end_s=10.9, launch_s=0.3)
TIMES = ("schedule_start_s", "schedule_end_s", "output_s", "update_end_s", "device_start_s", "device_end_s")


def drained(ahead_s: float) -> list[StepRecord]:
    """Return both steps as a client on this machine has them, the server's clock being so far ahead of its own."""
    from simmoe.live.driving.endpoint import Endpoint

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        rank: dict[str, Any] = {"monotonic_s": time.monotonic() + ahead_s, "steps": [STEP, TIMED]}
        body = json.dumps({"ranks": {"0": rank}, "deployment": {"flags": ["--some"]}}).encode()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        await writer.drain()
        writer.close()
        closed.set()

    closed = asyncio.Event()

    async def run() -> list[StepRecord]:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            endpoint = Endpoint(f"http://127.0.0.1:{port}", "tiny")
            steps = (await endpoint.drain())[0][1]
            assert endpoint.deployment == {"flags": ["--some"]}
            await closed.wait()  # no connection is left to whoever collects it
            return steps

    return asyncio.run(run())


def test_one_machine_has_one_clock() -> None:
    assert drained(0.0) == [STEP, TIMED]


@pytest.mark.parametrize("ahead_s", [1000.0, -1000.0])
def test_all_times_of_a_step_move_together(ahead_s: float) -> None:
    plain, timed = drained(ahead_s)
    assert plain.device_end_s is None and plain.launch_s is None
    assert timed.launch_s == TIMED.launch_s, "a duration stays"
    moved_s = plain.output_s - STEP.output_s
    assert moved_s == pytest.approx(-ahead_s, abs=5.0), "the answer took less than that"
    for name in TIMES:
        assert getattr(timed, name) - getattr(TIMED, name) == pytest.approx(moved_s)
