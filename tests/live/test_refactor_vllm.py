"""Refactored checkpoints in vLLM: the same logits and tokens as the original and as transformers."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torch import Tensor

torch = pytest.importorskip("torch", reason="refactoring needs torch; run make test-live")
pytest.importorskip("transformers", reason="refactoring needs transformers; run make test-live")

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: pip install 'simmoe[live-cpu]'"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own, at import and at exit
]

from tests.support.small_moe import TOP_K, calibration_text, write_model  # noqa: E402

SPLITS = 4
FULL = TOP_K * SPLITS
VOCAB = list(range(256))
PROMPTS = torch.randint(2, 256, (64, 9), generator=torch.Generator().manual_seed(4)).tolist()
#: vLLM's OLMoE never normalises, so its normalising case is Qwen3-MoE.
NAMES = ["olmoe", "qwen3_moe-normalised", "deepseek_v2"]
#: vLLM's CPU kernel of latent attention is compiled for one size: 512 latent and 64 rotary dimensions. Rotary positions
#: are YaRN's, as in the published DeepSeek-V2: those vLLM computes in torch, where it is right (see the last test).
LATENT: dict[str, Any] = {
    "kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_nope_head_dim": 32, "head_dim": 64, "n_group": 1, "topk_group": 1,
    "rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32,
        "beta_fast": 32, "beta_slow": 1, "mscale": 0.707, "mscale_all_dim": 0.707,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Path, Path]]:
    """(family, gate) -> (original, refactored) directories, each made once.

    By the command, in a process of its own: vLLM 0.32 trips over llvmlite's objects where numba is loaded before it.
    """
    folder = tmp_path_factory.mktemp("checkpoints")
    text = calibration_text(folder / "text", 3000)

    def make(name: str, gate: str) -> tuple[Path, Path]:
        original, out = folder / name, folder / f"{name}-{gate}"
        if not original.exists():
            write_model(original, name, **(LATENT if name == "deepseek_v2" else {}))
        if not out.exists():
            command = ["refactor", original, "--gate", gate, "--calibration", text, "--out", out]
            command += ["--iterations", "200", "--device", "cpu"]
            subprocess.run([sys.executable, "-m", "simmoe", *map(str, command)], check=True, capture_output=True)
        return original, out

    return make


@contextlib.contextmanager
def engine(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """An in-process float32 engine."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    from vllm import LLM

    llm = LLM(
        str(folder), dtype="float32", max_model_len=64, skip_tokenizer_init=True, enable_prefix_caching=False,
        enforce_eager=True, kv_cache_memory_bytes=1 << 26, logprobs_mode="raw_logits",
        scheduler_cls="simmoe.live.engine.scheduler.BudgetScheduler",
        max_logprobs=len(VOCAB),
    )  # fmt: skip
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def last_logits(llm: Any, prompts: list[list[int]], k: int | None) -> Tensor:
    """[prompts, vocabulary] raw logits of the first new token at budget ``k``."""
    from vllm import SamplingParams

    parameters = SamplingParams(
        max_tokens=1, temperature=0.0, detokenize=False, logprobs=len(VOCAB),
        extra_args=None if k is None else {"simmoe_k": k},
    )  # fmt: skip
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], parameters, use_tqdm=False)
    return torch.tensor([[output.outputs[0].logprobs[0][i].logprob for i in VOCAB] for output in outputs])


def greedy_tokens(llm: Any) -> list[list[int]]:
    from vllm import SamplingParams

    parameters = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], parameters, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def relative_error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("gate", ["linear", "complex"])
@pytest.mark.parametrize("name", NAMES)
def test_full_budget_gives_the_original_and_smaller_ones_their_reference(
    name: str, gate: str, checkpoints: Callable[[str, str], tuple[Path, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below full budget the reference is transformers on the same checkpoint, itself held to the paper's formulas."""
    from simmoe.live.evaluate.perplexity import set_budget
    from simmoe.live.refactor.engine import load_model

    original, out = checkpoints(name, gate)
    prompts = PROMPTS[:4]
    wanted: dict[int, Tensor] = {}
    with engine(original, monkeypatch) as llm:
        wanted_tokens = greedy_tokens(llm)
        wanted[FULL] = last_logits(llm, prompts, None)
    unsplit = load_model(original, device="cpu")
    with torch.no_grad():
        assert relative_error(wanted[FULL], unsplit(input_ids=torch.tensor(prompts)).logits[:, -1]) < 1e-4
    model = load_model(out, device="cpu")
    # ties among repeated rows leave LG free between whole experts
    for k in (1, 3, 5, 6) if gate == "complex" else (SPLITS,):
        set_budget(model, k)
        with torch.no_grad():
            wanted[k] = model(input_ids=torch.tensor(prompts)).logits[:, -1]
    with engine(out, monkeypatch) as llm:
        assert greedy_tokens(llm) == wanted_tokens
        for k, expected in wanted.items():
            assert relative_error(last_logits(llm, prompts, k), expected) < 1e-4, k


@pytest.mark.parametrize(
    "shape",
    [
        (5, 16),
        pytest.param(
            (5, 2, 8),
            marks=pytest.mark.xfail(strict=True, raises=AssertionError, reason="vLLM 0.32's kernel strides by heads"),
        ),
    ],
)
def test_vllm_rotates_queries_on_a_cpu(shape: tuple[int, ...]) -> None:
    """Why the small DeepSeek-V2 has YaRN's positions.

    Its latent attention passes queries as [num_tokens, heads, head_size] to ``rotary_embedding``, whose CPU kernel
    (csrc/cpu/pos_encoding.cpp) reads the tokens' stride off dimension -2: right for [num_tokens, heads * head_size],
    and for keys of one head, wrong here. Plain rotary positions therefore come out wrong, by 16% of the logits' norm in
    a model of this size; YaRN's do not use the kernel.
    """
    import vllm._C  # noqa: F401 (registers the operator)

    head_size, positions = 8, torch.arange(5)
    angles = positions[:, None] * 10000.0 ** (-torch.arange(0, head_size, 2) / head_size)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    query = torch.randn(5, 2, head_size, generator=torch.Generator().manual_seed(0))
    even, odd = query[..., ::2], query[..., 1::2]
    wanted = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)
    found, cache = query.clone().view(shape), torch.cat([angles.cos(), angles.sin()], dim=1)
    torch.ops._C.rotary_embedding(positions, found, torch.zeros(5, head_size), head_size, cache, False)
    assert torch.allclose(found.view_as(wanted), wanted, atol=1e-5)
