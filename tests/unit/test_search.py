"""``simmoe search`` as a user types it."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from simmoe.analysis.metrics import Slo
from simmoe.cli import run as simmoe
from simmoe.commands.searching.bisection import Bisection, Outcome
from simmoe.commands.searching.objective import Objective
from simmoe.commands.searching.ranges import MOST_CORNERS, Variation
from simmoe.commands.searching.report import Found, print_table
from simmoe.commands.sweeping.cells import Cell, run_cell
from simmoe.errors import UsageError
from simmoe.simulator.config import EngineConfig, FrontEndConfig, SimConfig
from simmoe.traces.spec import WorkloadSpec

PROFILE = "synthetic-olmoe-split4"
SIZE = 60


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    rng = np.random.default_rng(1)
    rows = [f"{0.1 * i},{rng.integers(20, 2000)},{rng.integers(2, 60)}" for i in range(SIZE)]
    path = tmp_path / "requests.csv"
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]) + "\n")
    return path


@pytest.fixture
def command(trace: Path) -> list[str]:
    options = ["--requests", str(SIZE), "--profile", PROFILE, "--seeds", "2", "--jobs", "1", "--tolerance", "0.05"]
    return ["search", "--trace", str(trace), *options]


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("how", [["--at", "p90"], ["--attainment", "0.9"]])
def test_each_rate_holds_where_it_says_and_fails_where_it_says(
    how: list[str], command: list[str], trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    options = [
        "--slo-ttft",
        "0.08",
        *how,
        "--policy",
        "fifo",
        "--policy",
        "lanes",
        "--ingress-s",
        "0",
        "--egress-s",
        "0",
    ]
    assert simmoe([*command, *options, "--num-gpu-blocks", "9000", "--out", str(out)]) == 0
    objective = Objective(Slo(ttft_s=0.08), "p90", 0.9 if how[0] == "--attainment" else None)
    config = SimConfig(
        num_ranks=2,
        k_max=32,
        engine=EngineConfig(num_gpu_blocks=9000),
        front_end=FrontEndConfig(ingress_s=0.0, egress_s=0.0),
    )
    with open(out / "search.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["policy"], row["seed"]) for row in rows] == [(p, s) for p in ("fifo", "lanes") for s in ("0", "1")]
    for row in rows:
        assert row["outcome"] == "found"
        for column, expected in (("holds_at_per_s", True), ("fails_at_per_s", False)):
            rate = float(row[column])
            spec = WorkloadSpec(trace=str(trace), rate=rate, requests=SIZE, k_max=32, seed=int(row["seed"]))
            metrics = run_cell(Cell(spec, row["policy"], PROFILE, config, objective.slo)).metrics
            assert objective.holds(metrics) is expected
        assert float(row["fails_at_per_s"]) <= float(row["holds_at_per_s"]) / 0.95
    manifest = json.loads((out / "manifest.json").read_text())
    mean = np.mean([float(row["holds_at_per_s"]) for row in rows if row["policy"] == "lanes"])
    assert manifest["highest_rate_that_holds"]["lanes"]["mean_per_s"] == pytest.approx(mean)
    assert manifest["highest_rate_that_holds"]["fifo"]["change_vs_baseline"] == 0
    assert "Highest rate at which" in capsys.readouterr().out


def test_a_repeated_search_resumes_and_writes_the_same_bytes(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--slo-ttft", "0.08", "--at", "mean", "--policy", "tiers", "--policy", "fifo"]
    for out, jobs in (("a", "1"), ("b", "2"), ("a", "2")):
        assert simmoe([*command, *options, "--jobs", jobs, "--out", str(tmp_path / out)]) == 0
    assert files_of(tmp_path / "a") == files_of(tmp_path / "b")
    printed = capsys.readouterr().out.splitlines()
    assert printed[3].startswith("fifo"), "the baseline comes first"


def test_objectives_that_never_or_always_hold_are_said(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simmoe([*command, "--policy", "fifo", "--slo-ttft", "0.0001", "--out", str(tmp_path / "never")]) == 0
    assert "fifo: no rate tried holds (2 of 2 seeds)." in capsys.readouterr().out
    assert simmoe([*command, "--policy", "fifo", "--slo-ttft", "1000", "--out", str(tmp_path / "always")]) == 0
    assert "fifo: every rate tried holds" in (out := capsys.readouterr().out) and ">= " in out


def test_tuning_begins_with_the_policy_as_given_and_confirms_on_other_seeds(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("optuna")
    vary = ["--vary", "window=0..8", "--vary", "adaptive=true|false", "--vary", "cooldown_s=0.1..10:log"]
    options = ["--policy", "lanes", *vary, "--trials", "3", "--slo-ttft", "0.08", "--at", "p90"]
    for jobs in ("1", "2"):
        assert simmoe([*command, *options, "--jobs", jobs, "--out", str(tmp_path / jobs)]) == 0
    assert files_of(tmp_path / "1") == files_of(tmp_path / "2"), "whatever the jobs"
    with open(tmp_path / "1" / "trials.csv", newline="") as file:
        trials = list(csv.DictReader(file))
    assert len(trials) == 4 and trials[0]["policy"] == "lanes"
    assert all(trial["policy"].startswith("lanes,window=") for trial in trials[1:])
    best = max(trials, key=lambda trial: float(trial["mean_per_s"]))["policy"]
    with open(tmp_path / "1" / "search.csv", newline="") as file:
        confirmed = [(row["policy"], row["seed"]) for row in csv.DictReader(file)]
    assert confirmed == [(policy, seed) for policy in dict.fromkeys(("lanes", best)) for seed in ("2", "3")]
    assert "3 sets of parameters tried on seeds 0 to 1" in capsys.readouterr().out


def test_a_variation_is_a_policy_of_its_own() -> None:
    variation = Variation("tiers,max_wait_s=20+lanes,window=2", ["window=0..4", "max_wait_s=1..9", "bypass=true|false"])
    text = variation.text({"window": 3, "max_wait_s": 2.5, "bypass": False})
    assert text == "tiers,max_wait_s=2.5+lanes,window=3,bypass=false"
    assert [(r.low, r.high, r.whole) for r in variation.ranges] == [(0, 4, True), (1, 9, False), (0, 0, False)]


@given(st.floats(-1e300, 1e300), st.floats(-1e300, 1e300), st.floats(0, 1))
def test_what_a_policy_is_given_lies_within_the_bounds(a: float, b: float, share: float) -> None:
    """Four significant digits would lie outside bounds that have more of them."""
    low, high = min(a, b), max(a, b)
    assume(low < high)
    (values,) = Variation("lanes", [f"cooldown_s={low}..{high}"]).ranges
    given = values.rounded(min(max(low + share * (high - low), low), high))
    assert isinstance(given, float) and low <= given <= high and values.extremes == (low, high)
    assert abs(given - (low + share * (high - low))) <= 1e-3 * (high - low) + 1e-15 * max(abs(low), abs(high))
    assert Variation("lanes", ["window=0..99999999999999999999"]).ranges[0].extremes == (0, 99999999999999999999)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("windw=0..4", r"has no such parameter \(did you mean 'window'\?\)"),
        ("window", "is no range; write NAME=LOW..HIGH"),
        ("window=4..4", "the lower one first"),
        ("window=0..x", "it must be a whole number"),
        ("window=3", "--vary window=3: there is nothing to choose from"),
        ("window=3|4|3", r"--vary window=3\|4\|3: 3 is given twice"),
        ("adaptive=true|yes", "true is given twice"),
        ("window=1..4..8", "--vary window=1..4..8: .* it must be a whole number"),
        ("window=..4", "--vary window=..4: .* it must be a whole number"),
        ("start=1..none", "must be finite"),
        ("cooldown_s=-inf..4", "must be finite"),
        ("cooldown_s=-1e308..1e308", "must be finite"),
        ("adaptive=true..false", "adaptive is no number"),
        ("cooldown_s=0..4:log", "a log scale needs bounds above 0"),
        ("cooldown_s=0..4:lin", "'lin' is no scale"),
        ("cooldown_s=0..inf", "must be finite"),
    ],
)
def test_ranges_that_are_none(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Variation("lanes", [text])


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ("", 2, "there is nothing to hold; give --slo-ttft, --slo-tpot or both"),
        ("--slo-ttft 1 --attainment 1.5", 2, "--attainment is 1.5"),
        ("--slo-ttft 1 --tolerance 0", 2, "--tolerance is 0"),
        ("--slo-ttft 1 --seeds 0", 2, "--seeds is 0"),
        ("--slo-ttft 1 --seeds 1000000000", 2, "--seeds is 1000000000; it must be in 1..10000"),
        ("--slo-ttft 1 --vary window=0..4", 2, "--vary needs exactly one --policy"),
        ("--slo-ttft 1 --policy lanes --vary window=0..4 --trials 0", 2, "--trials is 0"),
        ("--slo-ttft 1 --at p50 --attainment 0.9", 2, "--at p50 and --attainment 0.9 are two objectives"),
        ("--slo-ttft 1 --at p98", 2, "'p98' is not one of"),
        ("--slo-ttft 1e6 --policy lanes --vary window=0..4 --trials 2", 2, "holds at every rate tried for 'lanes'"),
        ("--slo-ttft 1 --policy lanes --vary window=-1..4", 2, "lanes: window is -1; it must be at least 0"),
        ("--slo-ttft 1 --policy lanes --vary lanes=2..9", 2, "lanes: lanes is 9; it must be at most 2"),
        ("--slo-ttft 1 --policy lanes --vary start=8|16|32 --vary window=0..4", 2, "lanes: start is 32; it must be in"),
        (
            "--slo-ttft 1 --policy lanes --ranks 4 --vary lanes=2..4 --vary start=8..16",
            2,
            "start is 8; it must be none",
        ),
        ("--slo-ttft 1 --num-gpu-blocks 2", 1, "finished none of 32 requests offline"),
    ],
)
def test_bad_options_get_one_line(
    options: str, code: int, message: str, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simmoe([*command, *options.split(), "--out", str(tmp_path / "out")]) == code
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.startswith("simmoe: ") and message in last


def test_ranges_are_tried_at_their_ends_before_anything_runs(command: list[str], tmp_path: Path) -> None:
    """Together, for what one parameter may be can depend on another; a list at each of its values."""
    assert {*Variation("lanes", ["window=0..4", "cooldown_s=0.5..2:log", "start=4|none"]).corners()} == {
        f"lanes,window={window},cooldown_s={cooldown_s},start={start}"
        for window in (0, 4)
        for cooldown_s in (0.5, 2.0)
        for start in ("4", "none")
    }
    many = [f"{name}=0..9" for name in ("window", "hysteresis", "hysteresis_growth", "min_gap", "cooldown_s")]
    corners = [
        *Variation("tiers+lanes", [*many, "max_wait_s=1..9", "start=" + "|".join(map(str, range(99)))]).corners()
    ]
    assert len(corners) == MOST_CORNERS
    out = tmp_path / "out"
    options = ["--slo-ttft", "1", "--policy", "lanes", "--vary", "window=0..4", "--vary", "min_gap=-1..1"]
    assert simmoe([*command, *options, "--out", str(out)]) == 2
    assert not out.exists()


def test_without_optuna_the_extra_is_named(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    assert simmoe([*command, "--slo-ttft", "1", "--policy", "lanes", "--vary", "window=0..4"]) == 6
    assert "pip install 'simmoe[search]'" in capsys.readouterr().err


def test_lower_bounds_are_not_compared(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where the SLO holds at every rate tried, two figures are bounds: no change, in the table or in the manifest."""
    policies = ["--policy", "fifo", "--policy", "tiers"]
    assert simmoe([*command, *policies, "--slo-ttft", "1e6", "--out", str(tmp_path / "out")]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("tiers "))
    assert "%" not in " ".join(line.split()[:-1]) and ">=" in line
    results = json.loads((tmp_path / "out" / "manifest.json").read_text())["highest_rate_that_holds"]["tiers"]
    assert results["change_vs_baseline"] is None and set(results["outcomes"]) == {"always"}


def ended(low: float, high: float, outcome: Outcome = Outcome.FOUND) -> Bisection:
    search = Bisection(1.0, 0.1)
    search.low, search.high, search.outcome = low, high, outcome
    return search


def test_an_interval_is_no_narrower_than_the_brackets_it_is_made_of(capsys: pytest.CaptureFixture[str]) -> None:
    """Seeds that end in one bracket agree to the last digit: that is the tolerance, not certainty."""
    searches = {
        "fifo": [ended(100, 125)] * 3,
        "lanes": [ended(110, 137.5)] * 3,
        "tiers": [ended(100, 125), ended(50, 62.5)],
    }
    rows = {}
    for policy, found in searches.items():
        print_table(Found({"fifo": searches["fifo"][: len(found)], policy: found}, range(3), {policy: 1e3}), "", "")
        rows[policy] = capsys.readouterr().out
    assert "20 " in rows["fifo"], "a fifth of 100, for all that the seeds agree"
    assert "+10.0%   40.0%" in rows["lanes"], "each rate may be off by a fifth"
    assert "318%" not in rows["tiers"] and "-25.0%   317" in rows["tiers"], "where seeds differ by more, theirs counts"


@pytest.mark.parametrize(("saturation", "said"), [(100.0, True), (119.0, False)])
def test_a_rate_that_cannot_last_is_said(saturation: float, said: bool, capsys: pytest.CaptureFixture[str]) -> None:
    print_table(Found({"fifo": [ended(120, 122)] * 2}, range(2), {"fifo": saturation}), "", "")
    assert ("holds above saturation" in capsys.readouterr().out) is said


def test_a_bracket_stays_within_the_rates_a_workload_takes() -> None:
    for guess, holds, outcome in ((9e5, True, Outcome.ALWAYS), (1.1e-6, False, Outcome.NEVER)):
        search = Bisection(guess, 0.05)
        while (rate := search.rate) is not None:
            assert 1e-6 <= rate <= 1e6
            search.tell(holds)
        assert search.outcome is outcome
