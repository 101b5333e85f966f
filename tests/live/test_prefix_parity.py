"""Prefix caching salted by k: vLLM's scheduler and the simulator's find the same, and decide the same, step by step."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simmoe.policies.views import RequestView
from simmoe.simulator.config import EngineConfig
from tests.live.test_policy_parity import live_step, sim_step
from tests.live.twin import Twin

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
        run(scheduler, twin, Pipeline(scheduler), make_request, rng, is_async)
        num_cached += twin.totals.num_cached_tokens
        num_preempted += twin.totals.num_preemptions
    assert num_cached > 1000 and num_preempted > 10


def run(scheduler: Any, twin: Twin, pipeline: Any, make_request: Any, rng: Any, is_async: bool) -> None:
    """Run both to the end on one workload."""
    arrivals = np.cumsum(rng.exponential(0.7, 40))
    left = [
        make_request(
            f"{i:03d}", *map(int, rng.integers(1, 200, 2)), int(rng.choice(BUDGETS)), float(t),
            text=int(rng.integers(NUM_TEXTS)),
        )
        for i, t in enumerate(arrivals)
    ]  # fmt: skip
    composed: list[int | None] = []
    plans_before, index, now_s = scheduler.num_plans, 0, 0.0
    scheduler.clock = lambda: now_s
    for _ in range(20_000):
        if not left and not scheduler.has_requests() and not composed:
            break
        while left and left[0].arrival_time <= now_s:
            request = left.pop(0)
            scheduler.add_request(request)
            k = request.sampling_params.extra_args["simmoe_k"]
            view = RequestView(request.request_id, request.arrival_time, request.num_prompt_tokens, 0, k)
            twin.add(view, request.max_tokens, tuple(request.block_hashes))
        if scheduler.has_requests():
            output = pipeline.schedule()
            step = twin.scheduler.compose(now_s)
            assert (step is None) == (not output.num_scheduled_tokens)
            if step is not None:
                live = live_step(scheduler, output)
                live["num_plans"] -= plans_before
                assert live == sim_step(twin, step), (index, now_s)
                index += 1
            composed.append(None if step is None else step.index)
            if is_async and len(composed) < 2 and (step is not None or scheduler.has_requests()):
                continue
        if composed:
            pipeline.deliver()
            finished = composed.pop(0)
            if finished is not None:
                twin.scheduler.finish(finished)
            twin.scheduler.check_integrity()
        now_s += float(rng.exponential(0.1))
    assert not scheduler.requests and not twin.scheduler.running
