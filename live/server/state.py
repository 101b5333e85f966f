"""Inside a replica's API server: ``GET /simmoe/state``, its counts and limits, at the cost of a dictionary.

vLLM loads :class:`StateEndpoint` by ``--middleware simmoe.live.server.state.StateEndpoint``. Scraping ``/metrics`` ten
times a second would render every histogram each time, on the event loop that serves requests.
"""

from __future__ import annotations

import json
import time
from typing import Any

from simmoe.live.engine.device_clock import DeviceTimes, longest_launches
from simmoe.live.engine.steps import StepRecord, TimedSteps
from simmoe.live.engine.transport import told_k_running

STATE_PATH = "/simmoe/state"
STEPS_PATH = "/simmoe/steps"


class EngineCounts:
    """Counts of one engine, fresh with every step: a stat logger of vLLM's ``AsyncLLM``."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self.num_running = 0
        self.kv_used = 0.0
        self.k_running: int | None = None
        """The largest budget that runs; None: the engine does not tell."""
        self._stalled_s = 0.0
        self._asked_s = time.monotonic()
        self._captured: dict[str, Any] | None = None

    @classmethod
    def of(cls, engine: Any) -> EngineCounts:
        """Attach to an ``AsyncLLM``; the same counts when called again.

        Raises:
            LiveError: the engine keeps no statistics.
        """
        from simmoe.errors import LiveError

        manager = engine.logger_manager
        if manager is None:
            raise LiveError("the engine keeps no statistics, which routing needs; leave --disable-log-stats away")
        for logger in manager.stat_loggers:
            if isinstance(logger, cls):
                return logger
        counts = cls(engine)
        manager.stat_loggers.append(counts)
        return counts

    async def captured_graphs(self) -> dict[str, Any]:
        """Return what graphs the engine has, see ``BudgetMixin.captured_graphs``; it is asked once.

        Those of an engine whose scheduler is none of simmoe's are all of the largest budget.
        """
        if self._captured is None:
            from vllm.config.compilation import CUDAGraphMode

            from simmoe.live.engine.transport import follows_budgets, model_k_max

            config = self._engine.vllm_config
            if follows_budgets(config):
                core = self._engine.engine_core
                self._captured = await core.call_utility_async("simmoe_scheduler", "captured_graphs", [])
            elif config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE:
                self._captured = {"captured_ks": [model_k_max(config)]}
            else:
                self._captured = {"captured_ks": []}
        return self._captured

    @property
    def num_waiting(self) -> int:
        """Requests the front end has taken and the engine does not run."""
        return max(0, int(self._engine.output_processor.get_num_unfinished_requests()) - self.num_running)

    def stalled_s(self) -> float:
        """Return how long the engine has had requests and made no step, over the times it was asked.

        Time in which nobody asked counts one second at most: this process may have stood still itself.
        """
        now_s = time.monotonic()
        self._stalled_s += min(now_s - self._asked_s, 1.0)
        self._asked_s = now_s
        if not self._engine.output_processor.get_num_unfinished_requests():
            self._stalled_s = 0.0
        return self._stalled_s

    def record(self, scheduler_stats: Any = None, *args: Any, **kwargs: Any) -> None:
        """Take in a step's statistics."""
        self._stalled_s = 0.0
        if scheduler_stats is not None:
            self.num_running = scheduler_stats.num_running_reqs
            self.kv_used = scheduler_stats.kv_cache_usage
            self.k_running = told_k_running(scheduler_stats)

    def __getattr__(self, name: str) -> Any:
        """Ignore whatever else a stat logger may be told."""
        if name.startswith(("log", "record")):
            return lambda *args, **kwargs: None
        raise AttributeError(name)


async def engine_state(engine: Any) -> dict[str, Any]:
    """Return the counts and limits of an ``AsyncLLM``, as plain data.

    Raises:
        LiveError: the engine keeps no statistics.
    """
    from vllm.utils.import_utils import resolve_obj_by_qualname

    from simmoe.live.engine.transport import EngineOptions

    config, counts = engine.vllm_config, EngineCounts.of(engine)
    options, graphs = EngineOptions.of(config), await counts.captured_graphs()
    sizes = config.compilation_config.cudagraph_capture_sizes if graphs["captured_ks"] else ()
    worker = resolve_obj_by_qualname(config.parallel_config.worker_cls)
    backend = config.parallel_config.distributed_executor_backend
    return {
        "healthy": not engine.errored,
        "num_waiting": counts.num_waiting,
        "num_running": counts.num_running,
        "kv_used": counts.kv_used,
        "k_running": counts.k_running,
        "stalled_s": counts.stalled_s(),
        "k_max": options.k_max,
        "default_k": options.default_k,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "enable_chunked_prefill": bool(config.scheduler_config.enable_chunked_prefill),
        "enable_prefix_caching": bool(config.cache_config.enable_prefix_caching),
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "distributed_executor_backend": backend if isinstance(backend, str) else backend.__qualname__,
        "block_size": config.cache_config.block_size,
        "num_gpu_blocks": config.cache_config.num_gpu_blocks,
        "vocab_size": config.model_config.get_vocab_size(),
        "max_model_len": config.model_config.max_model_len,
        **graphs,
        "uncaptured_k": options.uncaptured_k,
        "captured_sizes": sorted(sizes),
        "device_clock": hasattr(worker, "drain_device_times"),
        "hosts_policy": hasattr(config.scheduler_config.get_scheduler_cls(), "policy_stats"),
        "monotonic_s": time.monotonic(),
    }


class StateEndpoint:
    """ASGI middleware that answers simmoe's own paths and passes every other one on."""

    def __init__(self, app: Any) -> None:
        self._app = app
        self._timed = TimedSteps()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer, or pass on."""
        path = scope.get("path") if scope["type"] == "http" else None
        if path not in (STATE_PATH, STEPS_PATH):
            await self._app(scope, receive, send)
            return
        engine = scope["app"].state.engine_client
        answer: Any = await engine_state(engine)
        if path == STEPS_PATH:
            answer["steps"] = await self._drain_steps(engine, has_device_clock=answer["device_clock"])
            if answer["hosts_policy"]:
                answer["policy"] = await engine.engine_core.call_utility_async("simmoe_scheduler", "policy_stats", [])
        body = json.dumps(answer).encode()
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _drain_steps(self, engine: Any, *, has_device_clock: bool) -> list[StepRecord]:
        """Return the steps since the last call, with the device's times where the worker keeps a clock."""
        rows = await engine.engine_core.call_utility_async("simmoe_scheduler", "drain_steps", [])
        records = [StepRecord(*row) for row in rows]
        if not has_device_clock:
            return records
        told = await engine.collective_rpc("drain_device_times")
        return self._timed.join(records, longest_launches([DeviceTimes(*row) for row in rows] for rows in told))
