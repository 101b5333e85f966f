"""Models by name or config.json: published numbers, splitting, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from simmoe.errors import DataError, UsageError
from simmoe.profiles.models import FAMILIES, deciding_values, model_shape, published_models, read_model, split_config


def config(name: str = "olmoe-1b-7b", **change: Any) -> dict[str, Any]:
    return {**read_model(name).config, **change}


def without(key: str, name: str = "olmoe-1b-7b") -> dict[str, Any]:
    return {k: v for k, v in config(name).items() if k != key}


@pytest.mark.parametrize(
    ("name", "billions", "active_billions"),
    # the numbers of parameters their papers and model cards give
    [("olmoe-1b-7b", 6.9, 1.3), ("deepseek-v2-lite", 15.7, 2.4), ("qwen3-30b-a3b", 30.5, 3.3)],
)
def test_published_models_have_the_parameters_their_cards_name(
    name: str, billions: float, active_billions: float
) -> None:
    shape = model_shape(read_model(name).config)
    assert shape.num_parameters / 1e9 == pytest.approx(billions, abs=0.05)
    idle = shape.num_moe_layers * (shape.num_experts - shape.top_k) * shape.expert_weights
    # the papers count embeddings and head differently: within a tenth, or the input embedding
    embedding = shape.vocab_size * shape.hidden_size
    assert active_billions * 0.95 <= (shape.num_parameters - idle) / 1e9 <= active_billions * 1.05 + embedding / 1e9


def test_the_shapes_the_issue_names() -> None:
    lite = model_shape(read_model("deepseek-v2-lite").config)
    assert (lite.num_experts, lite.top_k, lite.expert_width, lite.shared_width) == (64, 6, 1408, 2 * 1408)
    assert (lite.num_layers, lite.num_moe_layers, lite.kv_elements, lite.kv_heads) == (27, 26, 512 + 64, 1)
    qwen = model_shape(read_model("qwen3-30b-a3b").config)
    assert (qwen.num_experts, qwen.top_k, qwen.expert_width, qwen.num_moe_layers) == (128, 8, 768, 48)


@pytest.mark.parametrize("name", published_models())
def test_splitting_keeps_the_parameters_but_the_gate_s_rows(name: str) -> None:
    whole = model_shape(read_model(name).config)
    parts = model_shape(split_config(read_model(name).config, 4))
    assert (parts.num_experts, parts.top_k, 4 * parts.expert_width) == (
        4 * whole.num_experts, 4 * whole.top_k, whole.expert_width
    )  # fmt: skip
    assert parts.shared_width == whole.shared_width
    more_gate_rows = whole.num_moe_layers * 3 * whole.num_experts * whole.hidden_size
    assert parts.num_parameters == whole.num_parameters + more_gate_rows


@pytest.mark.parametrize("name", published_models())
def test_the_deciding_values_decide_the_shape(name: str) -> None:
    for splits in (1, 2):
        split = split_config(read_model(name).config, splits)
        assert model_shape(deciding_values(split)) == model_shape(split)


def test_transformers_5_spells_the_number_of_experts_otherwise() -> None:
    renamed = without("num_experts", "qwen3-30b-a3b") | {"num_local_experts": 128}
    assert model_shape(renamed) == model_shape(config("qwen3-30b-a3b"))
    assert split_config(renamed, 2)["num_local_experts"] == 256


def test_dense_layers_are_those_vllm_makes_dense() -> None:
    assert model_shape(config("qwen3-30b-a3b", mlp_only_layers=[0, 5])).num_moe_layers == 46
    every_other = model_shape(config("qwen3-30b-a3b", decoder_sparse_step=2))
    assert (every_other.num_moe_layers, every_other.dense_width) == (24, 6144)
    assert model_shape(config("deepseek-v2-lite", first_k_dense_replace=3)).num_moe_layers == 24


@pytest.mark.parametrize(
    "model_type", ["qwen2_moe", "mixtral", "deepseek_v3", "llama", "simmoe_cg_olmoe", 7, ["olmoe"]]
)
def test_another_family_is_named_with_those_supported(model_type: Any) -> None:
    with pytest.raises(DataError) as error:
        model_shape(config(model_type=model_type))
    assert f"model_type '{model_type}' is not supported" in str(error.value)
    assert all(family in str(error.value) for family in FAMILIES)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (config(vocab_size=10**9 + 1), "vocab_size is 1000000001; no model has more than 1000000000"),
        (config(tie_word_embeddings="yes"), "tie_word_embeddings is 'yes'; it must be true or false"),
        (without("hidden_size"), "hidden_size is missing"),
        (without("num_experts"), "num_experts is missing"),
        (without("model_type"), "no model_type; supported families"),
        (config(vocab_size="50304"), "vocab_size is '50304'; it must be a whole number of at least 1"),
        (config(num_hidden_layers=0), "num_hidden_layers is 0"),
        (config(num_hidden_layers=True), "num_hidden_layers is True"),
        (config(num_experts_per_tok=65), "num_experts_per_tok is 65, above num_experts 64"),
        (config(num_key_value_heads=3), "num_attention_heads 16 is not a multiple of num_key_value_heads 3"),
        (config(quantization_config={"quant_method": "awq"}), "quantization_config (awq) is not supported"),
        (config("deepseek-v2-lite", first_k_dense_replace=27), "none of the 27 layers has routed experts"),
        (without("qk_rope_head_dim", "deepseek-v2-lite"), "qk_rope_head_dim is missing"),
        (config("qwen3-30b-a3b", mlp_only_layers="all"), "mlp_only_layers is 'all'"),
        (config(num_hidden_layers=10**12), "num_hidden_layers is 1000000000000"),
        (config(num_attention_heads=4096, num_key_value_heads=4096), "num_attention_heads is 4096, above hidden_size"),
    ],
)
def test_a_field_that_is_missing_or_odd_is_named(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError) as error:
        model_shape(changed)
    assert message in str(error.value)


@pytest.mark.parametrize("splits", [0, 3, 5, 2048])
def test_a_split_must_divide_the_width(splits: int) -> None:
    with pytest.raises(UsageError, match="intermediate_size 1024 into"):
        split_config(config(), splits)


def test_a_config_json_or_its_folder_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(without("_name_or_path")))
    for path in (folder, folder / "config.json"):
        model = read_model(str(path))
        assert (model.name, model.published_as) == ("mine", "mine")
        assert model_shape(model.config) == model_shape(config())


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "is not JSON"), ("[]", "holds no JSON object"), ('{"model_type": "mixtral"}', "'mixtral' is not supported")],
)
def test_a_bad_config_json_is_named(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(DataError) as error:
        read_model(str(tmp_path / "config.json"))
    assert message in str(error.value) and "config.json" in str(error.value)


def test_an_unknown_name_suggests_and_an_absent_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="did you mean 'qwen3-30b-a3b'"):
        read_model("qwen3-30b")
    with pytest.raises(UsageError, match="cannot read the model's configuration"):
        read_model(str(tmp_path / "none.json"))


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("qwen3-30b-a3b", "num_key_value_heads"),
        ("deepseek-v2-lite", "q_lora_rank"),
        ("deepseek-v2-lite", "kv_lora_rank"),
        ("deepseek-v2-lite", "n_shared_experts"),
    ],
)
def test_what_transformers_would_fill_in_is_asked_for(tmp_path: Path, name: str, key: str) -> None:
    """Its default is another model's: 4 KV heads, a query rank of 1,536, two shared experts."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(without(key, name)))
    with pytest.raises(DataError, match=f"{key} is missing"):
        read_model(str(path))
    path.write_text(json.dumps(config(name)))
    assert model_shape(read_model(str(path)).config) == model_shape(config(name))


@pytest.mark.parametrize("name", ["allenai/OLMoE-1B-7B-0924", "https://huggingface.co/allenai/OLMoE-1B-7B-0924"])
def test_a_name_on_a_hub_is_not_fetched_but_said_to_be_downloaded(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name}.*of a model on a hub, download its config.json"):
        read_model(name)
