"""vLLM's schedulers, with a budget a step: the largest of the requests the step computes.

Choose one with ``scheduler_cls``: ``AsyncBudgetScheduler`` where vLLM schedules asynchronously (its default on a GPU),
``BudgetScheduler`` where it does not (the CPU).
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from typing import Any

from simmoe.errors import LiveError
from simmoe.live.engine.graph_memory import GIB, CapturedGraphs
from simmoe.live.engine.steps import BatchSummary, StepRecord, StepRecorder, summarise
from simmoe.live.engine.transport import EngineOptions, request_k, tell_k_running
from simmoe.live.engine.versions import check_vllm

check_vllm()  # before the imports that another version may not have

from vllm.config.compilation import CUDAGraphMode  # noqa: E402
from vllm.logger import init_logger  # noqa: E402
from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402
from vllm.v1.core.sched.output import SchedulerOutput  # noqa: E402
from vllm.v1.core.sched.scheduler import Scheduler  # noqa: E402

logger = init_logger("vllm.simmoe")  # beneath vLLM's own, which has the handlers


class BudgetMixin:
    """Sets ``SchedulerOutput.simmoe_k`` on every step that computes tokens, and records the steps when asked."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.vllm_config  # type: ignore[attr-defined]
        self.options = EngineOptions.of(config)
        self.uses_graphs = config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE
        if self.uses_graphs and not config.use_v2_model_runner:
            raise LiveError(
                "only vLLM's second model runner keys its CUDA graphs by k, those of the first are all of the largest: "
                "set VLLM_USE_V2_MODEL_RUNNER=1, or enforce_eager"
            )
        self.captured = CapturedGraphs()
        """What the workers captured."""
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
        """Return the budget the step runs at: the batch's largest, or where so chosen the next one that has graphs."""
        k = batch.shape.k_exec
        if self.options.uncaptured_k == "next":
            return next((captured for captured in self.captured.ks if captured >= k), k)
        return k

    def update_from_output(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        """Take a step's output in, and close its record."""
        output_s = self.clock()
        outputs = super().update_from_output(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        if self.recorder is not None and scheduler_output.simmoe_step is not None:
            self.recorder.finished(scheduler_output.simmoe_step, output_s, self.clock())
        return outputs

    def take_captured(self, told: Sequence[CapturedGraphs | None]) -> None:
        """Take in what each worker captured, before the first step, and say so in the log.

        Raises:
            LiveError: they differ, and would wait for each other in the first step for ever.
        """
        budgets = {None if one is None else one.ks for one in told}
        if len(budgets) > 1:
            raise LiveError(f"the workers captured graphs at different budgets, {budgets}: name fewer captured_ks")
        if not self.uses_graphs or told[0] is None:
            return
        self.captured = told[0]
        asked = self.options.captured_ks
        log = logger.info if self.captured.ks == asked else logger.warning
        log("%s", described(self.captured, self.options))

    def captured_graphs(self) -> dict[str, Any]:
        """Return what the workers captured, for the state endpoint and a run's manifest."""
        taken, bound = (round(size / GIB, 3) for size in (self.captured.taken_bytes, self.captured.bound_bytes))
        return {"captured_ks": list(self.captured.ks), "graph_gib": taken, "graph_memory_gib": bound}

    @property
    def k_running(self) -> int:
        """The largest budget among running requests; 0 if none runs."""
        ks = self.request_ks
        return max([ks[request.request_id] for request in self.running], default=0)  # type: ignore[attr-defined]

    def make_stats(self, *args: Any, **kwargs: Any) -> Any:
        """Return vLLM's statistics of a step, with ``k_running`` in them."""
        stats = super().make_stats(*args, **kwargs)  # type: ignore[misc]
        if stats is not None:
            tell_k_running(stats, self.vllm_config, self.k_running)  # type: ignore[attr-defined]
        return stats

    def drain_steps(self) -> list[StepRecord]:
        """Return the steps finished since the last call."""
        return self.recorder.drain() if self.recorder is not None else []


class BudgetScheduler(BudgetMixin, Scheduler):  # type: ignore[misc]
    """vLLM's synchronous scheduler with budgets."""


class AsyncBudgetScheduler(BudgetMixin, AsyncScheduler):  # type: ignore[misc]
    """vLLM's asynchronous scheduler with budgets."""


def described(captured: CapturedGraphs, options: EngineOptions) -> str:
    """Return in one line at which budgets there are graphs, and how a step at any other runs."""
    ks, num_asked = captured.ks, len(options.captured_ks)
    taken, bound = (f"{size / GIB:.2f}" for size in (captured.taken_bytes, captured.bound_bytes))
    budgets = f"k = {', '.join(map(str, ks))}" if ks else "none"
    line = f"CUDA graphs at {len(ks)} of {num_asked} budgets, {budgets}; {taken} of at most {bound} GiB"
    if len(ks) == options.k_max:
        return line
    if options.uncaptured_k == "next" and ks:
        return f"{line}; a step at another k runs at the next of them (uncaptured_k: next)"
    return f"{line}; a step at another k runs without graphs, at that k (uncaptured_k: eager)"


def install_utility() -> None:
    """Let a client of an engine core call its scheduler: ``call_utility("simmoe_scheduler", method, [args])``.

    And let the scheduler know which graphs there are, once an engine core has been made. Idempotent.
    """
    from vllm.v1.engine.core import EngineCore

    original = EngineCore.__init__
    if hasattr(original, "simmoe"):
        return

    @functools.wraps(original)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        if isinstance(self.scheduler, BudgetMixin):
            told = self.model_executor.collective_rpc("simmoe_captured_graphs")
            self.scheduler.take_captured([None if one is None else CapturedGraphs(*one) for one in told])

    init.simmoe = True  # type: ignore[attr-defined]
    EngineCore.__init__ = init

    def simmoe_scheduler(self: Any, method: str, args: list) -> Any:  # type: ignore[type-arg]
        return getattr(self.scheduler, method)(*args)

    EngineCore.simmoe_scheduler = simmoe_scheduler
