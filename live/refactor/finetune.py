"""Gate-only fine-tuning of a linear-gate checkpoint: every tensor but the router rows frozen.

The budget k is annealed upwards over the run (8 to 24 or 32 sub-experts, learning rate 1e-5, batches of 32 or 64
windows, as published), or drawn anew for each micro-batch, which trains every budget alike, or drawn with one
micro-batch a step held at the full budget. The loss is the language model's, or the Kullback-Leibler divergence from
the original model, which the checkpoint itself is at its full budget with the rows it came with. Router rows are kept
in float32 beside a bf16 model, since a step of 1e-5 is below bf16's resolution. A state file lets an interrupted run
go on where it was, with the same windows and the same budgets.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from simmoe.errors import RefactorError
from simmoe.live.evaluate.perplexity import gate_modules, set_budget
from simmoe.live.refactor.checkpoint import Checkpoint, check_new, copy_companions, new_checkpoint
from simmoe.live.refactor.families import GATE_TENSOR, RECORD_KEY
from simmoe.live.training.windows import Windows
from simmoe.writing import check_place, whole_file

BUDGET_SCHEDULES = ("anneal", "mixed", "sandwich")
OBJECTIVES = ("lm", "distil")

#: Logits of the original model for token ids [sequences, tokens].
Teacher = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class FinetuneConfig:
    """Everything that decides the run, with the checkpoint and the text."""

    steps: int = 500
    """Optimiser steps."""
    sequences: int = 32
    """Windows an optimiser step."""
    micro_sequences: int = 8
    """Windows a forward pass; divides ``sequences``."""
    context_tokens: int = 512
    """Tokens a window."""
    learning_rate: float = 1e-5
    """AdamW's learning rate at the start; falls linearly to zero."""
    budget_schedule: str = "anneal"
    """``anneal``: k rises evenly from k_start to k_end. ``mixed``: each micro-batch draws k from k_start..k_end.
    ``sandwich``: likewise, but a step's first micro-batch runs k_end."""
    objective: str = "lm"
    """``lm``: cross-entropy of the text. ``distil``: divergence from the original model's distribution."""
    k_start: int = 8
    """First budget."""
    k_end: int = 32
    """Last budget."""
    seed: int = 0
    """Of the order of the windows and of drawn budgets."""
    save_every: int = 200
    """Steps between writes of the state file."""

    def budget(self, step: int, micro: int) -> int:
        """The budget of one micro-batch."""
        if self.budget_schedule == "sandwich" and micro == 0:
            return self.k_end
        if self.budget_schedule != "anneal":
            return int(np.random.default_rng((self.seed, step, micro)).integers(self.k_start, self.k_end + 1))
        span = self.k_end - self.k_start + 1
        return self.k_start + min(span - 1, step * span // self.steps)


def check_places(out: Path, state_path: Path | None) -> Path:
    """Make sure that a checkpoint and a run's state can be written; return where the state goes.

    Raises:
        OutputError: ``out`` exists, or one of them cannot be written.
    """
    check_new(out)
    state_path = state_path or out.parent / f".{out.name}.finetune.pt"
    check_place(state_path, "the fine-tuning state")
    return state_path


def finetune(
    path: Path,
    tokens: np.ndarray[Any, Any],
    out: Path,
    config: FinetuneConfig,
    *,
    load: Callable[[Path], Any],
    state_path: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> None:
    """Fine-tune the gates of the LG checkpoint ``path`` and write the new checkpoint ``out``.

    Args:
        tokens: [num_tokens] training text.
        load: gives the transformers model of a directory, on its device.
        state_path: where the run's state is kept until it ends; default ``.OUT.finetune.pt`` beside ``out``.
    Raises:
        RefactorError: not an LG checkpoint, fine-tuned already, a budget or window it cannot run, or a state of other
            settings.
        OutputError: ``out`` exists or cannot be written.
    """
    state_path = check_places(out, state_path)
    source = Checkpoint(path)
    record = _linear_record(source)
    _check(config, source)
    model = load(path)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    rows = [gate.weight.requires_grad_(True) for gate in gate_modules(model)]
    masters = [row.detach().float().clone() for row in rows]
    teacher = None
    if config.objective == "distil":
        teacher = _teacher(model, rows, record["splits"] * record["original"]["top_k"])
    optimizer = torch.optim.AdamW(masters, lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    run = _identity(config, tokens, masters)
    first = _resume(state_path, run, masters, rows, optimizer)
    if first:
        say(f"resumed at step {first} from {state_path}")
    windows = Windows(tokens, config.sequences, config.context_tokens, config.seed)
    device = masters[0].device
    model.eval()
    for step in range(first, config.steps):
        for group in optimizer.param_groups:
            group["lr"] = config.learning_rate * (1 - step / config.steps)
        batch = windows.step(step).to(device)
        loss = _accumulate(model, batch, config, step, teacher)
        for master, row in zip(masters, rows, strict=True):
            master.grad, row.grad = row.grad.float(), None
        optimizer.step()
        _publish(masters, rows)
        if (step + 1) % 100 == 0 or step + 1 == config.steps:
            say(f"step {step + 1}/{config.steps}: loss {loss:.4f}, last budget {config.budget(step, 0)}")
        if (step + 1) % config.save_every == 0:
            _save(state_path, run, step + 1, masters, optimizer)
    record["finetuned"] = asdict(config)
    _write(source, out, {**source.config, RECORD_KEY: record}, masters)
    state_path.unlink(missing_ok=True)


def _accumulate(model: Any, batch: torch.Tensor, config: FinetuneConfig, step: int, teacher: Teacher | None) -> float:
    """Backward over the micro-batches of one step; returns the mean loss in nats a token."""
    pieces = batch.split(config.micro_sequences)
    total = 0.0
    for micro, piece in enumerate(pieces):
        wanted = teacher(piece) if teacher else None
        set_budget(model, config.budget(step, micro))
        logits = model(input_ids=piece, use_cache=False).logits[:, :-1].float().flatten(0, 1)
        if wanted is None:
            loss = torch.nn.functional.cross_entropy(logits, piece[:, 1:].flatten())
        else:
            target = wanted[:, :-1].float().flatten(0, 1).log_softmax(dim=-1)
            found = logits.log_softmax(dim=-1)
            loss = torch.nn.functional.kl_div(found, target, reduction="batchmean", log_target=True)
        loss = loss / len(pieces)
        loss.backward()
        total += float(loss.detach())
    if not np.isfinite(total):
        raise RefactorError(f"fine-tuning diverged at step {step + 1}: the loss is {total}; lower --learning-rate")
    return total


def _teacher(model: Any, rows: list[Any], full_budget: int) -> Teacher:
    """The model at its full budget with the rows it has now, whatever they are trained to afterwards."""
    original = [row.detach().clone() for row in rows]

    def logits(ids: torch.Tensor) -> torch.Tensor:
        trained = [row.detach().clone() for row in rows]
        _publish(original, rows)
        set_budget(model, full_budget)
        with torch.no_grad():
            found: torch.Tensor = model(input_ids=ids, use_cache=False).logits
        _publish(trained, rows)
        return found

    return logits


def _publish(masters: list[torch.Tensor], rows: list[Any]) -> None:
    with torch.no_grad():
        for master, row in zip(masters, rows, strict=True):
            row.copy_(master)


def _linear_record(source: Checkpoint) -> dict[str, Any]:
    record = source.config.get(RECORD_KEY)
    if not isinstance(record, dict) or record.get("gate") != "linear":
        raise RefactorError(f"{source.path}: no linear-gate checkpoint; make one with 'simmoe refactor --gate linear'")
    if "finetuned" in record:
        raise RefactorError(f"{source.path}: gates are fine-tuned already; start from the checkpoint before that")
    return dict(record)


def _check(config: FinetuneConfig, source: Checkpoint) -> None:
    record = source.config[RECORD_KEY]
    ceiling = record["splits"] * record["original"]["num_experts"]
    if not 1 <= config.k_start <= config.k_end <= ceiling:
        raise RefactorError(f"budgets {config.k_start}..{config.k_end}: need 1 <= start <= end <= {ceiling}")
    positions = source.config.get("max_position_embeddings")
    if isinstance(positions, int) and config.context_tokens > positions:
        raise RefactorError(f"context {config.context_tokens}: the model takes {positions} tokens a window")
    if config.sequences % config.micro_sequences:
        raise RefactorError(f"batch {config.sequences} is not a multiple of micro-batch {config.micro_sequences}")
    if config.budget_schedule not in BUDGET_SCHEDULES:
        raise RefactorError(f"budget schedule {config.budget_schedule!r} is none of {', '.join(BUDGET_SCHEDULES)}")
    if config.objective not in OBJECTIVES:
        raise RefactorError(f"objective {config.objective!r} is none of {', '.join(OBJECTIVES)}")


def _identity(config: FinetuneConfig, tokens: np.ndarray[Any, Any], masters: list[torch.Tensor]) -> dict[str, Any]:
    """All that a run's outcome depends on: a state of another is refused."""
    rows = hashlib.sha256(b"".join(row.cpu().numpy().tobytes() for row in masters))
    text = hashlib.sha256(np.ascontiguousarray(tokens, dtype=np.int64).tobytes())
    return {**asdict(config), "text": text.hexdigest(), "gates of the checkpoint": rows.hexdigest()}


def _save(path: Path, run: dict[str, Any], step: int, masters: list[torch.Tensor], optimizer: Any) -> None:
    state = {"run": run, "step": step, "rows": masters, "optimizer": optimizer.state_dict()}
    with whole_file(path, "the fine-tuning state") as partial:
        try:
            torch.save(state, partial)
        except RuntimeError as error:  # what torch makes of a failure to write
            raise OSError(str(error)) from error


def _resume(path: Path, run: dict[str, Any], masters: list[torch.Tensor], rows: list[Any], optimizer: Any) -> int:
    if not path.exists():
        return 0
    try:
        state = torch.load(path, map_location=masters[0].device, weights_only=True)
        found = state["run"]
    except Exception as error:  # torch.load raises whatever the bytes lead it to
        raise RefactorError(f"{path}: no state of a fine-tuning run; remove it to start anew") from error
    if found != run:
        changed = sorted(key for key, value in run.items() if found.get(key) != value)
        raise RefactorError(
            f"{path}: state of a run with other settings ({', '.join(changed)}); remove it to start anew"
        )
    with torch.no_grad():
        for master, saved in zip(masters, state["rows"], strict=True):
            master.copy_(saved)
    _publish(masters, rows)
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def _write(source: Checkpoint, out: Path, config: dict[str, Any], masters: list[torch.Tensor]) -> None:
    gate_names = sorted((n for n in source.shard_of if GATE_TENSOR.match(n)), key=lambda n: int(n.split(".")[2]))
    tuned = dict(zip(gate_names, masters, strict=True))
    with new_checkpoint(out) as writer:
        for name, tensor in source.tensors():
            writer.add(name, tuned[name].to(tensor.dtype).cpu() if name in tuned else tensor)
        copy_companions(source.path, writer.path)
        writer.write_json("config.json", config)
