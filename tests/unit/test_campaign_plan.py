"""The campaign's plan: every command line is one its program takes, and all that ships is in it."""

from __future__ import annotations

import gzip
import importlib
import importlib.util
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from simmoe.cli import run as cli
from simmoe.commands.asked_layout import require_budgets, require_cards
from simmoe.commands.profile import measure
from simmoe.commands.profile_layer import layer
from simmoe.live.measure.layer_alone import held_shape
from simmoe.live.measure.loads import Loads
from simmoe.live.measure.models import read_split
from simmoe.profiles.models import model_shape
from simmoe.profiles.recorded_steps import CALIBRATION

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "campaign"
RAW = ROOT / "profiles" / "data" / "raw"

HELD_OUT = 3000
"""Recorded steps that a table is to be checked on, at least."""

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="benchmarks/ is in the repository alone")


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """The plan's jobs by name."""
    monkeypatch.syspath_prepend(str(FOLDER))
    found = list(importlib.import_module("plan").jobs())
    names = [job.name for job in found]
    assert len(set(names)) == len(names)
    yield {job.name: job for job in found}
    for name in ("job", "plan", "validation_plan"):
        sys.modules.pop(name, None)


def simmoe_options(jobs: dict[str, Any], out: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, dict[str, Any]]:
    """Return the options of each job that calls simmoe, as its command is called with."""
    seen: list[dict[str, Any]] = []
    for command in (measure, layer):
        monkeypatch.setattr(command, "callback", lambda **options: seen.append(options))
    found = {}
    for name, job in jobs.items():
        words = job.words("python", out / name, 500.0)
        if words[:4] == ["python", "-P", "-m", "simmoe"]:
            assert cli(words[4:]) == 0, words
            found[name] = seen.pop()
    return found


def test_every_simmoe_command_is_taken_and_asks_for_what_its_model_has(
    jobs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, options in simmoe_options(jobs, tmp_path, monkeypatch).items():
        cards = options["tensor_parallel"], options["expert_parallel"]
        shape = model_shape(read_split(options["model"], options["split"])[1].config)
        require_cards(*cards)
        require_budgets(options["budgets"], shape.top_k)
        held_shape(shape, *cards)
        # one card does for the layer of any layout; its file is where 'profile show' looks for it
        assert jobs[name].num_gpus == (1 if name.startswith("layer-") else cards[0]), name
        written = {options["out"], options.get("raw")} - {None}
        assert {tmp_path / name / made for made in jobs[name].makes} >= written


def test_every_table_that_ships_is_measured_as_it_was(
    jobs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = simmoe_options(jobs, tmp_path, monkeypatch)
    shipped = [path.name.removesuffix("-h200.jsonl.gz") for path in RAW.glob("*-h200.jsonl.gz")]
    for name in (name for name in shipped if "revision2" not in name):
        with gzip.open(RAW / f"{name}-h200.jsonl.gz", "rt") as file:
            header = json.loads(file.readline())
        asked = options[f"table-{name}"]
        flags = header["engine_flags"]
        assert list(asked["budgets"] or header["captured_ks"]) == header["captured_ks"], name
        assert asked["max_tokens"] == flags["max_num_batched_tokens"], name
        assert asked["tensor_parallel"] == header["num_cards"], name
        assert asked["expert_parallel"] == flags.get("enable_expert_parallel", False), name
        assert f"--split {asked['split']} --graphs {asked['graphs']} " in header["command"], name
        assert asked["pin"] and asked["time_limit"] is None, "for want of time recordings would be shortened"
    lacking = {path.name.removesuffix(".json") for path in (RAW.parent).glob("*-h200.json")} - {
        path.name.removesuffix("-layer.json") for path in RAW.glob("*-layer.json")
    }
    makes = {made for name, job in jobs.items() if name.startswith("layer-") for made in job.makes}
    assert {f"{name}-layer.json" for name in lacking} <= makes


def test_recordings_are_long_enough(jobs: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """At the rates of steps of the shipped recordings, with a tenth to spare for another host."""
    options = simmoe_options(jobs, tmp_path, monkeypatch)
    for path in RAW.glob("*-recording.jsonl.gz"):
        name = path.name.removesuffix("-h200-recording.jsonl.gz")
        if f"table-{name}" not in options:
            continue
        recordings: dict[str, list[list[Any]]] = {}
        with gzip.open(path, "rt") as file:
            header = json.loads(file.readline())
            for row in map(json.loads, file):
                if isinstance(row, dict):
                    recordings[row["recording"]] = []
                else:
                    recordings[next(reversed(recordings))].append(row)
        due, output = (
            1 + header[kind].index(column) for kind, column in (("requests", "due_s"), ("steps", "output_s"))
        )
        expected = 0.0
        lasting_s = {each.name: each.seconds for each in Loads.lasting(seconds(options[f"table-{name}"])).poisson}
        for recording, rows in recordings.items():
            if recording == CALIBRATION:
                continue
            ends_s = [row[output] for row in rows if row[0] == "step"]
            arrivals_s = max(row[due] for row in rows if row[0] == "request")
            drains_s = max(ends_s) - arrivals_s
            # a burst's steps are those of its longest request, however many there are
            expected += len(ends_s) / max(ends_s) * (lasting_s.get(recording, 0.0) + drains_s)
        assert expected > 1.1 * HELD_OUT, (name, expected)


def seconds(options: dict[str, Any]) -> float:
    return float(options["recording_seconds"])


def test_every_experiment_is_recorded_and_its_command_taken(jobs: dict[str, Any], tmp_path: Path) -> None:
    parsed = (
        "import argparse, runpy, sys\n"
        "def parse(self, parse=argparse.ArgumentParser.parse_args):\n"
        "    sys.exit(repr(parse(self)))\n"
        "argparse.ArgumentParser.parse_args = parse\n"
        "sys.argv = sys.argv[1:]\n"
        "sys.path.insert(0, 'benchmarks/validation')\n"
        "runpy.run_path(sys.argv[0], run_name='__main__')\n"
    )
    experiments = importlib.import_module("plan")._experiments()
    assert {name for name in jobs if name.startswith("records-")} == {f"records-{name}" for name in experiments}
    for name, experiment in experiments.items():
        job = jobs[f"records-{name}"]
        _, *words = job.words("python", tmp_path, 400.0)
        done = subprocess.run([sys.executable, "-c", parsed, *words], cwd=ROOT, capture_output=True, text=True)
        assert f"experiment='{name}'" in done.stderr and "limit_s=400.0" in done.stderr, done.stderr
        assert job.num_gpus == experiment.num_ranks and len(job.makes) == len(experiment.runs)


def collected(words: Sequence[str]) -> list[str]:
    """Return the tests pytest would run; a file that needs what is not here is skipped as a whole."""
    done = subprocess.run([*words, "--collect-only", "-q"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 or "SKIPPED" in done.stdout, done.stdout + done.stderr
    return [line for line in done.stdout.splitlines() if "::" in line]


def test_every_gpu_test_is_run_once(jobs: dict[str, Any], tmp_path: Path) -> None:
    calls = [job.words(sys.executable, tmp_path, 400.0) for job in jobs.values() if "pytest" in job.command]
    files = {f"tests/gpu/{path.name}" for path in (ROOT / "tests" / "gpu").glob("test_*.py")}
    assert files == {word for words in calls for word in words if word.startswith("tests/gpu/")}
    every = collected([sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/gpu"])
    assert every and sorted(test for words in calls for test in collected(words)) == sorted(every)


def test_what_is_wanted_first_is_first_and_more_cards_come_after_fewer(jobs: dict[str, Any]) -> None:
    """In a window of 25 minutes on two cards layers and tests leave time for tables."""
    names = list(jobs)
    kinds = [name.split("-")[0] for name in names]
    assert kinds == sorted(kinds, key=lambda kind: {"layer": 0, "test": 1}.get(kind, 2))
    short_s = [job.expected_s for job in jobs.values() if job.name.split("-")[0] in ("layer", "test")]
    first_table = next(job for job in jobs.values() if job.fast_host)
    assert sum(short_s) / 2 + max(short_s) + first_table.least_s < 1500
    assert first_table.name == "table-qwen3-30b-a3b-split4"
    assert all(job.fast_host == name.startswith(("table", "records")) for name, job in jobs.items())
    several = [name for name, job in jobs.items() if job.num_gpus > 1]
    assert several[0] == "table-deepseek-v2-lite-tp2" and several[1] == "records-repeated"
