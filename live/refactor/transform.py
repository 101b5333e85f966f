"""Rewrite a checkpoint with its experts split: tensors stream from the source's shards into the new ones."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from simmoe.errors import RefactorError
from simmoe.live.refactor import modeling_complex_gate
from simmoe.live.refactor.checkpoint import Checkpoint, copy_companions, new_checkpoint
from simmoe.live.refactor.families import (
    EXPERT_TENSOR,
    GATE_TENSOR,
    RECORD_KEY,
    MoeShape,
    family_of,
    moe_shape,
    refactored_config,
)

PARTITION_FILE = "simmoe_partition.npz"


@dataclass(frozen=True)
class LayerPlan:
    """How one MoE layer is split."""

    layer: int
    """Index of the decoder layer."""
    order: torch.Tensor
    """[num_experts, width] int64: block n of width / N neurons is sub-expert n."""
    gate_neurons: torch.Tensor | None = None
    """[num_experts, N, r] int64 for a complex gate."""


def write_refactored(
    source: Checkpoint,
    out: Path,
    plans: Sequence[LayerPlan],
    record: Mapping[str, Any],
    *,
    shard_bytes: int = 4_000_000_000,
) -> None:
    """Write the split checkpoint of ``source`` to the new directory ``out``.

    Args:
        plans: one for each MoE layer the checkpoint has.
        record: what config.json says under ``simmoe_refactor``: splits, gate ("linear" or "complex") and, for the
        latter,
            gate_neurons, kappa and original.
    Raises:
        RefactorError: plans and checkpoint disagree, or an expert's tensor is missing or misshapen.
        OutputError: ``out`` exists or cannot be written; nothing is left behind.
    """
    family = family_of(source.config)
    shape = moe_shape(source.config, family)
    splits, linear = int(record["splits"]), record["gate"] == "linear"
    config = refactored_config(source.config, family, splits, record)
    if not linear:
        config["model_type"] = family.complex_gate_model_type
        config["architectures"] = [family.complex_gate_architecture]
        module = Path(modeling_complex_gate.__file__).stem
        config["auto_map"] = {
            "AutoConfig": f"{module}.{family.complex_gate_architecture.replace('ForCausalLM', 'Config')}",
            "AutoModelForCausalLM": f"{module}.{family.complex_gate_architecture}",
        }
    check_complete(source, shape, {plan.layer for plan in plans})
    with new_checkpoint(out, shard_bytes=shard_bytes) as writer:
        for name, tensor in _split_tensors(source, {plan.layer: plan for plan in plans}, shape, splits, linear):
            writer.add(name, tensor)
        copy_companions(source.path, writer.path, skip=("config.json", "README.md"))
        (writer.path / "README.md").write_text(_model_card(source, shape, record))
        writer.write_json("config.json", config)
        orders = {f"layer_{plan.layer}": plan.order.to(torch.int32).numpy() for plan in plans}
        np.savez_compressed(writer.path / PARTITION_FILE, **orders)
        if not linear:
            shutil.copyfile(modeling_complex_gate.__file__, writer.path / Path(modeling_complex_gate.__file__).name)


def _model_card(source: Checkpoint, shape: MoeShape, record: Mapping[str, Any]) -> str:
    splits = int(record["splits"])
    linear = record["gate"] == "linear"
    code = "" if linear else "\nThe router is code in this directory: load with `trust_remote_code=True`."
    return f"""# {source.path.resolve().name}, refactored

Each of the {shape.num_experts} routed experts of a layer was split into {splits} sub-experts of width
{shape.width // splits} by `simmoe refactor` ({record["gate"]} gate); config.json says how under `{RECORD_KEY}`.{code}
Licence, training and intended use are the original model's: see its card.
"""


def moe_layer_indices(source: Checkpoint) -> list[int]:
    """The decoder layers that hold routed experts, by their tensors' names."""
    return sorted({int(found[1]) for name in source.shard_of if (found := EXPERT_TENSOR.match(name))})


def check_complete(source: Checkpoint, shape: MoeShape, layers: set[int] | None = None) -> None:
    """Raise ``RefactorError`` unless ``layers`` are the MoE layers, each with its gate and all its experts' tensors.

    A gate's rows, and the first expert's width, must be what config.json says.
    """
    present = moe_layer_indices(source)
    if not present:
        raise RefactorError(
            f"{source.path}: no tensor is named like model.layers.L.mlp.experts.E.gate_proj.weight; "
            "fused or quantised expert weights are not supported"
        )
    if layers is not None and set(present) != layers:
        raise RefactorError(f"{source.path}: has MoE layers {present}, but partitions are for {sorted(layers)}")
    for layer in present:
        wanted = {f"model.layers.{layer}.mlp.gate.weight"} | {
            f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight"
            for expert in range(shape.num_experts)
            for part in ("gate_proj", "up_proj", "down_proj")
        }
        missing = wanted - source.shard_of.keys()
        if missing:
            raise RefactorError(f"{source.path}: tensor {min(missing)!r} is missing ({len(missing)} in layer {layer})")
        rows = {"gate": shape.num_experts, "experts.0.up_proj": shape.width}
        for part, expected in rows.items():
            name = f"model.layers.{layer}.mlp.{part}.weight"
            found = source.shape(name)
            if found[:1] != (expected,):
                raise RefactorError(
                    f"{source.path}: tensor {name!r} has shape {list(found)}, but config.json asks for {expected} rows"
                )


def _split_tensors(
    source: Checkpoint, plans: Mapping[int, LayerPlan], shape: MoeShape, splits: int, linear: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in source.tensors():
        if found := EXPERT_TENSOR.match(name):
            layer, expert, part = int(found[1]), int(found[2]), found[3]
            down = part == "down_proj"
            if tensor.ndim != 2 or tensor.shape[1 if down else 0] != shape.width:
                raise RefactorError(f"{name}: shape {tuple(tensor.shape)} does not fit expert width {shape.width}")
            for n, group in enumerate(plans[layer].order[expert].view(splits, -1)):
                piece = tensor[:, group] if down else tensor[group]
                piece = piece * splits if down and linear else piece
                yield f"model.layers.{layer}.mlp.experts.{expert * splits + n}.{part}.weight", piece
        elif GATE_TENSOR.match(name):
            yield name, tensor.repeat_interleave(splits, dim=0)
        else:
            yield name, tensor
    for layer, plan in sorted(plans.items()):
        if plan.gate_neurons is None:
            continue
        for part in ("gate_proj", "up_proj"):
            rows = [
                source.tensor(f"model.layers.{layer}.mlp.experts.{expert}.{part}.weight")[neurons.flatten()]
                for expert, neurons in enumerate(plan.gate_neurons)
            ]
            yield f"model.layers.{layer}.mlp.gate_neurons.{part}.weight", torch.cat(rows)
