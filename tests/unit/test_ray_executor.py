"""``--executor ray`` against a real Ray cluster on this machine, and what it refuses."""

from __future__ import annotations

import importlib.util
import os
import secrets
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import pytest

from simmoe.analysis.metrics import Slo
from simmoe.cli import run as simmoe
from simmoe.commands.sweeping.cells import Cell
from simmoe.commands.sweeping.ray_executor import _attempt_there, _Place
from simmoe.commands.sweeping.sources import cell_sources
from simmoe.errors import SimmoeError
from simmoe.simulator.config import SimConfig
from simmoe.traces.spec import WorkloadSpec
from tests.support.ports import later_port

PROFILE = "synthetic-olmoe-split4"

needs_ray = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed (simmoe[ray])")

#: A policy that, first asked, notes where it runs and, unless somebody has done so, kills the process it runs in. From
#: the third cell on it goes on when three processes have been seen: a fast worker does not take the cells of all.
KILLS_ONCE = """
import os
import signal
import time
from simmoe.policies.protocols import ADMIT_ALL

def seen():
    with open("pids.log") as log:
        return log.read().split()

class KillsOnce:
    def __init__(self):
        self.noted = False

    def plan(self, view):
        if not self.noted:
            self.noted = True
            with open("pids.log", "a") as log:
                log.write(f"{os.getpid()}\\n")
            try:
                os.close(os.open("killed", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                deadline = time.monotonic() + 300
                while len(seen()) > 2 and len(set(seen())) < 3 and time.monotonic() < deadline:
                    time.sleep(0.01)
                return ADMIT_ALL
            os.kill(os.getpid(), signal.SIGKILL)
        return ADMIT_ALL
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    rows = [f"{0.2 * i},{20 + 37 * i % 900},{1 + 11 * i % 60}" for i in range(30)]
    path = tmp_path / "requests.csv"
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]) + "\n")
    return path


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def last_line(folder: Path, environment: Mapping[str, str], *arguments: str) -> tuple[int, str]:
    """Run simmoe in a folder; return its exit code and the last line it said."""
    command = [sys.executable, "-m", "simmoe", *arguments]
    done = subprocess.run(command, cwd=folder, env=dict(environment), capture_output=True, text=True)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stderr.splitlines()[-1]


@pytest.mark.slow
@needs_ray
def test_a_killed_worker_costs_its_cell_and_the_bytes_are_those_of_a_local_run(trace: Path, tmp_path: Path) -> None:
    (tmp_path / "once.py").write_text(KILLS_ONCE)
    options = ["--requests", "30", "--seeds", "3", "--rates", "20,60", "--ranks", "1", "--profile", PROFILE]
    policies = ["--policy", "fifo", "--policy", "once.py:KillsOnce"]
    command = [sys.executable, "-m", "simmoe", "sweep", "--trace", trace.name, *options, *policies]
    for out, where in (("ray", ["--executor", "ray", "--jobs", "3"]), ("local", ["--jobs", "1"])):
        done = subprocess.run([*command, *where, "--out", out], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        if out == "ray":
            pids = (tmp_path / "pids.log").read_text().split()
            assert (tmp_path / "killed").exists() and len(pids) == 8, "seven cells, one of them twice"
            assert len(set(pids)) >= 3 and str(os.getpid()) not in pids, "several workers"
    assert files_of(tmp_path / "ray") == files_of(tmp_path / "local")


#: A policy that, first asked, kills the node's Ray process: the cluster is gone.
KILLS_NODE = """
import os
import signal
from simmoe.policies.protocols import ADMIT_ALL

class KillsNode:
    def plan(self, view):
        if os.path.exists("doomed"):
            os.remove("doomed")
            os.kill(os.getppid(), signal.SIGKILL)
        return ADMIT_ALL
"""


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """A cluster of one node with token authentication: its address, and the environment that has its token."""
    port = later_port()
    environment = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    with tempfile.TemporaryDirectory(prefix="ray") as folder:  # its sockets' names must be short
        options = [f"--port={port}", "--num-cpus=2", "--include-dashboard=false", "--disable-usage-stats"]
        command = [str(Path(sys.executable).with_name("ray")), "start", "--head", "--block", *options]
        with open(tmp_path / "ray.log", "w+b") as log:
            process = subprocess.Popen([*command, f"--temp-dir={folder}"], env=environment, stdout=log, stderr=log)
            try:
                while b"Ray runtime started" not in (tmp_path / "ray.log").read_bytes():
                    with suppress(subprocess.TimeoutExpired):
                        process.wait(0.1)
                        pytest.fail((tmp_path / "ray.log").read_text())
                yield f"127.0.0.1:{port}", environment
            finally:
                process.terminate()
                process.wait()


@pytest.mark.slow
@needs_ray
def test_a_cluster_that_asks_for_a_token(trace: Path, tmp_path: Path, cluster: tuple[str, dict[str, str]]) -> None:
    address, environment = cluster
    options = ["--requests", "30", "--seeds", "2", "--rates", "20,60", "--ranks", "1", "--profile", PROFILE]
    command = ["sweep", "--trace", trace.name, *options, "--policy", "fifo"]
    ray = [*command, "--executor", "ray", "--ray-address", address]
    without = {name: value for name, value in environment.items() if not name.startswith("RAY_AUTH")}
    code, last = last_line(tmp_path, without, *ray, "--out", "refused")
    assert code == 1 and last.startswith("simmoe: cannot use Ray at") and "needs RAY_AUTH_MODE=token" in last
    another = {**environment, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    code, last = last_line(tmp_path, another, *ray, "--out", "refused")
    assert code == 1 and "is the token here" in last
    assert last_line(tmp_path, environment, *ray, "--out", "ray")[0] == 0
    assert last_line(tmp_path, environment, *command, "--jobs", "1", "--out", "local")[0] == 0
    assert files_of(tmp_path / "ray") == files_of(tmp_path / "local")


@pytest.mark.slow
@needs_ray
def test_a_cluster_that_dies_is_said_to_and_the_sweep_resumes(trace: Path, tmp_path: Path) -> None:
    (tmp_path / "node.py").write_text(KILLS_NODE)
    options = ["--requests", "30", "--seeds", "1", "--rates", "20", "--ranks", "1", "--profile", PROFILE]
    command = ["sweep", "--trace", trace.name, *options, "--policy", "fifo", "--policy", "node.py:KillsNode"]
    (tmp_path / "doomed").touch()
    code, last = last_line(tmp_path, os.environ, *command, "--executor", "ray", "--jobs", "1", "--out", "out")
    assert code == 1 and last.startswith("simmoe: lost a Ray cluster on this machine") and last.endswith("to resume")
    assert not (tmp_path / "doomed").exists() and list((tmp_path / "out" / "cells").iterdir()), "what had ended is kept"
    assert last_line(tmp_path, os.environ, *command, "--jobs", "1", "--out", "out")[0] == 0


def test_a_node_with_other_files_refuses_its_cells(trace: Path, tmp_path: Path) -> None:
    cell = Cell(WorkloadSpec(trace=str(trace), rate=5.0, requests=9, k_max=32), "fifo", PROFILE, SimConfig(), Slo())
    expected = cell_sources(cell)
    place = _Place(os.getcwd(), None)
    assert not isinstance(_attempt_there(cell, expected, place), SimmoeError)
    refused = _attempt_there(cell, {**expected, "trace_sha256": "0" * 64}, place)
    assert isinstance(refused, SimmoeError) and "has another trace than this machine" in str(refused)


def test_without_ray_the_extra_is_named(
    trace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    out = str(tmp_path / "out")
    assert simmoe(["sweep", "--trace", str(trace), "--profile", PROFILE, "--executor", "ray", "--out", out]) == 6
    assert "pip install 'simmoe[ray]'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--ray-address auto", "--ray-address needs --executor ray"),
        ("--executor ray --ray-address auto --jobs 2", "--jobs and --ray-address contradict each other"),
        ("--executor rya", "'rya' is not one of 'local', 'ray'"),
    ],
)
def test_options_that_do_not_go_together(
    options: str, message: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simmoe(["sweep", "--trace", str(trace), "--profile", PROFILE, *options.split()]) == 2
    assert message in capsys.readouterr().err
