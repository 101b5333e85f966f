"""Applying a step's budget to the model: each MoE layer's router reads ``top_k`` when it runs."""

from __future__ import annotations

import functools
from typing import Any


def set_k(vllm_config: Any, k: int) -> None:
    """Route every later token of this worker's model to k experts.

    Kernels take k from the routing's own output, so nothing else need change. A captured CUDA graph keeps the k it was
    captured with (see ``graph_banks``), and so would compiled CPU code, which is why ``install`` makes the MoE an
    opaque operation there.
    """
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner

    for layer in vllm_config.compilation_config.static_forward_context.values():
        if isinstance(layer, MoERunner):
            layer.router.top_k = k
            layer.routed_experts.top_k = k


def install() -> None:
    """Make workers apply ``SchedulerOutput.simmoe_k`` before each step, and tell what they captured. Idempotent."""
    from vllm.v1.worker.gpu_worker import Worker

    original = Worker.execute_model
    if hasattr(original, "simmoe"):
        return

    @functools.wraps(original)
    def execute_model(self: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        k = getattr(scheduler_output, "simmoe_k", None)
        if k is not None and k != getattr(self, "simmoe_k", None):
            set_k(self.vllm_config, k)
            banks = getattr(self.model_runner, "simmoe_banks", None)
            if banks is not None:
                banks.select(k)
            self.simmoe_k = k
        return original(self, scheduler_output, *args, **kwargs)

    def simmoe_captured_graphs(self: Any) -> Any:
        banks = getattr(self.model_runner, "simmoe_banks", None)
        return None if banks is None else tuple(banks.captured)

    execute_model.simmoe = True  # type: ignore[attr-defined]
    Worker.execute_model = execute_model
    Worker.simmoe_captured_graphs = simmoe_captured_graphs
    _keep_moe_opaque_on_cpu()


def _keep_moe_opaque_on_cpu() -> None:
    import torch
    from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return

    def select_forward(self: Any) -> Any:
        return torch.ops.vllm.moe_forward if self._shared_experts is None else torch.ops.vllm.moe_forward_shared

    MoERunner._select_forward = select_forward
