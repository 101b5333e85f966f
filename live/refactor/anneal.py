"""Simulated annealing by pair swaps, every expert of a layer at once: on a GPU with Triton, on CPU threads with numba.

One iteration proposes, for each expert, to swap one neuron of one group with one of another, keeps the groups' sizes,
and updates the two groups' token masses from the two neurons' columns alone. A better swap is taken; a worse one with
probability exp(-increase / T).

**Units of the temperature.** The published T0 = 100 has none. Here T is in millionths of the expert's total activation
mass (ppm), the unit of :func:`simmoe.live.refactor.partition.partition_loss` times 1e6. At factor 0.995 the published
schedule falls from 100 ppm to 0.005 ppm in 2,000 iterations, when a typical single swap moves the loss by 1 to 100
ppm: the remaining 98,000 iterations are a greedy descent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from simmoe.errors import MissingDependency, RefactorError
from simmoe.live.refactor.partition import canonical, drop_coefficients, group_masses, partition_loss


@dataclass(frozen=True)
class Schedule:
    """Temperature by iteration: ``max(t0 * factor ** iteration, 0)`` ppm."""

    t0_ppm: float = 100.0
    """Temperature of the first iteration; 0 takes improvements only."""
    factor: float = 0.995
    """Multiplies the temperature after each iteration."""
    iterations: int = 100_000
    """Proposed swaps an expert."""

    @classmethod
    def spread(cls, t0_ppm: float, iterations: int, *, end_ppm: float = 0.05) -> Schedule:
        """A schedule that cools over all its iterations instead of the first two thousand."""
        return cls(t0_ppm, math.exp(math.log(end_ppm / t0_ppm) / iterations), iterations)


PUBLISHED = Schedule()
DESCENT = Schedule(t0_ppm=0.0, factor=1.0)


def anneal(
    activations: torch.Tensor,
    start: torch.Tensor,
    splits: int,
    *,
    schedule: Schedule = PUBLISHED,
    k_drop: int | None = None,
    seed: int = 0,
) -> torch.Tensor:
    """Improve partitions; an expert whose annealed partition is no better keeps its start.

    Args:
        activations: [num_experts, rows, width], zero rows where an expert kept fewer tokens. CUDA tensors run on the
        GPU. start: [num_experts, width] int64 orders. splits: N; divides width. k_drop: as in
        :func:`drop_coefficients`. seed: of the proposals and acceptances; expert e's stream depends on (seed, e)
        alone.
    Returns:
        [num_experts, width] int64 orders, canonical.
    Raises:
        RefactorError: width is not a multiple of ``splits``.
        MissingDependency: numba (CPU) or triton (GPU) is not installed.
    """
    width = activations.shape[2]
    if width % splits:
        raise RefactorError(f"width {width} is not a multiple of {splits} splits")
    coefficients = drop_coefficients(splits, k_drop)
    # columns[e, c] are the absolute activations of neuron c, so a swap reads two contiguous rows
    columns = activations.abs().transpose(1, 2).contiguous()
    total = columns.sum(dim=(1, 2), dtype=torch.float32).double()
    unit = torch.where(total > 0, 1e6 / total.clamp_min(1e-300), torch.zeros_like(total)).float()
    masses = group_masses(activations, start, splits).transpose(1, 2).contiguous()
    run = _on_gpu if activations.is_cuda else _on_cpu
    found = run(columns, masses, start, unit, coefficients, k_drop is None, schedule, seed)
    before = partition_loss(group_masses(activations, start, splits), k_drop).cpu()
    after = partition_loss(group_masses(activations, found, splits), k_drop).cpu()
    return canonical(torch.where((after < before)[:, None], found.cpu(), start.cpu()), splits)


def _on_cpu(
    columns: torch.Tensor,
    masses: torch.Tensor,
    start: torch.Tensor,
    unit: torch.Tensor,
    coefficients: torch.Tensor,
    pairwise: bool,
    schedule: Schedule,
    seed: int,
) -> torch.Tensor:
    try:
        from simmoe.live.refactor.anneal_cpu import anneal_experts
    except ImportError as error:
        raise MissingDependency("annealing on a CPU needs numba; pip install 'simmoe[refactor]'") from error
    order = start.clone().contiguous().numpy()
    threads = torch.get_num_threads()
    anneal_experts(
        columns.float().numpy(), masses.numpy(), order, unit.numpy(), coefficients.float().numpy(), pairwise,
        schedule.iterations, schedule.t0_ppm, schedule.factor, seed,
    )  # fmt: skip
    torch.set_num_threads(threads)  # numba leaves the process's OpenMP, which torch runs on, at a count of its own
    return torch.from_numpy(order)


def _on_gpu(
    columns: torch.Tensor,
    masses: torch.Tensor,
    start: torch.Tensor,
    unit: torch.Tensor,
    coefficients: torch.Tensor,
    pairwise: bool,
    schedule: Schedule,
    seed: int,
) -> torch.Tensor:
    try:
        from simmoe.live.refactor.anneal_gpu import anneal_experts
    except ImportError as error:
        raise MissingDependency("annealing on a GPU needs triton, which torch's CUDA builds bring") from error
    order = start.to(torch.int32).to(columns.device).contiguous()
    anneal_experts(
        columns, masses, order, unit, coefficients.float().to(columns.device), pairwise,
        schedule.iterations, schedule.t0_ppm, schedule.factor, seed,
    )  # fmt: skip
    return order.long()
