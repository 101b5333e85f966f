"""Models by name or config.json: what of a configuration decides a step's work, and the same model split.

Three Hugging Face families are supported, all with SwiGLU experts. One function reads a configuration for measuring and
for roofline estimates alike, and names what it cannot use.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from simmoe.errors import DataError, UsageError, did_you_mean
from simmoe.profiles.reading import parse_json, read_text

_PUBLISHED = Path(__file__).parent / "data" / "models"

#: Layers beyond which a configuration is taken to be damaged.
MOST_LAYERS = 10_000

#: The same of any other number of a configuration.
LARGEST = 10**9

Config = Mapping[str, Any]
"""A Hugging Face config.json."""


class Family(NamedTuple):
    """Where a family keeps the numbers of its routed experts."""

    num_experts: tuple[str, ...]
    """Keys of the number of routed experts in a layer; transformers 5 renamed one of them."""
    width: str
    """Key of one routed expert's width."""
    grow: tuple[str, ...]
    """Keys that grow with the number of experts when they are split; the shared experts' width is counted in routed
    widths."""


FAMILIES = {
    "olmoe": Family(("num_experts",), "intermediate_size", ("num_experts_per_tok",)),
    "qwen3_moe": Family(("num_experts", "num_local_experts"), "moe_intermediate_size", ("num_experts_per_tok",)),
    "deepseek_v2": Family(("n_routed_experts",), "moe_intermediate_size", ("num_experts_per_tok", "n_shared_experts")),
}

#: Fields without which transformers assumes those of its own default model, by family.
UNSAID = {
    "qwen3_moe": ("num_key_value_heads",),
    "deepseek_v2": ("q_lora_rank", "kv_lora_rank", "n_shared_experts"),
}


class Model(NamedTuple):
    """A configuration and what it is called."""

    name: str
    """Short, for file names."""
    published_as: str
    """As the hub names it, where the configuration says so."""
    config: dict[str, Any]


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The numbers of a model that decide a step's work. Widths are in elements; bf16 weights take two bytes each."""

    family: str
    hidden_size: int
    num_layers: int
    num_moe_layers: int
    """Layers with routed experts; the others have one MLP of ``dense_width``."""
    num_experts: int
    """Routed experts in a layer."""
    top_k: int
    """Routed experts a token activates, as published (or split): the largest budget."""
    expert_width: int
    """moe_intermediate_size of one routed expert."""
    shared_width: int
    """Intermediate width of a layer's shared experts together; 0 without."""
    dense_width: int
    vocab_size: int
    tied_embeddings: bool
    attention_weights: int
    """Elements of a layer's attention projections."""
    kv_elements: int
    """Elements of KV cache a token takes in a layer."""
    kv_width: int
    """Elements of keys and values a prompt token attends with in a layer; a latent is expanded for it."""
    kv_heads: int
    """Heads of KV cache in a layer; 1 for latent attention, whose heads share one latent."""
    pair_flops: int
    """Floating-point operations of a query-key pair in a layer, prompt tokens; causal pairs alone are counted."""
    kv_token_flops: int
    """The same of a decoding sequence and a KV token, which latent attention meets in the latent."""

    @property
    def expert_weights(self) -> int:
        """Elements of one routed expert: gate, up and down projection."""
        return 3 * self.hidden_size * self.expert_width

    @property
    def dense_layer_weights(self) -> int:
        """Elements every token multiplies with, over all layers, the language-model head left out."""
        mlps = self.num_moe_layers * (3 * self.shared_width + self.num_experts)
        mlps += (self.num_layers - self.num_moe_layers) * 3 * self.dense_width
        return self.num_layers * self.attention_weights + mlps * self.hidden_size

    @property
    def head_weights(self) -> int:
        """Elements of the language-model head."""
        return self.vocab_size * self.hidden_size

    @property
    def num_parameters(self) -> int:
        """All weights, norms and biases left out."""
        embeddings = self.head_weights * (1 if self.tied_embeddings else 2)
        experts = self.num_moe_layers * self.num_experts * self.expert_weights
        return self.dense_layer_weights + experts + embeddings


def published_models() -> list[str]:
    """Return the names of the models whose configurations ship with simmoe."""
    return sorted(path.stem for path in _PUBLISHED.glob("*.json"))


def read_model(name_or_path: str) -> Model:
    """Return a shipped model by name, or the one of a config.json (or of a folder that holds it).

    Raises:
        UsageError: neither a shipped name nor a readable path.
        DataError: the file is no JSON object, or not of a supported family.
    """
    if name_or_path in published_models():
        path = _PUBLISHED / f"{name_or_path}.json"
    else:
        path = Path(name_or_path)
        if name_or_path and path.is_dir():
            path = path / "config.json"
        is_name = not path.exists() and path.suffix != ".json" and len(path.parts) <= 1
        if is_name or not name_or_path:
            hint = did_you_mean(name_or_path, published_models())
            raise UsageError(f"no model '{name_or_path}'{hint}; give a name or the path of a Hugging Face config.json")
    if not path.exists():
        raise UsageError(
            f"cannot read the model's configuration '{name_or_path}': No such file; of a model on a hub, download its "
            f"config.json and name that"
        )
    config = parse_json(read_text(path, "the model's configuration"), f"'{path}'")
    if not isinstance(config, dict):
        raise DataError(f"'{path}' is no Hugging Face config.json: it holds no JSON object")
    try:
        model_shape(config)
        _refuse_unsaid(config)
    except DataError as error:
        raise DataError(f"'{path}': {error}") from None
    published_as = config.get("_name_or_path")
    short = path.parent.resolve().name if path.name == "config.json" else path.stem
    return Model(short, published_as if isinstance(published_as, str) and published_as else short, config)


def family_of(config: Config) -> Family:
    """Return where the configuration's family keeps its numbers.

    Raises:
        DataError: names the family, and those supported.
    """
    model_type = config.get("model_type")
    if model_type is None:
        raise DataError(f"no model_type; supported families: {', '.join(sorted(FAMILIES))}")
    if not isinstance(model_type, str) or model_type not in FAMILIES:
        raise DataError(
            f"model_type '{model_type}' is not supported; supported families: {', '.join(sorted(FAMILIES))}"
        )
    if config.get("quantization_config"):
        method = (
            config["quantization_config"].get("quant_method", "")
            if isinstance(config["quantization_config"], dict)
            else ""
        )
        raise DataError(
            f"quantization_config{f' ({method})' if method else ''} is not supported; profiles are of bf16 weights: "
            f"give the configuration of the unquantized model"
        )
    return FAMILIES[model_type]


def num_experts_key(config: Config) -> str:
    """Return the key this configuration keeps the number of routed experts under."""
    keys = family_of(config).num_experts
    return next((key for key in keys if key in config), keys[0])


def model_shape(config: Config) -> ModelShape:
    """Return the numbers of a configuration that decide a step's work.

    Args:
        config: of the OLMoE, Qwen3-MoE or DeepSeek-V2 family, split or not.
    Raises:
        DataError: another family, or a field that is missing or of an impossible value; names field and value.
    """
    family = family_of(config)
    hidden_size, num_layers = _count(config, "hidden_size"), _count(config, "num_hidden_layers")
    num_experts, top_k = _count(config, num_experts_key(config)), _count(config, "num_experts_per_tok")
    if top_k > num_experts:
        raise DataError(f"num_experts_per_tok is {top_k}, above {num_experts_key(config)} {num_experts}")
    width = _count(config, family.width)
    if num_layers > MOST_LAYERS:
        raise DataError(f"num_hidden_layers is {num_layers}; no model has more than {MOST_LAYERS}")
    num_moe_layers = sum(_is_moe_layer(config, layer) for layer in range(num_layers))
    if not num_moe_layers:
        raise DataError(f"none of the {num_layers} layers has routed experts")
    attention = _latent_attention(config) if "kv_lora_rank" in config else _attention(config)
    return ModelShape(
        family=str(config["model_type"]),
        hidden_size=hidden_size,
        num_layers=num_layers,
        num_moe_layers=num_moe_layers,
        num_experts=num_experts,
        top_k=top_k,
        expert_width=width,
        shared_width=width * _count(config, "n_shared_experts", least=0, default=0),
        dense_width=_count(config, "intermediate_size") if num_moe_layers < num_layers else 0,
        vocab_size=_count(config, "vocab_size"),
        tied_embeddings=_flag(config, "tie_word_embeddings"),
        **attention._asdict(),
    )


def split_config(config: Config, splits: int) -> dict[str, Any]:
    """Return the configuration of the same model with every routed expert split into ``splits`` sub-experts.

    Args:
        config: of the OLMoE, Qwen3-MoE or DeepSeek-V2 family.
        splits: N; divides the expert width.
    Raises:
        DataError: another family.
        UsageError: a width N does not divide.
    """
    family = family_of(config)
    width = _count(config, family.width)
    if splits < 1 or width % splits:
        raise UsageError(f"cannot split experts of {family.width} {width} into {splits}: it must divide the width")
    scaled = {key: config[key] * splits for key in (num_experts_key(config), *family.grow) if config.get(key)}
    return {**config, **scaled, family.width: width // splits}


def deciding_values(config: Config) -> dict[str, Any]:
    """Return the fields of a configuration that decide a step's work, as published, in a fixed order."""
    keys = (
        "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim",
        "vocab_size", "tie_word_embeddings", "q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim",
        "v_head_dim", "first_k_dense_replace", "moe_layer_freq", "decoder_sparse_step", "mlp_only_layers",
        "intermediate_size", "moe_intermediate_size", num_experts_key(config), *family_of(config).grow,
    )  # fmt: skip
    return {key: config[key] for key in keys if config.get(key) is not None}


def _is_moe_layer(config: Config, layer: int) -> bool:
    """As vLLM's model classes decide it."""
    if config["model_type"] == "deepseek_v2":
        dense = _count(config, "first_k_dense_replace", least=0, default=0)
        return layer >= dense and layer % _count(config, "moe_layer_freq", default=1) == 0
    if config["model_type"] == "qwen3_moe":
        dense_layers = config.get("mlp_only_layers") or []
        if not isinstance(dense_layers, list):
            raise DataError(f"mlp_only_layers is {dense_layers!r}; it must be a list of layers")
        return layer not in dense_layers and (layer + 1) % _count(config, "decoder_sparse_step", default=1) == 0
    return True


class _Attention(NamedTuple):
    """One layer's attention, as in ModelShape."""

    attention_weights: int
    kv_elements: int
    kv_width: int
    kv_heads: int
    pair_flops: int
    kv_token_flops: int


def _attention(config: Config) -> _Attention:
    """Grouped-query attention."""
    hidden_size, heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
    kv_heads = _count(config, "num_key_value_heads", default=heads)
    head_dim = _count(config, "head_dim", default=hidden_size // heads)
    if not head_dim:
        raise DataError(f"num_attention_heads is {heads}, above hidden_size {hidden_size}")
    if heads % kv_heads:
        raise DataError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    weights = 2 * hidden_size * head_dim * (heads + kv_heads)
    kv = 2 * kv_heads * head_dim
    return _Attention(weights, kv, kv, kv_heads, 4 * heads * head_dim, 4 * heads * head_dim)


def _latent_attention(config: Config) -> _Attention:
    """Multi-head latent attention: the cache holds one latent and one rotary key a token."""
    hidden_size, heads = _count(config, "hidden_size"), _count(config, "num_attention_heads")
    latent, nope = _count(config, "kv_lora_rank"), _count(config, "qk_nope_head_dim")
    rope, value = _count(config, "qk_rope_head_dim"), _count(config, "v_head_dim")
    query_rank = _count(config, "q_lora_rank", least=0, default=0)
    query = heads * (nope + rope)
    weights = query_rank * (hidden_size + query) if query_rank else hidden_size * query
    weights += hidden_size * (latent + rope) + latent * heads * (nope + value) + heads * value * hidden_size
    width = heads * (nope + rope + value)
    return _Attention(weights, latent + rope, width, 1, 2 * width, 2 * heads * (2 * latent + rope))


def _count(config: Config, key: str, *, least: int = 1, default: int | None = None) -> int:
    """Return a field that is a whole number; ``default`` where the configuration leaves it out or null."""
    value = config.get(key)
    if value is None:
        if default is None:
            raise DataError(f"{key} is missing; a {config['model_type']} configuration needs it")
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise DataError(f"{key} is {value!r}; it must be a whole number of at least {least}")
    if value > LARGEST:
        raise DataError(f"{key} is {value}; no model has more than {LARGEST}")
    return value


def _flag(config: Config, key: str) -> bool:
    value = config.get(key)
    if value is not None and not isinstance(value, bool):
        raise DataError(f"{key} is {value!r}; it must be true or false")
    return bool(value)


def _refuse_unsaid(config: Config) -> None:
    """Refuse a configuration that leaves out what transformers would then fill in with another model's number."""
    for key in UNSAID.get(config["model_type"], ()):
        if key not in config:
            raise DataError(f"{key} is missing; a {config['model_type']} configuration needs it, null for none")
