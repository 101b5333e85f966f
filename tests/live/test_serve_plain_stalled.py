"""A plain vLLM server whose engine core stands still inside a step, its API server well: noticed by all that use it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.deployment import IN_TIME_S, START_S, deployed, wait_for

pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: pip install 'simmoe[live-cpu]'"),
]

STALL_TIMEOUT_S = 10
"""Longer than any step of the tiny model, on any machine; the shorter, the sooner the test is over."""


def simmoe(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command on a workload of three requests."""
    trace = folder / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n0,20,5\n0.1,30,5\n0.2,20,3\n")
    command = [sys.executable, "-m", "simmoe", *arguments, "--trace", str(trace), "--api-key", "secret"]
    return subprocess.run(command, capture_output=True, text=True, timeout=IN_TIME_S, check=False)


def test_an_engine_that_hangs_inside_a_step(tmp_path: Path) -> None:
    from simmoe.live.server.process_watch import engine_processes
    from tests.live.test_serve_plain import BUDGETS, vllm_server
    from tests.support.tiny_model import ENDLESS, write_tiny_model

    with vllm_server(tmp_path, write_tiny_model(tmp_path / "model"), "engine", *BUDGETS) as (url, process):
        # before it hangs: what cannot be simulated afterwards is not sent anything
        refused = simmoe(tmp_path, "validate", "--url", url, "--out", str(tmp_path / "out"))
        assert refused.returncode == 8 and not (tmp_path / "out").exists()
        assert "does not tell its engines' limits and the policy they run" in refused.stderr

        # nor are its first steps, in which much may be compiled, held to the limit
        drive = ["live", "run", "--url", url, "--k-max", "8", "--vocab-size", "50"]
        driven = simmoe(tmp_path, *drive)
        assert "3 injected = 3 finished" in driven.stdout, driven.stderr

        arguments = ["simmoe", "serve", "--url", url, "--k-max", "8", "--port", "0"]
        arguments += ["--stall-timeout-s", str(STALL_TIMEOUT_S)]
        with deployed(tmp_path / "serve.log", arguments, START_S) as running:
            running.headers = {"Authorization": "Bearer secret"}
            stream = running.stream(max_tokens=ENDLESS)
            assert stream.event()
            cores = engine_processes(process.pid)
            assert cores
            for pid in cores:
                os.kill(pid, signal.SIGSTOP)
            *_, error, done = stream.rest()
            assert done == "[DONE]" and "replica 0 was lost" in error["error"]["message"]
            wait_for(lambda: running.states() == {"0": "down"}, "it is down")
            assert f"has shown no work for {STALL_TIMEOUT_S} s" in running.log.read_text()
            assert running.complete()[0] == 503

            drive += ["--stall-timeout-s", str(STALL_TIMEOUT_S)]
            driven = simmoe(tmp_path, *drive)
            assert driven.returncode == 8
            reason = f"nothing came of any answer for {STALL_TIMEOUT_S} s, nor did an engine show work"
            assert f"note: 3 failed: {reason}" in driven.stderr.splitlines()

            for pid in cores:
                os.kill(pid, signal.SIGCONT)
            wait_for(lambda: running.states() == {"0": "up"}, "it is up again")
            assert running.complete()[0] == 200
            driven = simmoe(tmp_path, *drive)
            assert "3 injected = 3 finished" in driven.stdout, driven.stderr
            assert running.stop() == 0
