"""One policy, two hosts: vLLM's own scheduler classes and the simulator's decide the same, step by step."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simmoe.live.engine.decisions import Recording
from simmoe.policies.registry import parse_policy
from simmoe.profiles.catalog import DEFAULT_PROFILE, load_profile
from simmoe.simulator.config import EngineConfig
from tests.live.twin import K_MAX, Twin, run_beside

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: pip install 'simmoe[live-cpu]'"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own, at import
]

POLICIES = ("fifo", "tiers", "tiers,max_wait_s=2,count_running=true", "fixed-k,k=5", "{}/contrary.py:Contrary")
NUM_BLOCKS = 64

CONTRARY = """
from simmoe.policies.protocols import StepPlan

class Contrary:
    def queue_key(self, request, /):
        return -request.k_qos

    def plan(self, view, /):
        names = [request.request_id for request in view.waiting]
        computed = sum(request.num_computed_tokens + request.prompt_tokens for request in view.running) + len(names)
        if computed % 3 == 0:
            return StepPlan(order=names[::-1][:2], wake_at_s=view.now_s + 0.3)
        if computed % 3 == 1:
            return StepPlan(k_max=view.k_running - 1 if view.k_running else 0)
        return StepPlan(order=names[1:2], k_max=view.free_kv_blocks % 8)
"""
"""A user's file that answers in every way there is, by everything a view shows."""


@pytest.mark.parametrize("kind", ["sync", "async", "whole prompts"])
@pytest.mark.parametrize("policy", POLICIES)
def test_every_step_is_the_simulators(tmp_path: Path, policy: str, kind: str) -> None:
    """Random arrivals on an engine so small that tokens, seats and blocks all bind and requests are preempted.

    With whole prompts there are blocks for all: vLLM would wait for ever to compute again what no longer fits a step,
    and the simulator computes it in chunks.
    """
    from tests.live.schedulers import BLOCK_SIZE, Pipeline, make_request, make_scheduler

    (tmp_path / "contrary.py").write_text(CONTRARY)
    path = tmp_path / "decisions.jsonl"
    policy = policy.format(tmp_path)
    is_async, chunked = kind == "async", kind != "whole prompts"
    limits: dict[str, Any] = {"max_num_batched_tokens": 64 if chunked else 450, "max_num_seqs": 6}
    limits["enable_chunked_prefill"] = chunked
    num_blocks = NUM_BLOCKS if chunked else 6 * 450 // BLOCK_SIZE + 8
    config = EngineConfig(block_size=BLOCK_SIZE, num_gpu_blocks=num_blocks, async_scheduling=is_async, **limits)
    scheduler = make_scheduler(
        tmp_path, num_blocks, scheduler_cls=f"simmoe.live.engine.policy_host.{'Async' * is_async}PolicyScheduler",
        max_model_len=450, **limits,
        additional_config={"simmoe_policy": {"policy": policy, "profile": DEFAULT_PROFILE, "decisions": str(path)}},
    )  # fmt: skip
    scheduler.views.wall_offset_s = 0.0
    preemptions = 0
    for seed in range(3):
        rng = np.random.default_rng(seed)
        twin = Twin(policy, config)
        opened = scheduler.waiting.gates_opened
        arrivals = np.cumsum(rng.exponential(0.7, 40))
        requests = []
        for i, t in enumerate(arrivals):
            prompt, output = rng.integers(1, 200, 2).tolist()
            requests.append(make_request(f"{i:03d}", prompt, output, int(rng.integers(1, K_MAX + 1)), float(t)))
        run_beside(scheduler, twin, Pipeline(scheduler), requests, rng, is_async)
        preemptions += twin.totals.num_preemptions
        assert scheduler.waiting.gates_opened - opened == twin.scheduler.gates_opened
    assert (preemptions > 10) == chunked
    assert (scheduler.waiting.gates_opened > 0) == ("contrary" in policy)

    # and the recording of it all, asked again
    scheduler.shutdown()
    recording = Recording(path)
    context = recording.context(load_profile(recording.profile).cost(recording.async_scheduling).prefill_s)
    assert recording.replay(parse_policy(policy).batch(context)) == scheduler.num_plans
