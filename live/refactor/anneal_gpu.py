"""The annealing loop as one Triton program an expert: the group masses stay in registers for all iterations.

Proposals come from the same counter-based hash as :mod:`simmoe.live.refactor.anneal_cpu`'s.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def _mix(x):
    x ^= x >> 16
    x *= 0x7FEB352D
    x ^= x >> 15
    x *= 0x846CA68B
    x ^= x >> 16
    return x


@triton.jit
def _loss_by_row(masses, PAIRWISE: tl.constexpr, coefficients, SPLITS: tl.constexpr, LANES: tl.constexpr):
    """[ROWS] loss of each token; masses is [ROWS, LANES], lanes at and above SPLITS hold zero."""
    lane = tl.arange(0, LANES)
    left, right = masses[:, :, None], masses[:, None, :]
    i, j = lane[None, :, None], lane[None, None, :]
    if PAIRWISE:
        pair = tl.where((i < j) & (j < SPLITS), tl.minimum(left, right), 0.0)
        return tl.sum(tl.sum(pair, axis=2), axis=1)
    below = ((right < left) | ((right == left) & (j < i))) & (j < SPLITS)
    rank = tl.sum(below.to(tl.int32), axis=2)
    weight = tl.zeros_like(masses)
    for r in tl.static_range(SPLITS):
        weight += tl.where(rank == r, tl.load(coefficients + r), 0.0)
    return tl.sum(tl.where(lane[None, :] < SPLITS, weight * masses, 0.0), axis=1)


@triton.jit(do_not_specialize=["seed", "rows", "width"])
def _anneal_kernel(
    columns, masses_in, order, unit, coefficients, rows, width, iterations, t0_ppm, factor, seed,
    PAIRWISE: tl.constexpr, SPLITS: tl.constexpr, LANES: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    e = tl.program_id(0)
    lane = tl.arange(0, LANES)
    row = tl.arange(0, ROWS)
    valid = row < rows
    room = width // SPLITS
    columns += e.to(tl.int64) * width * rows
    order += e.to(tl.int64) * width
    masses = tl.load(
        masses_in + (e.to(tl.int64) * SPLITS + lane[None, :]) * rows + row[:, None],
        mask=valid[:, None] & (lane[None, :] < SPLITS), other=0.0,
    )  # fmt: skip
    scale = tl.load(unit + e)
    if PAIRWISE:
        scale = scale / (SPLITS - 1)
    loss = tl.sum(_loss_by_row(masses, PAIRWISE, coefficients, SPLITS, LANES), axis=0) * scale
    stream = _mix(seed.to(tl.uint32) ^ _mix(e.to(tl.uint32) + 0x9E3779B9))
    temperature = t0_ppm
    counter = stream  # stream + iteration * golden ratio, modulo 2^32
    for _ in range(iterations):
        base = _mix(counter)
        counter += 0x9E3779B9
        a = (_mix(base + 1) % SPLITS).to(tl.int32)
        b = (a + 1 + (_mix(base + 2) % (SPLITS - 1)).to(tl.int32)) % SPLITS
        at_a = a * room + (_mix(base + 3) % room.to(tl.uint32)).to(tl.int32)
        at_b = b * room + (_mix(base + 4) % room.to(tl.uint32)).to(tl.int32)
        i = tl.load(order + at_a)
        j = tl.load(order + at_b)
        gain = tl.load(columns + j.to(tl.int64) * rows + row, mask=valid, other=0.0).to(tl.float32)
        loss_of = tl.load(columns + i.to(tl.int64) * rows + row, mask=valid, other=0.0).to(tl.float32)
        sign = (lane == a).to(tl.float32) - (lane == b).to(tl.float32)
        moved = masses + (gain - loss_of)[:, None] * sign[None, :]
        new_loss = tl.sum(_loss_by_row(moved, PAIRWISE, coefficients, SPLITS, LANES), axis=0) * scale
        change = new_loss - loss
        draw = (_mix(base + 5) >> 8).to(tl.float32) * (1.0 / 16777216.0)
        accept = (change < 0.0) | ((temperature > 0.0) & (draw < tl.exp(-change / tl.maximum(temperature, 1e-30))))
        masses = tl.where(accept, moved, masses)
        loss = tl.where(accept, new_loss, loss)
        tl.debug_barrier()  # all threads have read the order before any writes it
        tl.store(order + at_a, j, mask=accept)
        tl.store(order + at_b, i, mask=accept)
        tl.debug_barrier()  # and the writes are seen before the next proposal reads
        temperature *= factor


def anneal_experts(
    columns: torch.Tensor, masses: torch.Tensor, order: torch.Tensor, unit: torch.Tensor, coefficients: torch.Tensor,
    pairwise: bool, iterations: int, t0_ppm: float, factor: float, seed: int,
) -> None:  # fmt: skip
    """Anneal in place.

    Args:
        columns: [num_experts, width, rows] absolute activations, any float dtype.
        masses: [num_experts, N, rows] float32 group masses at the start.
        order: [num_experts, width] int32, changed in place.
        unit: [num_experts] float32; coefficients: [N] float32, as in the CPU twin.
    """
    num_experts, width, rows = columns.shape
    splits = masses.shape[1]
    options: dict[str, Any] = {"num_warps": 8 if rows > 512 else 4}
    _anneal_kernel[(num_experts,)](
        columns, masses, order, unit, coefficients, rows, width, iterations, float(t0_ppm), float(factor), seed,
        PAIRWISE=pairwise, SPLITS=splits, LANES=triton.next_power_of_2(splits), ROWS=triton.next_power_of_2(rows),
        **options,
    )  # fmt: skip
