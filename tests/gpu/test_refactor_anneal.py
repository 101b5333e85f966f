"""The annealing kernel on a GPU: as good as the CPU's loop, and fast enough."""

from __future__ import annotations

import time

import pytest

torch = pytest.importorskip("torch", reason="annealing needs torch; run make test-live")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

from simmoe.live.refactor.anneal import PUBLISHED, Schedule, anneal  # noqa: E402
from simmoe.live.refactor.partition import greedy, group_masses, partition_loss  # noqa: E402


@pytest.mark.parametrize("k_drop", [None, 1, 2, 3])
def test_gpu_and_cpu_end_equally_low(k_drop: int | None) -> None:
    """Sums are added in another order, so near-ties may fall otherwise; the loss they end at may not."""
    pytest.importorskip("numba", reason="the CPU twin needs numba")
    activations = torch.randn(4, 200, 32, generator=torch.Generator().manual_seed(0)) ** 3
    start = greedy(activations, 4)
    ends = []
    for device in ("cuda", "cpu"):
        found = anneal(
            activations.to(device), start, 4, schedule=Schedule(iterations=5000), k_drop=k_drop, seed=1
        ).cpu()
        assert torch.equal(found.sort(dim=1).values, torch.arange(32).expand(4, -1))
        ends.append(partition_loss(group_masses(activations, found, 4), k_drop))
    assert torch.allclose(ends[0], ends[1], rtol=0.01)


@pytest.mark.slow
def test_a_thousand_experts_of_olmoe_in_a_minute() -> None:
    """1,024 experts of width 1,024 with 2,048 tokens each; the target is an H200's."""
    activations = torch.randn(1024, 2048, 1024, device="cuda", dtype=torch.bfloat16)
    anneal(activations[:2], greedy(activations[:2], 4), 4, schedule=Schedule(iterations=10))
    began = time.monotonic()
    start = greedy(activations, 4)
    found = anneal(activations, start, 4, schedule=PUBLISHED)
    torch.cuda.synchronize()
    assert time.monotonic() - began < 60
    masses = [group_masses(activations[:8], order[:8], 4) for order in (start, found)]
    assert bool((partition_loss(masses[1]) < partition_loss(masses[0])).all())
