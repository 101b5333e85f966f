"""Holding a real device: it waits at least as long as asked, and what is launched meanwhile runs without a gap."""

from __future__ import annotations

import time
from importlib.util import find_spec

import pytest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(find_spec("torch") is None, reason="torch is not installed"),
]

LAUNCHES = 300


def test_a_held_device_waits_and_then_runs_all_that_was_launched() -> None:
    import torch

    from simmoe.live.measure.device_hold import MARGIN, cuda_hold

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    hold = cuda_hold()
    x = torch.zeros(1 << 20, device="cuda")

    def seconds(hold_s: float) -> tuple[float, float, float]:
        """Return the seconds held, of the kernels, and of their launches."""
        torch.cuda.synchronize()
        before, start, end = (torch.cuda.Event(enable_timing=True) for _ in range(3))
        before.record()
        hold(hold_s)
        start.record()
        began_s = time.perf_counter()
        for _ in range(LAUNCHES):
            x.add_(1.0)
            sum(range(1000))  # a host that is slow to launch
        launched_s = time.perf_counter() - began_s
        end.record()
        torch.cuda.synchronize()
        return before.elapsed_time(start) / 1e3, start.elapsed_time(end) / 1e3, launched_s

    seconds(0.02)
    for hold_s in (0.005, 0.02, 0.05):
        held_s, kernels_s, launched_s = seconds(hold_s)
        # the clock does not rise above what was read by more than the margin, nor fall to less than half of it
        assert hold_s <= held_s <= 2 * MARGIN * hold_s
        if launched_s < hold_s:
            # a launch takes the host 20 microseconds so, an addition within 4 MB the device a few
            assert kernels_s < launched_s
