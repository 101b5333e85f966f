"""Partitions of an expert's neurons into equal groups: the objective of Eq. 4, and the simple partitions.

A partition is stored as ``order``, a permutation of the neurons whose n-th block of width / N entries is sub-expert n,
ascending inside the block.

**The loss.** With ``L[b, n]`` the L1 activation mass of token b in group n, Eq. 4 sums the ``K_drop`` smallest masses
of each token. Averaged over ``K_drop`` = 1..N-1 that sum is ``sum over pairs i < j of min(L_i, L_j) / (N - 1)``: the
r-th smallest mass (r = 1..N) is dropped at N - r of the N - 1 values, and is the smaller one of N - r pairs. Losses
here are divided by the expert's total activation mass, so a loss is the share of mass that is dropped, between 0 and
1, and means the same for every expert.
"""

from __future__ import annotations

import torch

from simmoe.errors import RefactorError


def drop_coefficients(splits: int, k_drop: int | None) -> torch.Tensor:
    """[N] float64: weight of the r-th smallest group mass in the loss.

    Args:
        k_drop: sub-experts dropped, 1..N-1; None averages over all of them.
    Raises:
        RefactorError: ``k_drop`` outside that range.
    """
    rank = torch.arange(splits, dtype=torch.float64)
    if k_drop is None:
        return (splits - 1 - rank) / (splits - 1)
    if not 1 <= k_drop < splits:
        raise RefactorError(f"--k-drop {k_drop}: must be between 1 and {splits - 1} for --splits {splits}")
    return (rank < k_drop).double()


def group_masses(activations: torch.Tensor, order: torch.Tensor, splits: int) -> torch.Tensor:
    """L1 mass of each group for each token.

    Args:
        activations: [..., rows, width].
        order: [..., width] int64 permutation(s) of the neurons.
    Returns:
        [..., rows, splits] float32.
    """
    index = order[..., None, :].expand(activations.shape).to(activations.device)
    placed = activations.float().abs().gather(-1, index)
    return placed.unflatten(-1, (splits, -1)).sum(dim=-1)


def partition_loss(masses: torch.Tensor, k_drop: int | None = None) -> torch.Tensor:
    """Share of activation mass that the partition drops (Eq. 4 over total mass).

    Args:
        masses: [..., rows, N].
    Returns:
        [...] float64; 0 where there is no mass at all.
    """
    ascending = masses.double().sort(dim=-1).values
    coefficients = drop_coefficients(masses.shape[-1], k_drop).to(masses.device)
    dropped = (ascending * coefficients).sum(dim=(-2, -1))
    total = ascending.sum(dim=(-2, -1))
    return torch.where(total > 0, dropped / total.clamp_min(torch.finfo(torch.float64).tiny), torch.zeros_like(total))


def captured_mass(masses: torch.Tensor) -> torch.Tensor:
    """[..., N] share of the mass in each token's ``k_in`` heaviest groups, k_in = 1..N, over all tokens."""
    descending = masses.double().sort(dim=-1, descending=True).values
    total = descending.sum(dim=(-2, -1), keepdim=True).squeeze(-1)
    return descending.sum(dim=-2).cumsum(-1) / total.clamp_min(torch.finfo(torch.float64).tiny)


def contiguous(num_experts: int, width: int) -> torch.Tensor:
    """[num_experts, width]: neurons in stored order."""
    return torch.arange(width).expand(num_experts, width).clone()


def uniform_random(num_experts: int, width: int, splits: int, seed: int) -> torch.Tensor:
    """[num_experts, width]: a uniformly drawn equal partition an expert."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.stack([torch.randperm(width, generator=generator) for _ in range(num_experts)])
    return canonical(order, splits)


def greedy(activations: torch.Tensor, splits: int) -> torch.Tensor:
    """The balanced start of section III-B2: neurons by falling L1 norm, each to the lightest group with room.

    Args:
        activations: [num_experts, rows, width].
    Returns:
        [num_experts, width] int64 orders. Ties go to the lower neuron and the lower group.
    """
    norms = activations.float().abs().sum(dim=1).cpu()
    num_experts, width = norms.shape
    room = width // splits
    falling = norms.argsort(dim=1, descending=True, stable=True)
    load = torch.zeros(num_experts, splits, dtype=torch.float64)
    filled = torch.zeros(num_experts, splits, dtype=torch.int64)
    group_of = torch.empty(num_experts, width, dtype=torch.int64)
    everyone = torch.arange(num_experts)
    for position in range(width):
        neuron = falling[:, position]
        group = load.masked_fill(filled == room, torch.inf).argmin(dim=1)
        group_of[everyone, neuron] = group
        load[everyone, group] += norms[everyone, neuron].double()
        filled[everyone, group] += 1
    return group_of.argsort(dim=1, stable=True)


def canonical(order: torch.Tensor, splits: int) -> torch.Tensor:
    """The same partition with neurons ascending inside each group and groups by their first neuron."""
    groups = order.unflatten(-1, (splits, -1)).sort(dim=-1).values
    first = groups[..., 0].argsort(dim=-1)
    return groups.gather(-2, first[..., None].expand(groups.shape)).flatten(-2)
