"""The benchmarks' own parts: their policies, their baseline, and when a case counts as regressed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from simmoe.cli import run as simmoe

FOLDER = Path(__file__).parents[2] / "benchmarks"

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="benchmarks/ is in the repository alone")


def test_the_policy_for_many_ranks_keeps_the_protocol(capsys: pytest.CaptureFixture[str]) -> None:
    assert simmoe(["policies", "check", f"{FOLDER / 'two_choices.py'}:TwoChoices"]) == 0, capsys.readouterr().out


def test_every_checked_case_has_a_baseline_and_a_regression_fails(tmp_path: Path) -> None:
    program = (
        "import json, sys; sys.path.insert(0, sys.argv[1]); import run; from cases import CASES\n"
        "from measure import Measurement, calibrate\n"
        "assert calibrate() > 0\n"
        "stored = json.loads(run.BASELINE.read_text())\n"
        "assert {case.name for case in CASES if case.checked} <= stored.keys()\n"
        "def runs(*cpu_s): return [Measurement(s, s, 90.0, 0.1) for s in cpu_s]\n"
        "base = {'ratio': 10.0, 'peak_mb': 90.0}\n"
        "print(json.dumps([\n"
        "    run._is_above([runs(1.2, 1.24, 9.0)], base), run._is_above([runs(1.2, 1.3, 1.3)], base),\n"
        "    run._is_above([runs(9.0, 9.0, 9.0), runs(1.0, 1.0, 1.0)], base),\n"
        "    run._is_above([runs(1.0)], {'ratio': 10.0, 'peak_mb': 60.0}),\n"
        "]))\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(FOLDER)], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [False, True, False, True], "a median, the best of rounds, memory too"


def test_a_check_of_nothing_does_not_pass(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "run.py"), "--check", "no such case"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1 and done.stderr.startswith("no case matches no such case")
