"""Live, the simulator with the same workload, compare: ``simmoe validate``, and the script of the experiments."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import json
import math
import re
import shlex
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import AsyncMock

import pytest

from simmoe.records import read_record
from tests.support.deployment import START_S

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "benchmarks" / "validation" / "record.py"

pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: pip install 'simmoe[live-cpu]'"),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.support.tiny_model import write_tiny_model

    return write_tiny_model(tmp_path_factory.mktemp("tiny") / "model")


def engine_arguments() -> list[str]:
    from tests.support.tiny_model import VLLM_ARGUMENTS

    return [word for word in VLLM_ARGUMENTS if word not in ("--served-model-name", "tiny")]


def test_one_command_runs_live_simulates_the_same_and_compares(tiny: Path, tmp_path: Path) -> None:
    trace, out = tmp_path / "trace.csv", tmp_path / "out"
    rows = [f"{i / 4:.2f},{20 + i % 7},{3 + i % 5}" for i in range(24)]
    trace.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]) + "\n")
    command = [sys.executable, "-m", "simmoe", "validate", "--trace", str(trace), "--out", str(out)]
    command += ["--model", str(tiny), "--replicas", "2", "--policy", "tiers+lanes", "--profile", "olmoe-1b-7b-h200"]
    command += ["--mu", "4", "--sigma", "2"]
    done = subprocess.run(
        [*command, "--", *engine_arguments()], capture_output=True, text=True, timeout=2 * START_S, check=False
    )
    assert done.returncode in (0, 8), done.stderr  # 8: a busy machine sent too late, and no TTFT is compared
    live, simulated = read_record(out / "live"), read_record(out / "sim")
    assert live.manifest["counts"]["finished"] == simulated.manifest["counts"]["finished"] == 24
    for name in ("request_id", "prompt_tokens", "output_tokens", "k_qos"):
        assert list(live.requests[name]) == list(simulated.requests[name])
    engines, limits = live.manifest["config"]["engine"], simulated.manifest["config"]["engine"]
    for name in ("num_gpu_blocks", "max_num_seqs", "max_num_batched_tokens", "block_size", "enable_prefix_caching"):
        assert limits[name] == engines[name]
    assert simulated.manifest["config"]["num_ranks"] == 2
    assert simulated.manifest["policy"]["given"] == live.manifest["policy"]["given"] == "tiers+lanes"
    compared = json.loads((out / "compare" / "compare.json").read_text())
    assert {row["metric"] for row in compared["differences"]} >= {"tpot", "e2e"}
    assert any((out / "compare").glob("*.png"))
    assert "TPOT" in done.stdout


def write_model_of_keyed(folder: Path) -> Path:
    """Write a tiny model with the experts, budgets and lengths of an experiment's."""
    from tests.support.tiny_model import write_tiny_model

    model = write_tiny_model(folder)
    config = json.loads((model / "config.json").read_text())
    config |= {"num_experts": 64, "num_experts_per_tok": 32, "num_hidden_layers": 2, "max_position_embeddings": 16384}
    (model / "config.json").write_text(json.dumps(config))
    return model


def engine_arguments_of_keyed() -> list[str]:
    return [word if word != "1024" else "16384" for word in engine_arguments()]


@pytest.mark.skipif(not RECORD.is_file(), reason="benchmarks/ is in the repository alone")
def test_the_experiments_script_records_every_run_of_the_plan_but_those_that_are_there(tmp_path: Path) -> None:
    model, out = write_model_of_keyed(tmp_path / "model"), tmp_path / "records"
    there = out / "vllm-50" / "manifest.json"
    there.parent.mkdir(parents=True)
    there.write_text("{}")
    command = [sys.executable, str(RECORD), "keyed", "--out", str(out), "--model", str(model), "--seconds", "1"]
    command += ["--rate", "3", "--engine", shlex.join(engine_arguments_of_keyed())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=2 * START_S, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "vllm-50: recorded before" in done.stdout
    assert there.read_text() == "{}"
    names = set(re.findall(r"\] (\S+): 3 of 3 finished", done.stdout))
    assert {path.parent.name for path in out.glob("*/manifest.json")} == names | {"vllm-50"}
    assert {name.rsplit("-", 1)[0] for name in names} >= {"front-end", "vllm", "vllm+k", "k-aware"}
    for name in names:
        record = read_record(out / name)
        assert record.manifest["experiment"]["cell"] == name
        assert record.manifest["counts"]["finished"] == 3
        assert record.steps is not None


@pytest.mark.skipif(not RECORD.is_file(), reason="benchmarks/ is in the repository alone")
def test_the_experiments_script_keeps_no_run_that_was_cut_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C lets a run end early; its record, if kept, would be taken for the whole and not be made again."""
    monkeypatch.syspath_prepend(str(RECORD.parent))
    script = importlib.import_module("record")
    facts = {"num_gpu_blocks": 1, "captured_ks": []}
    engines = contextlib.nullcontext(SimpleNamespace(facts=[facts]))
    monkeypatch.setattr(script, "running_engines", lambda *_: engines)
    monkeypatch.setattr(script, "_run", AsyncMock(return_value=SimpleNamespace(is_interrupted=True)))
    monkeypatch.setattr(script, "write_record", pytest.fail)
    cells = script.EXPERIMENTS["keyed"].cells({"vllm": 30.0, "vllm+k": 30.0, "k-aware": 30.0})
    launch = SimpleNamespace(profile="olmoe-1b-7b-split4-h200")
    with pytest.raises(KeyboardInterrupt):
        asyncio.run(script._record(launch, cells, tmp_path, math.inf))
    script._run.assert_awaited_once()
