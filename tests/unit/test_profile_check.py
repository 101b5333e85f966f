"""Checking a table on recorded steps: limits, spread, what is refused, and the command."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simmoe.cli import run
from simmoe.errors import ProfileError
from simmoe.profiles.catalog import DEFAULT_PROFILE, load_profile, profile_path, recording_path
from simmoe.profiles.checking.checked_steps import DECODE_ONLY, WITH_PROMPTS, CheckedStep, checked_steps
from simmoe.profiles.checking.verdicts import Errors, Limits, errors_by, host_spread, served_host_spread, verdicts
from simmoe.profiles.recorded_steps import CALIBRATION
from simmoe.profiles.shape import StepShape
from simmoe.profiles.step_cost import ProfileStepCost, Surfaces
from simmoe.profiles.table import Cell, GridTable, HostShare

SYNTHETIC = "synthetic-olmoe-split4"
COLUMNS = (
    "start_s", "output_s", "num_prefill_tokens", "prefill_kv_pairs", "num_prefill_seqs", "num_decode_seqs",
    "decode_kv_tokens", "k_exec",
)  # fmt: skip
SHAPES = [StepShape(0, 0, 0, n, n * 500, k) for n in (1, 16, 64, 300) for k in (8, 32)]
SHAPES += [StepShape(n, n * (n + 1) // 2, 1, 20, 9000, k) for n in (100, 700, 3000) for k in (8, 32)]


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


#: What a recording says of its engine, as the synthetic table's samples do.
ENGINE = {
    field: load_profile(SYNTHETIC).provenance["runs"][0][field]
    for field in ("model", "card", "num_cards", "captured_sizes", "engine_flags")
}


def write_recording(
    path: Path,
    pace_s: Callable[[StepShape], float],
    shapes: Sequence[StepShape] = SHAPES,
    name: str = "poisson",
    **header: Any,
) -> Path:
    """Write a busy engine's steps, each as long as ``pace_s`` says."""
    head = {"format": "simmoe-recording", "version": 1, "steps": COLUMNS, "requests": [], **ENGINE, **header}
    lines = [json.dumps(head), json.dumps({"recording": name})]
    now_s = 0.0
    for shape in (shapes[0], *shapes):
        end_s = now_s + pace_s(shape)
        lines.append(json.dumps(["step", now_s - 1e-4, end_s, *shape]))
        now_s = end_s
    path.write_text("\n".join(lines) + "\n")
    return path


def step(steps: str, launch: str, ratio: float) -> CheckedStep:
    return CheckedStep(steps, launch, 8, 4, "grid", ratio, 1.0)


def test_a_perfect_recording_passes_and_a_slower_one_does_not(tmp_path: Path) -> None:
    cost = load_profile(SYNTHETIC).cost()
    perfect = write_recording(tmp_path / "a.jsonl", cost.step_s)
    assert run(["profile", "check", SYNTHETIC, str(perfect)]) == 0
    slower = write_recording(tmp_path / "b.jsonl", lambda shape: 1.02 * cost.step_s(shape))
    assert run(["profile", "check", SYNTHETIC, str(slower)]) == 9
    assert run(["profile", "check", SYNTHETIC, str(slower), "--bias", "2.5"]) == 0
    assert run(["profile", "check", SYNTHETIC, str(perfect), str(slower), "--bias", "0.5"]) == 9


def test_a_synchronous_engine_is_checked_as_one(tmp_path: Path) -> None:
    """Each of its steps is begun when the one before has been taken in."""
    table = replace(load_profile(SYNTHETIC).table, update=HostShare(3e-4, 2e-6), graph_tail_s=6e-4)
    cost = ProfileStepCost(Surfaces.of(table), async_scheduling=False)
    columns = [*COLUMNS, "device_end_s", "update_end_s"]
    lines, now_s = [], 0.0
    for shape in SHAPES:
        parts = cost.parts_s(shape)
        taken_in_s = now_s + cost.step_s(shape)
        end_s = taken_in_s - parts.update_s
        lines.append(json.dumps(["step", now_s, end_s + 1e-5, *shape, end_s, taken_in_s]))
        now_s = taken_in_s
    head = {"format": "simmoe-recording", "version": 1, "steps": columns, "requests": [], **ENGINE}
    path = tmp_path / "synchronous.jsonl"
    path.write_text("\n".join([json.dumps({**head, "async_scheduling": False}), *lines]) + "\n")
    steps = checked_steps(table, [path]).steps
    assert len(steps) == len(SHAPES) - 1
    assert [step.predicted_s for step in steps] == pytest.approx([step.measured_s for step in steps])
    path.write_text("\n".join([json.dumps({**head, "async_scheduling": True}), *lines]) + "\n")
    with pytest.raises(ProfileError, match="followed another without a pause"):
        checked_steps(table, [path])


@pytest.mark.parametrize(
    ("ratios", "above"),
    [
        ([1.0, 1.0, 1.0], []),
        ([1.011, 1.011, 1.011], ["bias"]),
        ([0.96, 1.04, 1.04, 0.96], ["median"]),
        ([1.0] * 18 + [0.9, 1.1], ["p95"]),
        ([2.0, 2.0], ["bias", "median", "p95"]),
    ],
)
def test_each_limit_is_held_apart(ratios: list[float], above: list[str]) -> None:
    (verdict,) = verdicts([step(DECODE_ONLY, "captured", ratio) for ratio in ratios], Limits(), host_spread=0.5)
    assert [line.split()[0] for line in verdict.above] == above


def test_the_host_s_spread_counts_above_the_captured_sizes_alone() -> None:
    steps = [step(kind, launch, 1.1) for kind in (WITH_PROMPTS, DECODE_ONLY) for launch in ("captured", "eager")]
    found = {(v.steps, v.launch): bool(v.above) for v in verdicts(steps, Limits(), host_spread=0.2)}
    assert found == {
        (WITH_PROMPTS, "captured"): True, (WITH_PROMPTS, "eager"): False,
        (DECODE_ONLY, "captured"): True, (DECODE_ONLY, "eager"): False,
    }  # fmt: skip
    assert all(v.above for v in verdicts(steps, Limits(), host_spread=0.05))


def test_errors_are_those_of_numpy() -> None:
    rng = np.random.default_rng(3)
    measured = rng.uniform(1, 2, 200)
    predicted = measured * rng.normal(1, 0.1, 200)
    steps = [CheckedStep(DECODE_ONLY, "captured", 8, 4, "grid", p, m) for p, m in zip(predicted, measured, strict=True)]
    errors = Errors.of(steps)
    relative = predicted / measured - 1
    assert errors.bias == pytest.approx(relative.mean())
    assert errors.median == pytest.approx(np.median(np.abs(relative)))
    assert errors.p95 == pytest.approx(np.quantile(np.abs(relative), 0.95))
    assert errors.number == 200
    assert errors.predicted_s == pytest.approx(predicted.sum())


def test_the_part_at_fault_is_named() -> None:
    table = load_profile(SYNTHETIC).table
    steps = checked_steps(table, [recorded_at(SHAPES)]).steps
    parts = {(s.num_tokens, s.k): s.part for s in steps if s.steps == DECODE_ONLY}
    # the synthetic host takes 1 ms and the device at least 1.5 ms: never the host
    assert set(parts.values()) <= {"grid", "attention"}
    long_contexts = [StepShape(0, 0, 0, 64, 64 * 16000, 8)]
    assert {s.part for s in checked_steps(table, [recorded_at(long_contexts)]).steps} == {"attention"}
    slow_host = replace(table, host={path: share._replace(base_s=1.0) for path, share in table.host.items()})
    assert {s.part for s in checked_steps(slow_host, [recorded_at(SHAPES)]).steps} == {"host"}


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def recorded_at(shapes: Sequence[StepShape]) -> Path:
    return write_recording(Path("recorded.jsonl"), load_profile(SYNTHETIC).cost().step_s, shapes)


def test_loads_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cost = load_profile(SYNTHETIC).cost()
    burst = write_recording(tmp_path / "b.jsonl", cost.step_s, name="burst")
    slow = write_recording(tmp_path / "s.jsonl", lambda shape: 1.25 * cost.step_s(shape), name="poisson")
    both = tmp_path / "both.jsonl"
    both.write_text(burst.read_text() + "\n".join(slow.read_text().splitlines()[1:]) + "\n")
    steps = checked_steps(load_profile(SYNTHETIC).table, [both]).steps
    errors = errors_by(steps, lambda s: s.load)
    assert errors["burst"].bias == pytest.approx(0, abs=1e-6)
    assert errors["poisson"].bias == pytest.approx(-0.2)
    run(["profile", "check", SYNTHETIC, str(both)])
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert {line[1] for line in lines if len(line) > 3 and line[3] == "-20.0%"} >= {"poisson"}


def test_every_step_lies_in_one_class() -> None:
    steps = checked_steps(load_profile(SYNTHETIC).table, [recorded_at(SHAPES)]).steps
    groups = errors_by(steps, lambda s: (s.steps, s.size_class, s.part))
    assert sum(errors.number for errors in groups.values()) == len(steps) == len(SHAPES)
    for s in steps:
        low, _, high = s.size_class.replace(",", "").partition("-")
        assert int(low) <= s.num_tokens <= int(high)


def test_the_spread_is_that_of_eager_points_and_calibration_steps_come_first() -> None:
    table = load_profile(SYNTHETIC).table
    assert host_spread(table) == 0.0  # measured at captured sizes alone
    above = GridTable(
        (*table.prefill.sizes, 10_000),
        table.prefill.ks,
        (*table.prefill.cells, tuple(Cell(0.5, 0.1, 3) for _ in table.prefill.ks)),
    )
    assert host_spread(replace(table, prefill=above)) == pytest.approx(0.2, rel=0.02)
    ratios = np.linspace(1, 2, 11)
    calibration = [CheckedStep(WITH_PROMPTS, "eager", 9000, 4, "host", 1.0, float(ratio)) for ratio in ratios]
    assert host_spread(replace(table, prefill=above), calibration) == pytest.approx(0.8)


def test_the_spread_of_captured_steps_that_the_host_decides_is_told_and_changes_no_limit() -> None:
    assert served_host_spread([]) == (0.0, 0)
    ratios = np.linspace(1, 2, 11)
    steps = [CheckedStep(DECODE_ONLY, "captured", 1, 4, "host", 1.0, float(ratio)) for ratio in ratios]
    others = [s._replace(part="grid", measured_s=9.0) for s in steps] + [s._replace(launch="eager") for s in steps]
    spread, number = served_host_spread([*steps, *others])
    assert spread == pytest.approx(0.8)
    assert number == 11


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"model": "another"}, "was recorded with model 'another'"),
        ({"card": "NVIDIA H100"}, "was recorded with card 'NVIDIA H100'"),
        ({"captured_sizes": [1, 2]}, "was recorded with captured_sizes 2 sizes up to 2"),
        ({"num_cards": 2}, "was recorded with num_cards '2'"),
        ({"k_max": 64}, "was recorded with k_max '64'"),
        ({"block_size": 32}, "was recorded with block_size '32'"),
        ({"engine_flags": {"enable_expert_parallel": True}}, "was recorded with whole experts on each card"),
    ],
)
def test_a_recording_of_another_engine_is_refused(tmp_path: Path, header: dict[str, Any], message: str) -> None:
    path = write_recording(tmp_path / "r.jsonl", lambda _: 0.01, **header)
    with pytest.raises(ProfileError) as error:
        checked_steps(load_profile(SYNTHETIC).table, [path])
    assert message in str(error.value) and "r.jsonl" in str(error.value)


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("output_s", "x", "output_s is 'x', no float"),
        ("start_s", None, "start_s is None, no float"),
        ("num_decode_seqs", 1.5, "num_decode_seqs is 1.5, no int"),
        ("k_exec", True, "k_exec is True, no int"),
        ("k_exec", 0, "k is 0; it must be at least 1"),
        ("output_s", float("nan"), "nan"),
    ],
)
def test_a_step_of_an_odd_value_is_named(tmp_path: Path, column: str, value: Any, message: str) -> None:
    path = write_recording(tmp_path / "r.jsonl", lambda _: 0.01)
    lines = path.read_text().splitlines()
    row = json.loads(lines[4])
    row[1 + COLUMNS.index(column)] = value
    path.write_text("\n".join([*lines[:4], json.dumps(row), *lines[5:]]))
    with pytest.raises(ProfileError) as error:
        checked_steps(load_profile(SYNTHETIC).table, [path])
    assert message in str(error.value) and "r.jsonl' line 5" in str(error.value)


@pytest.mark.parametrize("line", ["[]", "5", '"step"', "null"])
def test_a_line_that_is_no_row_is_named(tmp_path: Path, line: str) -> None:
    path = write_recording(tmp_path / "r.jsonl", lambda _: 0.01)
    path.write_text(path.read_text() + line + "\n")
    with pytest.raises(ProfileError, match=r"r\.jsonl' line \d+ is neither"):
        checked_steps(load_profile(SYNTHETIC).table, [path])


def test_a_recording_counts_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_recording(tmp_path / "r.jsonl", lambda _: 0.01)
    assert run(["profile", "check", SYNTHETIC, str(path), "r.jsonl"]) == 3
    assert "is named twice" in capsys.readouterr().err


def test_an_estimate_is_not_checked_on_another_card(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recording = str(recording_path(DEFAULT_PROFILE))
    for gpu, code in (("a100-80gb", 3), ("h200", 9)):
        options = ["--gpu", gpu, "--model", "olmoe-1b-7b", "--out", f"{gpu}.json"]
        assert run(["profile", "roofline", *options]) == 0
        assert run(["profile", "check", f"{gpu}.json", recording]) == code
    assert "was recorded with card 'NVIDIA H200'" in capsys.readouterr().err


@pytest.mark.parametrize("field", ENGINE)
def test_a_recording_that_does_not_say_its_engine_is_refused(tmp_path: Path, field: str) -> None:
    path = write_recording(tmp_path / "r.jsonl", load_profile(SYNTHETIC).cost().step_s)
    head, *rows = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps({k: v for k, v in json.loads(head).items() if k != field}), *rows]))
    with pytest.raises(ProfileError, match=f"r.jsonl' does not say its {field}: it cannot be told"):
        checked_steps(load_profile(SYNTHETIC).table, [path])


def test_what_took_part_in_a_fit_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    samples = profile_path(DEFAULT_PROFILE).parent / "raw" / f"{DEFAULT_PROFILE}.jsonl.gz"
    assert run(["profile", "check", DEFAULT_PROFILE, str(samples)]) == 3
    assert "samples a table is fitted to cannot check it" in capsys.readouterr().err


def test_steps_recorded_to_calibrate_the_host_judge_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    calibration = write_recording(tmp_path / "c.jsonl", lambda _: 9.0, name="calibration")
    assert run(["profile", "check", SYNTHETIC, str(calibration)]) == 3
    assert "no step that was kept out of the fit" in capsys.readouterr().err
    held_out = write_recording(tmp_path / "h.jsonl", load_profile(SYNTHETIC).cost().step_s)
    both = tmp_path / "both.jsonl"
    both.write_text(calibration.read_text() + "\n".join(held_out.read_text().splitlines()[1:]) + "\n")
    assert run(["profile", "check", SYNTHETIC, str(both)]) == 0
    assert f"{len(SHAPES)} further steps" in capsys.readouterr().out


def test_a_recording_of_nothing_does_not_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    idle = write_recording(tmp_path / "idle.jsonl", lambda _: 0.01, SHAPES[:1])
    idle.write_text("\n".join(idle.read_text().splitlines()[:-1]) + "\n")
    assert run(["profile", "check", SYNTHETIC, str(idle)]) == 3
    assert "no step that followed another without a pause" in capsys.readouterr().err


def test_a_kind_of_step_that_was_not_recorded_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    decodes = write_recording(tmp_path / "d.jsonl", load_profile(SYNTHETIC).cost().step_s, SHAPES[:4])
    assert run(["profile", "check", SYNTHETIC, str(decodes)]) == 0
    assert "no step with prompts was recorded: not checked" in capsys.readouterr().err


def test_budgets_of_an_unsplit_model_are_in_the_table_s_units(tmp_path: Path) -> None:
    table = load_profile(SYNTHETIC).table
    recording = write_recording(tmp_path / "r.jsonl", lambda _: 0.01, [StepShape(0, 0, 0, 8, 800, 2)])
    (once,) = checked_steps(table, [recording]).steps
    (fourfold,) = checked_steps(replace(table, k_granularity=4), [recording]).steps
    assert (once.k, fourfold.k) == (2, 8)


def test_the_shipped_recording_is_the_default_and_its_kinds_are_apart(capsys: pytest.CaptureFixture[str]) -> None:
    path = recording_path(DEFAULT_PROFILE)
    assert path is not None
    run(["profile", "check"])
    default = capsys.readouterr().out
    run(["profile", "check", DEFAULT_PROFILE, str(path)])
    assert capsys.readouterr().out == default
    lines = [line.split() for line in default.splitlines()]
    numbers = {line[0]: int(line[2].replace(",", "")) for line in lines if len(line) > 2 and line[1] == "captured"}
    recorded, name = 0, ""
    with gzip.open(path, "rt") as file:
        for row in map(json.loads, file):
            name = row.get("recording", name) if isinstance(row, dict) else name
            recorded += isinstance(row, list) and row[0] == "step" and name != CALIBRATION
    steps = checked_steps(load_profile().table, [path]).steps
    assert numbers == {kind: sum(s.steps == kind for s in steps) for kind in (WITH_PROMPTS, DECODE_ONLY)}
    assert 3000 <= len(steps) <= recorded


def test_without_a_recording_one_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profile", "check", SYNTHETIC]) == 2
    assert "no recording ships with 'synthetic-olmoe-split4'" in capsys.readouterr().err


def test_the_plot_is_written_even_where_limits_are_exceeded(tmp_path: Path) -> None:
    slower = write_recording(tmp_path / "b.jsonl", lambda _: 0.5)
    assert run(["profile", "check", SYNTHETIC, str(slower), "--plot", "c.png"]) == 9
    assert Path("c.png").read_bytes().startswith(b"\x89PNG")
    assert run(["profile", "check", SYNTHETIC, str(slower), "--plot", "c.gif"]) == 2


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "x"])
def test_a_limit_that_limits_nothing_is_refused(value: str) -> None:
    assert run(["profile", "check", SYNTHETIC, "--p95", value]) == 2


CLOCKS = ("device_start_s", "device_end_s", "launch_s", "schedule_end_s", "update_end_s")


def write_clocked_recording(path: Path, host_factor: Callable[[int], float]) -> Path:
    """Write what an engine with the synthetic profile's device does whose host takes so many times its share.

    Two steps are under way; a step's clocks are those of the loop, written out one after the other.
    """
    cost = load_profile(SYNTHETIC).cost()
    head = {"format": "simmoe-recording", "version": 1, "steps": [*COLUMNS, *CLOCKS], "requests": [], **ENGINE}
    composed_s = ended_s = 0.0
    rows: list[dict[str, Any]] = []
    for i, shape in enumerate([SHAPES[0], *SHAPES * 3]):
        parts = cost.parts_s(shape)
        update_s = 2e-4
        launched_s = composed_s + host_factor(i) * parts.host_s - update_s
        began_s = max(composed_s, ended_s)
        end_s = max(began_s + parts.device_s, launched_s)
        before = rows[-1] if rows else None
        if before is not None:  # the step before is taken in once it is done and this one is launched
            before["output_s"] = max(ended_s, launched_s) + 1e-4
            before["update_end_s"] = max(ended_s, launched_s) + update_s
        rows.append(
            {"shape": shape, "start_s": composed_s, "device_start_s": began_s, "device_end_s": end_s,
             "launch_s": (launched_s - composed_s) / 2, "schedule_end_s": (launched_s + composed_s) / 2}
        )  # fmt: skip
        composed_s = launched_s if before is None else before["update_end_s"]
        ended_s = end_s
    rows[-1] |= {"output_s": ended_s + 1e-4, "update_end_s": ended_s + 2e-4}
    lines = [json.dumps(head), json.dumps({"recording": "poisson"})]
    lines += [
        json.dumps(["step", row["start_s"], row["output_s"], *row["shape"], *(row[name] for name in CLOCKS)])
        for row in rows
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_with_the_hosts_own_times_a_slow_host_is_no_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A spell of a host that takes 20 times its share, which decides every step there."""
    path = write_clocked_recording(tmp_path / "slow.jsonl", lambda i: 20.0 if 15 <= i < 30 else 1.0)
    steps = checked_steps(load_profile(SYNTHETIC).table, [path]).steps
    errors = Errors.of(steps)
    assert errors.bias < -0.1 and errors.p95 > 0.3
    clocked = [s for s in steps if s.clocked is not None]
    assert len(clocked) == len(steps) - 1  # of the first it is not known when the host began it
    for s in clocked:
        assert s.clocked is not None
        assert s.clocked.predicted_s == pytest.approx(s.measured_s, rel=2e-3)
        assert s.clocked.table_host_s > 0
    assert max(s.clocked.host_s / s.clocked.table_host_s for s in clocked if s.clocked) > 15
    assert run(["profile", "check", SYNTHETIC, str(path)]) == 9  # the limits hold the table to what it says itself
    printed = capsys.readouterr().out
    assert "with the host's own time for each step, as recorded" in printed
    run(["profile", "check", SYNTHETIC, str(recorded_at(SHAPES))])
    assert "with the host's own time" not in capsys.readouterr().out
