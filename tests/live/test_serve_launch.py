"""How engines are started: arguments that vLLM takes, a card each, and what cannot be started."""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from simmoe.errors import PolicyError, UsageError
from simmoe.live.server.launch import EngineLaunch, read_k_max, visible_gpus
from simmoe.policies.registry import parse_policy


def launch(**fields: Any) -> EngineLaunch:
    return EngineLaunch(model=Path("model"), choice=parse_policy("tiers+lanes"), k_max=32, **fields)


def value_of(arguments: Sequence[str], name: str) -> Any:
    return json.loads(arguments[list(arguments).index(name) + 1])


def test_every_engine_gets_a_card(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    assert visible_gpus() == ["3", "5"]
    two = launch(num_ranks=2)
    two.check_devices()
    assert [two.environment(rank)["CUDA_VISIBLE_DEVICES"] for rank in (0, 1)] == ["3", "5"]
    with pytest.raises(UsageError, match=r"--replicas is 3; this machine shows 2 GPU\(s\)"):
        launch(num_ranks=3).check_devices()


def test_a_policy_that_cannot_be_built_is_refused_before_an_engine_is_started(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text("class Mine:\n    def __init__(self, context):\n        1 / 0\n    def plan(self, view, /): ...\n")
    refused = EngineLaunch(model=Path("model"), choice=parse_policy(f"{path}:Mine"), k_max=32)
    with pytest.raises(PolicyError, match=r"mine.py:3: ZeroDivisionError"):
        refused.check_policy(lambda n, k: 0.0)


def test_without_cards_engines_share_the_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    engines = launch(num_ranks=1000)
    engines.check_devices()
    assert engines.environment(7)["OMP_NUM_THREADS"] == "1"
    assert "--enforce-eager" in engines.arguments(0)
    assert "simmoe.live.engine.policy_host.PolicyScheduler" in engines.arguments(0)


def test_graphs_are_keyed_by_every_budget_up_to_the_largest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    keyed = launch(max_num_batched_tokens=1000).arguments(0)
    budgets = value_of(keyed, "--additional-config")["simmoe"]["captured_ks"]
    sizes = value_of(keyed, "--compilation-config")["cudagraph_capture_sizes"]
    assert (budgets[-1], budgets) == (32, sorted(set(budgets)))
    assert max(sizes) <= 1000
    assert "--compilation-config" not in launch(graphs="default").arguments(0)
    assert "--enforce-eager" in launch(graphs="none").arguments(0)
    assert "simmoe.live.engine.policy_host.AsyncPolicyScheduler" in keyed
    synchronous = launch(further=["--no-async-scheduling"]).arguments(0)
    assert "simmoe.live.engine.policy_host.PolicyScheduler" in synchronous


def test_recorded_steps_are_timed_on_the_device() -> None:
    worker = "simmoe.live.engine.timed_worker.TimedWorker"
    assert worker in launch(record_steps=True).arguments(0)
    assert "--worker-cls" not in launch().arguments(0)
    own = launch(record_steps=True, further=["--worker-cls", "mine.Worker"]).arguments(0)
    assert own.index("mine.Worker") > own.index(worker), "what the user says comes last, and wins"


def test_a_model_is_an_moe(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no readable config\.json"):
        read_k_max(tmp_path)
    for config in ("{}", "[]", '{"num_experts_per_tok": "8"}'):
        (tmp_path / "config.json").write_text(config)
        with pytest.raises(UsageError, match="has no num_experts_per_tok"):
            read_k_max(tmp_path)
    (tmp_path / "config.json").write_text('{"num_experts_per_tok": 8}')
    assert read_k_max(tmp_path) == 8


@pytest.mark.live
@pytest.mark.filterwarnings("ignore")
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: pip install 'simmoe[live-cpu]'")
@pytest.mark.parametrize("gpus", ["", "0,1"])
@pytest.mark.parametrize("graphs", ["keyed", "default", "none"])
def test_vllm_takes_the_arguments(monkeypatch: pytest.MonkeyPatch, gpus: str, graphs: Any) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
    arguments = launch(
        graphs=graphs, num_ranks=2, max_num_seqs=16, max_num_batched_tokens=512, further=["--max-model-len", "256"]
    ).arguments(1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    parsed = AsyncEngineArgs.from_cli_args(parser.parse_args(["--model", "model", *arguments]))
    assert parsed.additional_config["simmoe_policy"]["dp_rank"] == 1
    assert (parsed.max_num_seqs, parsed.max_num_batched_tokens, parsed.max_model_len) == (16, 512, 256)
    assert parsed.enable_prefix_caching is False
    if gpus and graphs == "keyed":
        assert parsed.compilation_config.max_cudagraph_capture_size == 512
