"""The profiler keeps a uniform sample of what the experts really computed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torch import Tensor

torch = pytest.importorskip("torch", reason="refactoring needs torch; run make test-live")
pytest.importorskip("transformers", reason="profiling needs transformers; run make test-live")

import numpy as np  # noqa: E402

from simmoe.errors import RefactorError  # noqa: E402
from simmoe.live.refactor import concentration  # noqa: E402
from simmoe.live.refactor.engine import load_model, load_tokenizer  # noqa: E402
from simmoe.live.refactor.profiler import (  # noqa: E402
    LayerProfile,
    _Reservoir,
    calibration_batches,
    coverage_report,
    profile_model,
    starved,
)
from tests.support.small_moe import NUM_EXPERTS, TOP_K, write_model  # noqa: E402


class _Experts:
    """Two experts of width 1 whose activation reveals the token: silu(g) * u with g huge is g * u."""

    num_experts = 2
    gate_up_proj = torch.tensor([[[1.0], [1.0]], [[1.0], [2.0]]])
    down_proj = torch.zeros(2, 1, 1)


def offer(reservoir: _Reservoir, tokens: Tensor, expert: int = 0) -> None:
    hidden = tokens[:, None].float()
    reservoir.observe(hidden, torch.full((len(tokens), 1), expert), torch.ones(len(tokens), 1))


def test_reservoir_is_uniform_over_all_batches() -> None:
    counts = torch.zeros(40)
    for seed in range(400):
        reservoir = _Reservoir(0, _Experts, 8, torch.Generator().manual_seed(seed))
        for batch in torch.arange(100, 140).split([3, 30, 7]):
            offer(reservoir, batch)
        kept = reservoir.profile()
        assert int(kept.kept[0]) == 8 and int(kept.seen[0]) == 40
        values = kept.activations[0, :, 0].sqrt().round().long() - 100
        assert values.unique().numel() == 8
        counts[values] += 1
    # each token is kept with probability 1/5: a binomial of 400 draws, mean 80, deviation 8
    assert float(((counts - 80) / 8).abs().max()) < 4.5
    assert float(((counts - 80) ** 2 / 64).sum()) < 80


def test_reservoir_holds_no_more_after_a_thousand_times_its_rows() -> None:
    reservoir = _Reservoir(0, _Experts, 8, torch.Generator().manual_seed(0))

    def held() -> int:
        tensors = (value for value in vars(reservoir).values() if isinstance(value, torch.Tensor))
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors)

    # two experts of eight rows, each a key, an activation of width 1 and a weight (float32) and a rank (int64)
    bound = 2 * 8 * (4 + 4 + 4 + 8) + 2 * 8
    assert held() == bound
    for batch in torch.arange(8000).split(100):
        offer(reservoir, batch)
    assert held() == bound
    assert reservoir.profile().activations.shape == (2, 8, 1)
    assert all(not isinstance(value, list | dict) for value in vars(reservoir).values())


def test_reservoir_keeps_everything_below_its_size() -> None:
    reservoir = _Reservoir(0, _Experts, 8, torch.Generator().manual_seed(0))
    offer(reservoir, torch.arange(100, 103), expert=1)
    profile = reservoir.profile()
    assert profile.kept.tolist() == [0, 3] and profile.seen.tolist() == [0, 3]
    assert sorted((profile.activations[1, :3, 0] / 2).sqrt().round().tolist()) == [100, 101, 102]
    assert profile.ranks[0].tolist() == [-1, -1, -1]


@pytest.mark.parametrize("name", ["olmoe", "qwen3_moe-normalised", "deepseek_v2"])
def test_profile_holds_the_activations_ranks_and_weights_of_routed_tokens(name: str, tmp_path: Path) -> None:
    model = load_model(write_model(tmp_path / "model", name), device="cpu")
    ids = torch.randint(0, 256, (2, 20), generator=torch.Generator().manual_seed(0))
    captured: dict[int, Any] = {}
    for index, layer in enumerate(model.model.layers):
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts.register_forward_pre_hook(
                lambda module, args, index=index: captured.__setitem__(index, (module, *args))
            )
    profiles = profile_model(model, [ids], tokens_per_expert=64)
    assert [profile.layer for profile in profiles] == list(captured)
    for profile in profiles:
        experts, hidden, index, weights = captured[profile.layer]
        assert int(profile.seen.sum()) == 40 * TOP_K
        for e in range(NUM_EXPERTS):
            tokens, choice = (index == e).nonzero(as_tuple=True)
            gate, up = (hidden[tokens] @ experts.gate_up_proj[e].T).chunk(2, dim=1)
            wanted = torch.nn.functional.silu(gate) * up
            found = profile.activations[e, : int(profile.kept[e])]
            by_first = found[found[:, 0].argsort()]
            assert torch.allclose(by_first, wanted[wanted[:, 0].argsort()], atol=1e-5)
            assert torch.allclose(
                profile.weights[e, : len(tokens)].sort().values, weights[tokens, choice].float().sort().values
            )
            above = (weights[tokens] > weights[tokens, choice][:, None]).sum(dim=1)
            assert profile.ranks[e, : len(tokens)].sort().values.tolist() == above.sort().values.tolist()


def test_starved_experts_are_named_with_a_remedy() -> None:
    kept = torch.tensor([3, 100])
    profile = LayerProfile(4, torch.zeros(2, 100, 2), torch.zeros(2, 100), torch.zeros(2, 100), kept, kept)
    assert starved([profile]) == [(4, 0, 3)]
    report = coverage_report([profile])
    assert "layer 4 expert 0: 3" in report and "more varied" in report


def test_too_little_calibration_text_is_refused(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_model(tmp_path / "model", "olmoe"))
    with pytest.raises(RefactorError, match="5 tokens are less than one window of 64"):
        calibration_batches(tokenizer, "hello", max_tokens=100, context_tokens=64)


def test_concentration_of_known_activations(tmp_path: Path) -> None:
    flat, peaked = torch.ones(1, 4, 20), torch.zeros(1, 4, 20)
    peaked[:, :, 3] = -2.0
    activations = torch.cat([flat, peaked, torch.zeros(1, 4, 20)])
    kept = torch.tensor([4, 4, 0])
    profile = LayerProfile(0, activations, torch.zeros(3, 4), torch.zeros(3, 4), kept, kept)
    assert np.allclose(concentration.top_mass(profile, 0.25), [0.25, 1.0, np.nan], equal_nan=True)
    assert np.allclose(concentration.top_mass(profile, 0.10)[:2], [0.10, 1.0])
    concentration.plot([profile], tmp_path / "figure.png", "known", "png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
