"""vLLM's schedulers, with a budget a step: the largest of the requests the step computes.

Choose one with ``scheduler_cls``: ``AsyncBudgetScheduler`` where vLLM schedules asynchronously (its default on a GPU),
``BudgetScheduler`` where it does not (the CPU).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from simmoe.errors import LiveError
from simmoe.live.engine.steps import BatchSummary, StepRecord, StepRecorder, summarise
from simmoe.live.engine.transport import EngineOptions, request_k
from simmoe.live.engine.versions import check_vllm

check_vllm()  # before the imports that another version may not have

from vllm.config.compilation import CUDAGraphMode  # noqa: E402
from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402
from vllm.v1.core.sched.output import SchedulerOutput  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402


class BudgetMixin:
    """Sets ``SchedulerOutput.simmoe_k`` on every step that computes tokens, and records the steps when asked."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.vllm_config  # type: ignore[attr-defined]
        self.options = EngineOptions.of(config)
        self.uses_graphs = config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE
        if self.uses_graphs and len(self.options.captured_ks) > 1 and not config.use_v2_model_runner:
            raise LiveError(
                f"captured_ks is {list(self.options.captured_ks)}, but only vLLM's second model runner keys its graphs "
                "by k: set VLLM_USE_V2_MODEL_RUNNER=1, or enforce_eager"
            )
        self.clock: Callable[[], float] = time.monotonic
        """The host's clock, in seconds."""
        self.schedule_start_s = 0.0
        """When the step at hand began to be scheduled."""
        self.request_ks: dict[str, int] = {}
        self.num_steps = 0
        self.recorder = StepRecorder() if self.options.record_steps else None

    def add_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Keep the request's budget beside it."""
        self.request_ks[request.request_id] = request_k(request.sampling_params, self.options.default_k)
        return super().add_request(request, *args, **kwargs)  # type: ignore[misc]

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        self.request_ks.pop(request.request_id, None)
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]

    def schedule(self, *args: Any, **kwargs: Any) -> SchedulerOutput:
        """Schedule as vLLM does, then decide the step's budget."""
        self.schedule_start_s = self.clock()
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        output.simmoe_k = output.simmoe_step = None
        if not output.num_scheduled_tokens:
            return output
        batch = summarise(output.num_scheduled_tokens, self.requests, self.request_ks)  # type: ignore[attr-defined]
        output.simmoe_k = self.step_k(batch)
        output.simmoe_step = self.num_steps
        self.num_steps += 1
        if self.recorder is not None:
            running, waiting = self.get_request_counts()  # type: ignore[attr-defined]
            counts = (waiting, running, len(output.preempted_req_ids or ()))
            times_s = (self.schedule_start_s, self.clock())
            self.recorder.scheduled(output.simmoe_step, times_s, batch, output.simmoe_k, counts)
        return output

    def step_k(self, batch: BatchSummary) -> int:
        """Return the budget the step runs at: the batch's largest, or the next one graphs were captured at."""
        k = batch.shape.k_exec
        return self.options.captured_at_least(k) if self.uses_graphs else k

    def update_from_output(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        """Take a step's output in, and close its record."""
        output_s = self.clock()
        outputs = super().update_from_output(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        if self.recorder is not None and scheduler_output.simmoe_step is not None:
            self.recorder.finished(scheduler_output.simmoe_step, output_s, self.clock())
        return outputs

    def drain_steps(self) -> list[StepRecord]:
        """Return the steps finished since the last call."""
        return self.recorder.drain() if self.recorder is not None else []


class BudgetScheduler(BudgetMixin, Scheduler):  # type: ignore[misc]
    """vLLM's synchronous scheduler with budgets."""


class AsyncBudgetScheduler(BudgetMixin, AsyncScheduler):  # type: ignore[misc]
    """vLLM's asynchronous scheduler with budgets."""


def install_utility() -> None:
    """Let a client of an engine core call its scheduler: ``call_utility("simmoe_scheduler", method, [args])``."""
    from vllm.v1.engine.core import EngineCore

    def simmoe_scheduler(self: Any, method: str, args: list) -> Any:  # type: ignore[type-arg]
        return getattr(self.scheduler, method)(*args)

    EngineCore.simmoe_scheduler = simmoe_scheduler
