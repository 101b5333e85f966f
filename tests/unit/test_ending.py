"""A command ends when it is done, whatever threads a policy has started; those that end are waited for."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from simmoe.profiles.catalog import DEFAULT_PROFILE, profile_names

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

IN_TIME_S = 120.0
"""Long after everything has ended, on any machine."""


def run(tmp_path: Path, text: str, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "mine.py").write_text(text)
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{i},20,5\n" for i in range(20)))
    line = [sys.executable, "-m", "simmoe", command, "--trace", str(trace), "--profile", PROFILE]
    line += ["--policy", f"{tmp_path / 'mine.py'}:Mine", *arguments]
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
