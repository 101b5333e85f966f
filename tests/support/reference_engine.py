"""vLLM 0.32's scheduler and engine loop read off line by line: lists, no aggregates, no clock tricks. Slow and plain.

One rank, every request's blocks and tokens kept by itself, the policy asked at every composition that has room. The
simulator must agree with it on every time, to the bit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from simmoe.policies.protocols import BatchPolicy
from simmoe.policies.views import RequestView, StepView
from simmoe.profiles.shape import StepCost, StepParts, StepShape
from simmoe.simulator.config import EngineConfig
from simmoe.traces.workload import Workload


@dataclass(eq=False)
class Request:
    row: int
    arrival_s: float
    prompt: int
    output: int
    k: int
    computed: int = 0
    sampled: int = 0  # output tokens scheduled, in flight ones included
    delivered: int = 0
    prefill_end: int = 0  # tokens to compute before the next is sampled
    blocks: int = 0
    preemptions: int = 0
    times: dict[str, float] = field(default_factory=dict)

    def view(self) -> RequestView:
        return RequestView(str(self.row), self.arrival_s, self.prompt + self.sampled, 0, self.k)


@dataclass
class Composed:
    shape: StepShape
    parts: StepParts
    started: list[Request]
    samples: list[Request]
    start_s: float = 0.0
    end_s: float = 0.0


class ReferenceEngine:
    """One rank under vLLM's rules."""

    def __init__(self, config: EngineConfig, policy: BatchPolicy, cost: StepCost, wakeup_s: float = 0.0) -> None:
        self.config = config
        self.wakeup_s = wakeup_s
        self.policy = policy
        self.cost = cost
        self.free = config.num_gpu_blocks - 1
        self.waiting: list[Request] = []
        self.preempted: list[Request] = []
        self.running: list[Request] = []
        self.steps: list[Composed] = []

    def run(self, workload: Workload) -> list[Request]:
        lead = 2 if self.config.async_scheduling else 1
        requests = [
            Request(row, *fields)
            for row, fields in enumerate(
                zip(
                    workload.arrival_s.tolist(),
                    workload.prompt_tokens.tolist(),
                    workload.output_tokens.tolist(),
                    workload.k_qos.tolist(),
                    strict=True,
                )
            )
        ]
        to_come = [request for request in requests if self.accepts(request)]
        now = -math.inf  # idle until somebody comes
        host_free_s = workers_free_s = device_free_s = 0.0
        queue: list[Composed] = []
        while True:
            # vLLM's loop: take in what arrived; compose and launch a step; unless two are under way or nothing is to be
            # computed, go round again, else wait for the oldest and take its output in
            while to_come and to_come[0].arrival_s <= now:  # an arrival at a boundary comes before it
                self.enqueue(to_come.pop(0))
            step = self.compose(now) if len(queue) < lead else None
            if step is None and not queue and (self.waiting or self.preempted):
                step = self.compose(now)
            host_free_s = now
            if step is not None:
                if self.config.distributed_executor_backend == "mp":
                    # sent to workers, who launch it once they have launched the one before; the loop goes on
                    begin_s = max(now, workers_free_s)
                    launched_s = workers_free_s = begin_s + step.parts.launch_s
                else:
                    begin_s = now
                    launched_s = host_free_s = begin_s + step.parts.launch_s
                step.start_s = max(begin_s + step.parts.wait_s, device_free_s)
                step.end_s = device_free_s = max(step.start_s + step.parts.device_s, launched_s)
                for request in step.started:
                    request.times.setdefault("scheduled", step.start_s)
                queue.append(step)
                if len(queue) < lead:
                    now = host_free_s
                    continue
            if not queue:
                if not to_come:
                    return requests
                now = to_come[0].arrival_s + self.wakeup_s  # its process reads it, and its loop goes on
                continue
            step = queue.pop(0)
            now = max(step.end_s, host_free_s) + step.parts.update_s
            self.steps.append(step)
            while to_come and to_come[0].arrival_s <= now:
                self.enqueue(to_come.pop(0))
            self.deliver(step, now)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.config.block_size)

    def accepts(self, request: Request) -> bool:
        usable = self.config.num_gpu_blocks - 1
        too_long = not self.config.enable_chunked_prefill and request.prompt > self.config.max_num_batched_tokens
        return not too_long and self.blocks_for(request.prompt + request.output - 1) <= usable

    def enqueue(self, request: Request) -> None:
        key = getattr(self.policy, "queue_key", None)
        self.waiting.append(request)
        if key is not None:
            self.waiting.sort(key=lambda r: (key(r.view()), r.arrival_s, r.row))

    def deliver(self, step: Composed, now: float) -> None:
        for request in step.samples:
            request.delivered += 1
            request.times.setdefault("first", now)
            if request.delivered == request.output:
                request.times["finished"] = now
                if request in self.running:
                    self.running.remove(request)
                    self.free += request.blocks
                    request.blocks = 0

    def preempt(self, request: Request) -> None:
        self.free += request.blocks
        request.blocks = request.computed = 0
        request.preemptions += 1
        if request.sampled < request.output:
            self.preempted.insert(0, request)

    def compose(self, now: float) -> Composed | None:
        budget = self.config.max_num_batched_tokens
        scheduled: list[tuple[Request, int]] = []
        any_preempted = False
        index = 0
        while index < len(self.running) and budget > 0:
            request = self.running[index]
            if request.sampled >= request.output:  # its last token is on its way
                index += 1
                continue
            new = min(request.prompt + request.sampled - request.computed, budget)
            need = self.blocks_for(request.computed + new) - request.blocks
            fits = True
            while need > self.free:
                any_preempted = True
                victim = self.running.pop()
                self.preempt(victim)
                if victim is request:
                    fits = False
                    break
            if not fits:
                break
            self.free -= need
            request.blocks += need
            budget -= new
            scheduled.append((request, new))
            index += 1
        started: list[Request] = []
        if not any_preempted:
            k_running = max((request.k for request, _ in scheduled), default=0)
            started = self.admit(now, budget, k_running, scheduled)
        if not scheduled:
            return None
        prefill = [(r, n) for r, n in scheduled if r.computed < r.prefill_end]
        decodes = [(r, n) for r, n in scheduled if r.computed >= r.prefill_end]
        k_exec = max(max(r.k for r, _ in scheduled), int(getattr(self.policy, "k_floor", 0)))
        rounding = self.config.captured_ks if self.config.uncaptured_k == "next" else ()
        shape = StepShape(
            sum(n for _, n in prefill),
            sum(n * r.computed + n * (n + 1) // 2 for r, n in prefill),
            len(prefill),
            len(decodes),
            sum(r.computed + 1 for r, _ in decodes),
            min((k for k in rounding if k >= k_exec), default=k_exec),
        )
        samples = []
        for request, new in scheduled:
            request.computed += new
            if request.computed == request.prompt + request.sampled:
                request.sampled += 1
                samples.append(request)
        return Composed(shape, self.cost.parts_s(shape), started, samples)

    def admit(self, now: float, budget: int, k_running: int, scheduled: list[tuple[Request, int]]) -> list[Request]:
        queue = self.preempted + self.waiting
        started: list[Request] = []
        if not queue or not budget or len(self.running) >= self.config.max_num_seqs:
            return started
        views = [request.view() for request in queue]
        view = StepView(
            now_s=now,
            dp_rank=0,
            waiting=views,
            running=[],
            token_budget=budget,
            max_num_seqs=self.config.max_num_seqs,
            free_kv_blocks=self.free,
            block_size=self.config.block_size,
            k_running=k_running,
            oldest=min(queue, key=lambda r: (r.arrival_s, r.row)).view(),
            num_preempted=len(self.preempted),
        )
        plan = self.policy.plan(view)
        candidates = queue
        if plan.order is not None:
            by_id = {str(request.row): request for request in queue}
            candidates = [by_id[request_id] for request_id in plan.order]
        for gate in (plan.k_max, None):
            for request in candidates:
                if gate is not None and request.k > gate:
                    break
                if len(self.running) >= self.config.max_num_seqs or budget <= 0:
                    break
                total = request.prompt + request.sampled
                if not self.config.enable_chunked_prefill and total > budget and not request.preemptions:
                    break
                watermark = int(self.config.watermark * self.config.num_gpu_blocks) if self.running else 0
                if self.blocks_for(total) + watermark > self.free:
                    break
                new = min(total, budget)
                request.prefill_end = total
                request.blocks = self.blocks_for(new)
                self.free -= request.blocks
                (self.preempted if request in self.preempted else self.waiting).remove(request)
                self.running.append(request)
                budget -= new
                started.append(request)
                scheduled.append((request, new))
            if started or self.running:
                break
            candidates = self.preempted + self.waiting
        return started


def fates(requests: list[Request]) -> dict[str, list[Any]]:
    """Return columns comparable with the simulator's request table."""
    nan = float("nan")
    return {
        "scheduled_s": [request.times.get("scheduled", nan) for request in requests],
        "first_token_s": [request.times.get("first", nan) for request in requests],
        "finished_s": [request.times.get("finished", nan) for request in requests],
        "num_preemptions": [request.preemptions for request in requests],
    }
