"""What one command measures."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simmoe.live.measure.engine import EngineSetup
from simmoe.live.measure.loads import Loads
from simmoe.live.measure.plan import Plan

Progress = Callable[[str, int, int], None]
"""Called with (what, points done, points in all)."""

PROBE_BATCHES: tuple[tuple[int, ...], ...] = ((40,) * 8, (700,), (3000,))
"""Prompt lengths the k is proved with: short prompts together, and prompts of large captured sizes."""


@dataclass(frozen=True)
class MeasuredModel:
    """What the samples' header says of the model."""

    name: str
    """As published and how changed."""
    config: dict[str, Any]
    k_granularity: int = 1
    """Sub-expert units one k of this model is worth."""


@dataclass(frozen=True)
class Measuring:
    """A run of :func:`measure`."""

    model: MeasuredModel
    setup: EngineSetup
    plan: Plan
    out: Path
    """Sample file; measured points already in it are skipped."""
    reference: Path | None = None
    """Logits of :func:`write_reference`, to prove k against; None: against the same engine without its graphs."""
    probe_batches: tuple[tuple[int, ...], ...] = PROBE_BATCHES
    loads: Loads | None = None
    """Recorded beside the sample file; None records nothing."""
    layer: bool = False
    """Time the MoE layer alone, beside the sample file; of several cards, on the first."""
    time_limit_s: float = math.inf
    """From the call of :func:`measure`; what is not reached is measured by the next call."""
    command: str = field(default_factory=lambda: " ".join(["python", *sys.argv[1:]]))

    @property
    def recording_path(self) -> Path:
        """Of the recordings."""
        return self.out.with_name(f"{self.out.stem}-recording.jsonl")

    @property
    def layer_path(self) -> Path:
        """Of the MoE layer's times."""
        return self.out.with_name(f"{self.out.stem}-layer.json")
