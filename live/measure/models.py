"""Model folders to measure: configurations are read, split and described by :mod:`simmoe.profiles.models`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from simmoe.live.measure.measuring import MeasuredModel
from simmoe.profiles.models import deciding_values, read_model, split_config

__all__ = ["OLMOE_1B_7B", "read_split", "shape_of", "split_config", "write_model"]

OLMOE_1B_7B = read_model("olmoe-1b-7b").config
"""allenai/OLMoE-1B-7B-0924, as published."""

shape_of = deciding_values


def read_split(name_or_path: str, splits: int) -> tuple[str, MeasuredModel]:
    """Return a model's short name, and the model with its experts split into so many.

    Raises:
        UsageError: no such model, or experts that cannot be split so.
        DataError: a configuration that is not supported.
    """
    short, published_as, published = read_model(name_or_path)
    name = published_as if splits == 1 else f"{published_as} split by {splits}"
    return short, MeasuredModel(name, split_config(published, splits))


def write_model(config: Mapping[str, Any], folder: Path, max_model_len: int) -> Path:
    """Write a folder vLLM can load with dummy weights; positions are raised to ``max_model_len`` where below it."""
    folder.mkdir(parents=True, exist_ok=True)
    positions = max(config.get("max_position_embeddings") or 0, max_model_len)
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": positions}), encoding="utf-8")
    return folder
