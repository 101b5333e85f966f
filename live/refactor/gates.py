"""Gate reconstruction: the complex gate's neurons and allocation vectors; the linear gate's rows.

The complex gate (CG, training-free) keeps the original router over the original experts and, inside each selected
expert j, takes the ``kappa_j`` sub-experts whose ``r`` gate neurons are most active on average. One vector
``(kappa_1..kappa_m)``, by the rank of the expert's router weight, serves each budget k. The linear gate (LG) repeats
each gate row N times and lets the stock router score sub-experts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from simmoe.errors import RefactorError
from simmoe.live.refactor.profiler import LayerProfile

#: Share of a token's neurons that count as active (k_a / C in section III-B2).
ACTIVE_FRACTION = 0.75

ALLOCATIONS = ("front-loaded", "proportional", "marginal", "energy")

#: down_proj [hidden, width] of (decoder layer, expert).
DownProj = Callable[[int, int], torch.Tensor]


def co_activation_scores(activations: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    """Each neuron's co-activations with the other neurons of its group.

    With B the binary matrix of each token's ``k_a`` largest absolute activations, this is the row sum of ``B^T B``
    over the group without its diagonal, computed without forming the matrix.

    Args:
        activations: [rows, width] of one expert, every row a token.
        group: [size] int64 neurons of one sub-expert.
    Returns:
        [size] float64 counts.
    """
    active_count = max(1, round(ACTIVE_FRACTION * activations.shape[1]))
    active = torch.zeros(activations.shape, dtype=torch.float64, device=activations.device)
    active.scatter_(1, activations.float().abs().topk(active_count, dim=1).indices, 1.0)
    inside = active[:, group.to(active.device)]
    return inside.T @ inside.sum(dim=1) - inside.sum(dim=0)


def choose_gate_neurons(profile: LayerProfile, order: torch.Tensor, splits: int, per_group: int) -> torch.Tensor:
    """The ``r`` gate neurons of every sub-expert of a layer.

    Args:
        profile: the layer's activations.
        order: [num_experts, width] partitions.
        per_group: r; at most width / N.
    Returns:
        [num_experts, N, r] int64 neurons of the original expert; ties go to the lower neuron, an expert without tokens
        takes the first r of each group.
    Raises:
        RefactorError: r outside 1..width / N.
    """
    num_experts, width = order.shape
    check_gate_neurons(per_group, width // splits)
    chosen = torch.empty(num_experts, splits, per_group, dtype=torch.int64)
    for expert in range(num_experts):
        rows = profile.activations[expert, : int(profile.kept[expert])]
        for n, group in enumerate(order[expert].view(splits, -1)):
            scores = co_activation_scores(rows, group)
            best = scores.argsort(descending=True, stable=True)[:per_group].cpu()
            chosen[expert, n] = group[best].sort().values
    return chosen


def check_gate_neurons(per_group: int, sub_expert_width: int) -> None:
    """Raise ``RefactorError`` unless a sub-expert has ``per_group`` neurons to choose, one at the least."""
    if not 1 <= per_group <= sub_expert_width:
        raise RefactorError(
            f"--gate-neurons {per_group}: must be between 1 and the sub-expert width {sub_expert_width}"
        )


@dataclass(frozen=True)
class Calibration:
    """What allocation needs to know of the calibrated layers, averaged over MoE layers of equal say."""

    weight_by_rank: torch.Tensor
    """[m] float64 mean router weight by rank."""
    marginal_mass: torch.Tensor
    """[m, N] float64: mean router-weighted activation mass that the n-th sub-expert chosen by the proxy adds at rank j,
    as a share of the layer's whole."""
    marginal_energy: torch.Tensor
    """[m, N] float64: likewise, of its output's squared norm under the squared router weight."""


def calibrate(
    profiles: Sequence[LayerProfile],
    orders: Sequence[torch.Tensor],
    gate_neurons: Sequence[torch.Tensor],
    splits: int,
    top_k: int,
    down_proj: DownProj,
) -> Calibration:
    """Measure weights, and mass and energy in the proxy's order, by rank on the profiled tokens.

    Args:
        profiles, orders, gate_neurons: one a MoE layer.
        top_k: m, the experts the router selects natively.
        down_proj: the original experts' output weights.
    """
    weight = torch.zeros(top_k, dtype=torch.float64)
    marginal = torch.zeros(top_k, splits, dtype=torch.float64)
    marginal_energy = torch.zeros(top_k, splits, dtype=torch.float64)
    for profile, order, neurons in zip(profiles, orders, gate_neurons, strict=True):
        layer_weight = torch.zeros(top_k, dtype=torch.float64)
        layer_count = torch.zeros(top_k, dtype=torch.float64)
        layer_mass = torch.zeros(top_k, splits, dtype=torch.float64)
        layer_energy = torch.zeros(top_k, splits, dtype=torch.float64)
        # reservoirs hold as many tokens of rare experts as of frequent ones: each row counts for those it stands for
        for expert in range(order.shape[0]):
            kept = int(profile.kept[expert])
            if not kept:
                continue
            stands_for = float(profile.seen[expert]) / kept
            magnitude = profile.activations[expert, :kept].double().abs().cpu()
            masses = magnitude[:, order[expert]].unflatten(1, (splits, -1)).sum(dim=2)
            proxy = magnitude[:, neurons[expert].flatten()].unflatten(1, (splits, -1)).mean(dim=2)
            best = proxy.argsort(dim=1, descending=True, stable=True)
            energies = _output_energies(
                profile.activations[expert, :kept], order[expert], down_proj(profile.layer, expert), splits
            )
            ranks, weights = profile.ranks[expert, :kept], profile.weights[expert, :kept].double()
            layer_weight.index_add_(0, ranks, weights * stands_for)
            layer_count.index_add_(0, ranks, torch.full_like(weights, stands_for))
            layer_mass.index_add_(0, ranks, masses.gather(1, best) * weights[:, None] * stands_for)
            layer_energy.index_add_(0, ranks, energies.gather(1, best) * weights[:, None] ** 2 * stands_for)
        weight += layer_weight / layer_count.clamp_min(1)
        marginal += layer_mass / layer_mass.sum().clamp_min(1e-300)
        marginal_energy += layer_energy / layer_energy.sum().clamp_min(1e-300)
    return Calibration(weight / len(profiles), marginal / len(profiles), marginal_energy / len(profiles))


def _output_energies(activations: torch.Tensor, order: torch.Tensor, down: torch.Tensor, splits: int) -> torch.Tensor:
    """[rows, N] float64 squared norm of each sub-expert's output.

    Args:
        activations: [rows, width]; order: [width]; down: [hidden, width].
    """
    device = activations.device
    placed = activations.float()[:, order.to(device)].unflatten(1, (splits, -1)).transpose(0, 1)
    columns = down.to(device).float()[:, order.to(device)].T.unflatten(0, (splits, -1))
    return torch.bmm(placed, columns).square().sum(dim=2).T.double().cpu()


def allocation_table(kind: str, splits: int, top_k: int, calibration: Calibration) -> list[list[int]]:
    """The vector kappa of every budget.

    ``front-loaded`` fills whole experts by rank; ``proportional`` shares k out by the calibrated router weight (largest
    remainder, at most N each); ``marginal`` gives each further sub-expert to the rank where it adds the most
    calibrated mass; ``energy`` where it adds the most calibrated output energy, the squared error that leaving it out
    costs if outputs of sub-experts do not correlate.

    Returns:
        [m * N][m]: entry k - 1 sums to k, each value in 0..N.
    Raises:
        RefactorError: an unknown kind.
    """
    if kind not in ALLOCATIONS:
        raise RefactorError(f"allocation {kind!r} is none of {', '.join(ALLOCATIONS)}")
    budgets = range(1, top_k * splits + 1)
    if kind == "front-loaded":
        return [[min(splits, max(0, k - splits * j)) for j in range(top_k)] for k in budgets]
    if kind == "proportional":
        return [_share_out(k, calibration.weight_by_rank, splits) for k in budgets]
    gain = calibration.marginal_energy if kind == "energy" else calibration.marginal_mass
    kappa = [0] * top_k
    table = []
    for _ in budgets:
        gains = [float(gain[j, kappa[j]]) if kappa[j] < splits else -1.0 for j in range(top_k)]
        kappa[max(range(top_k), key=lambda j: (gains[j], -j))] += 1
        table.append(list(kappa))
    return table


def _share_out(k: int, weights: torch.Tensor, splits: int) -> list[int]:
    """k units in proportion to ``weights``, at most ``splits`` each; largest remainders first, then the lower rank."""
    free = list(range(len(weights)))
    share = [0.0] * len(weights)
    left = float(k)
    while free:  # what exceeds a cap is shared out among the rest
        total = sum(float(weights[j]) for j in free) or 1.0
        over = [j for j in free if left * float(weights[j]) / total >= splits]
        if not over:
            for j in free:
                share[j] = left * float(weights[j]) / total
            break
        for j in over:
            share[j] = float(splits)
        left -= splits * len(over)
        free = [j for j in free if j not in over]
    kappa = [int(value) for value in share]
    by_remainder = sorted(range(len(share)), key=lambda j: (kappa[j] - share[j], j))
    while sum(kappa) < k:
        for j in by_remainder:
            if sum(kappa) < k and kappa[j] < splits:
                kappa[j] += 1
    return kappa
