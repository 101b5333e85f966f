"""vLLM's schedulers with a batch policy inside: vLLM composes the step, the policy says who may enter it.

``scheduler_cls``: ``AsyncPolicyScheduler`` where vLLM schedules asynchronously (its default on a GPU),
``PolicyScheduler`` where it does not (the CPU). The policy is named in ``additional_config`` (see ``policy_options``).
It is asked under the same conditions as in the simulator: when somebody waits, a seat and tokens are left once running
requests have had theirs, and the queue, the running set or the prompt in progress has changed since the last plan, or
the plan's ``wake_at_s`` has come.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger

from simmoe.ending import described, threads_in
from simmoe.errors import LiveError, PolicyError
from simmoe.live.engine.decision_file import set_aside
from simmoe.live.engine.decisions import DecisionRecorder
from simmoe.live.engine.policy_options import PolicyOptions
from simmoe.live.engine.policy_queue import PolicyQueue
from simmoe.live.engine.policy_views import ViewBuilder
from simmoe.live.engine.scheduler import AsyncBudgetScheduler, BudgetMixin, BudgetScheduler
from simmoe.live.engine.steps import BatchSummary
from simmoe.policies.asking import Asker
from simmoe.policies.protocols import ADMIT_ALL, PolicyContext, StepPlan
from simmoe.policies.views import RequestView, StepView

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

logger = init_logger(__name__)


class PolicyMixin(BudgetMixin):
    """Hosts a batch policy.

    A policy that raises, or answers what cannot be applied, admits nobody to the step at hand, which is composed and
    run all the same; the next call of ``schedule`` raises the failure before it touches anything. So no token in flight
    is lost, a server's engine process stops with the policy's name, and an engine in one's own process can go on.

    Raises:
        LiveError: a configuration that no policy can be hosted in.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.vllm_config  # type: ignore[attr-defined]
        _check_hostable(config)
        self.views = ViewBuilder(self, time.time() - self.clock())
        self.decisions: DecisionRecorder | None = None
        self._is_shut_down = False
        hosting = PolicyOptions.of(config)
        if hosting.decisions:
            _set_aside(Path(hosting.decisions))
        self._host(hosting)

    def host_policy(self, options: dict[str, Any]) -> None:
        """Host another policy from now on; an engine can serve one after another without starting anew.

        Args:
            options: as ``additional_config["simmoe_policy"]`` takes them.
        Raises:
            LiveError: requests are queued or running, or the policy cannot be hosted; the one before stays.
        """
        if self.requests:  # type: ignore[attr-defined]
            raise LiveError(f"{len(self.requests)} requests are in the engine; change its policy when none is")  # type: ignore[attr-defined]
        self._host(PolicyOptions.given(options))

    def _host(self, hosting: PolicyOptions) -> None:
        context = hosting.context(self.vllm_config, self.options.k_max)  # type: ignore[attr-defined]
        policy, asker = hosting.build(context), Asker(context)
        k_floor = asker.k_floor(policy)
        enqueue = self._put_in_order if asker.orders_queue(policy) else None
        decisions = self._recorder(hosting, context) if hosting.decisions else None
        # what could fail has not: the policy before has gone from here on
        if self.decisions is not None:
            self.decisions.close()
        self.hosting = hosting
        self.batch_policy = policy
        self.k_floor = k_floor
        self.views.dp_rank = hosting.dp_rank
        self.decisions = decisions
        self.waiting = PolicyQueue(self.views.request, enqueue, None if decisions is None else decisions.queued)
        self.plan_stale = True
        """Whether the queue, the running set or the prompt in progress has changed since the last plan."""
        self.wake_at_s = math.inf
        """When the standing plan asks to be made again."""
        self.num_plans = 0
        self.plan_s = 0.0
        """CPU seconds spent on views, the policy's ``plan``, and checking its answer: waits for a core do not count."""
        self.queue_key_s = 0.0
        """CPU seconds spent on its ``queue_key``, checking the key, and putting newcomers in its order."""
        self._asker = asker
        self._num_scheduled = 0
        """Requests the last step computed."""
        self._departures_noted = self._planned = self._overrule = False
        self._failure: PolicyError | None = None
        self._is_key_saved = False
        """Whether a call of ``queue_key`` that failed has been saved."""

    # ------------------------------------------------------------------------------------------------ vLLM's scheduler

    def add_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Queue a request in the policy's order.

        Raises:
            PolicyError: the policy's ``queue_key`` failed; the request is not queued.
        """
        self.plan_stale = True
        try:
            return super().add_request(request, *args, **kwargs)
        except PolicyError as error:
            self.request_ks.pop(request.request_id, None)
            # every request may be refused so, and a call holds all that wait: the first is kept
            refusal = self._named(error) if self._is_key_saved else self._with_evidence(error)
            self._is_key_saved = True
            raise refusal from error

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self.plan_stale = True
        if self.decisions is not None:
            self.decisions.left(request.request_id)
        self.views.forget(request.request_id)
        return super()._free_request(request, *args, **kwargs)

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedule as vLLM does, whoever the policy lets in.

        Raises:
            PolicyError: the policy failed at the step before.
        """
        if self._failure is not None:
            failure, self._failure, self.plan_stale = self._failure, None, True
            raise failure
        self._departures_noted = self._planned = False
        self.views.share.clear()
        num_running_before = len(self.running)  # type: ignore[attr-defined]
        self.waiting.arm(self._choose, lambda: not self.running)  # type: ignore[attr-defined]
        try:
            output = super().schedule(*args, **kwargs)
        finally:
            self.waiting.disarm()
        self._composed(output, num_running_before)
        return output

    def step_k(self, batch: BatchSummary) -> int:
        """Return the budget the step runs at: at least the policy's floor."""
        if batch.shape.k_exec < self.k_floor:
            batch = batch._replace(shape=batch.shape._replace(k_exec=self.k_floor))
        return super().step_k(batch)

    def shutdown(self) -> None:
        """Finish the recording of decisions, and name the threads of the policy's that go on."""
        if self.decisions is not None:
            self.decisions.close()
        if not self._is_shut_down:  # vLLM may say so twice
            self._is_shut_down = True
            origin = getattr(sys.modules.get(type(self.batch_policy).__module__), "__file__", None)
            for thread in threads_in(origin or ""):
                logger.warning("rank %d: a policy's %s is still running", self.hosting.dp_rank, described(thread))
        super().shutdown()  # type: ignore[misc]

    # ------------------------------------------------------------------------------------------------------ the policy

    def policy_stats(self) -> dict[str, Any]:
        """Return what hosting has cost and the policy's own state, as plain data.

        Raises:
            PolicyError: the policy cannot show its state.
        """
        return {
            "policy": self.hosting.policy,
            "num_plans": self.num_plans,
            "plan_s": self.plan_s,
            "policy_s": self.plan_s + self.queue_key_s,
            "gates_opened": self.waiting.gates_opened,
            "snapshot": self._asker.snapshot(self.batch_policy),
        }

    def _put_in_order(
        self, request: RequestView, waiting: Sequence[RequestView], insert: Callable[[Any], object]
    ) -> None:
        """Queue a newcomer by the policy's key, as :meth:`Asker.enqueue` does."""
        start_s = time.thread_time()
        try:
            self._asker.enqueue(self.batch_policy, request, waiting, insert)
        finally:
            self.queue_key_s += time.thread_time() - start_s

    def _choose(self) -> StepPlan | None:
        """Return the plan of the step at hand; None where the standing one admits nobody more."""
        self._note_departures()
        seats = self.max_num_active_reqs - len(self.running) - self.num_waiting_for_streaming_input  # type: ignore[attr-defined]
        if seats <= 0:
            return None
        # whoever vLLM skipped (a grammar that compiles, an output on its way) may be ready without any change
        if not self.plan_stale and self.schedule_start_s < self.wake_at_s and not self.deferred_waiting:  # type: ignore[attr-defined]
            return None
        start_s = time.thread_time()
        self._planned = True
        if self._overrule:
            self.plan_stale = self._overrule = False
            self.waiting.gates_opened += 1
            return ADMIT_ALL
        view = self.views.step(self.schedule_start_s, self.waiting)
        plan = self._ask(view)
        self.num_plans += 1
        if plan is not None:
            self.plan_stale = False
            self.wake_at_s = math.inf if plan.wake_at_s is None else plan.wake_at_s
        self.plan_s += time.thread_time() - start_s
        return plan

    def _ask(self, view: StepView) -> StepPlan | None:
        try:
            plan = self._asker.plan(self.batch_policy, view, self.waiting.by_id.get)
        except PolicyError as error:
            if self.decisions is not None:
                self.decisions.decided(self.views.anew(view, self.waiting), str(error))
            self._failure = self._with_evidence(error)
            logger.error("%s", self._failure)
            return None
        if self.decisions is not None:
            self.decisions.decided(self.views.anew(view, self.waiting), plan)
        return plan

    def _note_departures(self) -> None:
        """A request whose last token is on its way takes no part in the step: the running set has changed."""
        if not self._departures_noted:
            self._departures_noted = True
            if self.views.share.num_seqs != self._num_scheduled:
                self.plan_stale = True

    def _composed(self, output: SchedulerOutput, num_running_before: int) -> None:
        """Take note of a composed step."""
        self._note_departures()
        share = self.views.share
        self._num_scheduled = len(output.num_scheduled_tokens)
        admitted = self._num_scheduled - share.num_seqs
        if admitted or share.chunks or output.preempted_req_ids:
            self.plan_stale = True
        running = self.running  # type: ignore[attr-defined]
        if self.decisions is not None:
            self.decisions.stepped([request.request_id for request in running[len(running) - admitted :]])
        if self._planned and not running and self._failure is None and len(self.waiting) > len(self.deferred_waiting):  # type: ignore[attr-defined]
            # nothing of the plan fits an empty engine: the next step takes the queue as it is
            self.plan_stale = self._overrule = True

    # ------------------------------------------------------------------------------------------------------- failures

    def _with_evidence(self, error: PolicyError) -> PolicyError:
        """Return the failure with the rank it was on, its view saved where the message says."""
        path = self.hosting.evidence_path
        if error.evidence is None:
            return self._named(error, "; its view cannot be saved: the policy has written into what it was shown")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(error.evidence, indent=2) + "\n")
        except OSError as failure:
            return self._named(error, f"; its view could not be saved to '{path}': {failure.strerror}")
        told = f"; its view is saved in '{path}': 'simmoe policies check POLICY --replay {path}' asks again"
        return self._named(error, told)

    def _named(self, error: PolicyError, told: str = "") -> PolicyError:
        named = PolicyError(f"rank {self.hosting.dp_rank}: {error}{told}")
        named.evidence = error.evidence
        return named

    def _recorder(self, hosting: PolicyOptions, context: PolicyContext) -> DecisionRecorder:
        constant = {
            "dp_rank": hosting.dp_rank,
            "max_num_seqs": self.max_num_active_reqs,  # type: ignore[attr-defined]
            "block_size": self.block_size,  # type: ignore[attr-defined]
        }
        is_async = bool(self.vllm_config.scheduler_config.async_scheduling)  # type: ignore[attr-defined]
        try:
            return DecisionRecorder(Path(hosting.decisions), "batch", hosting.provenance, is_async, context, constant)
        except OSError as error:
            raise LiveError(f"cannot record decisions in '{hosting.decisions}': {error.strerror}") from None


class PolicyScheduler(PolicyMixin, BudgetScheduler):
    """vLLM's synchronous scheduler with a batch policy."""


class AsyncPolicyScheduler(PolicyMixin, AsyncBudgetScheduler):
    """vLLM's asynchronous scheduler with a batch policy."""


def _set_aside(path: Path) -> None:
    """Keep what an engine before this one recorded: it may have died of it."""
    try:
        set_aside(path)
    except OSError as error:
        raise LiveError(f"cannot keep the earlier recording '{path}': {error.strerror}") from None


def _check_hostable(vllm_config: Any) -> None:
    unsupported = {
        "scheduling policy 'priority'": vllm_config.scheduler_config.policy != "fcfs",
        "a KV connector": vllm_config.kv_transfer_config is not None,
        "data_parallel_size above 1 (start one engine a rank)": vllm_config.parallel_config.data_parallel_size > 1,
    }
    for what, present in unsupported.items():
        if present:
            raise LiveError(f"a batch policy cannot be hosted with {what}; leave that out")
