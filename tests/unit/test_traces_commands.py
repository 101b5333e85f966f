"""``simmoe traces`` and the workload options, as typed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest

from simmoe.cli import run
from simmoe.commands.workload_options import spec_from_options, workload_options
from simmoe.errors import SimmoeError, UsageError
from simmoe.traces.spec import WorkloadSpec

MOONCAKE = """{"timestamp": 1000, "input_length": 955, "output_length": 52, "hash_ids": [46, 47]}
{"timestamp": 3000, "input_length": 472, "output_length": 26, "hash_ids": [46]}
{"timestamp": 3000, "input_length": 472, "output_length": 26, "hash_ids": [48]}
"""


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SIMMOE_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "mine.jsonl"
    path.write_text(MOONCAKE)
    return path


def test_list_says_what_is_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["traces", "list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("azure ") and "shipped summary" in line for line in lines)
    assert any(line.startswith("mooncake ") and "not here" in line for line in lines)


def test_describe(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["traces", "describe", str(trace)]) == 0
    out = capsys.readouterr().out
    assert "3 of 3 rows kept" in out
    assert "633.00" in out  # mean prompt
    assert "1.000 requests/s over 2.0 s" in out
    assert "25.0% seen before" in out
    assert "correlation of prompt and output: 1.000" in out


def test_describe_what_is_left_after_a_filter(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["traces", "describe", str(trace), "--max-total-tokens", "500"]) == 0
    out = capsys.readouterr().out
    assert "2 of 3 rows kept, total tokens ..500" in out
    assert "all at one instant" in out
    assert "one is constant" in out


def test_describe_the_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["traces", "describe", "azure"]) == 0
    out = capsys.readouterr().out
    assert "shipped summary" in out and "the summary has none" in out


@pytest.mark.parametrize("name", ["out.csv", "out.csv.gz", "out.jsonl", "out.jsonl.gz", "out.parquet"])
def test_convert_there_and_back(name: str, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, back, again = tmp_path / "first.jsonl", tmp_path / name, tmp_path / "again.jsonl"
    for source, target in ((trace, first), (first, back), (back, again)):
        assert run(["traces", "convert", str(source), str(target)]) == 0
    assert again.read_text() == first.read_text()
    assert first.read_text().splitlines()[0] == (
        '{"arrival_s": 0.0, "prompt_tokens": 955, "output_tokens": 52, "prefix_hashes": [46, 47]}'
    )
    assert "wrote 3 requests" in capsys.readouterr().out


def test_convert_clips_and_says_so(trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["traces", "convert", str(trace), str(tmp_path / "o.csv"), "--clip-total-tokens", "512"]) == 0
    assert "1 prompts shortened to fit 512 tokens" in capsys.readouterr().out
    assert (tmp_path / "o.csv").read_text().splitlines()[1] == "0.0,460,52,46"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["describe", "azur"], 2, "did you mean 'azure'?"),
        (["describe", "mooncake"], 2, "simmoe traces fetch mooncake"),
        (["convert", "TRACE", "out.xlsx"], 2, "end it in one of .csv"),
        (["convert", "TRACE", "/dev/null/out.csv"], 5, "cannot write the trace to '/dev/null/out.csv'"),
        (["convert", "azure", "out.csv"], 2, "no recorded arrivals"),
        (["describe", "TRACE", "--min-total-tokens", "5000"], 3, "none of 3 rows has 5000.."),
        (["describe", "TRACE", "--min-total-tokens", "9", "--max-total-tokens", "8"], 2, "min_total_tokens is 9"),
        (["fetch", "azur"], 2, "did you mean 'azure'?"),
        (["fetch", "azure", "mooncake", "--url", "http://x/"], 2, "one file"),
    ],
)
def test_failures_are_one_line_and_a_code(
    arguments: list[str], code: int, message: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["traces", *(str(trace) if a == "TRACE" else a for a in arguments)]) == code
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1
    assert not captured.out


def typed(*arguments: str, one_run: bool = True) -> WorkloadSpec:
    """The specification a command with the workload's options makes of its arguments."""

    @click.command()
    @workload_options(one_run=one_run)
    def command(**options: Any) -> WorkloadSpec:
        return spec_from_options(k_max=32, **options)

    spec = command.main(args=list(arguments), standalone_mode=False)
    assert isinstance(spec, WorkloadSpec)
    return spec


def test_no_options_are_the_defaults() -> None:
    assert typed() == WorkloadSpec()
    assert typed(one_run=False) == WorkloadSpec()
    assert WorkloadSpec().arrival_process == "replay"


def test_options_reach_the_specification() -> None:
    spec = typed(
        *("--trace", "azure-conv", "--clip-total-tokens", "4096", "--requests", "10000", "--arrivals", "poisson"),
        *("--rate", "3", "--mu", "8", "--sigma", "2", "--seed", "7"),
    )
    assert spec == WorkloadSpec(
        trace="azure-conv",
        clip_total_tokens=4096,
        requests=10000,
        arrivals="poisson",
        rate=3.0,
        budgets="normal",
        mu=8.0,
        sigma=2.0,
        seed=7,
    )


def test_a_rate_alone_means_poisson() -> None:
    assert typed("--rate", "3").arrival_process == "poisson"
    assert typed("--rate", "inf").rate == float("inf")
    assert typed("--rate", "3", "--arrivals", "replay").arrival_process == "replay"


def test_parameters_imply_their_generator() -> None:
    assert typed("--mix", "4:1,8:3").budgets == "mix"
    assert typed("--mix", "4:1,8:3").mix == ((4, 1.0), (8, 3.0))
    assert typed("--k", "8").budgets == "fixed"
    assert typed("--mu", "8").budgets == "normal"
    assert typed("--arrivals", "gamma", "--cv", "3", "--rate", "1").cv == 3.0


def test_parameters_imply_their_generator_in_python_too() -> None:
    """What a specification is given is used or refused, as on the command line."""
    mix = ((4, 1.0), (8, 3.0))
    assert WorkloadSpec(mix=mix).budgets == "mix" and WorkloadSpec(mix=mix) == typed("--mix", "4:1,8:3")
    assert WorkloadSpec(k=8).budgets == "fixed" and WorkloadSpec(k=8) == typed("--k", "8")
    assert WorkloadSpec(mu=8.0).budgets == WorkloadSpec(sigma=1.0).budgets == "normal"
    assert WorkloadSpec().budgets is None
    for fields, message in (
        ({"mix": mix, "k": 8}, "mix and k contradict"),
        ({"k": 8, "mu": 3.0}, "k and mu contradict"),
        ({"k": 8, "budgets": "normal"}, "k needs budgets fixed, not normal"),
        ({"mix": mix, "budgets": "trace"}, "mix needs budgets mix, not trace"),
    ):
        with pytest.raises(UsageError, match=message):
            WorkloadSpec(**fields)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--rate 0", "rate is 0.0; it must be above 0"),
        ("--rate nan", "rate is nan"),
        ("--rate -1", "rate is -1.0"),
        ("--requests 0", "requests is 0; it must be at least 1"),
        ("--arrivals poison", "did you mean 'poisson'?"),
        ("--arrivals gamma --cv 0", "cv is 0.0"),
        ("--arrivals gamma --cv inf", "cv is inf"),
        ("--arrivals onoff --on-s 0", "on_s is 0.0"),
        ("--arrivals onoff --off-s -1", "off_s is -1.0"),
        ("--arrivals poisson --cv 2", "--cv needs --arrivals gamma, not poisson"),
        ("--cv 2", "--cv needs --arrivals gamma"),
        ("--off-s 2", "--off-s needs --arrivals onoff"),
        ("--budgets norml", "did you mean 'normal'?"),
        ("--budgets mix", "mixed budgets need their tiers"),
        ("--budgets fixed --mu 3", "--mu needs --budgets normal, not fixed"),
        ("--mix 4:1 --k 8", "contradict each other"),
        ("--k 0", "k is 0; it must be in 1..k_max (32)"),
        ("--k 33", "k is 33; it must be in 1..k_max (32)"),
        ("--mix 4:1,33:1", "mix is 33; it must be of budgets in 1..k_max (32)"),
        ("--mix 4:1,0:1", "budget 0; it must be at least 1"),
        ("--mix 4:1,4:2", "budget 4 twice"),
        ("--mix 4:0", "weight 0.0; it must be above 0"),
        ("--mix 4:nan", "weight nan"),
        ("--mix 4", "'4' is not K:WEIGHT"),
        ("--mix 4.5:1", "'4.5:1' is not K:WEIGHT"),
        ("--mu nan", "mu is nan; it must be in -1e+06..1e+06"),
        ("--sigma -1", "sigma is -1.0"),
        ("--sigma inf", "sigma is inf"),
        ("--seed -1", "seed is -1"),
        ("--clip-total-tokens 1", "clip_total_tokens is 1; it must be at least 2"),
        (
            "--min-total-tokens 10 --max-total-tokens 9",
            "min_total_tokens is 10; it must be at most max_total_tokens (9)",
        ),
    ],
)
def test_bad_values_are_named(arguments: str, message: str) -> None:
    with pytest.raises(SimmoeError) as caught:
        typed(*arguments.split())
    assert message in str(caught.value)
    assert caught.value.exit_code == 2
