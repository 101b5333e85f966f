"""Partitions of neurons: the objective against its definition, the solver against brute force."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
import textwrap
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from torch import Tensor

torch = pytest.importorskip("torch", reason="refactoring needs torch; run make test-live")
pytest.importorskip("numba", reason="annealing on a CPU needs numba; run make test-live")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from simmoe.errors import RefactorError  # noqa: E402
from simmoe.live.refactor import anneal_cpu  # noqa: E402
from simmoe.live.refactor.anneal import PUBLISHED, Schedule, anneal  # noqa: E402
from simmoe.live.refactor.partition import (  # noqa: E402
    canonical,
    captured_mass,
    contiguous,
    drop_coefficients,
    greedy,
    group_masses,
    partition_loss,
    uniform_random,
)

QUICK = Schedule(iterations=3000)


def planted(num_experts: int = 2, rows: int = 60, splits: int = 4, room: int = 4) -> tuple[Tensor, Tensor]:
    """Activations whose neurons fire in ``splits`` groups, shuffled, and the orders that undo the shuffle."""
    generator = torch.Generator().manual_seed(1)
    groups = torch.rand(num_experts, rows, splits, generator=generator) ** 4
    clean = groups.repeat_interleave(room, dim=2) * (1 + 0.05 * torch.rand(num_experts, rows, splits * room))
    shuffle = torch.randperm(splits * room, generator=generator)
    order = shuffle.argsort().expand(num_experts, -1)
    return clean[:, :, shuffle] * torch.randn(1, 1, splits * room, generator=generator).sign(), canonical(order, splits)


def losses(activations: Tensor, order: Tensor, splits: int, k_drop: int | None = None) -> Tensor:
    return partition_loss(group_masses(activations, order, splits), k_drop)


@given(st.integers(2, 6), st.integers(1, 8), st.integers(0, 2**31))
@settings(max_examples=40)
def test_averaged_objective_is_the_mean_of_eq_4_and_the_sum_of_pair_minima(splits: int, rows: int, seed: int) -> None:
    masses = torch.rand(rows, splits, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    ascending = masses.sort(dim=1).values
    by_definition = [float(ascending[:, :k].sum() / masses.sum()) for k in range(1, splits)]
    for k, wanted in enumerate(by_definition, start=1):
        assert float(partition_loss(masses, k)) == pytest.approx(wanted, rel=1e-12)
    assert float(partition_loss(masses)) == pytest.approx(sum(by_definition) / (splits - 1), rel=1e-12)
    pairs = sum(torch.minimum(masses[:, i], masses[:, j]).sum() for i, j in itertools.combinations(range(splits), 2))
    assert float(pairs / masses.sum() / (splits - 1)) == pytest.approx(float(partition_loss(masses)), rel=1e-12)


@pytest.mark.parametrize("k_drop", [0, 4, -1])
def test_k_drop_outside_its_range_is_refused(k_drop: int) -> None:
    with pytest.raises(RefactorError, match="between 1 and 3"):
        drop_coefficients(4, k_drop)


@given(st.integers(2, 4), st.integers(1, 5), st.integers(1, 3), st.integers(0, 2**31))
@settings(max_examples=25)
def test_every_partition_is_equal_sized_and_complete(splits: int, room: int, num_experts: int, seed: int) -> None:
    width = splits * room
    activations = torch.randn(num_experts, 7, width, generator=torch.Generator().manual_seed(seed))
    start = greedy(activations, splits)
    for order in (
        contiguous(num_experts, width), uniform_random(num_experts, width, splits, seed), start,
        anneal(activations, start, splits, schedule=Schedule(iterations=50), seed=seed % 1000),
    ):  # fmt: skip
        assert torch.equal(order.sort(dim=1).values, contiguous(num_experts, width))
        blocks = order.view(num_experts, splits, room)
        assert bool((blocks[..., 1:] > blocks[..., :-1]).all())


def test_greedy_start_balances_the_groups_norms() -> None:
    activations = torch.rand(1, 50, 64, generator=torch.Generator().manual_seed(0)) ** 3
    greedy_mass = group_masses(activations, greedy(activations, 4), 4).sum(dim=1)
    plain_mass = group_masses(activations, contiguous(1, 64), 4).sum(dim=1)
    assert float(greedy_mass.max() / greedy_mass.min()) < float(plain_mass.max() / plain_mass.min())
    assert float(greedy_mass.max() / greedy_mass.min()) < 1.02


@pytest.mark.parametrize("schedule", [QUICK, Schedule(0.0, 1.0, 3000), Schedule.spread(300.0, 3000)])
def test_annealing_finds_a_planted_partition(schedule: Schedule) -> None:
    activations, truth = planted()
    found = anneal(activations, greedy(activations, 4), 4, schedule=schedule)
    assert torch.equal(found, truth)


@pytest.mark.parametrize("k_drop", [None, 1, 2])
def test_annealing_reaches_the_best_of_all_partitions(k_drop: int | None) -> None:
    splits, width = 3, 6
    activations = torch.randn(1, 20, width, generator=torch.Generator().manual_seed(5))
    best = min(
        float(losses(activations, torch.tensor([order]), splits, k_drop))
        for order in itertools.permutations(range(width))
    )
    starts = [uniform_random(1, width, splits, seed) for seed in range(6)]
    hot = Schedule.spread(20_000.0, 2000)
    found = min(
        float(losses(activations, anneal(activations, start, splits, schedule=hot, k_drop=k_drop), splits, k_drop))
        for start in starts
    )
    assert found == pytest.approx(best, rel=1e-6)


@given(st.integers(2, 5), st.integers(1, 4), st.integers(1, 9), st.data())
@settings(max_examples=60, deadline=None)
def test_the_change_of_a_swap_is_the_difference_of_two_objectives(
    splits: int, room: int, rows: int, data: st.DataObject
) -> None:
    seed = data.draw(st.integers(0, 2**31))
    activations = torch.randn(1, rows, splits * room, generator=torch.Generator().manual_seed(seed))
    order = uniform_random(1, splits * room, splits, seed)
    a, b = data.draw(st.permutations(range(splits)))[:2]
    at_a, at_b = (group * room + data.draw(st.integers(0, room - 1)) for group in (a, b))
    swapped = order.clone()
    swapped[0, at_a], swapped[0, at_b] = order[0, at_b], order[0, at_a]
    columns = activations[0].abs().T.contiguous().numpy()
    masses = group_masses(activations, order, splits)[0].T.float().contiguous().numpy()
    i, j, total = int(order[0, at_a]), int(order[0, at_b]), float(activations.abs().sum())
    for k_drop in (None, *range(1, splits)):
        wanted = float(losses(activations, swapped, splits, k_drop) - losses(activations, order, splits, k_drop))
        weights = drop_coefficients(splits, k_drop).float().numpy()
        ranked = anneal_cpu._ranked_change(columns, masses, i, j, a, b, splits, weights)
        assert float(ranked) / total == pytest.approx(wanted, abs=1e-5)
        if k_drop is None:
            pairwise = anneal_cpu._pairwise_change(columns[j], columns[i], masses, a, b)
            assert float(pairwise) / total / (splits - 1) == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("pairwise", [True, False])
def test_the_masses_kept_along_the_way_are_those_of_the_final_partition(pairwise: bool) -> None:
    activations = torch.rand(2, 25, 12, generator=torch.Generator().manual_seed(4))
    order = uniform_random(2, 12, 3, 0)
    masses = group_masses(activations, order, 3).transpose(1, 2).float().contiguous()
    columns, found = activations.transpose(1, 2).contiguous(), order.clone()
    unit = (1e6 / columns.sum((1, 2))).numpy()
    weights = drop_coefficients(3, None).float().numpy()
    anneal_cpu.anneal_experts(
        columns.numpy(), masses.numpy(), found.numpy(), unit, weights, pairwise, 2000, 5000.0, 0.999, 1
    )
    assert not torch.equal(found, order)
    assert torch.allclose(masses, group_masses(activations, found, 3).transpose(1, 2).float(), rtol=1e-4)


@pytest.mark.parametrize("k_drop", [None, 1, 3])
def test_annealing_is_seeded_and_never_worse_than_its_start(k_drop: int | None) -> None:
    activations = torch.randn(3, 40, 32, generator=torch.Generator().manual_seed(2))
    start = greedy(activations, 4)
    first, again, other = (
        anneal(activations, start, 4, schedule=QUICK, k_drop=k_drop, seed=seed) for seed in (7, 7, 8)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert bool((losses(activations, first, 4, k_drop) <= losses(activations, start, 4, k_drop)).all())


def test_temperature_is_free_of_the_activations_scale() -> None:
    activations, _ = planted(rows=30)
    start = uniform_random(2, 16, 4, 0)
    short = replace(PUBLISHED, iterations=500)
    small, large = (anneal(activations * scale, start, 4, schedule=short) for scale in (1.0, 1024.0))
    assert torch.equal(small, large)


def test_one_token_and_no_token_at_all() -> None:
    nothing = torch.zeros(1, 3, 8)
    start = greedy(nothing, 4)
    assert torch.equal(anneal(nothing, start, 4, schedule=QUICK), canonical(start, 4))
    assert float(losses(nothing, start, 4)) == 0.0
    one = torch.tensor([[[8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 2.0, 1.0]]])
    found = anneal(one, greedy(one, 4), 4, schedule=Schedule(0.0, 1.0, 500))
    assert torch.equal(found[0].view(4, 2), torch.arange(8).view(4, 2))


def test_captured_mass_grows_to_all_of_it_and_learned_beats_chance() -> None:
    activations, truth = planted()
    captured = captured_mass(group_masses(activations, truth, 4))
    assert bool((captured[:, 1:] >= captured[:, :-1]).all())
    assert torch.allclose(captured[:, -1], torch.ones(2, dtype=torch.float64))
    chance = captured_mass(group_masses(activations, uniform_random(2, 16, 4, 0), 4))
    assert bool((captured[:, :-1] > chance[:, :-1]).all())


def test_width_must_divide() -> None:
    with pytest.raises(RefactorError, match="not a multiple"):
        anneal(torch.rand(1, 2, 10), contiguous(1, 10), 4)


def test_the_gpu_kernel_walks_as_the_cpu_loop_does() -> None:
    """Under Triton's interpreter, in a process of its own because the switch is read at import."""
    pytest.importorskip("triton", reason="the GPU kernel needs triton")
    program = """
        import warnings; warnings.simplefilter("ignore")
        import torch
        from simmoe.live.refactor import anneal_cpu, anneal_gpu
        from simmoe.live.refactor.partition import drop_coefficients, group_masses, uniform_random
        a = torch.randn(2, 30, 12, generator=torch.Generator().manual_seed(0)).abs()
        start = uniform_random(2, 12, 3, 0)
        columns = a.transpose(1, 2).contiguous()
        unit = 1e6 / columns.sum((1, 2))
        for k_drop in (None, 1, 2):
            weights = drop_coefficients(3, k_drop).float()
            masses = group_masses(a, start, 3).transpose(1, 2).contiguous()
            gpu, cpu = start.int().contiguous(), start.clone().numpy()
            anneal_gpu.anneal_experts(columns, masses, gpu, unit, weights, k_drop is None, 120, 3000.0, 0.99, 4)
            anneal_cpu.anneal_experts(columns.numpy(), masses.numpy(), cpu, unit.numpy(), weights.numpy(),
                                      k_drop is None, 120, 3000.0, 0.99, 4)
            assert (gpu.numpy() == cpu).all(), k_drop
            assert (cpu != start.numpy()).any()
    """
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
