"""A vLLM worker that times its steps on the device, launches them in other ways, and says what its kernels are."""

from __future__ import annotations

from typing import Any

from vllm.platforms import current_platform

import simmoe.live.measure.dummy_weights  # noqa: F401 (registers its load format in this process)
from simmoe.errors import LiveError
from simmoe.live.engine.timed_worker import TimedWorker
from simmoe.live.measure import moe_layer
from simmoe.live.measure.device_hold import DeviceHold, cuda_hold


class MeasuringWorker(TimedWorker):
    """Named by ``worker_cls``; its extra methods are called through ``collective_rpc``."""

    _hold: DeviceHold | None = None
    _hold_s = 0.0

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run the forward pass; a step that computes something may have the device wait first."""
        if self._hold is not None and self._hold_s and getattr(scheduler_output, "simmoe_step", None) is not None:
            self._hold(self._hold_s)
        return super().execute_model(scheduler_output)

    def set_graphs(self, on: bool) -> None:
        """Replay captured graphs, or launch kernels one by one as above the captured sizes."""
        banks = getattr(self.model_runner, "simmoe_banks", None)
        if banks is not None:
            banks.leave_aside(not on)

    def hold_device(self, seconds: float) -> None:
        """Let the device wait so long before each later step, while the step is launched; 0 ends it."""
        if current_platform.is_cpu():
            raise LiveError("a CPU cannot be held before a step: it runs the step while it launches it")
        if self._hold is None:
            self._hold = cuda_hold()
        self._hold_s = seconds

    def time_moe_layers(self, sizes: list[int], ks: list[int]) -> dict[str, Any]:
        """Return :func:`moe_layer.time_layers` of this worker's model."""
        return moe_layer.time_layers(self.vllm_config, moe_layer.engine_layers(self.vllm_config), sizes, ks)

    def moe_tiles(self, num_tokens: list[int], ks: list[int]) -> dict[str, Any]:
        """Return the Triton tile configuration of the first MoE layer at each size and budget, 'n/k' to a mapping."""
        from vllm.model_executor.layers.fused_moe.fused_moe import try_get_optimal_moe_config

        experts = self._first_moe_layer().routed_experts
        w13, w2 = experts.w13_weight.shape, experts.w2_weight.shape
        return {f"{n}/{k}": try_get_optimal_moe_config(w13, w2, k, None, n) for n in num_tokens for k in ks}

    def backends(self) -> dict[str, str]:
        """Return the names of the attention backend and of the MoE kernel in use; '' where a layer does not say."""
        context = self.vllm_config.compilation_config.static_forward_context
        backends = [layer.attn_backend for layer in context.values() if hasattr(layer, "attn_backend")]
        method = self._first_moe_layer().routed_experts.quant_method
        experts = getattr(getattr(method, "moe_kernel", None), "fused_experts", method)
        return {"attention": backends[0].get_name() if backends else "", "moe": type(experts).__name__}

    def _first_moe_layer(self) -> Any:
        from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

        context = self.vllm_config.compilation_config.static_forward_context
        return next(layer for layer in context.values() if isinstance(layer, MoERunner))
