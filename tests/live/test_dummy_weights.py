"""Random weights in real engines: how large, whose, and how evenly they route the tokens of a prompt."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simmoe.live.measure.expert_balance import FloatArray, evenness, router_logits
from tests.live.tiny import TINY_DEEPSEEK_V2, TINY_OLMOE, TINY_QWEN3_MOE, split

pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: pip install 'simmoe[live-cpu]'"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own, at import and at exit
]

#: Tokens of the prompt, and sequences that decode together.
NUM_TOKENS = 64

#: Deep enough that what attention adds to all tokens alike would have drowned them, were it as large as the rest; wide
#: enough that a layer's experts do not squeeze tokens into few dimensions, where gates are less even; of so many tokens
#: that sequences seldom decode the same one, which is routed alike wherever it stands.
DEEP = {"num_hidden_layers": 12, "num_experts_per_tok": 8, "hidden_size": 512, "vocab_size": 32768}

#: Budgets routing is looked at with: the less, the more a gate's favourites show.
KS = (1, 2, 8)

MODELS = {
    "olmoe": {**TINY_OLMOE, **DEEP, "num_experts": 64},
    "qwen3_moe": {**TINY_QWEN3_MOE, **DEEP, "num_experts": 64},
    "deepseek_v2": {**TINY_DEEPSEEK_V2, **DEEP, "n_routed_experts": 64},
}
CASES = {**MODELS, **{f"{name}-split": split(config) for name, config in MODELS.items()}}


@contextlib.contextmanager
def engine(config: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch, **args: Any) -> Iterator[Any]:
    """Yield an engine that says what was drawn for it."""
    from vllm import LLM

    (folder / "config.json").write_text(json.dumps(config))
    llm = LLM(
        str(folder), load_format="simmoe-dummy-told", worker_cls="tests.live.drawn.TellingWorker",
        skip_tokenizer_init=True, enforce_eager=True, max_model_len=512, max_num_batched_tokens=1024,
        max_num_seqs=NUM_TOKENS, enable_prefix_caching=False, kv_cache_memory_bytes=1 << 30, **args,
    )  # fmt: skip
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def statistics(logits: FloatArray) -> dict[str, FloatArray]:
    """Return what is looked at of [num_layers, num_tokens, num_experts] router logits, by layer."""
    found = {"deviation": logits.std(axis=(1, 2))}
    for k in KS:
        found |= {f"{name} at k {k}": values for name, values in evenness(logits, k)._asdict().items()}
    return found


@cache
def balanced(hidden_size: int, num_experts: int, draws: int = 4000) -> dict[str, FloatArray]:
    """Return the same of independent tokens, at random gates, one a draw."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(draws):
        tokens = rng.standard_normal((NUM_TOKENS, hidden_size), dtype=np.float32)
        tokens /= np.sqrt((tokens**2).mean(axis=1, keepdims=True))
        gate = rng.standard_normal((hidden_size, num_experts), dtype=np.float32)
        rows.append(statistics((tokens @ gate / hidden_size**0.5)[np.newaxis]))
    return {name: np.concatenate([row[name] for row in rows]) for name in rows[0]}


def outside(logits: FloatArray, hidden_size: int) -> list[str]:
    """Return what means over layers are not within, of what 999 in 1,000 balanced models are within in everything."""
    num_layers, _, num_experts = logits.shape
    reference, rng = balanced(hidden_size, num_experts), np.random.default_rng(0)
    found = []
    for name, seen in statistics(logits).items():
        means = rng.choice(reference[name], (200_000, num_layers)).mean(axis=1)
        tail = 0.001 / len(reference) / 2
        low, high = np.quantile(means, (tail, 1 - tail), method="inverted_cdf")
        if not low <= seen.mean() <= high:
            found.append(f"{name}: {seen.mean():g} is not within {low:g} and {high:g}; by layer {seen.round(2)}")
    return found


def one_prompt() -> list[list[int]]:
    return [np.random.default_rng(1).integers(2, DEEP["vocab_size"], NUM_TOKENS).tolist()]


@pytest.fixture(params=CASES)
def config(request: pytest.FixtureRequest) -> dict[str, Any]:
    return CASES[request.param]


@pytest.fixture(autouse=True)
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")


def test_tokens_of_a_prompt_are_routed_as_independently_as_sequences(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(2)
    many = [rng.integers(2, DEEP["vocab_size"], 8).tolist() for _ in range(NUM_TOKENS)]
    with engine(config, tmp_path, monkeypatch, dtype="float32") as llm:
        prompt, decoding = router_logits(llm, one_prompt()), router_logits(llm, many, 2)
        first, second = llm.collective_rpc("drawn")[0]
    assert prompt.shape == decoding.shape
    assert prompt.shape[:2] == (config["num_hidden_layers"], NUM_TOKENS)
    assert outside(prompt, config["hidden_size"]) == []
    assert outside(decoding, config["hidden_size"]) == []

    assert first == second, "drawn again, the weights are others"
    matrices = {name: drawn for name, drawn in first.items() if len(drawn.shape) > 1}
    assert len({drawn.digest for drawn in matrices.values()}) == len(matrices), "some matrices are copies of others"
    assert {(drawn.mean, drawn.deviation) for name, drawn in first.items() if name not in matrices} == {(1.0, 0.0)}
    for name, drawn in matrices.items():
        check_scale(name, drawn, drawn.shape[-1])


def check_scale(name: str, drawn: Any, fan_in: int) -> None:
    """Compare a matrix with what it should be drawn from, to 5 standard errors of its mean and deviation."""
    number = np.prod(drawn.shape)
    expected = 1.0 if "embed_tokens" in name else fan_in**-0.5 * (0.1 if ".o_proj." in name else 1.0)
    assert abs(drawn.mean) < 5 * expected / number**0.5, name
    assert drawn.deviation == pytest.approx(expected, rel=5 / (2 * number) ** 0.5), name
