"""Small models of the three families, on disk with a tokenizer, and their float64 references."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from simmoe.live.refactor.checkpoint import Checkpoint
from simmoe.live.refactor.reference import ReferenceLayer

VOCAB_SIZE = 256
NUM_EXPERTS = 8
TOP_K = 2
WIDTH = 32

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "num_experts_per_tok": TOP_K, "bos_token_id": 0,
    "eos_token_id": 0, "pad_token_id": 0,
}  # fmt: skip

#: name -> (transformers class stem, configuration beyond the common one); names say who normalises top-k weights
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "olmoe": ("Olmoe", {"intermediate_size": WIDTH, "num_experts": NUM_EXPERTS, "norm_topk_prob": False}),
    "olmoe-normalised": ("Olmoe", {"intermediate_size": WIDTH, "num_experts": NUM_EXPERTS, "norm_topk_prob": True}),
    "qwen3_moe-normalised": (
        "Qwen3Moe",
        {"intermediate_size": 96, "moe_intermediate_size": WIDTH, "num_experts": NUM_EXPERTS, "norm_topk_prob": True,
         "head_dim": 32, "mlp_only_layers": [0], "decoder_sparse_step": 1},
    ),
    "deepseek_v2": (
        "DeepseekV2",
        {"intermediate_size": 96, "moe_intermediate_size": WIDTH, "n_routed_experts": NUM_EXPERTS,
         "n_shared_experts": 2, "first_k_dense_replace": 1, "kv_lora_rank": 32, "q_lora_rank": None,
         "qk_nope_head_dim": 16, "qk_rope_head_dim": 16, "v_head_dim": 32, "n_group": None, "topk_group": None,
         "topk_method": "greedy", "routed_scaling_factor": 1.5, "norm_topk_prob": False, "head_dim": 16},
    ),
}  # fmt: skip


def write_model(
    folder: Path, name: str, *, dtype: torch.dtype = torch.float32, shard_size: str = "5GB", **overrides: Any
) -> Path:
    """Write the family's small model with weights large enough that routing and activations vary."""
    import transformers

    stem, more = FAMILIES[name]
    config = getattr(transformers, f"{stem}Config")(**{**_COMMON, **more, **overrides})
    torch.manual_seed(0)
    model = getattr(transformers, f"{stem}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(5)
    model.to(dtype).save_pretrained(folder, max_shard_size=shard_size)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """One token a character, below code point 256; no training, no download."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = {chr(code): code for code in range(VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token=chr(1)))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=chr(0), pad_token=chr(0), unk_token=chr(1)
    ).save_pretrained(folder)


def calibration_text(path: Path, characters: int = 6000) -> Path:
    """Letters drawn from a fixed stream, enough to reach every expert."""
    draw = torch.randint(32, 127, (characters,), generator=torch.Generator().manual_seed(3))
    path.write_text("".join(chr(int(code)) for code in draw))
    return path


def reference_layers(path: Path) -> dict[int, ReferenceLayer]:
    """The original checkpoint's MoE layers in float64, read from its per-expert tensors."""
    source = Checkpoint(path)
    layers = {}
    for index in sorted({int(n.split(".")[2]) for n in source.shard_of if n.endswith("mlp.gate.weight")}):
        stem = f"model.layers.{index}.mlp"

        def stacked(part: str, stem: str = stem) -> torch.Tensor:
            return torch.stack(
                [source.tensor(f"{stem}.experts.{e}.{part}.weight").double() for e in range(NUM_EXPERTS)]
            )

        layers[index] = ReferenceLayer(
            source.tensor(f"{stem}.gate.weight").double(), stacked("gate_proj"), stacked("up_proj"),
            stacked("down_proj"), TOP_K, bool(source.config.get("norm_topk_prob", False)),
            float(source.config.get("routed_scaling_factor") or 1.0),
        )  # fmt: skip
    return layers


def reference_logits(path: Path, ids: torch.Tensor, moe: Callable[[int, torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """Logits of the original model in float64 with ``moe(layer, x [hidden])`` in place of its routed experts."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64).eval()

    def routed(index: int, block: Any) -> Callable[[torch.Tensor], torch.Tensor]:
        def forward(hidden: torch.Tensor) -> torch.Tensor:
            flat = hidden.reshape(-1, hidden.shape[-1])
            out = torch.stack([moe(index, x) for x in flat]).view_as(hidden)
            return out + block.shared_experts(hidden) if hasattr(block, "shared_experts") else out

        return forward

    for index, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "experts"):
            layer.mlp.forward = routed(index, layer.mlp)
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids).logits
    return logits


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference over the norm of what is wanted."""
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())
