"""The death of another process's processes is heard of at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from simmoe.live.server.process_watch import engine_processes, first_death, is_dying
from tests.support.deployment import wait_for

uvloop = pytest.importorskip("uvloop", reason="the server is not installed: pip install 'simmoe[serve]'")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and pidfd")

#: exec gives a process the title that vLLM gives its own; each starts the next one and sleeps.
NESTED = "exec -a VLLM::EngineCore bash -c 'bash -c \"exec -a VLLM::Worker sleep 60\" & wait' & sleep 60 & wait"


@contextlib.contextmanager
def server(script: str) -> Iterator[int]:
    with subprocess.Popen(["bash", "-c", script], start_new_session=True) as process:
        try:
            yield process.pid
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def titles(pids: list[int]) -> list[bytes]:
    return [Path(f"/proc/{pid}/cmdline").read_bytes().partition(b"\0")[0] for pid in pids]


@pytest.mark.parametrize("which", [0, 1], ids=["engine", "worker"])
def test_the_first_of_an_engines_processes_to_end_is_named(which: int) -> None:
    async def run(pids: list[int]) -> int:
        num_open = len(os.listdir("/proc/self/fd"))
        with first_death(pids) as death:
            await asyncio.sleep(0)
            assert not death.done()
            os.kill(pids[which], signal.SIGKILL)
            dead = await death
        assert len(os.listdir("/proc/self/fd")) == num_open
        return dead

    with server(NESTED) as pid:
        # and not the sleep beside them
        wait_for(
            lambda: titles(engine_processes(pid)) == [b"VLLM::EngineCore", b"VLLM::Worker"], "they have their names"
        )
        pids = engine_processes(pid)
        assert uvloop.run(run(pids)) == pids[which]


def test_one_that_has_ended_before_is_heard_of_too() -> None:
    async def run(pid: int) -> int:
        with first_death([pid]) as death:
            return await death

    with subprocess.Popen(["true"]) as process:
        process.wait()
    assert uvloop.run(run(process.pid)) == process.pid


def test_a_server_without_processes_has_none() -> None:
    with server("sleep 60 & wait") as pid:
        assert engine_processes(pid) == []
    assert engine_processes(pid) == []


def stat_with(place: int, value: bytes) -> bytes:
    """Return what /proc tells of this process, with a field after its name changed, and a name that is a trap."""
    fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    fields[place] = value
    return b"7 (a) Z 4 (b) " + b" ".join(fields)


def test_one_that_was_killed_is_dying_before_the_kernel_has_taken_it_apart() -> None:
    assert not is_dying(Path("/proc/self/stat").read_bytes())
    for place, value in ((0, b"S"), (6, b"4194304"), (28, str(1 << signal.SIGTERM - 1).encode())):
        assert not is_dying(stat_with(place, value))
    for place, value in ((0, b"Z"), (0, b"X"), (6, b"4194308"), (28, str(1 << signal.SIGKILL - 1).encode())):
        assert is_dying(stat_with(place, value))
    with subprocess.Popen(["sleep", "60"]) as process:
        assert not is_dying(Path(f"/proc/{process.pid}/stat").read_bytes())
        process.kill()
        assert is_dying(Path(f"/proc/{process.pid}/stat").read_bytes())
