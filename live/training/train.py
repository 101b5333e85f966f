"""Train the small OLMoE-architecture language model on the corpus and log its held-out perplexity.

``python -m simmoe.live.training.train TOKENS OUT --max-seconds 480`` reads the tokeniser and
``TOKENS/{train,validation}.npy`` (see :mod:`simmoe.live.training.tokenizer`) and writes ``OUT/model`` (a bf16 Hugging
Face checkpoint), ``OUT/log.jsonl`` (one line an evaluation: step, tokens, losses, validation perplexity) and
``OUT/training.json`` (every setting, the seed, what was measured of the machine, and whether the perplexity has
flattened). ``OUT/state.pt`` lets an interrupted run go on.

Windows of 512 tokens are cut from the concatenated documents at an offset drawn anew each epoch and visited in a drawn
order. AdamW; the learning rate is warmed up, held, and then let down to zero as the cube of what is left, so that the
last tenth of the steps is run below 2% of its peak. OLMoE's load-balancing loss at its published weight. What
flattened means is said in :mod:`simmoe.live.training.recipe`.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from simmoe.live.evaluate.perplexity import perplexity
from simmoe.live.training.architecture import grouped_experts_forward, small_olmoe_config
from simmoe.live.training.forward import Losses, make_losses
from simmoe.live.training.recipe import TrainingConfig, flatness, learning_rate
from simmoe.live.training.windows import Windows
from simmoe.writing import whole_file


class Run:
    """A model in training on one device, with its log and its state on disk.

    Args:
        tokens: ``train`` and ``validation``, [num_tokens] each.
        out: folder of the log and the state.
    """

    def __init__(
        self, tokens: dict[str, np.ndarray[Any, np.dtype[np.uint16]]], out: Path, config: TrainingConfig, *,
        device: str, model_config: Any = None,
    ) -> None:  # fmt: skip
        from transformers import OlmoeForCausalLM
        from transformers.models.olmoe.modeling_olmoe import OlmoeExperts

        out.mkdir(parents=True, exist_ok=True)
        torch.manual_seed(config.seed)
        self.out, self.config, self.device = out, config, device
        self.model_config = model_config or small_olmoe_config()
        self.model = OlmoeForCausalLM(self.model_config).to(device)
        if device == "cuda":
            OlmoeExperts.forward = grouped_experts_forward
        self.context = int(self.model_config.max_position_embeddings)
        self.windows = Windows(tokens["train"], config.sequences, self.context, config.seed)
        self.held_out = torch.from_numpy(tokens["validation"].astype(np.int64))
        self.compiled = False
        self.losses: Losses = make_losses(compiled=False)
        self.optimizer = self._new_optimizer()

    def _new_optimizer(self) -> Any:
        matrices = [p for p in self.model.parameters() if p.ndim >= 2]
        vectors = [p for p in self.model.parameters() if p.ndim < 2]
        config = self.config
        return torch.optim.AdamW(
            [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}],
            lr=config.learning_rate, betas=config.betas, fused=self.device == "cuda",
        )  # fmt: skip

    def step(self, step: int, decay_from: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One optimiser step; (language-model loss, load-balancing loss) before it."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate(step, decay_from, self.config)
        batch = self.windows.step(step).to(self.device, non_blocking=True)
        lm_loss, balance = self.losses(self.model, batch)
        (lm_loss + self.model_config.router_aux_loss_coef * balance).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return lm_loss.detach(), balance.detach()

    def validation_perplexity(self) -> float:
        """On all validation tokens, by transformers' own forward pass."""
        found = perplexity(self.model, self.held_out, context_tokens=self.context)
        self.model.train()
        return round(float(found.perplexity), 4)

    def fit(self, max_seconds: float) -> dict[str, float]:
        """Cut the steps to what ``max_seconds`` hold, probe included, at the speed measured here; no weight changes.

        Fuses the step with torch.compile where that works and is faster.
        """
        saved = {name: tensor.clone() for name, tensor in self.model.state_dict().items()}
        began = time.monotonic()
        first, step_s = self._timed_steps()
        measured = {"eager_step_s": step_s}
        if self.device == "cuda":
            self._restore(saved)
            self.losses = make_losses(compiled=True)
            try:
                again, compiled_s = self._timed_steps()
            except Exception as error:  # whatever the compiler trips over, the plain step works
                print(f"torch.compile: {str(error).strip().splitlines()[0][:200]}", flush=True)
            else:
                measured["compiled_step_s"] = compiled_s
                self.compiled = compiled_s < step_s and abs(again - first) < 0.01 * first
            step_s = compiled_s if self.compiled else step_s
            self.losses = make_losses(compiled=self.compiled)
        mark = time.monotonic()
        self.validation_perplexity()
        evaluation_s = time.monotonic() - mark
        self._restore(saved)
        left = max_seconds - (time.monotonic() - began)
        per_step = (step_s + evaluation_s / self.config.evaluate_every) * (1 + self.config.decay_fraction)
        every = self.config.evaluate_every
        steps = max(every, min(self.config.steps, int(0.96 * left / per_step) // every * every))
        print(f"{json.dumps(measured)}: {steps} of {self.config.steps} steps fit {left:.0f} s", flush=True)
        self.config = replace(self.config, steps=steps)
        return {name: round(value, 5) for name, value in measured.items()}

    def _timed_steps(self) -> tuple[float, float]:
        """(language-model loss of the fourth step, seconds a step)."""
        for step in range(4):
            loss = self.step(step, self.config.steps)[0]
        found = float(loss)
        began = time.monotonic()
        for step in range(4, 14):
            loss = self.step(step, self.config.steps)[0]
        float(loss)
        return found, (time.monotonic() - began) / 10

    def _restore(self, weights: dict[str, torch.Tensor]) -> None:
        self.model.load_state_dict(weights)
        self.optimizer = self._new_optimizer()

    def go(self, line: str, first: int, decay_from: int) -> float:
        """Train from step ``first`` until the rate is zero; the last validation perplexity.

        Args:
            line: ``model`` or ``probe``, as the log and the state name it.
            decay_from: the plateau's end.
        Raises:
            RuntimeError: the loss is no longer finite.
        """
        last = decay_from + self.config.decay_steps
        began = time.monotonic()
        found = math.nan
        self.model.train()
        for step in range(first, last):
            if line == "model" and step == self.config.probe_step:
                self.save("plateau.pt", line, step)
            lm_loss, balance = self.step(step, decay_from)
            if (step + 1) % self.config.evaluate_every == 0 or step + 1 == last:
                found = self.validation_perplexity()
                row: dict[str, Any] = {
                    "line": line, "step": step + 1, "tokens": (step + 1) * self.config.sequences * self.context,
                    "learning_rate": round(learning_rate(step, decay_from, self.config), 8),
                    "train_loss": round(float(lm_loss), 5), "aux_loss": round(float(balance), 4),
                    "validation_perplexity": found, "elapsed_s": round(time.monotonic() - began, 1),
                }  # fmt: skip
                with (self.out / "log.jsonl").open("a") as log:
                    log.write(json.dumps(row) + "\n")
                print(json.dumps(row), flush=True)
                if not math.isfinite(row["train_loss"]):
                    raise RuntimeError(f"training diverged at step {step + 1}; lower the learning rate")
            if (step + 1) % self.config.save_every == 0 or step + 1 == last:
                self.save("state.pt", line, step + 1)
        return found

    def save(self, name: str, line: str, step: int) -> None:
        """Write weights and optimiser before step ``step``."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "line": line,
                 "step": step, "config": asdict(self.config), "compiled": self.compiled}  # fmt: skip
        with whole_file(self.out / name, "the state") as partial:
            torch.save(state, partial)

    def load(self, name: str) -> tuple[str, int]:
        """(line, step) of a state file, whose weights, optimiser and settings become this run's."""
        state = torch.load(self.out / name, map_location=self.device, weights_only=True)
        self.config = TrainingConfig(**{**state["config"], "betas": tuple(state["config"]["betas"])})
        if state["compiled"] != self.compiled:
            self.compiled = state["compiled"]
            self.losses = make_losses(compiled=self.compiled)
        self.model.load_state_dict(state["model"])
        self.optimizer = self._new_optimizer()
        self.optimizer.load_state_dict(state["optimizer"])
        return state["line"], state["step"]


def train(run: Run, tokenizer: Any, *, max_seconds: float | None = None) -> dict[str, Any]:
    """Train, or go on where the folder's state says, and write everything; what ``training.json`` says."""
    out, measured, line, first = run.out, {}, "model", 0
    if (out / "state.pt").exists():
        line, first = run.load("state.pt")
    elif max_seconds is not None:
        measured = run.fit(max_seconds)
    config = run.config
    plateau_end = config.steps - config.decay_steps
    if line == "model":
        run.go(line, first, plateau_end)
        save_checkpoint(run.model, tokenizer, out / "model")
        line, first = "probe", run.load("plateau.pt")[1]
    run.go(line, first, config.probe_step)
    save_checkpoint(run.model, tokenizer, out / "probe")
    rows = [json.loads(row) for row in (out / "log.jsonl").read_text().splitlines()]
    report = {**asdict(config), **measured, **flatness(rows, config)}
    (out / "training.json").write_text(json.dumps(report, indent=1) + "\n")
    return report


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
    parser.add_argument("tokens", type=Path, help="folder of the tokeniser, train.npy and validation.npy")
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=TrainingConfig.steps)
    parser.add_argument("--sequences", type=int, default=TrainingConfig.sequences)
    parser.add_argument("--evaluate-every", type=int, default=TrainingConfig.evaluate_every)
    parser.add_argument("--validation-tokens", type=int, help="of the held-out text, from its beginning; all")
    parser.add_argument("--seed", type=int, default=TrainingConfig.seed)
    parser.add_argument("--max-seconds", type=float)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(argv)
    tokens = {split: np.load(options.tokens / f"{split}.npy") for split in ("train", "validation")}
    tokens["validation"] = tokens["validation"][: options.validation_tokens]
    config = TrainingConfig(
        steps=options.steps, sequences=options.sequences, evaluate_every=options.evaluate_every, seed=options.seed
    )
    run = Run(tokens, options.out, config, device=options.device)
    tokenizer = AutoTokenizer.from_pretrained(options.tokens)
    print(json.dumps(train(run, tokenizer, max_seconds=options.max_seconds)))


if __name__ == "__main__":
    main()
