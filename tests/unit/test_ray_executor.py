"""``--executor ray`` against a real Ray cluster on this machine, and what it refuses."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
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

PROFILE = "synthetic-olmoe-split4"

#: A policy that, first asked, notes where it runs and, unless somebody has done so, kills the process it runs in.
KILLS_ONCE = """
import os
import signal
from simmoe.policies.protocols import ADMIT_ALL

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


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed (simmoe[ray])")
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
            assert len(set(pids)) >= 2 and str(os.getpid()) not in pids, "workers, and another for the one killed"
    assert files_of(tmp_path / "ray") == files_of(tmp_path / "local")


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
