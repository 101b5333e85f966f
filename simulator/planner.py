"""One rank's batch policy: who may enter a step, asked when something has changed since its last plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import overload

from simmoe.policies.asking import Asker
from simmoe.policies.protocols import BatchPolicy, StepPlan
from simmoe.policies.views import RequestView, StepView
from simmoe.policies.waiting_queue import WaitingQueue, WaitingView
from simmoe.simulator.config import EngineConfig
from simmoe.simulator.prompts import StepPrompts
from simmoe.simulator.request import SimRequest
from simmoe.simulator.result import RankTotals


class Planner:
    """Keeps the waiting queue in the policy's order, and asks it for plans."""

    def __init__(
        self, dp_rank: int, config: EngineConfig, policy: BatchPolicy, asker: Asker, totals: RankTotals
    ) -> None:
        self.policy = policy
        self.waiting: WaitingQueue[SimRequest] = WaitingQueue(asker.orders_queue(policy))
        self.is_stale = True
        """Whether the queue, the running set or the prompt in progress has changed since the last plan."""
        self.wake_at_s = float("inf")
        """When the standing plan asks to be made again."""
        self._dp_rank = dp_rank
        self._config = config
        self._asker = asker
        self._totals = totals

    def add(self, request: SimRequest) -> None:
        """Queue a dispatched request, where the policy's order puts it.

        Raises:
            PolicyError: the policy gives it no key that can be ordered.
        """
        waiting = self.waiting
        if waiting.has_keys:
            self._asker.enqueue(self.policy, request.view, WaitingView(waiting), partial(waiting.add, request))
        else:
            waiting.add(request)
        self.is_stale = True

    def is_due(self, now_s: float) -> bool:
        """Return whether a plan made at ``now_s`` may differ from the standing one."""
        return self.is_stale or now_s >= self.wake_at_s

    def make_plan(
        self, now_s: float, prompts: StepPrompts, running: Mapping[SimRequest, None], last_step: int, num_free: int
    ) -> StepPlan:
        """Ask the policy.

        Args:
            now_s: when the step is composed.
            prompts: what it computes of prompts so far.
            running: admitted and unfinished requests, in order of admission.
            last_step: index of the last step composed.
            num_free: KV blocks that are free.
        Raises:
            PolicyError: the policy fails, or its plan is none.
        """
        waiting = self.waiting
        oldest = waiting.oldest()
        view = StepView(
            now_s=now_s,
            dp_rank=self._dp_rank,
            waiting=WaitingView(waiting),
            running=RunningView(running, last_step),
            token_budget=prompts.budget,
            max_num_seqs=self._config.max_num_seqs,
            free_kv_blocks=num_free,
            block_size=self._config.block_size,
            k_running=prompts.k_exec,
            oldest=None if oldest is None else oldest.view,
            num_preempted=waiting.num_preempted,
        )
        plan = self._asker.plan(self.policy, view, waiting.by_id.get)
        self._totals.num_plans += 1
        self.is_stale = False
        self.wake_at_s = float("inf") if plan.wake_at_s is None else plan.wake_at_s
        return plan

    def candidates(self, plan: StepPlan) -> Iterator[SimRequest]:
        """Yield who may enter, in order; each must be removed from the queue before the next is asked for."""
        if plan.order is not None:
            for request_id in plan.order:
                request = self.waiting.by_id[request_id]
                if plan.k_max is not None and request.k_exec > plan.k_max:
                    return
                yield request
            return
        while self.waiting.by_id:
            request = self.waiting[0]
            if plan.k_max is not None and request.k_exec > plan.k_max:
                return
            yield request


class RunningView(Sequence[RequestView]):
    """The running set as a policy sees it; items are built when they are asked for.

    Args:
        running: admitted and unfinished requests, in order of admission.
        last_step: index of the last step composed.
    """

    __slots__ = ("_last_step", "_running")

    def __init__(self, running: Mapping[SimRequest, None], last_step: int) -> None:
        self._running = running
        self._last_step = last_step

    def __len__(self) -> int:
        return len(self._running)

    def __iter__(self) -> Iterator[RequestView]:
        return map(self._build, self._running)

    @overload
    def __getitem__(self, index: int) -> RequestView: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RequestView]: ...
    def __getitem__(self, index: int | slice) -> RequestView | Sequence[RequestView]:
        requests = list(self._running)
        if isinstance(index, slice):
            return [self._build(request) for request in requests[index]]
        return self._build(requests[index])

    def _build(self, request: SimRequest) -> RequestView:
        view = request.view
        computed = request.num_computed_tokens
        if request.prefill_step >= 0:
            last = min(self._last_step, request.finish_step)
            computed = request.prefill_tokens + last - request.prefill_step
        return RequestView(view.request_id, view.arrival_s, view.prompt_tokens, computed, view.k_qos)
