"""Perplexity of a language model on held-out tokens, at any routing budget.

The text is cut into consecutive windows of the context length; each window is scored on its own, every token but its
first. No overlap: the figure is comparable between checkpoints that share a tokeniser and a context length, not with
sliding-window figures.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from simmoe.errors import UsageError


@dataclass(frozen=True)
class Perplexity:
    """One model at one budget on one text."""

    mean_nll: float
    """Mean negative log-likelihood a scored token, nats."""
    num_tokens: int
    """Scored tokens."""

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-likelihood."""
        return math.exp(self.mean_nll) if self.mean_nll < 700 else math.inf


def gate_modules(model: Any) -> list[Any]:
    """The router of every MoE layer, in layer order: the modules whose ``top_k`` decides the budget."""
    return [module for name, module in model.named_modules() if name.endswith("mlp.gate") and hasattr(module, "top_k")]


def check_budget(model: Any, k: int) -> None:
    """Raise ``UsageError`` if the model has no MoE layer, or fewer experts than ``k``."""
    gates = gate_modules(model)
    if not gates:
        raise UsageError(f"{type(model).__name__} has no routed experts; --k needs a Mixture-of-Experts checkpoint")
    ceiling = min(getattr(gate, "max_budget", gate.num_experts) for gate in gates)
    if not 1 <= k <= ceiling:
        raise UsageError(f"budget k={k} is outside 1..{ceiling} of this checkpoint")


def set_budget(model: Any, k: int) -> None:
    """Route every token to its top ``k`` (sub-)experts from now on.

    Raises:
        UsageError: see :func:`check_budget`.
    """
    check_budget(model, k)
    for gate in gate_modules(model):
        gate.top_k = k


@torch.no_grad()
def perplexity(model: Any, tokens: torch.Tensor, *, context_tokens: int, batch_tokens: int = 65_536) -> Perplexity:
    """Score ``tokens`` window by window at the budget the model is set to.

    Args:
        tokens: [num_tokens] int64.
        context_tokens: window length; a last window of at least two tokens is scored as well.
        batch_tokens: how many tokens one forward pass takes.
    Raises:
        UsageError: fewer than two tokens.
    """
    if tokens.numel() < 2:
        raise UsageError(f"{tokens.numel()} tokens are too few to score; perplexity needs two or more")
    model.eval()
    device = next(model.parameters()).device
    full = tokens.numel() // context_tokens
    rows = max(1, batch_tokens // context_tokens)
    batches = list(tokens[: full * context_tokens].view(full, context_tokens).split(rows)) if full else []
    rest = tokens[full * context_tokens :]
    if rest.numel() >= 2:
        batches.append(rest[None])
    total = torch.zeros((), dtype=torch.float64, device=device)
    count = 0
    for batch in batches:
        batch = batch.to(device)
        logits = model(input_ids=batch, use_cache=False).logits[:, :-1].float()
        nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten(), reduction="sum")
        total += nll.double()
        count += batch.numel() - batch.shape[0]
    return Perplexity(float(total) / count, count)
