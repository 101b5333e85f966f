"""A front end whose engine does not listen, and whose parent is gone, takes all it leads along."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys

import pytest

pytestmark = pytest.mark.live

LEADER = """
import multiprocessing, signal, sys, time
from simmoe.live.driving import front_end

def engine():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("up", flush=True)
    while True:
        time.sleep(60)

if __name__ == "__main__":
    front_end.STOP_S = 1
    signal.signal(signal.SIGTERM, front_end.stop)
    multiprocessing.get_context("fork").Process(target=engine, daemon=True).start()
    signal.pause()
"""


def test_an_engine_that_does_not_listen_is_killed() -> None:
    """Its output ends once nobody is left that could write."""
    leader = subprocess.Popen([sys.executable, "-c", LEADER], stdout=subprocess.PIPE, start_new_session=True)
    assert leader.stdout is not None
    try:
        assert leader.stdout.readline() == b"up\n"
        leader.terminate()
        assert leader.communicate(timeout=60.0)[0] == b""
        assert leader.returncode == -signal.SIGKILL
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader.pid, signal.SIGKILL)
