"""The simulator's scheduler beside a live one: told of the same arrivals, asked at the same times."""

from __future__ import annotations

from typing import Any

import numpy as np

from simmoe.policies.asking import Asker
from simmoe.policies.protocols import PolicyContext
from simmoe.policies.registry import parse_policy
from simmoe.policies.views import RequestView
from simmoe.profiles.catalog import DEFAULT_PROFILE, load_profile
from simmoe.simulator.config import EngineConfig
from simmoe.simulator.request import SimRequest
from simmoe.simulator.result import RankTotals
from simmoe.simulator.scheduler import Scheduler

K_MAX = 8
"""Of the tiny model."""


class Twin:
    """One rank under one policy."""

    def __init__(self, policy: str, config: EngineConfig, prefix_block_tokens: int = 512) -> None:
        cost = load_profile(DEFAULT_PROFILE).cost(config.async_scheduling)
        context = PolicyContext(
            cost.prefill_s, 1, K_MAX, 1, config.max_num_seqs, config.max_num_batched_tokens,
            config.enable_chunked_prefill,
        )  # fmt: skip
        self.totals = RankTotals()
        batch = parse_policy(policy).batch(context)
        self.scheduler = Scheduler(0, config, K_MAX, batch, cost, Asker(context), prefix_block_tokens, self.totals)
        self._num_requests = 0

    def add(self, view: RequestView, output_tokens: int, prefix_hashes: tuple[int, ...] = ()) -> None:
        """Queue a request."""
        self.scheduler.add(SimRequest(self._num_requests, view, output_tokens, view.k_qos, 0, prefix_hashes))
        self._num_requests += 1


def live_step(scheduler: Any, output: Any) -> dict[str, Any]:
    """Return what vLLM decided, from its own output.

    vLLM queues a preempted request even if its last token is on its way, and drops it when that is in; the simulator
    never queues it.
    """
    ks = scheduler.request_ks
    waiting = sum(r.num_output_tokens + min(r.num_stale_output_tokens, 1) < r.max_tokens for r in scheduler.waiting)
    return {
        "tokens": sum(output.num_scheduled_tokens.values()),
        "qos_slots": sum(ks[name] * count for name, count in output.num_scheduled_tokens.items()),
        "k_exec": output.simmoe_k,
        "running": len(scheduler.running),
        "k_running": scheduler.k_running,
        "waiting": waiting,
        "free_blocks": scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
        "num_plans": scheduler.num_plans,
    }


def sim_step(twin: Twin, step: Any) -> dict[str, Any]:
    """Return what the simulator decided, likewise."""
    return {
        "tokens": step.num_prefill_tokens + step.num_decode_seqs,
        "qos_slots": step.qos_slots,
        "k_exec": step.k_exec,
        "running": step.num_running,
        "k_running": twin.scheduler.k_running,
        "waiting": step.num_waiting,
        "free_blocks": twin.scheduler.pool.num_free_blocks,
        "num_plans": twin.totals.num_plans,
    }


def run_beside(
    scheduler: Any, twin: Twin, pipeline: Any, left: list[Any], rng: np.random.Generator, is_async: bool
) -> None:
    """Run both to the end on the same requests, each step and the number of preemptions held equal.

    Args:
        scheduler: vLLM's, hosting the policy.
        twin: the simulator's.
        pipeline: that runs the scheduler's steps.
        left: requests by arrival; emptied.
        rng: draws the steps' durations.
        is_async: whether a step is composed while the one before it runs.
    """
    plans_before, index = scheduler.num_plans, 0
    composed: list[int | None] = []
    now_s = 0.0
    scheduler.clock = lambda: now_s
    preempted = 0
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
            preempted += len(output.preempted_req_ids or ())
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
    assert preempted == twin.totals.num_preemptions
