"""The model families that can be refactored, and how a checkpoint of each names and counts its experts.

The three store routed experts one by one under the same tensor names
(``model.layers.L.mlp.experts.E.{gate,up,down}_proj``, ``model.layers.L.mlp.gate``), so a family is a handful of
configuration keys. Which layers are MoE layers is read off the tensors themselves.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from simmoe.errors import RefactorError, did_you_mean

#: The key under which a refactored checkpoint's config.json records what was done to it.
RECORD_KEY = "simmoe_refactor"

EXPERT_TENSOR = re.compile(r"model\.layers\.(\d+)\.mlp\.experts\.(\d+)\.(gate_proj|up_proj|down_proj)\.weight$")
GATE_TENSOR = re.compile(r"model\.layers\.(\d+)\.mlp\.gate\.weight$")
GATE_NEURON_TENSOR = re.compile(r"model\.layers\.(\d+)\.mlp\.gate_neurons\.(gate_proj|up_proj)\.weight$")


@dataclass(frozen=True)
class Family:
    """Configuration keys of one published architecture."""

    model_type: str
    """As config.json states it."""
    architecture: str
    """The causal language model's class name, in transformers and in vLLM."""
    num_experts_keys: tuple[str, ...]
    """Keys under which the number of routed experts in a layer may stand; transformers 5 renamed one of them."""
    width_key: str
    """Key of one routed expert's intermediate width."""
    shared_experts_key: str | None = None
    """Key of a count of shared experts whose width is that count times ``width_key``."""

    def num_experts_key(self, config: Mapping[str, Any]) -> str:
        """The spelling this configuration uses."""
        return next((key for key in self.num_experts_keys if key in config), self.num_experts_keys[0])

    @property
    def complex_gate_model_type(self) -> str:
        """``model_type`` of a CG checkpoint: stock classes must not load it, they would drop its gate neurons."""
        return f"simmoe_cg_{self.model_type}"

    @property
    def complex_gate_architecture(self) -> str:
        """Class name of a CG checkpoint's model."""
        return f"ComplexGate{self.architecture}"


FAMILIES = {
    family.model_type: family
    for family in (
        Family("olmoe", "OlmoeForCausalLM", ("num_experts",), "intermediate_size"),
        Family("qwen3_moe", "Qwen3MoeForCausalLM", ("num_experts", "num_local_experts"), "moe_intermediate_size"),
        Family(
            "deepseek_v2", "DeepseekV2ForCausalLM", ("n_routed_experts",), "moe_intermediate_size", "n_shared_experts"
        ),
    )
}


@dataclass(frozen=True)
class MoeShape:
    """The numbers of a checkpoint that refactoring changes."""

    num_experts: int
    """Routed experts in a layer, E."""
    top_k: int
    """Experts the router selects natively, m."""
    width: int
    """Intermediate width of a routed expert, C."""


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a checkpoint's configuration.

    Raises:
        RefactorError: the checkpoint is already refactored, quantised, or of a family not listed here.
    """
    if RECORD_KEY in config:
        record = config[RECORD_KEY]
        how = f" (splits {record.get('splits')}, {record.get('gate')} gate)" if isinstance(record, dict) else ""
        raise RefactorError(f"checkpoint is already refactored{how}; start from the original model")
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise RefactorError(f"model_type {model_type!r} cannot be refactored{did_you_mean(str(model_type), FAMILIES)}")
    if config.get("quantization_config"):
        # its scales are of whole experts: they would not fit the parts
        raise RefactorError("config.json: quantization_config is set; start from the checkpoint in bf16")
    return FAMILIES[model_type]


def has_complex_gate(config: Mapping[str, Any]) -> bool:
    """Whether this is the configuration of a CG checkpoint, which brings modelling code of ours."""
    return config.get("model_type") in {family.complex_gate_model_type for family in FAMILIES.values()}


def moe_shape(config: Mapping[str, Any], family: Family) -> MoeShape:
    """Read E, m and C.

    Raises:
        RefactorError: a key is absent or no positive integer, or m exceeds E.
    """
    values = []
    for key in (family.num_experts_key(config), "num_experts_per_tok", family.width_key):
        value = config.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise RefactorError(
                f"config.json: {key} is {value!r}; a {family.model_type} checkpoint needs a positive integer"
            )
        values.append(value)
    shape = MoeShape(*values)
    if shape.top_k > shape.num_experts:
        raise RefactorError(
            f"config.json: num_experts_per_tok {shape.top_k} exceeds {family.num_experts_key(config)} "
            f"{shape.num_experts}"
        )
    return shape


def check_splits(shape: MoeShape, splits: int, family: Family) -> None:
    """Raise ``RefactorError`` unless every expert divides into ``splits`` equal parts."""
    if splits < 2:
        raise RefactorError(f"--splits {splits}: an expert must be split into 2 parts or more")
    if shape.width % splits:
        divisors = [n for n in range(2, 17) if shape.width % n == 0]
        raise RefactorError(
            f"--splits {splits}: {family.width_key} {shape.width} is not a multiple of {splits}; "
            f"try one of {divisors}" if divisors else f"--splits {splits}: width {shape.width} has no small divisor"
        )  # fmt: skip


def refactored_config(
    config: Mapping[str, Any], family: Family, splits: int, record: Mapping[str, Any]
) -> dict[str, Any]:
    """config.json after every expert is split by ``splits``: counts times N, width over N, the record added.

    DeepSeek-V2 counts the shared experts' width in routed widths, so their number grows too and they stay as they are.
    """
    shape = moe_shape(config, family)
    changed = dict(config)
    changed[family.num_experts_key(config)] = shape.num_experts * splits
    changed["num_experts_per_tok"] = shape.top_k * splits
    changed[family.width_key] = shape.width // splits
    if family.shared_experts_key and changed.get(family.shared_experts_key):
        changed[family.shared_experts_key] *= splits
    changed[RECORD_KEY] = dict(record)
    return changed
