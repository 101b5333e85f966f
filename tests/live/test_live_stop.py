"""Engines that do not listen, to their end or to whoever asks: nobody waits for them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from typing import Any

import pytest

from simmoe.errors import LiveError
from tests.live.test_live_front_end import StandIn, conversation
from tests.support.deployment import IN_TIME_S

pytestmark = pytest.mark.live

# Told to stop before it knows of its engine, or between looking for signals and waiting for one, it would do neither.
LEADER = """
import multiprocessing, signal, sys, time
from simmoe.live.driving import front_end

def engine(is_deaf):
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    is_deaf.set()
    while True:
        time.sleep(60)

if __name__ == "__main__":
    front_end.STOP_S = 1
    signal.signal(signal.SIGTERM, front_end.stop)
    fork = multiprocessing.get_context("fork")
    is_deaf = fork.Event()
    fork.Process(target=engine, args=(is_deaf,), daemon=True).start()
    is_deaf.wait()
    print("up", flush=True)
    while True:
        time.sleep(0.1)
"""


def test_an_engine_that_does_not_listen_is_killed_when_its_parent_is_gone() -> None:
    """Its front end's output ends once nobody is left that could write."""
    leader = subprocess.Popen([sys.executable, "-c", LEADER], stdout=subprocess.PIPE, start_new_session=True)
    assert leader.stdout is not None
    try:
        assert leader.stdout.readline() == b"up\n"
        leader.terminate()
        assert leader.communicate(timeout=IN_TIME_S)[0] == b""
        assert leader.returncode == -signal.SIGKILL
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader.pid, signal.SIGKILL)


def test_a_call_that_an_engine_dies_over_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM leaves whoever asked a dead engine waiting."""

    async def never(self: StandIn, utility: str, method: str, arguments: list[Any]) -> Any:
        if method == "die":
            self.errored = True
        await asyncio.Event().wait()

    monkeypatch.setattr(StandIn, "call_utility_async", never)

    async def test() -> None:
        async with conversation(monkeypatch) as (engine, *_):
            asked = asyncio.create_task(engine.call("drain_steps"))
            await asyncio.sleep(0)
            for call in (engine.call("die"), asked, engine.call("drain_steps")):
                with pytest.raises(LiveError, match=r"^engine 0: LiveError: the engine has died$"):
                    await call
            assert engine.has_gone

    asyncio.run(asyncio.wait_for(test(), IN_TIME_S))
