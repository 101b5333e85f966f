"""Prefix caching salted by k: vLLM's scheduler and the simulator's find the same, and decide the same, step by step."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simmoe.simulator.config import EngineConfig
from tests.live.twin import Twin, run_beside

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: pip install 'simmoe[live-cpu]'"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own, at import
]

BUDGETS = (2, 5, 8)
NUM_TEXTS = 4
"""Texts that prompts are prefixes of."""

NUM_BLOCKS = 64


@pytest.mark.parametrize("kind", ["sync", "async"])
@pytest.mark.parametrize("policy", ["fifo", "tiers", "fixed-k,k=5"])
def test_every_step_is_the_simulators_with_shared_prefixes(tmp_path: Path, policy: str, kind: str) -> None:
    """Prompts of a few texts at several budgets, on so few blocks that content is evicted and requests preempted."""
    from tests.live.schedulers import BLOCK_SIZE, Pipeline, make_request, make_scheduler

    is_async = kind == "async"
    limits: dict[str, Any] = {"max_num_batched_tokens": 64, "max_num_seqs": 6, "enable_prefix_caching": True}
    config = EngineConfig(block_size=BLOCK_SIZE, num_gpu_blocks=NUM_BLOCKS, async_scheduling=is_async, **limits)
    scheduler = make_scheduler(
        tmp_path, NUM_BLOCKS, scheduler_cls=f"simmoe.live.engine.policy_host.{'Async' * is_async}PolicyScheduler",
        max_model_len=450, **limits,
        additional_config={"simmoe_policy": {"policy": policy, "profile": "olmoe-1b-7b-split4-h200"}},
    )  # fmt: skip
    scheduler.views.wall_offset_s = 0.0
    num_cached = num_preempted = 0
    for seed in range(3):
        assert scheduler.reset_prefix_cache()
        rng = np.random.default_rng(seed)
        twin = Twin(policy, config, prefix_block_tokens=BLOCK_SIZE)
        arrivals = np.cumsum(rng.exponential(0.7, 40))
        requests = []
        for i, t in enumerate(arrivals):
            prompt, output = rng.integers(1, 200, 2).tolist()
            k, text = int(rng.choice(BUDGETS)), int(rng.integers(NUM_TEXTS))
            requests.append(make_request(f"{i:03d}", prompt, output, k, float(t), text=text))
        run_beside(scheduler, twin, Pipeline(scheduler), requests, rng, is_async)
        num_cached += twin.totals.num_cached_tokens
        num_preempted += twin.totals.num_preemptions
    assert num_cached > 1000 and num_preempted > 10
