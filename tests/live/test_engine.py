"""Budgets inside a real vLLM engine, on the CPU: logits tell which k ran, not what the engine says of itself."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from simmoe.live.engine import plugin
from tests.live.tiny import TINY_DEEPSEEK_V2, TINY_OLMOE, TINY_QWEN3_MOE, split

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: pip install 'simmoe[live-cpu]'"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own, at import and at exit
]

PROMPTS = [list(range(10, 30)), list(range(100, 130))]
IDS = list(range(2, 66))


@contextlib.contextmanager
def engine(folder: Path, monkeypatch: pytest.MonkeyPatch, **args: Any) -> Iterator[Any]:
    """Yield an in-process engine of the tiny model."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM

    llm = LLM(
        str(folder), load_format="simmoe-dummy", skip_tokenizer_init=True, dtype="float32", max_model_len=512,
        enable_prefix_caching=False, kv_cache_memory_bytes=1 << 27, logprobs_mode="raw_logits",
        worker_cls="simmoe.live.measure.worker.MeasuringWorker", **args,
    )  # fmt: skip
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(TINY_OLMOE))
    return tmp_path


def logits(llm: Any, ks: Sequence[int | None], output_tokens: int = 3) -> list[Any]:
    """Return [output_tokens, 64] raw logits of each prompt, sent together, each with its k."""
    from vllm import SamplingParams

    params = [
        SamplingParams(
            max_tokens=output_tokens, temperature=0.0, ignore_eos=True, detokenize=False, allowed_token_ids=[7],
            logprob_token_ids=IDS, extra_args=None if k is None else {"simmoe_k": k},
        )
        for k in ks
    ]  # fmt: skip
    prompts = [{"prompt_token_ids": tokens} for tokens in PROMPTS[: len(ks)]]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [np.array([[p[i].logprob for i in IDS] for p in output.outputs[0].logprobs]) for output in outputs]


def scheduler_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.scheduler


BUDGETS = {"scheduler_cls": "simmoe.live.engine.scheduler.BudgetScheduler"}


MODELS = {"olmoe": TINY_OLMOE, "qwen3_moe": TINY_QWEN3_MOE, "deepseek_v2": TINY_DEEPSEEK_V2}


@pytest.fixture(scope="module", params=[f"{name}{kind}" for name in MODELS for kind in ("", "-split")])
def fixed(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[int, list[np.ndarray]]]:
    """A model's folder, and the logits of unmodified engines whose configuration says k, by k."""
    name, _, kind = request.param.partition("-")
    config = split(MODELS[name]) if kind else MODELS[name]
    k_max = config["num_experts_per_tok"]
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        for k in (1, 3, k_max):
            folder = tmp_path_factory.mktemp(f"k{k}")
            (folder / "config.json").write_text(json.dumps({**config, "num_experts_per_tok": k}))
            with engine(folder, patch, enforce_eager=True) as llm:
                found[k] = logits(llm, (None, None))
    # the oracle tells one k from another, at the prompt's end and at every decode step
    for k, other in pairwise(found):
        for mine, theirs in zip(found[k], found[other], strict=True):
            assert (np.abs(mine - theirs).max(axis=1) > 0.05).all(), (k, other)
    return folder, found


@pytest.mark.parametrize("eager", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["eager", "compiled"])
def test_the_k_asked_is_the_k_that_runs(
    fixed: tuple[Path, dict[int, list[np.ndarray]]], monkeypatch: pytest.MonkeyPatch, eager: bool
) -> None:
    folder, expected = fixed
    with engine(folder, monkeypatch, enforce_eager=eager, **BUDGETS) as llm:
        # there and back, so that a k left behind by the step before would show
        asked = [(k, logits(llm, (k, k))) for k in (*expected, 3, 1)]
        mixed = logits(llm, (1, 3), output_tokens=1)
        unnamed = logits(llm, (None, None))
    for k, answers in (*asked, (max(expected), unnamed)):
        for mine, theirs in zip(answers, expected[k], strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-3, atol=1e-3)
    for mine, theirs in zip(mixed, expected[3], strict=True):
        np.testing.assert_allclose(mine[0], theirs[0], rtol=1e-3, atol=1e-3)


def test_records_say_what_each_step_was(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"simmoe": {"record_steps": True, "default_k": 5}}
    with engine(model, monkeypatch, enforce_eager=True, additional_config=options, **BUDGETS) as llm:
        logits(llm, (2, None))
        steps = scheduler_of(llm).drain_steps()
        assert scheduler_of(llm).drain_steps() == []
        assert scheduler_of(llm).request_ks == {}
    prefill, *decode = [(s.shape, s.k_asked, s.qos_slots, s.num_waiting, s.num_running) for s in steps]
    assert prefill == ((50, 20 * 21 // 2 + 30 * 31 // 2, 2, 0, 0, 5), 5, 20 * 2 + 30 * 5, 0, 2)
    assert decode == [((0, 0, 0, 2, 21 + 31, 5), 5, 7, 0, 2), ((0, 0, 0, 2, 22 + 32, 5), 5, 7, 0, 2)]
    times = [t for s in steps for t in (s.schedule_start_s, s.schedule_end_s, s.output_s, s.update_end_s)]
    assert times == sorted(times)
    assert [s.step for s in steps] == [0, 1, 2]


def test_a_chunked_prompt_attends_to_what_came_before(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"simmoe": {"record_steps": True}}
    arguments = {"max_num_batched_tokens": 16, "max_num_seqs": 4, "additional_config": options, **BUDGETS}
    with engine(model, monkeypatch, enforce_eager=True, **arguments) as llm:
        logits(llm, (4,), output_tokens=1)
        steps = scheduler_of(llm).drain_steps()
    shapes = [s.shape for s in steps]
    assert [s.num_prefill_tokens for s in shapes] == [16, 4]
    assert sum(s.prefill_kv_pairs for s in shapes) == 20 * 21 // 2


@pytest.mark.parametrize("k", [0, 9, -1, 2.5, "4", True])
def test_a_budget_out_of_range_is_refused_by_name(k: Any) -> None:
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match=r"simmoe_k is .*; it must be an integer from 1 to 8"):
        validate({"num_experts_per_tok": 8}, k)


def test_a_dense_model_takes_no_budget() -> None:
    from vllm.exceptions import VLLMValidationError

    with pytest.raises(VLLMValidationError, match="model 'm' has no num_experts_per_tok: it is no MoE"):
        validate({}, 1)


def test_an_engine_without_the_scheduler_takes_no_budget() -> None:
    """It would run the request at another."""
    from vllm.exceptions import VLLMValidationError

    message = "simmoe_k is 4, but this engine runs all at 8: its --scheduler-cls is none of simmoe's"
    with pytest.raises(VLLMValidationError, match=message):
        validate({"num_experts_per_tok": 8}, 4, "vllm.v1.core.sched.scheduler.Scheduler")


def validate(text_config: dict[str, Any], k: Any, scheduler_cls: str = BUDGETS["scheduler_cls"]) -> None:
    """Ask vLLM's front end, the plug-in loaded twice, to take a request with a budget."""
    from vllm import SamplingParams
    from vllm.config import SchedulerConfig
    from vllm.v1.engine.input_processor import InputProcessor

    plugin.register()
    plugin.register()
    model_config = SimpleNamespace(model="m", hf_text_config=SimpleNamespace(**text_config))
    scheduler_config = SchedulerConfig(max_model_len=512, is_encoder_decoder=False, scheduler_cls=scheduler_cls)
    config = SimpleNamespace(model_config=model_config, scheduler_config=scheduler_config)
    front_end = SimpleNamespace(vllm_config=config)
    InputProcessor._validate_params(front_end, SamplingParams(extra_args={"simmoe_k": k}), ())
