"""Time the partition solver at OLMoE-1B-7B's size: ``python -m simmoe.live.training.solver_time OUT.json``.

16 layers of 64 experts of width 1,024, 2,048 tokens each, one layer after another, as ``simmoe refactor`` solves them,
under the published schedule, on a GPU if there is one.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from simmoe.live.refactor.anneal import PUBLISHED, Schedule, anneal
from simmoe.live.refactor.partition import greedy, group_masses, partition_loss

SHAPE = (16, 64, 2048, 1024)


def activations(layer: int, experts: int, tokens: int, width: int, device: str) -> torch.Tensor:
    """[experts, tokens, width] bf16, heavy-tailed, with shuffled groups of eight neurons that fire together."""
    generator = torch.Generator(device).manual_seed(layer)
    found = torch.empty(experts, tokens, width, dtype=torch.bfloat16, device=device)
    for expert in found:
        shared = torch.randn(tokens, width // 8, device=device, generator=generator).repeat_interleave(8, dim=1)
        sign = torch.randn(tokens, width, device=device, generator=generator).sign() * shared.sign()
        expert.copy_(sign * shared.abs() ** 1.5)
    return found[:, :, torch.randperm(width, device=device, generator=generator)]


class _Clock:
    """Sums wall and processor seconds of what it calls."""

    def __init__(self) -> None:
        self.wall_s = self.processor_s = 0.0

    def __call__(self, job: Callable[[], torch.Tensor]) -> torch.Tensor:
        wall, processor = time.monotonic(), time.process_time()
        result = job()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.wall_s += time.monotonic() - wall
        self.processor_s += time.process_time() - processor
        return result


def measure(shape: tuple[int, int, int, int] = SHAPE, schedule: Schedule = PUBLISHED) -> dict[str, Any]:
    """Solve ``shape`` = (layers, experts, tokens, width); times, losses and the machine's load."""
    layers, experts, tokens, width = shape
    device = "cuda" if torch.cuda.is_available() else "cpu"
    starting, annealing = _Clock(), _Clock()
    losses, load = [], []
    for layer in range(layers):
        rows = activations(layer, experts, tokens, width, device)
        if not layer:  # compile
            anneal(rows[:2], greedy(rows[:2], 4), 4, schedule=Schedule(iterations=10))
        start = starting(partial(greedy, rows, 4))
        found = annealing(partial(anneal, rows, start, 4, schedule=schedule))
        losses.append([float(partition_loss(group_masses(rows[:4], o[:4], 4)).mean()) for o in (start, found)])
        load.append(round(os.getloadavg()[0], 1))
    means = torch.tensor(losses).mean(dim=0).tolist()
    return {
        "shape": shape, "iterations": schedule.iterations,
        "device": torch.cuda.get_device_name() if device == "cuda" else f"{torch.get_num_threads()} threads",
        "greedy_s": round(starting.wall_s, 1), "greedy_cpu_s": round(starting.processor_s, 1),
        "anneal_s": round(annealing.wall_s, 1), "anneal_cpu_s": round(annealing.processor_s, 1),
        "load_average": load, "loss_greedy": means[0], "loss_annealed": means[1],
    }  # fmt: skip


if __name__ == "__main__":
    row = measure()
    print(json.dumps(row))
    Path(sys.argv[1]).write_text(json.dumps(row) + "\n")
