"""A vLLM worker that can time its steps, and say what its kernels are."""

from __future__ import annotations

import time
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.worker.gpu_worker import Worker

import simmoe.live.measure.dummy_weights  # noqa: F401 (registers its load format in this process)

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker
else:
    PlatformWorker = Worker


class MeasuringWorker(PlatformWorker):  # type: ignore[misc]
    """Named by ``worker_cls``; its extra methods are called through ``collective_rpc``."""

    _clock: list[tuple[int, Any, Any, float]] | None = None
    _begun: tuple[int, Any, float] | None = None

    def set_clock(self, on: bool) -> None:
        """Start or stop timing steps: CUDA events around forward pass and sampling, and the host's time to launch."""
        self._clock = [] if on else None
        self._begun = None

    def drain_clock(self) -> list[tuple[int, float | None, float]]:
        """Return (step, device seconds or None without a device, host seconds in the worker) of the steps timed."""
        rows, self._clock = self._clock or [], []
        if rows and rows[0][1] is not None:
            torch.cuda.synchronize()
        return [(n, a.elapsed_time(b) / 1e3 if a is not None else None, host_s) for n, a, b, host_s in rows]

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run the forward pass, timed when the clock is on."""
        step = getattr(scheduler_output, "simmoe_step", None)
        if self._clock is None or step is None:
            return super().execute_model(scheduler_output)
        start_s, event = time.perf_counter(), _record_event()
        output = super().execute_model(scheduler_output)
        self._begun = (step, event, time.perf_counter() - start_s)
        return output

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample, timed when the clock is on."""
        if self._begun is None or self._clock is None:
            return super().sample_tokens(grammar_output)
        start_s = time.perf_counter()
        output = super().sample_tokens(grammar_output)
        step, event, host_s = self._begun
        self._clock.append((step, event, _record_event(), host_s + time.perf_counter() - start_s))
        self._begun = None
        return output

    def moe_tiles(self, num_tokens: list[int], ks: list[int]) -> dict[str, Any]:
        """Return the Triton tile configuration of the first MoE layer at each size and budget, 'n/k' to a mapping."""
        from vllm.model_executor.layers.fused_moe.fused_moe import try_get_optimal_moe_config

        shapes = {n.rsplit(".", 1)[-1]: p.shape for n, p in self.model_runner.model.named_parameters() if ".w" in n}
        w13, w2 = shapes["w13_weight"], shapes["w2_weight"]
        return {f"{n}/{k}": try_get_optimal_moe_config(w13, w2, k, None, n) for n in num_tokens for k in ks}

    def backends(self) -> dict[str, str]:
        """Return the names of the attention backend and of the MoE kernel in use."""
        from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

        context = self.vllm_config.compilation_config.static_forward_context
        moe = next(layer for layer in context.values() if isinstance(layer, MoERunner))
        attention = next(layer for layer in context.values() if hasattr(layer, "attn_backend"))
        method = moe.routed_experts.quant_method
        experts = getattr(getattr(method, "moe_kernel", None), "fused_experts", method)
        return {"attention": attention.attn_backend.get_name(), "moe": type(experts).__name__}


def _record_event() -> Any:
    if current_platform.is_cpu():
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
