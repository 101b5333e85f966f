"""Gate neurons and allocation vectors."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from torch import Tensor

torch = pytest.importorskip("torch", reason="refactoring needs torch; run make test-live")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from simmoe.errors import RefactorError  # noqa: E402
from simmoe.live.refactor.gates import (  # noqa: E402
    ALLOCATIONS,
    Calibration,
    allocation_table,
    calibrate,
    choose_gate_neurons,
    co_activation_scores,
)
from simmoe.live.refactor.profiler import LayerProfile  # noqa: E402


def profile_of(activations: Tensor, ranks: Tensor, weights: Tensor) -> LayerProfile:
    kept = torch.full((activations.shape[0],), activations.shape[1])
    return LayerProfile(0, activations, ranks, weights, kept, kept)


def test_co_activation_is_the_off_diagonal_row_sum_of_b_transposed_b() -> None:
    activations = torch.randn(40, 16, generator=torch.Generator().manual_seed(0))
    group = torch.tensor([1, 4, 5, 11])
    binary = torch.zeros(40, 16)
    for row, active in zip(binary, activations.abs().topk(12, dim=1).indices, strict=True):
        row[active] = 1
    counts = binary.T @ binary
    wanted = [sum(counts[i, j] for j in group if j != i) for i in group]
    assert co_activation_scores(activations, group).tolist() == [float(value) for value in wanted]


def test_gate_neurons_come_from_their_own_sub_expert_and_are_its_most_co_active() -> None:
    activations = torch.randn(1, 50, 8, generator=torch.Generator().manual_seed(1))
    order = torch.tensor([[0, 2, 4, 6, 1, 3, 5, 7]])
    ranks = torch.zeros(1, 50, dtype=torch.int64)
    chosen = choose_gate_neurons(profile_of(activations, ranks, torch.ones(1, 50)), order, 2, 2)
    for n, group in enumerate(order.view(2, 4)):
        scores = dict(zip(group.tolist(), co_activation_scores(activations[0], group).tolist(), strict=True))
        best = sorted(scores, key=lambda neuron: (-scores[neuron], neuron))[:2]
        assert sorted(chosen[0, n].tolist()) == sorted(best)


@pytest.mark.parametrize("r", [0, 5])
def test_more_gate_neurons_than_a_sub_expert_has_are_refused(r: int) -> None:
    nothing = profile_of(torch.zeros(1, 1, 8), torch.zeros(1, 1, dtype=torch.int64), torch.zeros(1, 1))
    with pytest.raises(RefactorError, match="between 1 and"):
        choose_gate_neurons(nothing, torch.arange(8)[None], 2, r)


positive = st.floats(0.01, 10.0)


@given(
    st.sampled_from(ALLOCATIONS), st.integers(1, 5), st.integers(1, 4), st.lists(positive, min_size=5, max_size=5),
    st.lists(positive, min_size=20, max_size=20),
)  # fmt: skip
@settings(max_examples=80)
def test_every_vector_spends_its_budget_within_the_experts(
    kind: str, top_k: int, splits: int, weights: list[float], masses: list[float]
) -> None:
    marginal = torch.tensor(masses[: top_k * splits], dtype=torch.float64).view(top_k, splits)
    ranked = torch.tensor(sorted(weights[:top_k], reverse=True), dtype=torch.float64)
    table = allocation_table(kind, splits, top_k, Calibration(ranked, marginal, marginal.flip(0)))
    assert len(table) == top_k * splits
    for k, kappa in enumerate(table, start=1):
        assert len(kappa) == top_k
        assert sum(kappa) == k
        assert all(0 <= count <= splits for count in kappa)
    assert table[-1] == [splits] * top_k


def test_front_loaded_fills_whole_experts() -> None:
    flat = Calibration(torch.ones(3), torch.ones(3, 4), torch.ones(3, 4))
    table = allocation_table("front-loaded", 4, 3, flat)
    assert table[3] == [4, 0, 0]
    assert table[5] == [4, 2, 0]


def test_proportional_follows_the_weights_up_to_the_cap() -> None:
    calibration = Calibration(torch.tensor([6.0, 3.0, 1.0]), torch.ones(3, 4), torch.ones(3, 4))
    table = allocation_table("proportional", 4, 3, calibration)
    assert table[4] == [3, 2, 0]  # 3, 1.5, 0.5: the tie between remainders goes to the lower rank
    assert table[8] == [4, 4, 1]  # 5.4 and 2.7 are cut at 4 and shared out again: 3.75, 1.25


@pytest.mark.parametrize("kind", ["marginal", "energy"])
def test_the_greedy_kinds_take_the_most_where_it_falls_by_rank(kind: str) -> None:
    marginal = torch.tensor([[5.0, 3.0, 0.5], [4.0, 1.0, 0.2]], dtype=torch.float64)
    nothing = torch.zeros(2, 3)
    measured = {"marginal": (marginal, nothing), "energy": (nothing, marginal)}[kind]
    table = allocation_table(kind, 3, 2, Calibration(torch.ones(2), *measured))
    for k, kappa in enumerate(table, start=1):
        best = max(
            (sum(marginal[0, :a]) + sum(marginal[1, :b]), a, b)
            for a, b in itertools.product(range(4), repeat=2)
            if a + b == k
        )
        assert float(sum(marginal[0, : kappa[0]]) + sum(marginal[1, : kappa[1]])) == pytest.approx(float(best[0]))


def test_calibration_weighs_rows_by_what_they_stand_for() -> None:
    activations = torch.tensor([[[3.0, 1.0]], [[1.0, 2.0]]])
    ranks, weights = torch.tensor([[0], [1]]), torch.tensor([[0.5], [0.25]])
    profile = LayerProfile(0, activations, ranks, weights, torch.tensor([1, 1]), torch.tensor([10, 20]))
    down = torch.tensor([[2.0, 0.0], [0.0, 3.0]])
    orders, neurons = torch.tensor([[0, 1], [0, 1]]), torch.tensor([[[0], [1]], [[0], [1]]])
    found = calibrate([profile], [orders], [neurons], 2, 2, lambda layer, expert: down)
    assert found.weight_by_rank.tolist() == [0.5, 0.25]
    mass = torch.tensor([[10 * 0.5 * 3, 10 * 0.5 * 1], [20 * 0.25 * 2, 20 * 0.25 * 1]], dtype=torch.float64)
    assert torch.allclose(found.marginal_mass, mass / mass.sum())
    energy = torch.tensor([[10 * 0.25 * 36, 10 * 0.25 * 9], [20 * 0.0625 * 36, 20 * 0.0625 * 4]], dtype=torch.float64)
    assert torch.allclose(found.marginal_energy, energy / energy.sum())


def test_energy_is_what_leaving_a_sub_expert_out_costs_the_layer() -> None:
    """Against the outputs themselves: one token, one expert, each sub-expert dropped in turn."""
    draw = torch.Generator().manual_seed(2)
    activations, down = torch.randn(1, 1, 8, generator=draw), torch.randn(5, 8, generator=draw)
    order = torch.randperm(8, generator=draw)[None]
    profile = profile_of(activations, torch.zeros(1, 1, dtype=torch.int64), torch.full((1, 1), 0.5))
    neurons = choose_gate_neurons(profile, order, 4, 2)
    found = calibrate([profile], [order], [neurons], 4, 1, lambda layer, expert: down).marginal_energy[0]
    whole = 0.5 * down @ activations[0, 0]
    costs = []
    for group in order[0].view(4, 2):
        kept = activations[0, 0].clone()
        kept[group] = 0
        costs.append(float((whole - 0.5 * down @ kept).square().sum()))
    assert sorted((found / found.sum()).tolist()) == pytest.approx(sorted(c / sum(costs) for c in costs), rel=1e-4)


def test_an_unknown_allocation_is_refused() -> None:
    with pytest.raises(RefactorError, match="none of"):
        allocation_table("random", 4, 2, Calibration(torch.ones(2), torch.ones(2, 4), torch.ones(2, 4)))
