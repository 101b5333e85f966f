"""Run a workload through front ends and ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from simmoe.errors import UsageError
from simmoe.policies.protocols import BatchPolicy, Inspectable, PolicyContext, RoutePolicy
from simmoe.policies.views import RequestView
from simmoe.profiles.shape import StepCost
from simmoe.simulator.admission import rejection_reason
from simmoe.simulator.asking import Asker
from simmoe.simulator.clock import ARRIVAL, Clock
from simmoe.simulator.config import SimConfig
from simmoe.simulator.engine import Engine
from simmoe.simulator.fates import Fates
from simmoe.simulator.front_end import FrontEnd
from simmoe.simulator.request import SimRequest
from simmoe.simulator.result import RankTotals, SimResult
from simmoe.simulator.scheduler import Scheduler
from simmoe.simulator.step_log import StepLog
from simmoe.traces.workload import Workload

MakeBatchPolicy = Callable[[PolicyContext], BatchPolicy]
MakeRoutePolicy = Callable[[PolicyContext], RoutePolicy]


def simulate(
    workload: Workload,
    config: SimConfig,
    cost: StepCost,
    batch_policy: MakeBatchPolicy,
    route_policy: MakeRoutePolicy,
    *,
    after_compose: Callable[[Scheduler], None] | None = None,
) -> SimResult:
    """Simulate ``workload`` on ``config`` and return every request's fate.

    Args:
        workload: requests to replay, open loop.
        config: the deployment.
        cost: seconds of each step.
        batch_policy: makes one batch policy a rank.
        route_policy: makes one route policy a front end.
        after_compose: called with a rank's scheduler after each composition, to observe or to check it.
    Raises:
        UsageError: a budget of the workload outside 1..k_max, or hash blocks the KV blocks do not divide.
        PolicyError: a policy raised or answered nonsense; its attribute ``evidence`` holds the call as plain data.
    """
    return _Simulation(workload, config, cost, batch_policy, route_policy, after_compose).run()


class _Simulation:
    """The wiring of one run."""

    def __init__(
        self,
        workload: Workload,
        config: SimConfig,
        cost: StepCost,
        batch_policy: MakeBatchPolicy,
        route_policy: MakeRoutePolicy,
        after_compose: Callable[[Scheduler], None] | None,
    ) -> None:
        _check_budgets(workload, config)
        self.config = config
        self.workload = workload
        self.clock = Clock()
        self.fates = Fates(workload, config.front_end.egress_s)
        self.fates.on_finished = self._finished
        engine = config.engine
        context = PolicyContext(
            prefill_s=cost.prefill_s,
            k_min=config.k_granularity,
            k_max=config.k_max,
            num_ranks=config.num_ranks,
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            enable_chunked_prefill=engine.enable_chunked_prefill,
            num_front_ends=config.front_end.num_front_ends,
        )
        asker = Asker(context)
        self.totals = [RankTotals() for _ in range(config.num_ranks)]
        self.logs = [StepLog(rank) for rank in range(config.num_ranks)] if config.record_steps else []
        self.engines = []
        for rank, totals in enumerate(self.totals):
            scheduler = Scheduler(
                rank,
                engine,
                config.k_max,
                batch_policy(context),
                cost,
                Asker(context),
                workload.prefix_block_tokens,
                totals,
            )
            log = self.logs[rank] if self.logs else None
            self.engines.append(
                Engine(
                    self.clock,
                    scheduler,
                    totals,
                    self.fates,
                    config.front_end.publish_interval_s,
                    config.fast_forward,
                    log,
                    after_compose,
                )
            )
        num_front_ends = config.front_end.num_front_ends
        self.front_ends = [
            FrontEnd(
                route_policy(dataclasses.replace(context, front_end_index=index)),
                self.engines,
                num_front_ends,
                asker,
            )
            for index in range(num_front_ends)
        ]
        granularity = config.k_granularity
        self._k_exec = (-(-workload.k_qos // granularity) * granularity).tolist()
        self._k_qos = workload.k_qos.tolist()
        self._arrival_s = workload.arrival_s.tolist()
        self._prompt_tokens = workload.prompt_tokens.tolist()
        self._output_tokens = workload.output_tokens.tolist()
        self._next_row = 0
        self._requests: dict[int, SimRequest] = {}
        """row -> request dispatched and unfinished."""

    def run(self) -> SimResult:
        """Run to the end, or to ``max_time_s``."""
        if len(self.workload):
            self._schedule_arrivals()
        if self.config.max_time_s is None:
            self.clock.run()
        else:
            self.clock.run_before(self.config.max_time_s)
            for engine in self.engines:
                engine.halt(self.config.max_time_s)
        for request in self._requests.values():
            engine = self.engines[self.fates.dp_rank[request.row]]
            self.fates.left_over(request, running=request in engine.scheduler.running)
        return SimResult(
            requests=self.fates.columns(),
            ranks=self.totals,
            end_s=self.fates.end_s if self.config.max_time_s is None else self.config.max_time_s,
            steps=StepLog.columns(self.logs) if self.logs else None,
            policy_state=self._policy_state(),
            notes=self._notes(),
        )

    # ------------------------------------------------------------------------------------------------------- arrivals

    def _schedule_arrivals(self) -> None:
        self.clock.at(self._arrival_s[self._next_row] + self.config.front_end.ingress_s, ARRIVAL, self._arrive)

    def _arrive(self, _: object) -> None:
        """Route every request that reaches a rank at this instant, in workload order."""
        now = self.clock.now
        ingress = self.config.front_end.ingress_s
        row, num_rows = self._next_row, len(self._arrival_s)
        while row < num_rows and self._arrival_s[row] + ingress <= now:
            self._inject(row, now)
            row += 1
        self._next_row = row
        if row < num_rows:
            self._schedule_arrivals()

    def _inject(self, row: int, now_s: float) -> None:
        engine_config = self.config.engine
        prompt, output = self._prompt_tokens[row], self._output_tokens[row]
        reason = rejection_reason(engine_config, prompt, output)
        if reason is not None:
            self.fates.rejected(row, reason)
            return
        view = RequestView(self.workload.request_id[row], self._arrival_s[row], prompt, 0, self._k_exec[row])
        hashes: tuple[int, ...] = ()
        if engine_config.enable_prefix_caching and self.workload.prefix_hashes is not None:
            hashes = self.workload.prefix_hashes[row][: prompt // self.workload.prefix_block_tokens]
        index = row % len(self.front_ends)
        rank = self.front_ends[index].route(view, now_s)
        request = SimRequest(row, view, output, self._k_qos[row], index, hashes)
        self._requests[row] = request
        self.fates.dispatched(row, rank, now_s)
        self.engines[rank].dispatch(request)

    def _finished(self, request: SimRequest, rank: int) -> None:
        del self._requests[request.row]
        self.front_ends[request.front_end].finished(rank)

    # ------------------------------------------------------------------------------------------------------ the result

    def _policy_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for index, front_end in enumerate(self.front_ends):
            if isinstance(front_end.policy, Inspectable):
                state[f"route_{index}"] = dict(front_end.policy.snapshot())
        for rank, engine in enumerate(self.engines):
            if isinstance(engine.scheduler.policy, Inspectable):
                state[f"batch_{rank}"] = dict(engine.scheduler.policy.snapshot())
        return state

    def _notes(self) -> dict[str, Any]:
        return {
            "rejected": dict(sorted(self.fates.rejections.items())),
            "gates_opened": sum(engine.scheduler.gates_opened for engine in self.engines),
            "route_decided_at": "arrival_s + ingress_s",
        }


def _check_budgets(workload: Workload, config: SimConfig) -> None:
    if len(workload) and int(np.max(workload.k_qos)) > config.k_max:
        row = int(np.argmax(workload.k_qos))
        raise UsageError(
            f"request '{workload.request_id[row]}' (row {row}) asks for k_qos {int(workload.k_qos[row])}; "
            f"the deployment serves 1..{config.k_max}"
        )
    engine = config.engine
    if engine.enable_prefix_caching and workload.prefix_block_tokens % engine.block_size:
        raise UsageError(
            f"block_size {engine.block_size} does not divide the trace's hash blocks of "
            f"{workload.prefix_block_tokens} tokens; choose a divisor or turn prefix caching off"
        )
