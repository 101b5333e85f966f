"""Model folders to measure: configurations are read, split and described by :mod:`simmoe.profiles.models`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simmoe.profiles.models import deciding_values, read_model, split_config

__all__ = ["OLMOE_1B_7B", "shape_of", "split_config", "write_model"]

OLMOE_1B_7B = read_model("olmoe-1b-7b").config
"""allenai/OLMoE-1B-7B-0924, as published."""

shape_of = deciding_values


def write_model(config: Mapping[str, Any], folder: Path, max_model_len: int) -> Path:
    """Write a folder vLLM can load with dummy weights; positions are raised to ``max_model_len`` where below it."""
    folder.mkdir(parents=True, exist_ok=True)
    positions = max(config.get("max_position_embeddings") or 0, max_model_len)
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": positions}), encoding="utf-8")
    return folder
