"""The small model's training recipe, and what counts as flattened.

**Flattened** means both, on all validation tokens: over the last tenth of the steps perplexity changes by less than
0.5%; and the *probe*, a copy of the model that leaves the plateau half way through and is let down over as many steps,
ends within 2% of the model. The first alone can be had by lowering the rate; the second says that the additional
training did no more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

#: Of the change over the last tenth of the steps, and of the probe's distance.
TAIL_CHANGE, PROBE_DISTANCE = 0.005, 0.02


@dataclass(frozen=True)
class TrainingConfig:
    """Everything that decides the run, with the corpus and the tokeniser."""

    steps: int = 12_000
    """Optimiser steps of the model."""
    sequences: int = 128
    """Windows a step; 65,536 tokens a step at a context of 512."""
    learning_rate: float = 3e-3
    """Peak of AdamW's learning rate."""
    warmup_steps: int = 300
    """Steps of linear warm-up."""
    decay_fraction: float = 0.4
    """Share of the steps, at the end, over which the rate falls to zero."""
    decay_power: float = 3.0
    """The rate falls as this power of the share of those steps that is left."""
    weight_decay: float = 0.2
    """Decoupled weight decay, on matrices."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's moments."""
    clip_norm: float = 1.0
    """Gradient norm ceiling."""
    seed: int = 1
    """Of the initial weights and of the order of the windows."""
    evaluate_every: int = 200
    """Steps between looks at the validation text."""
    save_every: int = 1000
    """Steps between writes of the state file."""

    @property
    def decay_steps(self) -> int:
        """Steps from the plateau's end to the model's."""
        return max(1, round(self.steps * self.decay_fraction))

    @property
    def probe_step(self) -> int:
        """Where the probe leaves the plateau: half way."""
        return (self.steps - self.decay_steps) // 2


def learning_rate(step: int, decay_from: int, config: TrainingConfig) -> float:
    """Warm-up, plateau, and from step ``decay_from`` down to zero."""
    left = min(1.0, max(0.0, 1 - (step - decay_from) / config.decay_steps))
    return config.learning_rate * min(1.0, (step + 1) / config.warmup_steps) * math.pow(left, config.decay_power)


def flatness(rows: list[dict[str, Any]], config: TrainingConfig) -> dict[str, Any]:
    """Whether the log's perplexity has flattened, and the two numbers that say so.

    Args:
        rows: the log's, of both lines.
    """
    found = {line: {r["step"]: r["validation_perplexity"] for r in rows if r["line"] == line}
             for line in ("model", "probe")}  # fmt: skip
    final = found["model"][config.steps]
    tail = [value for step, value in found["model"].items() if step >= 0.9 * config.steps]
    probe = found["probe"][config.probe_step + config.decay_steps]
    change, distance = max(tail) / min(tail) - 1, final / probe - 1
    return {
        "validation_perplexity": final, "probe_perplexity": probe, "tail_change": round(change, 5),
        "probe_distance": round(distance, 5),
        "flattened": change < TAIL_CHANGE and abs(distance) < PROBE_DISTANCE,
    }  # fmt: skip
