"""The benchmarks' own parts: their policies, their baseline, when a case has regressed, when a promise is broken."""

from __future__ import annotations

import importlib
import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from simmoe.cli import run as simmoe

FOLDER = Path(__file__).parents[2] / "benchmarks"
NAMES = ("run", "cases", "measure", "verdict")

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="benchmarks/ is in the repository alone")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """``benchmarks/run.py`` as a module; its folder is on the path for the length of a test."""
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module("run")
    for name in NAMES:
        sys.modules.pop(name, None)


def test_the_policy_for_many_ranks_keeps_the_protocol(capsys: pytest.CaptureFixture[str]) -> None:
    assert simmoe(["policies", "check", f"{FOLDER / 'two_choices.py'}:TwoChoices"]) == 0, capsys.readouterr().out


def test_every_checked_case_has_a_baseline_and_keeps_its_promise_there(bench: Any) -> None:
    baseline = json.loads(bench.BASELINE.read_text())
    checked = {case.name: case for case in bench.CASES if case.checked}
    assert checked.keys() <= baseline["cases"].keys()
    for name, case in checked.items():
        stored = baseline["cases"][name]
        if case.promise.cpu_s is not None:
            assert stored["ratio"] * baseline["calibration_s"] <= case.promise.cpu_s, name
        if case.promise.peak_mb is not None:
            assert stored["peak_mb"] <= case.promise.peak_mb, name
    for series in bench.SERIES:
        assert set(series.names) <= checked.keys() and len(series.most) == len(series.sizes) - 2


def test_bounds_on_the_median_are_as_good_as_they_say(bench: Any) -> None:
    """Against every way that n values can lie around the median, each as likely as any other."""
    interval = importlib.import_module("verdict").median_interval
    assert interval([1.0] * 4) == (-np.inf, np.inf)
    for count in (5, 9, 12):
        sides = np.array(list(itertools.product((-1.0, 1.0), repeat=count)))
        low, high = np.transpose([interval(values) for values in sides])
        assert np.mean(low > 0) == np.mean(high < 0) <= 1 / 32
    assert interval([5.0, 1.0, 1e9, 3.0, 2.0]) == (1.0, 1e9) and interval([*range(9)]) == (1, 7)


class Machine:
    """A simulated machine: every run takes ``factor`` times the baseline's ratio, give or take."""

    def __init__(self, bench: Any, factor: float, spread: float, seed: int) -> None:
        self.case = bench.CASES[0]
        stored = {"ratio": 60.0, "peak_mb": 90.0}
        self.baseline = {"calibration_s": 0.01, "python": "3.11", "cases": {self.case.name: stored}}
        self.measurement = importlib.import_module("measure").Measurement
        self.rng = np.random.default_rng(seed)
        self.factor, self.spread = factor, spread
        self.num_runs = -1  # the first is for warmth

    def measure(self, arguments: str, environment: dict[str, str]) -> Any:
        """Stand in for measure.measure: noise as of a busy machine, one run in ten far off."""
        self.num_runs += 1
        noise = np.exp(self.rng.normal(0, self.spread)) * (1.6 if self.rng.random() < 0.1 else 1.0)
        calibration_s = 0.01 * self.rng.uniform(1, 3)  # another machine, or a busy one
        return self.measurement(60.0 * self.factor * noise * calibration_s, 1.0, 90.0, calibration_s)


@pytest.mark.parametrize(("factor", "fires"), [(1.0, False), (1.4, True)])
def test_the_check_tells_a_slower_program_from_a_slower_machine(
    factor: float, fires: bool, bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_runs, wrong = [], 0
    for seed in range(200):
        machine = Machine(bench, factor, spread=0.06, seed=seed)
        monkeypatch.setattr(bench, "measure", machine.measure)
        outcome = bench._run(machine.case, machine.baseline, {}, None, True)
        wrong += any("baseline" in fault for fault in outcome.faults()) is not fires
        num_runs.append(machine.num_runs)
    assert wrong == 0
    assert max(num_runs) <= 15 and np.mean(num_runs) < 8, "few runs where they tell already"


def test_promises_are_held_to(bench: Any) -> None:
    machine = Machine(bench, 1.0, 0.0, 0)
    case = machine.case  # at least 10,000 requests a CPU-second, at most 120 MB
    assert (case.num_requests, case.promise.cpu_s, case.promise.peak_mb) == (10_000, 1.0, 120)

    def faults(cpu_s: float, peak_mb: float, calibration_s: float) -> list[str]:
        runs = [machine.measurement(cpu_s, cpu_s, peak_mb, calibration_s)] * 5
        stored = {"ratio": 1e9, "peak_mb": 1e9}
        baseline = {"calibration_s": 0.01, "python": "3.11", "cases": {case.name: stored}}
        found: list[str] = bench.Outcome(case, runs, baseline).faults()
        return found

    assert faults(0.99, 119, 0.01) == faults(1.98, 119, 0.02) == [], "a machine half as fast may take twice as long"
    assert "slower than promised" in faults(1.01, 119, 0.01)[0] and "slower" in faults(0.99, 119, 0.009)[0]
    assert faults(0.5, 121, 0.01) == ["121 MB, promised 120"], "memory is memory on any machine"


def test_growth_is_of_the_slope_whatever_start_up_costs(bench: Any) -> None:
    growth = importlib.import_module("verdict").growth
    assert growth((1, 10, 100), [0.3 + 2 * n for n in (1, 10, 100)]) == pytest.approx([1.0])
    assert growth((10, 100, 1000), [n * np.log(n) for n in (10, 100, 1000)])[0] > 1.3


def test_growth_that_looks_broken_is_measured_again(bench: Any, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """By a twentieth in one case and another in the next, it is a third off: their few runs may be that unlucky."""
    series = bench.SERIES[1]
    measurement = importlib.import_module("measure").Measurement
    stored = json.loads(bench.BASELINE.read_text())["cases"]
    case_of = {case.arguments: case for case in bench.CASES}
    for lasts in (False, True):
        counts = dict.fromkeys(series.names, -1)

        def measured(arguments: str, environment: object, lasts: bool = lasts, counts: Any = counts) -> Any:
            name = case_of[arguments].name
            counts[name] += 1
            off = 1.0
            if lasts or counts[name] <= bench.FEWEST_RUNS:
                off = dict(zip(series.names, (1.08, 0.92, 1.0), strict=True))[name]
            return measurement(stored[name]["ratio"] * off, 1.0, 80.0, 1.0)

        monkeypatch.setattr(bench, "measure", measured)
        monkeypatch.setattr(sys, "argv", ["run.py", "--check", "offline, tiers"])
        if lasts:
            with pytest.raises(SystemExit) as ended:
                bench.main()
            assert f"cost of one more request, {series.text}" in str(ended.value)
        else:
            bench.main()
        assert counts[series.names[0]] == bench.MOST_RUNS
    capsys.readouterr()


def test_a_run_is_measured_with_the_machine_as_it_goes(bench: Any) -> None:
    measure = importlib.import_module("measure")
    process = subprocess.Popen([sys.executable, "-c", "sum(range(4_000_000))"], process_group=0)
    found = measure._watch(process)
    assert process.returncode == 0
    assert found.cpu_s > 0 and found.wall_s > 0 and found.peak_mb > 1 and 0 < found.calibration_s < 1
    assert found.ratio == found.cpu_s / found.calibration_s


def test_a_check_of_nothing_does_not_pass(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER / "run.py"), "--check", "no such case"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 1 and done.stderr.startswith("no case matches no such case")
