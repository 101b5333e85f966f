"""Weights by name: kept apart wherever times of two engines meet."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from simmoe.cli import run
from simmoe.errors import ProfileError
from simmoe.profiles.catalog import load_profile, profile_names
from simmoe.profiles.estimating.step_work import ROUTE_ALIKE
from simmoe.profiles.fitting.fit import fit_table
from simmoe.profiles.samples import SampleWriter
from simmoe.profiles.synthetic import SyntheticEngine
from simmoe.profiles.table import StepTable
from simmoe.profiles.table_file import write_table
from simmoe.profiles.weights import (
    NONE,
    REAL,
    REVISION_1,
    WEIGHTS,
    weights_of_table,
    weights_served,
)

MEASURED = "olmoe-1b-7b-h200"


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "250")


def with_weights(table: StepTable, weights: str) -> StepTable:
    runs = [{**run, "weights": weights} for run in table.provenance["runs"]]
    return replace(table, provenance={**table.provenance, "runs": runs})


def table_of(weights: str, folder: Path) -> str:
    """Return the path of a measured table, as if it had been measured with those weights."""
    path = folder / f"{weights.replace(' ', '-')}.json"
    write_table(path, with_weights(load_profile(MEASURED).table, weights))
    return str(path)


def test_every_shipped_table_says_which_weights_it_is_of() -> None:
    found = {weights_of_table(load_profile(name).table.provenance) for name in profile_names()}
    assert found <= {REVISION_1, WEIGHTS, NONE}
    assert weights_of_table({}) is None


def test_only_the_first_revision_routes_a_prompt_alike() -> None:
    assert REVISION_1 in ROUTE_ALIKE
    assert WEIGHTS not in ROUTE_ALIKE


@pytest.mark.parametrize(
    ("arguments", "weights"),
    [
        ([], REAL),
        (["--load-format", "auto"], REAL),
        (["--dtype", "float32", "--load-format", "simmoe-dummy", "--enforce-eager"], WEIGHTS),
        (["--load_format=simmoe-dummy"], WEIGHTS),
        (["--load-format", "dummy", "--load-format", "simmoe-dummy"], WEIGHTS),
        (["--load-format=dummy"], "vLLM's dummy"),
    ],
)
def test_an_engine_s_arguments_tell_its_weights(arguments: list[str], weights: str) -> None:
    assert weights_served(arguments) == weights


def recording(path: Path, engine: Mapping[str, Any], **header: Any) -> Path:
    """Write a recording of two busy steps of the engine of a sample file's header."""
    columns = [
        "start_s", "output_s", "num_prefill_tokens", "prefill_kv_pairs", "num_prefill_seqs", "num_decode_seqs",
        "decode_kv_tokens", "k_exec",
    ]  # fmt: skip
    head = {"format": "simmoe-recording", "version": 1, "steps": columns, "requests": []}
    head |= {name: engine[name] for name in ("model", "card", "num_cards", "captured_sizes", "engine_flags")} | header
    steps = [["step", i * 0.01 - 1e-4, (i + 1) * 0.01, 0, 0, 0, 4, 40, 8] for i in range(3)]
    lines = "".join(json.dumps(line) + "\n" for line in [head, {"recording": "burst"}, *steps])
    path.write_text(lines)
    return path


def test_show_says_what_the_weights_mean_for_the_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profile", "show", MEASURED]) == 0
    assert "dummy (random, revision 1: tokens of one prompt are routed nearly alike)" in capsys.readouterr().out
    assert run(["profile", "show", table_of(WEIGHTS, tmp_path)]) == 0
    assert "simmoe-dummy 2 (random, revision 2: " in capsys.readouterr().out


def test_diff_says_that_weights_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profile", "diff", MEASURED, table_of(WEIGHTS, tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "weights: a dummy (random, revision 1: " in out
    assert "small steps with prompts differ for that alone" in out
    assert run(["profile", "diff", MEASURED, table_of(REVISION_1, tmp_path)]) == 0
    assert run(["profile", "diff", MEASURED, "synthetic-olmoe-split4"]) == 1
    assert "weights: a" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("of_table", "header", "refused"),
    [
        (WEIGHTS, {}, True), (WEIGHTS, {"weights": REVISION_1}, True), (REVISION_1, {"weights": WEIGHTS}, True),
        (REVISION_1, {}, False), (WEIGHTS, {"weights": WEIGHTS}, False),
    ],
)  # fmt: skip
def test_a_table_is_not_checked_on_a_recording_of_other_weights(
    of_table: str, header: dict[str, Any], refused: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = recording(tmp_path / "r.jsonl", load_profile(MEASURED).provenance["runs"][0], **header)
    code = run(["profile", "check", table_of(of_table, tmp_path), str(path)])
    err = capsys.readouterr().err
    assert ("was recorded with weights" in err) == refused
    assert (code == 3) == refused


def test_samples_of_other_weights_are_not_fitted_together() -> None:
    engine = SyntheticEngine()
    header, rows = engine.header(), engine.samples()
    with pytest.raises(ProfileError, match=f"sample files disagree on weights: {REVISION_1} and {WEIGHTS}"):
        fit_table(
            [(replace(header, weights=REVISION_1), rows), (replace(header, weights=WEIGHTS), rows)], "x", "measured", ""
        )


def test_a_recording_of_other_weights_takes_no_part_in_a_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = SyntheticEngine()
    samples, out = tmp_path / "s.jsonl", tmp_path / "t.json"
    with SampleWriter(samples, replace(engine.header(), weights=WEIGHTS)) as writer:
        for sample in engine.samples():
            writer.write(sample)
    path = recording(tmp_path / "r.jsonl", asdict(engine.header()))
    assert run(["profile", "fit", str(samples), str(path), "--out", str(out)]) == 3
    assert f"was recorded with weights '{REVISION_1}', the sample file is of '{WEIGHTS}'" in capsys.readouterr().err
    assert not out.exists()


def test_samples_of_other_weights_are_not_added_to(tmp_path: Path) -> None:
    header = SyntheticEngine().header()
    SampleWriter(tmp_path / "s.jsonl", replace(header, weights=REVISION_1)).close()
    with pytest.raises(ProfileError, match=f"was measured with weights {REVISION_1}, this engine has {WEIGHTS}"):
        SampleWriter(tmp_path / "s.jsonl", replace(header, weights=WEIGHTS))
