"""Random weights in real engines: how large, whose, and how evenly they route the tokens of a prompt."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest

from tests.live.tiny import TINY_DEEPSEEK_V2, TINY_OLMOE, TINY_QWEN3_MOE, split

pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: pip install 'simmoe[live-cpu]'"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own, at import and at exit
]

FloatArray = npt.NDArray[np.float64]

#: Tokens of the prompt, and sequences that decode together.
NUM_TOKENS = 64

#: Deep enough that what attention adds to all tokens alike would have drowned them, were it as large as the rest.
DEEP = {"num_hidden_layers": 12, "num_experts_per_tok": 8}

MODELS = {
    "olmoe": {**TINY_OLMOE, **DEEP, "num_experts": 64},
    "qwen3_moe": {**TINY_QWEN3_MOE, **DEEP, "num_experts": 64},
    "deepseek_v2": {**TINY_DEEPSEEK_V2, **DEEP, "n_routed_experts": 64},
}
CASES = {**MODELS, **{f"{name}-split": split(config) for name, config in MODELS.items()}}


class Evenness(NamedTuple):
    """Of the tokens of one step, by layer."""

    distinct: FloatArray
    """Experts any token was routed to."""
    fullest: FloatArray
    """Tokens of the fullest expert over the mean."""


@contextlib.contextmanager
def engine(config: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch, **args: Any) -> Iterator[Any]:
    """Yield an engine that says what was drawn for it."""
    from vllm import LLM

    (folder / "config.json").write_text(json.dumps(config))
    llm = LLM(
        str(folder), load_format="simmoe-dummy-told", worker_cls="tests.live.drawn.TellingWorker",
        skip_tokenizer_init=True, enforce_eager=True, max_model_len=512, max_num_batched_tokens=1024,
        max_num_seqs=NUM_TOKENS, enable_prefix_caching=False, kv_cache_memory_bytes=1 << 28, **args,
    )  # fmt: skip
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def router_logits(llm: Any, prompts: list[list[int]], output_tokens: int) -> FloatArray:
    """Return [num_layers, num_tokens, num_experts] router logits of the last step of the prompts, sent together."""
    from vllm import SamplingParams
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear

    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    gates = [module for module in runner.model.modules() if isinstance(module, GateLinear)]
    seen: dict[int, FloatArray] = {}

    def look(layer: int) -> Any:
        return lambda module, inputs, output: seen.update({layer: output[0].double().numpy().copy()})

    hooks = [gate.register_forward_hook(look(layer)) for layer, gate in enumerate(gates)]
    params = SamplingParams(max_tokens=output_tokens, temperature=1.0, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": tokens} for tokens in prompts], params, use_tqdm=False)
    for hook in hooks:
        hook.remove()
    return np.stack([seen[layer] for layer in range(len(gates))])


def evenness(logits: FloatArray, k: int) -> Evenness:
    """Return how evenly [num_layers, num_tokens, num_experts] logits route every token to its k largest."""
    num_layers, num_tokens, num_experts = logits.shape
    chosen = np.argpartition(-logits, k - 1, axis=2)[:, :, :k].reshape(num_layers, -1)
    counts = np.stack([np.bincount(layer, minlength=num_experts) for layer in chosen])
    return Evenness((counts > 0).sum(axis=1), counts.max(axis=1) * num_experts / (num_tokens * k))


def balanced(hidden_size: int, num_experts: int, draws: int = 4000) -> FloatArray:
    """Return [draws, NUM_TOKENS, num_experts] logits of independent tokens at random gates, one a draw."""
    rng = np.random.default_rng(0)
    logits = np.empty((draws, NUM_TOKENS, num_experts))
    for draw in logits:
        tokens = rng.standard_normal((NUM_TOKENS, hidden_size))
        tokens /= np.sqrt((tokens**2).mean(axis=1, keepdims=True))
        draw[:] = tokens @ rng.standard_normal((hidden_size, num_experts)) / hidden_size**0.5
    return logits


def outside(logits: FloatArray, config: dict[str, Any]) -> list[str]:
    """Return the layers that route otherwise than 999 in 1,000 balanced models of as many layers, and how."""
    num_layers, _, num_experts = logits.shape
    reference = balanced(config["hidden_size"], num_experts)
    share = 0.001 / num_layers / 2
    found = []
    for k in sorted({1, 2, config["num_experts_per_tok"]}):
        for name, seen, drawn in zip(
            Evenness._fields, evenness(logits, k), evenness(reference, k), strict=True
        ):  # fmt: skip
            low, high = np.quantile(drawn, (share, 1 - share), method="inverted_cdf")
            found += [
                f"k {k}, layer {layer}: {name} {value:g} is not within {low:g} and {high:g}"
                for layer, value in enumerate(seen) if not low <= value <= high
            ]  # fmt: skip
    return found


def one_prompt() -> list[list[int]]:
    return [np.random.default_rng(1).permutation(np.arange(2, 512))[:NUM_TOKENS].tolist()]


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
    many = [rng.integers(2, 512, 8).tolist() for _ in range(NUM_TOKENS)]
    with engine(config, tmp_path, monkeypatch, dtype="float32") as llm:
        prompt, decoding = router_logits(llm, one_prompt(), 1), router_logits(llm, many, 2)
        first, second = llm.collective_rpc("drawn")[0]
    assert prompt.shape == decoding.shape
    assert prompt.shape[:2] == (config["num_hidden_layers"], NUM_TOKENS)
    assert outside(prompt, config) == []
    assert outside(decoding, config) == []
    scale = balanced(config["hidden_size"], prompt.shape[2]).std(axis=(1, 2))
    assert scale.min() <= prompt.std(axis=(1, 2)).min() <= prompt.std(axis=(1, 2)).max() <= scale.max()

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
