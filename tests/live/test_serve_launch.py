"""How engines are started: arguments that vLLM takes, a card each, and what cannot be started."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from simmoe.errors import LiveError, PolicyError, UsageError
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
    assert "captured_ks" not in value_of(keyed, "--additional-config")["simmoe"], "every budget, as engines do unasked"
    sizes = value_of(keyed, "--compilation-config")["cudagraph_capture_sizes"]
    assert max(sizes) <= 1000
    assert "--compilation-config" not in launch(graphs="default").arguments(0)
    assert "--enforce-eager" in launch(graphs="none").arguments(0)
    assert "simmoe.live.engine.policy_host.AsyncPolicyScheduler" in keyed
    synchronous = launch(further=["--no-async-scheduling"]).arguments(0)
    assert "simmoe.live.engine.policy_host.PolicyScheduler" in synchronous


def test_what_is_said_of_graphs_reaches_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    few = launch(captured_ks=(8, 32), graph_memory_gib=4.0, uncaptured_k="next", default_k=5, record_steps=True)
    few.check_options()
    assert value_of(few.arguments(0), "--additional-config")["simmoe"] == {
        "captured_ks": [8, 32], "graph_memory_gib": 4.0, "uncaptured_k": "next", "default_k": 5, "record_steps": True,
    }  # fmt: skip
    with pytest.raises(LiveError, match=re.escape("captured_ks is [8, 16]; it must ascend from at least 1 to the")):
        launch(captured_ks=(8, 16)).check_options()


@pytest.mark.parametrize("spelt", ["--additional-config {}", "--additional-config={}", "--additional_config={}"])
def test_additional_config_adds_to_what_the_command_sets(spelt: str) -> None:
    given = json.dumps({"simmoe": {"captured_ks": [8, 32], "default_k": 4}, "mine": {"a": 1}})
    spelt_out = [argument.replace("{}", given) for argument in spelt.split()]
    engines = launch(default_k=4, further=["--max-model-len", "256", *spelt_out, "--seed", "3"])
    engines.check_options()
    arguments = engines.arguments(0)
    config = value_of(arguments, "--additional-config")
    assert config["simmoe"] == {"captured_ks": [8, 32], "default_k": 4}
    assert config["simmoe_policy"]["policy"] == "tiers", "the policy stays"
    assert config["mine"] == {"a": 1}
    assert sum("additional" in argument for argument in arguments) == 1
    assert arguments[-4:] == ["--max-model-len", "256", "--seed", "3"]


@pytest.mark.parametrize(
    ("given", "refusal"),
    [
        ('{"simmoe": {"default_k": 4}}', "has simmoe.default_k 4, the command says 5; give --default-k"),
        ('{"simmoe": {"captured_ks": [32]}}', "has simmoe.captured_ks [32], the command says [8, 32]; give --captured"),
        (
            '{"simmoe_policy": {"policy": "fifo"}}',
            "has simmoe_policy.policy 'fifo', the command says 'tiers'; give --",
        ),
        ('{"simmoe_policy": {"dp_rank": 1}}', "has simmoe_policy.dp_rank 1, the command says 0; leave it out"),
        ('{"simmoe": 3}', "has simmoe 3, the command says {"),
        ("{simmoe", "--additional-config is '{simmoe', no JSON"),
        ("[]", "--additional-config is '[]'; it must be a JSON object"),
        ("", "--additional-config is '', no JSON"),
        ('{"simmoe": {"captured": [8]}}', "has no option 'captured' (did you mean 'captured_ks'?)"),
        ('{"simmoe_policy": {"police": "fifo"}}', "has no option 'police'"),
    ],
)
def test_what_contradicts_the_command_is_refused_before_an_engine_is_started(given: str, refusal: str) -> None:
    for further in (["--additional-config", given], [f"--additional-conf={given}"]):
        with pytest.raises((UsageError, LiveError), match=re.escape(refusal)) as refused:
            launch(default_k=5, captured_ks=(8, 32), further=further).check_options()
        assert "\n" not in str(refused.value)


def test_a_part_of_additional_config_would_replace_all_of_it() -> None:
    with pytest.raises(UsageError, match="as one JSON object"):
        launch(further=["--additional-config.simmoe.default_k", "4"]).check_options()
    with pytest.raises(UsageError, match="no JSON"):
        launch(further=["--additional-config"]).check_options()


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
        graphs=graphs,
        captured_ks=(8, 32),
        graph_memory_gib=4.0,
        num_ranks=2,
        max_num_seqs=16,
        max_num_batched_tokens=512,
        further=["--max-model-len", "256"],
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
