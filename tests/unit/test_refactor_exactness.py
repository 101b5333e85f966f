"""Refactored checkpoints in transformers: equal to the original at full budget, to the paper's formulas below it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torch import Tensor

torch = pytest.importorskip("torch", reason="refactoring needs torch; run make test-live")
pytest.importorskip("transformers", reason="refactored checkpoints are loaded by transformers; run make test-live")
pytest.importorskip("numba", reason="annealing on a CPU needs numba; run make test-live")

import numpy as np  # noqa: E402

from simmoe.live.evaluate.perplexity import set_budget  # noqa: E402
from simmoe.live.refactor.anneal import Schedule  # noqa: E402
from simmoe.live.refactor.checkpoint import Checkpoint  # noqa: E402
from simmoe.live.refactor.engine import RefactorConfig, load_model, refactor  # noqa: E402
from simmoe.live.refactor.families import EXPERT_TENSOR, GATE_TENSOR  # noqa: E402
from simmoe.live.refactor.reference import complex_gate_layer, linear_gate_layer, original_layer  # noqa: E402
from tests.support.small_moe import (  # noqa: E402
    FAMILIES,
    TOP_K,
    calibration_text,
    reference_layers,
    reference_logits,
    relative_error,
    write_model,
)

SPLITS = 4
Refactored = Callable[[str, str], tuple[Path, Path]]


@pytest.fixture(scope="module")
def refactored(tmp_path_factory: pytest.TempPathFactory) -> Refactored:
    """(family, gate) -> (original, refactored) directories, each made once."""
    made: dict[tuple[str, str], tuple[Path, Path]] = {}
    folder = tmp_path_factory.mktemp("refactored")
    text = calibration_text(folder / "calibration.txt")

    def make(name: str, gate: str) -> tuple[Path, Path]:
        if (name, gate) not in made:
            original = folder / name
            if not original.exists():
                write_model(original, name)
            out = folder / f"{name}-{gate}"
            refactor(original, text, out, RefactorConfig(gate=gate, schedule=Schedule(iterations=300)), device="cpu")
            made[name, gate] = original, out
        return made[name, gate]

    return make


def token_ids(sequences: int = 3, length: int = 12) -> Tensor:
    return torch.randint(2, 256, (sequences, length), generator=torch.Generator().manual_seed(9))


def logits(model: Any, ids: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(input_ids=ids).logits
    return found


def layer_groups(path: Path) -> dict[int, Tensor]:
    """layer -> [E, N, C / N] neurons of the checkpoint's partition."""
    with np.load(path / "simmoe_partition.npz") as stored:
        return {
            int(name.removeprefix("layer_")): torch.from_numpy(order.astype(np.int64)).unflatten(1, (SPLITS, -1))
            for name, order in stored.items()
        }


@pytest.mark.parametrize("gate", ["linear", "complex"])
@pytest.mark.parametrize("name", FAMILIES)
def test_full_budget_gives_the_original_model(name: str, gate: str, refactored: Refactored) -> None:
    original, out = refactored(name, gate)
    before, after = load_model(original, device="cpu"), load_model(out, device="cpu")
    assert relative_error(logits(after, token_ids()), logits(before, token_ids())) < 1e-4
    prompts = token_ids(64, 6)
    greedy = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(after.generate(prompts, **greedy), before.generate(prompts, **greedy))


@pytest.mark.parametrize("k", [1, 2])
@pytest.mark.parametrize("name", FAMILIES)
def test_linear_gate_at_whole_experts_gives_the_original_at_fewer(name: str, k: int, refactored: Refactored) -> None:
    original, out = refactored(name, "linear")
    layers = reference_layers(original)
    model = load_model(out, device="cpu")
    set_budget(model, SPLITS * k)
    wanted = reference_logits(original, token_ids(), lambda index, x: original_layer(x, layers[index], k))
    assert relative_error(logits(model, token_ids()), wanted) < 1e-4


@pytest.mark.parametrize("k", [1, 3, 5, 6, 7])
@pytest.mark.parametrize("name", FAMILIES)
def test_linear_gate_follows_the_formulas_between(name: str, k: int, refactored: Refactored) -> None:
    """Router rows are set apart as fine-tuning does; repeated rows tie, and any choice among ties would be right."""
    original, out = refactored(name, "linear")
    layers, groups = reference_layers(original), layer_groups(out)
    model = load_model(out, device="cpu")
    rows = {}
    for index, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "experts"):
            noise = torch.randn(layer.mlp.gate.weight.shape, generator=torch.Generator().manual_seed(index))
            with torch.no_grad():
                layer.mlp.gate.weight.add_(0.1 * noise)
            rows[index] = layer.mlp.gate.weight.detach().double()
    set_budget(model, k)
    wanted = reference_logits(
        original, token_ids(), lambda i, x: linear_gate_layer(x, layers[i], groups[i], rows[i], k)
    )
    assert relative_error(logits(model, token_ids()), wanted) < 1e-4


@pytest.mark.parametrize("k", [1, 3, 5, 6, 8])
@pytest.mark.parametrize("name", FAMILIES)
def test_complex_gate_follows_the_formulas(name: str, k: int, refactored: Refactored) -> None:
    original, out = refactored(name, "complex")
    layers, groups = reference_layers(original), layer_groups(out)
    source, record = Checkpoint(out), Checkpoint(out).config["simmoe_refactor"]
    neurons = {}
    for index, layer in layers.items():
        kept = source.tensor(f"model.layers.{index}.mlp.gate_neurons.gate_proj.weight").double()
        # the neuron of each stored row, found by its weights among its own sub-expert's
        found = [
            [next(int(c) for c in groups[index][e, n] if torch.equal(layer.w_gate[e, c], row)) for row in rows]
            for (e, n), rows in zip(
                ((e, n) for e in range(layer.gate.shape[0]) for n in range(SPLITS)),
                kept.view(-1, record["gate_neurons"], kept.shape[1]), strict=True,
            )
        ]  # fmt: skip
        neurons[index] = torch.tensor(found).view(-1, SPLITS, record["gate_neurons"])
    model = load_model(out, device="cpu")
    set_budget(model, k)
    kappa = record["kappa"][k - 1]
    wanted = reference_logits(
        original, token_ids(), lambda i, x: complex_gate_layer(x, layers[i], groups[i], neurons[i], kappa)
    )
    assert relative_error(logits(model, token_ids()), wanted) < 1e-4


@pytest.mark.parametrize("gate", ["linear", "complex"])
def test_everything_but_experts_and_gates_is_copied_bit_by_bit(gate: str, refactored: Refactored) -> None:
    original, out = refactored("deepseek_v2", gate)
    before, after = Checkpoint(original), Checkpoint(out)
    untouched = [n for n in before.shard_of if not EXPERT_TENSOR.match(n) and not GATE_TENSOR.match(n)]
    assert any("shared_experts" in name for name in untouched)
    for name in untouched:
        assert torch.equal(before.tensor(name), after.tensor(name)), name
    assert after.config["n_shared_experts"] * after.config["moe_intermediate_size"] == 2 * 32


@pytest.mark.parametrize("gate", ["linear", "complex"])
def test_bf16_shards_in_bf16_shards_out(gate: str, tmp_path: Path) -> None:
    original = write_model(tmp_path / "model", "olmoe", dtype=torch.bfloat16, shard_size="100KB")
    assert len(list(original.glob("*.safetensors"))) > 2
    text = calibration_text(tmp_path / "calibration.txt", 2000)
    out = tmp_path / "out"
    refactor(original, text, out, RefactorConfig(gate=gate, schedule=Schedule(iterations=50)), device="cpu")
    assert {tensor.dtype for _, tensor in Checkpoint(out).tensors()} == {torch.bfloat16}
    before, after = load_model(original, device="cpu"), load_model(out, device="cpu")
    assert relative_error(logits(after.float(), token_ids()), logits(before.float(), token_ids())) < 1e-4


def test_budget_of_a_complex_gate_is_bounded_by_its_native_experts(refactored: Refactored) -> None:
    from simmoe.errors import UsageError

    model = load_model(refactored("olmoe", "complex")[1], device="cpu")
    with pytest.raises(UsageError, match=f"outside 1..{TOP_K * SPLITS}"):
        set_budget(model, TOP_K * SPLITS + 1)
