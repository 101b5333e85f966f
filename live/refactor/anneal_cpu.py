"""The annealing loop on CPU threads: one expert a thread, compiled by numba.

Proposals come from the same counter-based hash as the GPU kernel's, so both walk the same proposals.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, prange

_GOLDEN = np.uint32(0x9E3779B9)


@njit(inline="always")
def _mix(x: Any) -> Any:
    """A 32-bit finaliser (lowbias32): every input bit reaches every output bit."""
    x = np.uint32(x)
    x ^= x >> np.uint32(16)
    x = np.uint32(x * np.uint32(0x7FEB352D))
    x ^= x >> np.uint32(15)
    x = np.uint32(x * np.uint32(0x846CA68B))
    x ^= x >> np.uint32(16)
    return x


@njit(inline="always")
def _least(x: Any, y: Any) -> Any:
    return x if x < y else y


@njit(fastmath=True)
def _pairwise_change(gain: Any, loss: Any, masses: Any, a: int, b: int) -> Any:
    """Change of sum over pairs of min(L_i, L_j), summed over tokens; only pairs with group a or b move.

    One plain loop a pair of groups, so that each becomes vector instructions.
    """
    of_a, of_b = masses[a], masses[b]
    change = np.float32(0.0)
    for t in range(of_a.shape[0]):
        shift = gain[t] - loss[t]
        change += _least(of_a[t] + shift, of_b[t] - shift) - _least(of_a[t], of_b[t])
    for g in range(masses.shape[0]):
        if g != a and g != b:
            other = masses[g]
            for t in range(of_a.shape[0]):
                shift = gain[t] - loss[t]
                change += _least(of_a[t] + shift, other[t]) - _least(of_a[t], other[t])
                change += _least(of_b[t] - shift, other[t]) - _least(of_b[t], other[t])
    return change


@njit(fastmath=True)
def _ranked_change(columns: Any, masses: Any, i: int, j: int, a: int, b: int, splits: int, coefficients: Any) -> Any:
    """Change of sum over groups of coefficient[rank of L] * L, summed over tokens."""
    change = np.float32(0.0)
    row = np.empty(splits, dtype=np.float32)
    for t in range(masses.shape[1]):
        shift = columns[j, t] - columns[i, t]
        for moved in range(2):
            for g in range(splits):
                row[g] = masses[g, t]
            if moved:
                row[a] += shift
                row[b] -= shift
            for g in range(1, splits):  # insertion sort: splits is small
                value, at = row[g], g
                while at > 0 and row[at - 1] > value:
                    row[at] = row[at - 1]
                    at -= 1
                row[at] = value
            for g in range(splits):
                change += coefficients[g] * row[g] if moved else -coefficients[g] * row[g]
    return change


@njit(parallel=True, cache=True)
def anneal_experts(
    columns: Any, masses: Any, order: Any, unit: Any, coefficients: Any, pairwise: bool,
    iterations: int, t0_ppm: float, factor: float, seed: int,
) -> None:  # fmt: skip
    """Anneal in place.

    Args:
        columns: [num_experts, width, rows] float32 absolute activations.
        masses: [num_experts, N, rows] float32 group masses, kept up to date.
        order: [num_experts, width] int64, changed in place.
        unit: [num_experts] float32, ppm of total mass in one unit of mass.
        coefficients: [N] float32, by rank; ``pairwise`` says they are those of the average over K_drop.
    """
    num_experts, width, _ = columns.shape
    splits = masses.shape[1]
    room = width // splits
    for e in prange(num_experts):
        temperature = t0_ppm
        stream = _mix(np.uint32(seed) ^ _mix(np.uint32(e) + _GOLDEN))
        scale = unit[e] / np.float32(splits - 1) if pairwise else unit[e]
        for iteration in range(iterations):
            base = _mix(stream + np.uint32(iteration) * _GOLDEN)
            a = np.int64(_mix(base + np.uint32(1)) % np.uint32(splits))
            b = (a + 1 + np.int64(_mix(base + np.uint32(2)) % np.uint32(splits - 1))) % splits
            at_a = a * room + np.int64(_mix(base + np.uint32(3)) % np.uint32(room))
            at_b = b * room + np.int64(_mix(base + np.uint32(4)) % np.uint32(room))
            i, j = order[e, at_a], order[e, at_b]
            if pairwise:
                change = _pairwise_change(columns[e, j], columns[e, i], masses[e], a, b) * scale
            else:
                change = _ranked_change(columns[e], masses[e], i, j, a, b, splits, coefficients) * scale
            accept = change < 0.0
            if not accept and temperature > 0.0:
                draw = np.float32(_mix(base + np.uint32(5)) >> np.uint32(8)) * np.float32(1.0 / 16777216.0)
                accept = draw < np.exp(-change / temperature)
            if accept:
                order[e, at_a], order[e, at_b] = j, i
                for t in range(columns.shape[2]):
                    shift = columns[e, j, t] - columns[e, i, t]
                    masses[e, a, t] += shift
                    masses[e, b, t] -= shift
            temperature *= factor
