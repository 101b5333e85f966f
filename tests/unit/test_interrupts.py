"""Ctrl-C at any moment: one line, exit code 130, no process left; and once it is obeyed, another changes nothing."""

from __future__ import annotations

import io
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from simmoe.analysis.metrics import Slo
from simmoe.cli import run as simmoe
from simmoe.commands.sweeping.cells import Cell
from simmoe.commands.sweeping.executor import LocalExecutor
from simmoe.commands.sweeping.progress import LineProgress
from simmoe.commands.sweeping.store import SweepStore
from simmoe.interrupts import ctrl_c_later, ctrl_c_once, sigint_blocked
from simmoe.profiles.catalog import DEFAULT_PROFILE, profile_names
from simmoe.simulator.config import SimConfig
from simmoe.traces.spec import WorkloadSpec
from tests.support.deployment import IN_TIME_S

PROFILE = DEFAULT_PROFILE if DEFAULT_PROFILE in profile_names() else profile_names()[0]

INTERRUPTED = "class Mine:\n    def plan(self, view, /):\n        raise KeyboardInterrupt\n"

#: The command line, with Ctrl-C once Python is about to end.
LATE = """
import atexit, os, signal, sys
atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT))
from simmoe.cli import main
main(sys.argv[1:])
"""


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{i},20,5\n" for i in range(20)))
    return str(path)


def press() -> None:
    signal.raise_signal(signal.SIGINT)


def before(call: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same call, with Ctrl-C first."""

    def pressed(*arguments: Any, **options: Any) -> Any:
        press()
        return call(*arguments, **options)

    return pressed


def test_what_is_not_to_be_cut_is_not() -> None:
    with pytest.raises(KeyboardInterrupt), ctrl_c_later() as came:
        assert not came
        press()
        press()
        assert len(came) == 2
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with pytest.raises(KeyboardInterrupt) as caught, ctrl_c_later() as came:
        press()
        if came:
            raise KeyboardInterrupt("mine")
    assert caught.value.args == ("mine",)
    with ctrl_c_later() as came:
        pass
    assert not came


def test_a_second_ctrl_c_does_not_cut_short_what_the_first_has_tidied_up() -> None:
    reached = []
    with ctrl_c_once():
        for _ in range(2):  # the next is heard again
            with pytest.raises(KeyboardInterrupt):
                try:
                    press()
                finally:
                    press()
                    try:
                        raise OSError
                    except OSError:
                        press()
                    reached.append("end")
    assert reached == ["end", "end"] and signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("held", [ctrl_c_once, ctrl_c_later])
def test_where_ctrl_c_is_ignored_it_stays_so(held: Any) -> None:
    earlier = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with held():
            press()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, earlier)


def test_a_process_can_be_started_without_hearing_ctrl_c_before_it_is_ready() -> None:
    program = "import os, signal; os.kill(os.getpid(), signal.SIGINT); print('alive')"
    with sigint_blocked():
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "alive\n", "")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode != 0, "afterwards as ever"


@pytest.mark.parametrize("when", ["submit", "shutdown"])
def test_ctrl_c_within_a_pool_s_start_or_end_leaves_nothing(
    when: str, trace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ProcessPoolExecutor, when, before(getattr(ProcessPoolExecutor, when)))
    cells = [Cell(WorkloadSpec(trace=trace, seed=seed), "fifo", PROFILE, SimConfig(), Slo()) for seed in range(3)]
    threads = set(threading.enumerate())
    with pytest.raises(KeyboardInterrupt):
        list(LocalExecutor(2).run(cells))
    assert not multiprocessing.active_children() and set(threading.enumerate()) == threads


def test_ctrl_c_is_the_parent_s_from_a_worker_s_first_moment(
    trace: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(BaseProcess, "_bootstrap", before(BaseProcess._bootstrap))  # type: ignore[attr-defined]
    cells = [Cell(WorkloadSpec(trace=trace, seed=seed), "fifo", PROFILE, SimConfig(), Slo()) for seed in range(3)]
    assert len([event for event in LocalExecutor(2).run(cells) if event is not None]) == 3
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("command", ["sweep", "search"])
@pytest.mark.parametrize("jobs", ["1", "2"])
def test_pressed_again_and_again_it_says_the_same_once(
    command: str, jobs: str, trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    for thing, name in ((LineProgress, "close"), (SweepStore, "interrupted"), (SweepStore, "__exit__")):
        monkeypatch.setattr(thing, name, before(getattr(thing, name)))
    monkeypatch.setattr(LineProgress, "advance", before(LineProgress.advance))
    monkeypatch.chdir(tmp_path)
    argv = [command, "--trace", trace, "--profile", PROFILE, "--policy", "fifo", "--seeds", "1", "--jobs", jobs]
    argv += ["--slo-ttft", "1", "--out", "out"]
    assert simmoe(argv) == 130
    lines = [line for line in capfd.readouterr().err.splitlines() if not line.startswith(("trace: ", "profile: "))]
    assert lines == ["simmoe: interrupted; 0 finished cells are kept in 'out': repeat the command to resume"]
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert simmoe(argv) == 0


@pytest.mark.parametrize("statement", ["raise KeyboardInterrupt", "exec('raise KeyboardInterrupt')"])
def test_the_exit_code_of_ctrl_c_is_130_wherever_it_struck(statement: str, trace: str, tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(INTERRUPTED.replace("raise KeyboardInterrupt", statement))
    argv = ["run", "--trace", trace, "--profile", PROFILE, "--policy", "mine.py:Mine"]
    done = subprocess.run(
        [sys.executable, "-c", LATE, *argv], cwd=tmp_path, capture_output=True, text=True, timeout=IN_TIME_S
    )
    assert done.returncode == 130, done.stderr
    assert done.stderr.splitlines()[-1] == "simmoe: interrupted; nothing was written" and "Trace" not in done.stderr


def test_a_command_that_is_done_ends_as_it_did(trace: str, tmp_path: Path) -> None:
    argv = ["run", "--trace", trace, "--profile", PROFILE]
    done = subprocess.run(
        [sys.executable, "-c", LATE, *argv], cwd=tmp_path, capture_output=True, text=True, timeout=IN_TIME_S
    )
    assert done.returncode == 0 and "Traceback" not in done.stderr


def test_closed_streams_are_nothing_to_write_to(trace: str, tmp_path: Path) -> None:
    def close() -> None:
        for number in (0, 1, 2):
            os.close(number)

    argv = [sys.executable, "-m", "simmoe", "sweep", "--trace", trace, "--profile", PROFILE, "--policy", "fifo"]
    argv += ["--rates", "1", "--seeds", "2", "--jobs", "2", "--out", "out"]
    done = subprocess.run(argv, cwd=tmp_path, preexec_fn=close, timeout=IN_TIME_S, check=False)
    assert done.returncode == 0 and (tmp_path / "out" / "sweep.csv").exists()


def test_who_reads_what_is_said_may_be_gone(trace: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends ``tee`` as well, in ``simmoe run ... |& tee log``."""

    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            if "interrupted" in text:
                raise BrokenPipeError
            return len(text)

    (tmp_path / "mine.py").write_text(INTERRUPTED)
    monkeypatch.setattr(sys, "stderr", Gone())
    assert simmoe(["run", "--trace", trace, "--profile", PROFILE, "--policy", f"{tmp_path}/mine.py:Mine"]) == 130
