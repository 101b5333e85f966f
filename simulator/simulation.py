"""Run a workload through front ends and ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from simmoe.errors import UsageError
from simmoe.policies.asking import Asker
from simmoe.policies.protocols import BatchPolicy, PolicyContext, RoutePolicy
from simmoe.policies.views import RequestView
from simmoe.profiles.shape import StepCost
from simmoe.simulator.admission import rejection_reason
from simmoe.simulator.clock import ARRIVAL, Alarm, Clock
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
    prefill_s: Callable[[int, int], float] | None = None,
    after_compose: Callable[[Scheduler], None] | None = None,
) -> SimResult:
    """Simulate ``workload`` on ``config`` and return every request's fate.

    Args:
        workload: requests to replay, open loop.
        config: the deployment.
        cost: seconds of each step.
        batch_policy: makes one batch policy a rank.
        route_policy: makes one route policy a front end.
        prefill_s: what the policies take T(n, k) to be, where it is not ``cost``'s own: a live run's may have been told
            another profile than the one its steps are costed by.
        after_compose: called with a rank's scheduler after each composition, to observe or to check it.
    Raises:
        UsageError: a budget of the workload outside 1..k_max, or hash blocks the KV blocks do not divide.
        PolicyError: a policy raised or answered nonsense; its attribute ``evidence`` holds the call as plain data.
    """
    context = policy_context(config, cost)
    if prefill_s is not None:
        context = dataclasses.replace(context, prefill_s=prefill_s)
    return _Simulation(workload, config, cost, context, batch_policy, route_policy, after_compose).run()


def policy_context(config: SimConfig, cost: StepCost) -> PolicyContext:
    """Return what policies of a deployment are told when they are built (batch policies, and the first front end's)."""
    engine = config.engine
    return PolicyContext(
        prefill_s=cost.prefill_s,
        k_min=config.k_granularity,
        k_max=config.k_max,
        num_ranks=config.num_ranks,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        enable_chunked_prefill=engine.enable_chunked_prefill,
        num_front_ends=config.front_end.num_front_ends,
    )


class _Simulation:
    """The wiring of one run."""

    def __init__(
        self,
        workload: Workload,
        config: SimConfig,
        cost: StepCost,
        context: PolicyContext,
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
        asker = self._asker = Asker(context)
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
                    config.front_end,
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
                config.front_end.publish_interval_s,
                asker,
            )
            for index in range(num_front_ends)
        ]
        self._policy_state()  # a state that cannot be kept shows before any work
        self._rows = _rows(workload)
        self._next = next(self._rows, None)
        # _served_s[rank] is when that rank's front end is done with every request it has been given
        self._served_s = [0.0] * config.num_ranks
        self._requests: dict[int, SimRequest] = {}
        """row -> request dispatched and unfinished."""

    def run(self) -> SimResult:
        """Run to the end, or to ``max_time_s``."""
        self._schedule_arrivals()
        num_arrived = len(self.workload)
        if self.config.max_time_s is None:
            self.clock.run_before(float("inf"))
        else:
            self.clock.run_before(self.config.max_time_s)
            for engine in self.engines:
                engine.halt(self.config.max_time_s)
            num_arrived = int(np.searchsorted(self.workload.arrival_s, self.config.max_time_s))
        for request in self._requests.values():
            engine = self.engines[self.fates.dp_rank[request.row]]
            self.fates.left_over(request, running=request in engine.scheduler.running)
        return SimResult(
            requests=self.fates.columns(num_arrived),
            ranks=self.totals,
            end_s=self.fates.end_s if self.config.max_time_s is None else self.config.max_time_s,
            steps=StepLog.columns(self.logs) if self.logs else None,
            policy_state=self._policy_state(),
            notes=self._notes(num_arrived),
        )

    # ------------------------------------------------------------------------------------------------------- arrivals

    def _schedule_arrivals(self) -> None:
        if self._next is not None:
            self.clock.at(self._next.arrival_s + self.config.front_end.ingress_s, ARRIVAL, self._arrive)

    def _arrive(self, alarm: Alarm) -> None:
        """Route every request that reaches a rank at this instant, in workload order."""
        now = alarm.time_s
        ingress = self.config.front_end.ingress_s
        row = self._next
        while row is not None and row.arrival_s + ingress <= now:
            self._inject(row, now)
            row = next(self._rows, None)
        self._next = row
        self._schedule_arrivals()

    def _inject(self, row: _Row, now_s: float) -> None:
        index, request_id, arrival_s, prompt, output, k_qos = row
        engine = self.config.engine
        reason = rejection_reason(engine, prompt, output)
        if reason is not None:
            self.fates.rejected(index, reason)
            return
        granularity = self.config.k_granularity
        k_exec = -(-k_qos // granularity) * granularity
        view = RequestView(request_id, arrival_s, prompt, 0, k_exec)
        hashes: tuple[int, ...] = ()
        if engine.enable_prefix_caching and self.workload.prefix_hashes is not None:
            hashes = self.workload.prefix_hashes[index][: prompt // self.workload.prefix_block_tokens]
        front_end = index % len(self.front_ends)
        rank = self.front_ends[front_end].route(view, now_s)
        request = SimRequest(index, view, output, k_qos, front_end, hashes)
        self._requests[index] = request
        self.fates.dp_rank[index] = rank
        service_s = self.config.front_end.ingress_service_s
        if not service_s:
            self._dispatch(request, rank, now_s)
            return
        self._served_s[rank] = max(now_s, self._served_s[rank]) + service_s
        self.clock.at(self._served_s[rank], ARRIVAL, lambda alarm: self._dispatch(request, rank, alarm.time_s))

    def _dispatch(self, request: SimRequest, rank: int, now_s: float) -> None:
        self.fates.dispatched(request.row, now_s)
        self.engines[rank].dispatch(request, now_s)

    def _finished(self, request: SimRequest, rank: int) -> None:
        del self._requests[request.row]
        self.front_ends[request.front_end].finished(rank)

    # ------------------------------------------------------------------------------------------------------ the result

    def _policy_state(self) -> dict[str, Any]:
        state: dict[str, Any] = {}
        for index, front_end in enumerate(self.front_ends):
            state[f"route_{index}"] = self._asker.snapshot(front_end.policy)
        for rank, engine in enumerate(self.engines):
            state[f"batch_{rank}"] = self._asker.snapshot(engine.scheduler.planner.policy)
        return {name: snapshot for name, snapshot in state.items() if snapshot is not None}

    def _notes(self, num_arrived: int) -> dict[str, Any]:
        return {
            "requests_after_the_end": len(self.workload) - num_arrived,
            "rejected": dict(sorted(self.fates.rejections.items())),
            "gates_opened": sum(engine.scheduler.gates_opened for engine in self.engines),
            "route_decided_at": "arrival_s + ingress_s",
        }


class _Row(NamedTuple):
    """One request of the workload, in plain Python numbers."""

    number: int
    request_id: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    k_qos: int


def _rows(workload: Workload, at_once: int = 4096) -> Iterator[_Row]:
    """Yield the workload's rows; plain numbers are faster than array items and are made for ``at_once`` rows a time."""
    columns = (workload.arrival_s, workload.prompt_tokens, workload.output_tokens, workload.k_qos)
    for start in range(0, len(workload), at_once):
        chunk = [column[start : start + at_once].tolist() for column in columns]
        request_ids = workload.request_id[start : start + at_once]
        yield from map(_Row._make, zip(range(start, len(workload)), request_ids, *chunk, strict=False))


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
