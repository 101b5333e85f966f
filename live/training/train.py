"""Train the small OLMoE-architecture language model on the corpus and log its held-out perplexity.

``python -m simmoe.live.training.train CORPUS TOKENIZER OUT --steps 8000`` writes ``OUT/model`` (a bf16 Hugging Face
checkpoint), ``OUT/log.jsonl`` (one line an evaluation: step, tokens, losses, validation perplexity) and
``OUT/training.json`` (every setting, the seed, the final validation and test perplexity). ``OUT/state.pt`` lets an
interrupted run go on.

Windows of 512 tokens are cut from the concatenated documents at an offset drawn anew each epoch and visited in a drawn
order. AdamW, learning rate warmed up, constant, then linear to zero; OLMoE's load-balancing loss at its published
weight.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from simmoe.live.evaluate.perplexity import perplexity
from simmoe.live.training.architecture import balance_loss, grouped_experts_forward, small_olmoe_config
from simmoe.live.training.tokenizer import encode_split
from simmoe.live.training.windows import Windows


@dataclass(frozen=True)
class TrainingConfig:
    """Everything that decides the run, with the corpus and the tokeniser."""

    steps: int = 8000
    """Optimiser steps."""
    sequences: int = 128
    """Windows a step; 65,536 tokens a step at a context of 512."""
    learning_rate: float = 3e-3
    """Peak of AdamW's learning rate."""
    warmup_steps: int = 300
    """Steps of linear warm-up."""
    decay_fraction: float = 0.4
    """Share of the steps, at the end, over which the rate falls linearly to zero."""
    weight_decay: float = 0.1
    """Decoupled weight decay, on matrices."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's moments."""
    clip_norm: float = 1.0
    """Gradient norm ceiling."""
    seed: int = 1
    """Of the initial weights and of the order of the windows."""
    evaluate_every: int = 250
    """Steps between looks at the validation text."""


def learning_rate(step: int, config: TrainingConfig) -> float:
    """Warm-up, plateau, linear decay."""
    decay_steps = max(1, round(config.steps * config.decay_fraction))
    return config.learning_rate * min(
        1.0, (step + 1) / config.warmup_steps, max(0.0, (config.steps - step) / decay_steps)
    )


def train(
    tokens: dict[str, np.ndarray[Any, np.dtype[np.uint16]]],
    out: Path,
    config: TrainingConfig,
    *,
    device: str,
    model_config: Any = None,
    max_seconds: float | None = None,
    validation_tokens: int = 262_144,
) -> Any:
    """Train and return the model (float32, on ``device``).

    Args:
        tokens: ``train`` and ``validation``, [num_tokens] each.
        max_seconds: if given, the number of steps is cut, before the first one counts, to what the measured speed fits.
    """
    from transformers import OlmoeForCausalLM
    from transformers.models.olmoe.modeling_olmoe import OlmoeExperts

    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(config.seed)
    model_config = model_config or small_olmoe_config()
    model = OlmoeForCausalLM(model_config).to(device)
    if device == "cuda":
        OlmoeExperts.forward = grouped_experts_forward
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
        lr=config.learning_rate, betas=config.betas, fused=device == "cuda",
    )  # fmt: skip
    context = model_config.max_position_embeddings
    windows = Windows(tokens["train"], config.sequences, context, config.seed)
    held_out = torch.from_numpy(tokens["validation"][:validation_tokens].astype(np.int64))
    log_path, state_path = out / "log.jsonl", out / "state.pt"
    first = 0
    if state_path.exists():
        state = torch.load(state_path, map_location=device, weights_only=False)
        config = TrainingConfig(**state["config"])
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        first = state["step"]
    elif max_seconds is not None:
        config = _fit(model, windows, config, max_seconds, device)
    began = time.monotonic()
    model.train()
    for step in range(first, config.steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, config)
        loss, lm_loss = _losses(model, windows.step(step).to(device, non_blocking=True), device)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if (step + 1) % config.evaluate_every == 0 or step + 1 == config.steps:
            row = {
                "step": step + 1,
                "tokens": (step + 1) * config.sequences * context,
                "learning_rate": round(learning_rate(step, config), 8),
                "train_loss": round(float(lm_loss), 5),
                "aux_loss": round(float(loss.detach() - lm_loss) / max(model_config.router_aux_loss_coef, 1e-9), 4),
                "validation_perplexity": round(perplexity(model, held_out, context_tokens=context).perplexity, 4),
                "elapsed_s": round(time.monotonic() - began, 1),
            }
            if not math.isfinite(row["train_loss"]):
                raise RuntimeError(f"training diverged at step {step + 1}; lower the learning rate")
            with log_path.open("a") as log:
                log.write(json.dumps(row) + "\n")
            print(json.dumps(row), flush=True)
            model.train()
        if (step + 1) % 2000 == 0:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save({**state, "config": asdict(config)}, state_path)
    (out / "training.json").write_text(json.dumps(asdict(config), indent=1) + "\n")
    return model


def _losses(model: Any, batch: torch.Tensor, device: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(language-model loss plus weighted load-balancing loss, language-model loss)."""
    with torch.autocast(device, dtype=torch.bfloat16):
        output = model(input_ids=batch, output_router_logits=True, use_cache=False)
        logits = output.logits[:, :-1].flatten(0, 1)
    lm_loss = torch.nn.functional.cross_entropy(logits.float(), batch[:, 1:].flatten())
    config = model.config
    balance = balance_loss(output.router_logits, config.num_experts_per_tok)
    return lm_loss + config.router_aux_loss_coef * balance, lm_loss.detach()


def _fit(model: Any, windows: Windows, config: TrainingConfig, max_seconds: float, device: str) -> TrainingConfig:
    """``config`` with no more steps than fit ``max_seconds`` at the speed measured here; no weight is changed."""
    for _ in range(5):
        _losses(model, windows.step(0).to(device), device)[0].backward()
    _wait(device)
    began = time.monotonic()
    for step in range(10):
        _losses(model, windows.step(step).to(device), device)[0].backward()
    _wait(device)
    step_s = (time.monotonic() - began) / 10 * 1.08  # the optimiser and the evaluations
    model.zero_grad(set_to_none=True)
    steps = min(config.steps, int(max_seconds / step_s) // config.evaluate_every * config.evaluate_every)
    print(f"step {step_s * 1e3:.1f} ms: {steps} of {config.steps} steps fit {max_seconds:.0f} s", flush=True)
    return TrainingConfig(**{**asdict(config), "steps": max(config.evaluate_every, steps)})


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def save_checkpoint(model: Any, tokenizer: Any, out: Path) -> None:
    """Write the bf16 checkpoint and the tokeniser beside it."""
    import copy

    half = copy.deepcopy(model).to(torch.bfloat16).cpu()
    half.save_pretrained(out)
    tokenizer.save_pretrained(out)


def main(argv: list[str] | None = None) -> None:
    """The command line of this module."""
    from transformers import AutoTokenizer

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("corpus", type=Path)
    parser.add_argument("tokenizer", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=TrainingConfig.steps)
    parser.add_argument("--seed", type=int, default=TrainingConfig.seed)
    parser.add_argument("--max-seconds", type=float)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(argv)
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    tokens = {split: encode_split(tokenizer, options.corpus / f"{split}.txt") for split in ("train", "validation")}
    config = TrainingConfig(steps=options.steps, seed=options.seed)
    model = train(tokens, options.out, config, device=options.device, max_seconds=options.max_seconds)
    save_checkpoint(model, tokenizer, options.out / "model")


if __name__ == "__main__":
    main()
