"""How evenly an engine routes the tokens of a prompt, and those of sequences that decode together: a table, on a CPU.

``python -m simmoe.live.measure.expert_balance olmoe-1b-7b`` is of the random weights times are measured with;
``... checkpoints/small-olmoe --text docs/*.md`` of a trained model, on the text of those files.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from simmoe.profiles.models import read_model, split_config
from simmoe.profiles.weights import LOAD_FORMAT

FloatArray = npt.NDArray[np.float64]

#: Width of an expert and tokens of the vocabulary, in place of the model's: neither decides how a random gate routes.
EXPERT_WIDTH, VOCAB_SIZE = 64, 32768

NUM_TOKENS = (16, 64, 256)
NUM_SEQS, PROMPT_TOKENS = 64, 24


class Evenness(NamedTuple):
    """Of the tokens of one step, by layer."""

    distinct: FloatArray
    """Experts any token was routed to."""
    fullest: FloatArray
    """Tokens of the fullest expert over the mean of all."""


def evenness(logits: FloatArray, k: int) -> Evenness:
    """Return how evenly [num_layers, num_tokens, num_experts] logits route every token to its k largest."""
    num_layers, num_tokens, num_experts = logits.shape
    chosen = np.argpartition(-logits, k - 1, axis=2)[:, :, :k].reshape(num_layers, -1)
    counts = np.stack([np.bincount(layer, minlength=num_experts) for layer in chosen])
    return Evenness((counts > 0).sum(axis=1), counts.max(axis=1) * num_experts / (num_tokens * k))


def router_logits(llm: Any, prompts: Sequence[Sequence[int]], output_tokens: int = 1) -> FloatArray:
    """Return [num_layers, num_tokens, num_experts] router logits of the last step of prompts that are sent together.

    Args:
        llm: vLLM's ``LLM``, eager, its engine in this process.
        prompts: token ids.
        output_tokens: of each; the last step of one is the prompts', of more it is one in which all decode.
    """
    from vllm import SamplingParams
    from vllm.model_executor.layers.fused_moe.router.gate_linear import GateLinear

    runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner
    gates = [module for module in runner.model.modules() if isinstance(module, GateLinear)]
    seen: dict[int, FloatArray] = {}

    def look(layer: int) -> Any:
        return lambda module, inputs, output: seen.update({layer: output[0].double().numpy().copy()})

    hooks = [gate.register_forward_hook(look(layer)) for layer, gate in enumerate(gates)]
    params = SamplingParams(max_tokens=output_tokens, temperature=1.0, ignore_eos=True, detokenize=False)
    llm.generate([{"prompt_token_ids": list(tokens)} for tokens in prompts], params, use_tqdm=False)
    for hook in hooks:
        hook.remove()
    return np.stack([seen[layer] for layer in range(len(gates))])


def narrowed(name: str, splits: int) -> dict[str, Any]:
    """Return the configuration of a shipped model with narrow experts, which route as wide ones, split in so many."""
    config = dict(read_model(name).config)
    width = "moe_intermediate_size" if "moe_intermediate_size" in config else "intermediate_size"
    config |= {width: EXPERT_WIDTH * splits, "vocab_size": VOCAB_SIZE, "bos_token_id": 0, "eos_token_id": 0}
    return split_config({**config, "pad_token_id": 0}, splits)


def main() -> None:
    """Print the table of one model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a model simmoe ships the shape of, or a checkpoint's folder")
    parser.add_argument("--split", type=int, default=1, help="sub-experts an expert is split into")
    parser.add_argument("--text", type=Path, nargs="+", default=[], help="files whose text a checkpoint is given")
    args = parser.parse_args()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    with tempfile.TemporaryDirectory() as temporary:
        if Path(args.model).is_dir():
            folder, load_format = Path(args.model), "auto"
            config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        else:
            folder, load_format = Path(temporary), LOAD_FORMAT
            config = narrowed(args.model, args.split)
            (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        one, many = _prompts(config["vocab_size"], folder, args.text)
        for line in _table(_engine(folder, load_format), config["num_experts_per_tok"], one, many):
            print(line, flush=True)


def _prompts(vocab_size: int, folder: Path, texts: Sequence[Path]) -> tuple[list[list[int]], list[list[int]]]:
    """Return eight prompts to look at one by one, and short ones for sequences that decode together."""
    rng = np.random.default_rng(1)
    ids = rng.integers(2, vocab_size, 1 << 20).tolist()
    if texts:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder)
        ids = tokenizer("\n".join(path.read_text(encoding="utf-8") for path in texts))["input_ids"]

    def windows(number: int, length: int) -> list[list[int]]:
        return [ids[at : at + length] for at in rng.integers(0, len(ids) - length, number).tolist()]

    return windows(8, NUM_TOKENS[-1]), windows(NUM_SEQS, PROMPT_TOKENS)


def _engine(folder: Path, load_format: str) -> Any:
    from vllm import LLM

    return LLM(
        str(folder), load_format=load_format, worker_cls="simmoe.live.measure.worker.MeasuringWorker",
        skip_tokenizer_init=True, dtype="bfloat16", enforce_eager=True, max_model_len=512,
        max_num_batched_tokens=NUM_SEQS * PROMPT_TOKENS, max_num_seqs=NUM_SEQS, enable_prefix_caching=False,
        kv_cache_memory_bytes=1 << 31,
    )  # fmt: skip


def _table(llm: Any, k: int, one: Sequence[list[int]], many: Sequence[list[int]]) -> Any:
    """Yield the table's lines: distinct experts and the fullest expert's share over the mean, means over layers."""
    prompts = np.concatenate([router_logits(llm, [tokens]) for tokens in one])  # layers of all prompts, one by one
    decoding = router_logits(llm, many, 2)
    num_experts = prompts.shape[2]
    balanced = np.random.default_rng(0).random((200, NUM_TOKENS[-1], num_experts))
    yield f"{num_experts} experts, k {k}, {len(decoding)} layers: distinct experts, and fullest over mean, of"
    yield f"{'tokens':>8}{'balanced draws':>20}{'one prompt':>20}{'decoding':>20}"
    for n in NUM_TOKENS:
        cells = [
            evenness(logits[:, :n], k) if logits.shape[1] >= n else None for logits in (balanced, prompts, decoding)
        ]
        shown = ["-" if e is None else f"{e.distinct.mean():.1f}{e.fullest.mean():7.2f}" for e in cells]
        yield f"{n:>8}" + "".join(f"{text:>20}" for text in shown)


if __name__ == "__main__":
    main()
