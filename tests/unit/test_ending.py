"""A command ends when it is done, whatever threads a policy has started; those that end are waited for."""

from __future__ import annotations

import multiprocessing
import re
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from simmoe import ending
from simmoe.analysis.metrics import Slo
from simmoe.commands.sweeping.cells import Cell
from simmoe.commands.sweeping.executor import LocalExecutor
from simmoe.errors import SimmoeError
from simmoe.profiles.catalog import DEFAULT_PROFILE, profile_names
from simmoe.simulator.config import SimConfig
from simmoe.traces.spec import WorkloadSpec
from tests.support.deployment import IN_TIME_S

PROFILE = DEFAULT_PROFILE if DEFAULT_PROFILE in profile_names() else profile_names()[0]

GOES_ON = """
import threading

def go_on():
    threading.Event().wait()
"""

ENDS = """
import pathlib, sys, threading

def go_on():
    threading.main_thread().join()
    pathlib.Path(__file__).with_name("written").write_text("whole")
"""

BATCH = """
from simmoe.policies.protocols import ADMIT_ALL

class Mine:
    started = False

    def plan(self, view, /):
        if not self.started:
            self.started = True
            threading.Thread(target=go_on, name="mine").start()
        return ADMIT_ALL
"""

ROUTE = """
from concurrent.futures import ThreadPoolExecutor

class Mine:
    def __init__(self):
        self.pool = ThreadPoolExecutor(1, thread_name_prefix="mine")
        self.pool.submit(go_on)

    def route(self, request, ranks, now_s, /):
        return 0
"""

STUBBORN = """
import pathlib, signal, threading

class Mine:
    def plan(self, view, /):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        pathlib.Path(__file__).with_name("planning").touch()
        threading.Event().wait()
"""


def write_inputs(tmp_path: Path, text: str) -> tuple[str, str]:
    """Return a trace and a policy."""
    (tmp_path / "mine.py").write_text(text)
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{i},20,5\n" for i in range(20)))
    return str(trace), f"{tmp_path / 'mine.py'}:Mine"


def run(tmp_path: Path, text: str, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    trace, policy = write_inputs(tmp_path, text)
    line = [sys.executable, "-m", "simmoe", command, "--trace", trace, "--profile", PROFILE]
    line += ["--policy", policy, *arguments]
    return subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=IN_TIME_S, check=False)


@pytest.mark.parametrize("policy", [BATCH, ROUTE], ids=["a batch policy's thread", "a route policy's pool"])
def test_a_thread_that_never_ends_is_named_and_left(tmp_path: Path, policy: str) -> None:
    done = run(tmp_path, GOES_ON + policy, "run")
    assert done.returncode == 0 and "20 injected = 20 finished" in done.stdout
    told, place = done.stderr.splitlines()[-1], re.escape(f"({tmp_path / 'mine.py'}:5)")
    assert re.fullmatch(rf"simmoe: ended without thread 'mine\S*' {place}, still running .*", told)


def test_the_exit_code_is_the_command_s_own(tmp_path: Path) -> None:
    done = run(tmp_path, GOES_ON + BATCH.replace("return ADMIT_ALL", "return None"), "run")
    failure, told = done.stderr.splitlines()[-2:]
    assert done.returncode == 4
    assert "plan returned None" in failure and told.startswith("simmoe: ended without thread 'mine'")


def test_a_thread_that_ends_is_waited_for(tmp_path: Path) -> None:
    done = run(tmp_path, ENDS + BATCH, "run")
    assert done.returncode == 0 and "ended without" not in done.stderr
    assert (tmp_path / "written").read_text() == "whole"


def test_workers_of_a_sweep_end_too(tmp_path: Path) -> None:
    arguments = ("--rates", "1,2", "--seeds", "2", "--jobs", "2", "--ranks", "1", "--out", str(tmp_path / "out"))
    done = run(tmp_path, GOES_ON + BATCH, "sweep", *arguments)
    assert done.returncode == 0 and (tmp_path / "out" / "sweep.csv").exists()
    (told,) = [line for line in done.stderr.splitlines() if "ended without" in line]
    assert told.startswith("simmoe: a worker process ended without thread 'mine' (")


def test_a_sweep_s_later_workers_wait_for_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The phases after the one in which a worker's patience has run out would not end in time if theirs had to."""
    trace, policy = write_inputs(tmp_path, GOES_ON + BATCH)
    cells = [Cell(WorkloadSpec(trace=trace, seed=seed), policy, PROFILE, SimConfig(), Slo()) for seed in (0, 1)]
    executor = LocalExecutor(2)
    monkeypatch.setattr(ending, "PATIENCE_S", 0.1)  # workers are forked, and this with them

    def finished() -> int:
        outcomes = [event[1] for event in executor.run(cells) if event is not None]
        return sum(not isinstance(outcome, SimmoeError) for outcome in outcomes)

    assert finished() == 2
    monkeypatch.setattr(ending, "PATIENCE_S", IN_TIME_S)
    began_s = time.monotonic()
    assert [finished(), finished()] == [2, 2]
    assert time.monotonic() - began_s < IN_TIME_S
    assert capfd.readouterr().err.count("ended without thread") == 1


@pytest.mark.parametrize("how", ["close", "throw"])
def test_an_abandoned_executor_leaves_no_process_and_no_thread(tmp_path: Path, how: str) -> None:
    """Python has a traceback printed at the end where the pool's own thread is still at its last work."""
    trace, policy = write_inputs(tmp_path, STUBBORN)
    cells = [Cell(WorkloadSpec(trace=trace, seed=seed), policy, PROFILE, SimConfig(), Slo()) for seed in range(4)]
    before = set(threading.enumerate())
    outcomes = LocalExecutor(2).run(cells)
    while not (tmp_path / "planning").exists():
        next(outcomes)
    if how == "close":
        outcomes.close()
    else:
        with pytest.raises(KeyboardInterrupt):
            outcomes.throw(KeyboardInterrupt())
    assert not multiprocessing.active_children() and set(threading.enumerate()) == before
