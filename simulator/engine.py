"""The engine loop of one rank: steps follow one another, each composed when vLLM would compose it.

With asynchronous scheduling (vLLM's default on a GPU) two steps are under way, so that the device seldom waits for the
host: a boundary is where the host has taken in a step's output, which it comes to once the device is done with it and
the step after is launched. There it starts on the step already composed, composes the next but one and launches that.

Where workers in processes of their own launch steps, one after another (vLLM's executor ``mp``), the host only sends
them what it composes, and waits for no launch before it goes on.

Synchronous scheduling composes each step when the last one has been taken in; the device runs it while it is launched,
and waits for the host from its end until it can begin the next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from simmoe.simulator.clock import Alarm, Clock, boundary_of
from simmoe.simulator.config import FrontEndConfig
from simmoe.simulator.publication import Counts, Timetable
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

    def token(self, request: SimRequest, out_s: float) -> None:
        """The step that completes the request's prompt has been taken in; its front end hands an output token out."""

    def finished(self, request: SimRequest, dp_rank: int, out_s: float) -> None:
        """The request's last step has been taken in; its front end hands the last output token out."""


class Engine:
    """One rank in time."""

    def __init__(
        self,
        clock: Clock,
        scheduler: Scheduler,
        totals: RankTotals,
        listener: Listener,
        front_end: FrontEndConfig,
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
        self._egress_per_token_s = front_end.egress_per_token_s
        self._wakeup_s = front_end.wakeup_s
        self.lead = 2 if scheduler.config.async_scheduling else 1
        """A step is composed when the step this many places before it is taken in."""
        self._after_compose = after_compose
        self._priority = boundary_of(scheduler.dp_rank)
        self._executing: Step | None = None
        self._composed: Step | None = None
        """With asynchronous scheduling, the step that follows the executing one."""
        self._stretch: Stretch | None = None
        self._alarm: Alarm | None = None
        """The next boundary; alarms replaced since are ignored when they ring."""
        self._filling = False
        """Whether the device has one step alone, and the next is composed once the host has launched that."""
        self._host_free_s = 0.0
        """When the host has launched, or sent to workers, all that is composed, and is done with what it took in."""
        self._workers_free_s = None if scheduler.config.distributed_executor_backend == "uni" else 0.0
        """When workers of their own have launched all that is composed; None: the host launches."""
        self._device_free_s = 0.0
        """When the device has run all that is composed."""
        self._busy_since_s = 0.0
        self._timetable = Timetable(front_end.publish_interval_s)
        self._published = self._counts(0.0)
        """The last publication; publications need no events, only to be kept before what they saw changes."""

    # --------------------------------------------------------------------------------------------------- the outside

    def dispatch(self, request: SimRequest, now_s: float) -> None:
        """Receive a request from a front end; an idle rank wakes up, and who comes meanwhile joins its first step."""
        if now_s >= self._timetable.next_s:
            self._publish(now_s)
        scheduler = self.scheduler
        stretch = self._stretch
        if stretch is not None:
            passed = stretch.passed_before(now_s)
            if passed > stretch.num_steady:
                self._pass(passed)
            elif passed < stretch.num_skipped:
                full = len(scheduler.running) >= scheduler.config.max_num_seqs
                if not full or self.log is not None:
                    stretch.num_skipped = passed
                    self._set_alarm(stretch.last_boundary_s)
        scheduler.add(request)
        if self._executing is None and self._alarm is None:
            self._set_alarm(now_s + self._wakeup_s)

    def published(self, now_s: float) -> Counts:
        """Return the counts a front end knows at ``now_s``."""
        if now_s >= self._timetable.next_s:
            self._publish(now_s)
        return self._published

    def halt(self, now_s: float) -> None:
        """Account for the steps that ended before ``now_s``, where the simulation was stopped."""
        if self._stretch is not None:
            self._pass(self._stretch.passed_before(now_s))
        if self._executing is not None:
            self.totals.busy_s += now_s - self._busy_since_s
        if self._composed is not None and self._composed.start_s < now_s:  # while the host was not done with the last
            self._start(self._composed)

    # -------------------------------------------------------------------------------------------------- the step loop

    def _set_alarm(self, time_s: float) -> None:
        self._alarm = self.clock.at(time_s, self._priority, self._boundary)

    def _boundary(self, alarm: Alarm) -> None:
        if alarm is not self._alarm:
            return
        self._alarm = None
        now = alarm.time_s
        if now >= self._timetable.next_s:
            self._publish(now)
        if self._stretch is not None:
            self._pass(self._stretch.num_skipped)
        if not self._filling:
            if not self._advance(now):
                return
            if self.lead == 2 and self._host_free_s > now:
                self._filling = True
                self._set_alarm(self._host_free_s)
                return
        if self.lead == 2:
            self._composed = self._compose(now)
            self._filling = False
        if self.fast_forward:
            self._stretch = self._find_stretch(now)
        self._set_alarm(self._next_boundary_s() if self._stretch is None else self._stretch.last_boundary_s)

    def _advance(self, now: float) -> bool:
        """Take in the output of the step that ends, and start the next; return whether there is one."""
        ended, step = self._executing, self._composed
        self._executing = self._composed = None
        if ended is not None:
            self._end(ended, now)
            if finished := self.scheduler.finish(ended.index):
                out_s = self._out_s(ended, now)
                for request in finished:
                    self.listener.finished(request, self.scheduler.dp_rank, out_s)
        if step is None:
            step = self._compose(now)
        if step is None:
            assert not self.scheduler.waiting, "a rank may not idle with admissible work"
            if ended is not None:
                self.totals.busy_s += now - self._busy_since_s
            return False
        if ended is None:
            self._busy_since_s = now
        self._start(step)
        return True

    def _compose(self, now_s: float) -> Step | None:
        scheduler = self.scheduler
        step = scheduler.compose(now_s)
        if step is None and self._executing is None and scheduler.waiting:
            # Everything that ran was preempted, and a step that preempts admits nobody: compose once more.
            step = scheduler.compose(now_s)
        self._host_free_s = now_s
        if step is not None:
            if self._workers_free_s is None:
                self._launch(step)
            else:
                self._send(step, self._workers_free_s)
        if self._after_compose is not None:
            self._after_compose(scheduler)
        return step

    def _launch(self, step: Step) -> None:
        """Have the host launch a step, and the device run it once it is free and can begin.

        It is done no sooner than all is launched.
        """
        start_s, device_free_s = self._host_free_s, self._device_free_s
        launched_s = start_s + step.launch_s
        start_s += step.wait_s
        if start_s < device_free_s:
            start_s = device_free_s
        end_s = start_s + step.device_s
        if end_s < launched_s:
            end_s = launched_s
        step.start_s, step.end_s = start_s, end_s
        self._host_free_s, self._device_free_s = launched_s, end_s

    def _send(self, step: Step, workers_free_s: float) -> None:
        """Have workers launch a step once they have launched the one before, and the host go on at once."""
        sent_s = self._host_free_s
        self._host_free_s = max(sent_s, workers_free_s)
        self._launch(step)
        self._workers_free_s, self._host_free_s = self._host_free_s, sent_s

    def _next_boundary_s(self) -> float:
        """Return when the executing step's output will have been taken in, for which the host must be free."""
        step = self._executing
        assert step is not None
        return (step.end_s if step.end_s > self._host_free_s else self._host_free_s) + step.update_s

    def _start(self, step: Step) -> None:
        self._executing = step
        for request in step.admitted:
            self.listener.scheduled(request, step.start_s)

    def _end(self, step: Step, end_s: float) -> None:
        totals = self.totals
        num_prefill_tokens, num_decode_tokens = step.num_prefill_tokens, step.num_decode_seqs
        totals.num_steps += 1
        totals.num_prefill_tokens += num_prefill_tokens
        totals.num_decode_tokens += num_decode_tokens
        totals.routed_slots += (num_prefill_tokens + num_decode_tokens) * step.k_exec
        totals.qos_slots += step.qos_slots
        if self.log is not None:
            self.log.add(step)
        for request in step.completed_prompts:
            self.listener.token(request, self._out_s(step, end_s))

    def _out_s(self, step: Step, end_s: float) -> float:
        """Return when the front end has handed out the tokens of a step."""
        return end_s + self._egress_per_token_s * (step.num_decode_seqs + len(step.completed_prompts))

    # --------------------------------------------------------------------------------------------------- fast-forward

    def _find_stretch(self, now_s: float) -> Stretch | None:
        """Return the boundaries that can be passed from the step that starts now; None if there are none."""
        scheduler = self.scheduler
        decodes = scheduler.decodes
        if not decodes.num_seqs or scheduler.partial is not None or scheduler.may_admit(now_s):
            return None
        step = self._executing
        assert step is not None
        num_steady = scheduler.next_finish_step() - self.lead + 1 - step.index
        fit = decodes.steps_within(scheduler.next_index, num_steady, scheduler.pool.num_free_blocks)
        # The boundary after those composes the step that a finishing request is no longer in. With asynchronous
        # scheduling its last token is still to come then, and while nobody waits nothing else changes.
        leaves = self.lead == 2 and fit == num_steady >= 0 and not scheduler.waiting.by_id and scheduler.host_eases
        if fit + leaves <= 0:
            return None
        k_exec = scheduler.step_ks[decodes.k_exec]
        line = scheduler.cost.decode_line(decodes.num_seqs, k_exec)
        stretch = Stretch(
            step, self._composed, self._host_free_s, self._workers_free_s, fit, leaves, decodes, k_exec, line
        )
        if scheduler.waiting.by_id and scheduler.planner.wake_at_s < float("inf"):
            stretch.num_skipped = stretch.passed_before(scheduler.planner.wake_at_s)
        return stretch if stretch.num_skipped else None

    def _pass(self, num_steps: int) -> None:
        """Leave the stretch with its first ``num_steps`` steps ended and as many composed."""
        stretch = self._stretch
        assert stretch is not None
        self._stretch = None
        if num_steps <= stretch.num_steady:
            if num_steps:
                self._executing, self._composed = self._pass_steady(stretch, num_steps)
            return
        executing, composed = self._executing, self._composed
        if stretch.num_steady:
            executing, composed = self._pass_steady(stretch, stretch.num_steady)
        assert executing is not None and composed is not None
        boundary_s = stretch.boundaries[stretch.num_steady]
        self._end(executing, boundary_s)
        self._start(composed)
        self._composed = self._compose(boundary_s)

    def _pass_steady(self, stretch: Stretch, num_steps: int) -> tuple[Step, Step | None]:
        """Pass boundaries at which the same sequences go on; return the steps executing and composed then."""
        first, second = self._executing, self._composed
        assert first is not None
        last = second or first
        self._end(first, stretch.boundaries[0])
        if second is not None:
            self._start(second)
            if num_steps > 1:
                self._end(second, stretch.boundaries[1])
        lead = self.lead
        scheduler = self.scheduler
        num_further = num_steps - lead
        if num_further > 0:
            totals = self.totals
            num_seqs = scheduler.decodes.num_seqs
            totals.num_steps += num_further
            totals.num_decode_tokens += num_further * num_seqs
            totals.routed_slots += num_further * num_seqs * stretch.k_exec
            totals.qos_slots += num_further * scheduler.decodes.sum_k_qos
            if self.log is not None:
                for position in range(lead, num_steps):
                    self.log.add(stretch.step(position, last))
        scheduler.skip_decodes(num_steps)
        executing = stretch.step(num_steps, last) if num_steps >= lead else last
        composed = stretch.step(num_steps + 1, last) if lead == 2 else None
        launched_s = stretch.launched_after(num_steps)
        if self._workers_free_s is None:
            self._host_free_s = launched_s
        else:
            self._host_free_s, self._workers_free_s = stretch.boundaries[num_steps - 1], launched_s
        self._device_free_s = (composed or executing).end_s
        return executing, composed

    # ---------------------------------------------------------------------------------------------------- publication

    def _publish(self, now_s: float) -> None:
        self._timetable.catch_up(now_s)
        self._published = self._counts(self._timetable.last_s)

    def _counts(self, time_s: float) -> Counts:
        """Return the counts as they were at ``time_s``, with no boundary between then and now but a stretch's."""
        scheduler = self.scheduler
        num_taken = 0
        stretch = self._stretch
        if stretch is not None:
            passed = stretch.passed_before(time_s)
            if passed > stretch.num_steady:
                self._pass(passed)
            else:
                num_taken = scheduler.decodes.new_blocks_over(scheduler.next_index, passed)
        pool = scheduler.pool
        kv_used = (pool.num_used_blocks + num_taken) / pool.num_usable_blocks
        return Counts(len(scheduler.waiting.by_id), len(scheduler.running), kv_used, scheduler.k_running)
