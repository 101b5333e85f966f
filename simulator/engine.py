"""The engine loop of one rank: steps follow one another, each composed when vLLM would compose it.

With asynchronous scheduling (vLLM's default on a GPU) the step after the running one has been composed before the
running one ends, so that the device never waits for the host: a boundary delivers the step that ends, starts the one
already composed, and composes the next but one. Synchronous scheduling composes each step when the last one ends.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import simpy

from simmoe.simulator.clock import Alarm, Clock, boundary_of
from simmoe.simulator.request import SimRequest
from simmoe.simulator.result import RankTotals
from simmoe.simulator.scheduler import Scheduler
from simmoe.simulator.step import Step
from simmoe.simulator.step_log import StepLog
from simmoe.simulator.stretch import Stretch


class Listener(Protocol):
    """Who hears of requests as they advance."""

    def scheduled(self, request: SimRequest, start_s: float) -> None:
        """The first step that computes any of the request starts (again, after a preemption)."""

    def token(self, request: SimRequest, end_s: float) -> None:
        """The step that completes the request's prompt ends: an output token is out."""

    def finished(self, request: SimRequest, dp_rank: int, end_s: float) -> None:
        """The request's last output token is out."""


class Counts:
    """What a rank publishes about itself."""

    __slots__ = ("k_running", "kv_used", "num_running", "num_waiting")

    def __init__(self, num_waiting: int, num_running: int, kv_used: float, k_running: int) -> None:
        self.num_waiting = num_waiting
        self.num_running = num_running
        self.kv_used = kv_used
        self.k_running = k_running


class Engine:
    """One rank in time."""

    def __init__(
        self,
        clock: Clock,
        scheduler: Scheduler,
        totals: RankTotals,
        listener: Listener,
        publish_interval_s: float,
        fast_forward: bool,
        log: StepLog | None,
        after_compose: Callable[[Scheduler], None] | None = None,
    ) -> None:
        self.clock = clock
        self.scheduler = scheduler
        self.totals = totals
        self.listener = listener
        self.fast_forward = fast_forward
        self.log = log
        self.lead = 2 if scheduler.config.async_scheduling else 1
        """A step is composed when the step this many places before it ends."""
        self._after_compose = after_compose
        self._priority = boundary_of(scheduler.dp_rank)
        self._executing: Step | None = None
        self._composed: Step | None = None
        """With asynchronous scheduling, the step that follows the executing one."""
        self._stretch: Stretch | None = None
        self._alarm: Alarm | None = None
        """The next boundary; alarms replaced since are ignored when they ring."""
        self._busy_since_s = 0.0
        self._publish_interval_s = publish_interval_s
        self._published = self._counts(0.0)
        self._publication = 0
        """Number of the last publication settled; publication i happens at i * publish_interval_s."""

    # --------------------------------------------------------------------------------------------------- the outside

    def dispatch(self, request: SimRequest) -> None:
        """Receive a request from a front end."""
        now = self.clock.now
        self._settle_publication(now)
        scheduler = self.scheduler
        scheduler.add(request)
        if self._executing is None:
            if self._alarm is None:
                self._set_alarm(now)
            return
        stretch = self._stretch
        if stretch is not None:
            full = len(scheduler.running) >= scheduler.config.max_num_seqs
            if (not full or self.log is not None) and stretch.stop_at(now):
                self._set_alarm(stretch.last_end_s)

    def published(self, now_s: float) -> tuple[Counts, float]:
        """Return the counts a front end knows at ``now_s`` and when they were published."""
        if not self._publish_interval_s:
            return self._counts(now_s), now_s
        self._settle_publication(now_s)
        return self._published, self._publication * self._publish_interval_s

    def halt(self, now_s: float) -> None:
        """Account for the steps that ended before ``now_s``, where the simulation was stopped."""
        if self._stretch is not None:
            self._pass_stretch(self._stretch, self._stretch.passed_before(now_s))
        if self._executing is not None:
            self.totals.busy_s += now_s - self._busy_since_s

    # -------------------------------------------------------------------------------------------------- the step loop

    def _set_alarm(self, time_s: float) -> None:
        self._alarm = self.clock.at(time_s, self._priority, self._boundary)

    def _boundary(self, alarm: simpy.Event) -> None:
        if alarm is not self._alarm:
            return
        self._alarm = None
        now = self.clock.now
        self._settle_publication(now)
        if self._stretch is not None:
            self._pass_stretch(self._stretch, self._stretch.num_skipped)
            self._stretch = None
        ended, step = self._executing, self._composed
        self._executing = self._composed = None
        if ended is not None:
            self._complete(ended, now)
        if step is None:
            step = self._compose(now)
        if step is None:
            assert not self.scheduler.waiting, "a rank may not idle with admissible work"
            if ended is not None:
                self.totals.busy_s += now - self._busy_since_s
            return
        if ended is None:
            self._busy_since_s = now
        self._executing = step
        step.start_s = now
        for request in step.admitted:
            self.listener.scheduled(request, now)
        if self.lead == 2:
            self._composed = self._compose(now)
        if self.fast_forward:
            self._stretch = self._find_stretch(step, now)
        self._set_alarm(now + step.duration_s if self._stretch is None else self._stretch.last_end_s)

    def _compose(self, now_s: float) -> Step | None:
        scheduler = self.scheduler
        step = scheduler.compose(now_s)
        if step is None and self._executing is None and scheduler.waiting:
            # Everything that ran was preempted, and a step that preempts admits nobody: compose once more.
            step = scheduler.compose(now_s)
        if self._after_compose is not None:
            self._after_compose(scheduler)
        return step

    def _complete(self, step: Step, end_s: float) -> None:
        shape = step.shape
        totals = self.totals
        totals.num_steps += 1
        totals.num_prefill_tokens += shape.num_prefill_tokens
        totals.num_decode_tokens += shape.num_decode_seqs
        totals.routed_slots += shape.num_tokens * shape.k_exec
        totals.qos_slots += step.qos_slots
        if self.log is not None:
            self.log.add(step)
        for request in step.completed_prompts:
            self.listener.token(request, end_s)
        for request in self.scheduler.finish(step.index):
            self.listener.finished(request, self.scheduler.dp_rank, end_s)

    # --------------------------------------------------------------------------------------------------- fast-forward

    def _find_stretch(self, step: Step, now_s: float) -> Stretch | None:
        """Return the boundaries that can be passed from ``step``, which starts now; None if there are none."""
        scheduler = self.scheduler
        last = self._composed if self.lead == 2 else step
        if last is None or not (step.decode_only and last.decode_only) or scheduler.partial is not None:
            return None
        if scheduler.may_admit(now_s):
            return None
        decodes = scheduler.decodes
        num_skipped = scheduler.next_finish_step() - self.lead + 1 - step.index
        if num_skipped <= 0:
            return None
        num_skipped = decodes.steps_within(scheduler.next_index, num_skipped, scheduler.pool.num_free_blocks)
        if num_skipped <= 0:
            return None
        k_exec = step.shape.k_exec
        line = scheduler.cost.decode_line(decodes.num_seqs, k_exec)
        stretch = Stretch(now_s, step.index, num_skipped, decodes, k_exec, line)
        if scheduler.waiting and scheduler.wake_at_s < float("inf"):
            stretch.stop_at(scheduler.wake_at_s)
        return stretch if stretch.num_skipped else None

    def _pass_stretch(self, stretch: Stretch, num_steps: int) -> None:
        """End the first ``num_steps`` steps of a stretch and compose as many; the next one is executing then."""
        if not num_steps:
            return
        scheduler = self.scheduler
        decodes = scheduler.decodes
        totals = self.totals
        totals.num_steps += num_steps
        totals.num_decode_tokens += decodes.num_seqs * num_steps
        totals.routed_slots += decodes.num_seqs * stretch.shape.k_exec * num_steps
        totals.qos_slots += decodes.sum_k_qos * num_steps
        first = self._executing
        assert first is not None
        last = self._composed or first
        if self.log is not None:
            self.log.add(first)
            self.log.add_stretch(stretch, num_steps, last.num_waiting, last.num_running)
        scheduler.skip_decodes(num_steps)
        self._executing = self._stretch_step(stretch, num_steps, last)
        self._executing.start_s = float(stretch.ends[num_steps - 1])
        if self.lead == 2:
            self._composed = self._stretch_step(stretch, num_steps + 1, last)

    def _stretch_step(self, stretch: Stretch, position: int, like: Step) -> Step:
        step = Step(
            stretch.first_index + position,
            stretch.shape_at(position),
            stretch.duration_s(position),
            self.scheduler.decodes.sum_k_qos,
        )
        step.num_waiting, step.num_running = like.num_waiting, like.num_running
        return step

    # ---------------------------------------------------------------------------------------------------- publication

    def _settle_publication(self, now_s: float) -> None:
        """Keep what was published last before the state changes at ``now_s``; publications need no events."""
        if not self._publish_interval_s:
            return
        number = int(now_s / self._publish_interval_s)
        if number > self._publication:
            self._publication = number
            self._published = self._counts(number * self._publish_interval_s)

    def _counts(self, time_s: float) -> Counts:
        """Return the counts as they were at ``time_s``, with no boundary between then and now but a stretch's."""
        scheduler = self.scheduler
        used = scheduler.pool.num_used_blocks
        if self._stretch is not None:
            passed = self._stretch.passed_before(time_s)
            used += scheduler.decodes.new_blocks_over(scheduler.next_index, passed)
        return Counts(
            len(scheduler.waiting), len(scheduler.running), used / scheduler.pool.num_usable_blocks, scheduler.k_running
        )
