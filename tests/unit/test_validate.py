"""Validating: a record that says it is live is simulated under its own limits, and compared."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest

from simmoe.cli import run as cli
from simmoe.commands.validate import doubts, simulate_like, validate
from simmoe.errors import LiveError, UsageError
from simmoe.live.driving.lag import judge_lag
from simmoe.profiles.catalog import load_profile
from simmoe.profiles.shape import StepShape
from simmoe.profiles.step_cost import prompt_shape
from simmoe.profiles.weights import weights_of_table
from simmoe.records import RunRecord, read_record, write_record
from simmoe.simulator.result import SimResult
from simmoe.simulator.simulation import simulate
from tests.support.live_record import as_live


@pytest.fixture
def live(tmp_path: Path) -> Path:
    """A record as 'simmoe live run' writes it, of engines that take exactly the profile's times."""
    options = ["--rate", "20", "--requests", "150", "--ranks", "2", "--max-num-seqs", "20", "--record-steps"]
    assert cli(["run", *options, "--policy", "tiers+lanes", "--out", str(tmp_path / "was")]) == 0
    return write_record(tmp_path / "live", as_live(read_record(tmp_path / "was")))


def test_engines_of_the_profiles_own_times_are_simulated_without_error(live: Path, tmp_path: Path) -> None:
    assert cli(["validate", "--live", str(live), "--out", str(tmp_path / "out")]) == 0
    content = json.loads((tmp_path / "out" / "compare" / "compare.json").read_text())
    assert content["num_paired"] == 150 and content["causes"]["counterfactual"]
    assert all(row["error"] == 0 for row in content["differences"])
    assert read_record(tmp_path / "out" / "sim").manifest["config"]["engine"]["max_num_seqs"] == 20


def test_engines_with_workers_are_simulated_as_such(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = "olmoe-1b-7b-tp2-h200"
    run = ["run", "--profile", profile, "--rate", "20", "--requests", "40", "--record-steps"]
    assert cli([*run, "--out", str(tmp_path / "was")]) == 0
    record = as_live(read_record(tmp_path / "was"))
    engine = record.manifest["config"]["engine"]
    assert engine["distributed_executor_backend"] == "mp"
    simulated, _ = simulate_like(record, load_profile(profile))
    for name, column in record.requests.items():
        np.testing.assert_array_equal(column, simulated.requests[name], err_msg=name)
    del engine["distributed_executor_backend"]  # as of a run before engines told
    simulated, _ = simulate_like(record, load_profile(profile))
    assert simulated.manifest["config"]["engine"]["distributed_executor_backend"] == "uni"
    engine["distributed_executor_backend"] = "ray"
    live = write_record(tmp_path / "live", record)
    assert cli(["validate", "--live", str(live), "--profile", profile, "--out", str(tmp_path / "out")]) == 3
    said = "config.engine: distributed_executor_backend is ray; it must be one of uni, mp"
    assert capsys.readouterr().err.count(said) == 1


def test_a_record_without_engines_is_refused(live: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = read_record(live)
    del record.manifest["config"]["engine"]
    write_record(live, record)
    assert cli(["validate", "--live", str(live), "--out", str(tmp_path / "out")]) == 3
    assert "does not say which engines" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_profile_of_another_k_max_is_refused(live: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = read_record(live)
    record.manifest["config"]["k_max"] = 8
    write_record(live, record)
    assert cli(["validate", "--live", str(live), "--out", str(tmp_path / "out")]) == 2
    assert "has k_max 32; the live engines have 8" in capsys.readouterr().err


def given(parameter: click.Parameter) -> list[str]:
    """Return a parameter as it is typed, with the value it would have anyway where it has one."""
    if isinstance(parameter, click.Argument):
        return ["--", "--dtype"]
    assert isinstance(parameter, click.Option)
    if parameter.is_flag:
        return [parameter.opts[0]]
    value = parameter.default if isinstance(parameter.default, str | int | float) else 3
    return [parameter.opts[0], str(value)]


@pytest.mark.parametrize(
    "parameter",
    [p for p in validate.params if p.name not in ("out", "live", "profile", "policy_profile", "host_from", "help")],
    ids=lambda parameter: parameter.name,
)
def test_what_only_a_live_run_takes_is_refused_beside_a_record(
    parameter: click.Parameter, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the record is looked for: there is none."""
    options = given(parameter)
    assert cli(["validate", "--live", "absent", "--out", str(tmp_path / "out"), *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    named = options[-1] if options[0] == "--" else options[0]
    assert line.removeprefix("simmoe: ").replace("'", "").startswith(f"{named} is for a live run now, and --live names")
    assert not (tmp_path / "out").exists()


def test_a_profile_takes_the_sizes_that_the_live_engines_captured() -> None:
    profile = load_profile("synthetic-olmoe-split4")
    assert profile.captured_at(None) is profile.captured_at(profile.table.captured_sizes) is profile
    at_512, eager = profile.captured_at((1, 256, 512)), profile.captured_at(())
    own_s, at_512_s, eager_s = (
        [p.cost().step_s(prompt_shape(n, 32)) for n in (300, 1000)] for p in (profile, at_512, eager)
    )
    # 300 tokens run as 512 do, and 1000 as they are, where the profile's own engine pads them to 1024
    assert at_512_s[0] > eager_s[0] and own_s[1] > at_512_s[1] == eager_s[1]
    with pytest.raises(UsageError, match="measured without graphs"):
        eager.captured_at((1, 256))


def test_the_sizes_that_live_engines_captured_decide_what_runs_eagerly(live: Path) -> None:
    profile = load_profile("synthetic-olmoe-split4")
    record = read_record(live)
    record.manifest["config"]["engine"]["captured_sizes"] = [1, 2, 4, 8]
    steps = simulate_like(record, profile)[0].steps
    assert steps is not None
    tokens = steps["num_prefill_tokens"] + steps["num_decode_tokens"]
    eager = profile.captured_at(()).cost()
    alone = (steps["num_prefill_tokens"] == 0) & (tokens > 8)
    shapes = zip(*(steps[name][alone] for name in ("num_decode_tokens", "kv_tokens", "k_exec")), strict=True)
    expected_s = [eager.step_s(StepShape(0, 0, 0, int(n), int(kv), int(k))) for n, kv, k in shapes]
    assert len(expected_s) > 100 and steps["duration_s"][alone] == pytest.approx(expected_s, rel=1e-6)


def test_policies_are_told_what_the_live_ones_were(
    live: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told_s: list[float] = []

    def listening(*args: Any, prefill_s: Callable[[int, int], float], **options: Any) -> SimResult:
        told_s.append(prefill_s(900, 32))
        return simulate(*args, prefill_s=prefill_s, **options)

    monkeypatch.setattr("simmoe.commands.validate.simulate", listening)
    record = read_record(live)
    other = load_profile("synthetic-olmoe-split4")
    record.manifest["profile"] = {"name": other.name, "sha256": other.sha256}
    write_record(live, record)
    options = ["validate", "--live", str(live)]
    assert cli([*options, "--out", str(tmp_path / "own")]) == 0
    assert "the live policies took T(n, k) from another state" in capsys.readouterr().err
    assert cli([*options, "--policy-profile", other.name, "--out", str(tmp_path / "told")]) == 0
    assert "T(n, k)" not in capsys.readouterr().err
    assert told_s == [load_profile().cost().prefill_s(900, 32), other.cost().prefill_s(900, 32)]


@pytest.mark.parametrize(("weights", "is_told"), [("simmoe-dummy 2", True), ("dummy", False), (None, False)])
def test_engines_of_other_weights_than_the_profiles_are_told(live: Path, weights: str | None, is_told: bool) -> None:
    record, profile = read_record(live), load_profile()
    assert weights_of_table(profile.provenance) == "dummy"
    if weights is not None:
        record.manifest["target"] = {"model": "any", "weights": weights}
    assert [doubt.startswith("the live engines had weights") for doubt in doubts(record, profile, profile)] == (
        [True] * is_told
    )


@pytest.mark.parametrize(("vocabulary", "is_told"), [(50304, False), (151936, True), (None, False)])
def test_engines_of_another_model_than_the_profiles_are_told(live: Path, vocabulary: int | None, is_told: bool) -> None:
    record, profile = read_record(live), load_profile()
    record.manifest["engines"] = {"0": {"vocab_size": vocabulary}}
    told = [
        doubt.startswith("the live engines' model has a vocabulary of") for doubt in doubts(record, profile, profile)
    ]
    assert told == [True] * is_told


def test_a_live_run_that_sent_too_late_is_compared_in_all_but_ttft(
    live: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    record = read_record(live)
    lag = judge_lag(np.array([0.1]), np.array([0.2])).as_dict()
    late = RunRecord(record.requests, {**record.manifest, "send_lag": lag}, record.steps)

    def drive(out: str, **options: object) -> None:
        write_record(out, late)
        raise LiveError("TTFT is not reported")

    monkeypatch.setattr("simmoe.commands.validate.drive", drive)
    assert cli(["validate", "--url", "http://any", "--out", str(tmp_path / "out")]) == 8
    assert "is not compared: the mean send lag" in capsys.readouterr().err
    content = json.loads((tmp_path / "out" / "compare" / "compare.json").read_text())
    assert {row["metric"] for row in content["differences"] if row["second"] is None} == {"ttft"}


def test_a_live_run_that_leaves_no_record_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def drive(**options: object) -> None:
        raise LiveError("no engine starts")

    monkeypatch.setattr("simmoe.commands.validate.drive", drive)
    assert cli(["validate", "--url", "http://any", "--out", str(tmp_path / "out")]) == 8
    assert not (tmp_path / "out" / "sim").exists()
