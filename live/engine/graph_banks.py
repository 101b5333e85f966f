"""CUDA graphs keyed by k: one bank of captured graphs a budget.

A captured graph, whole-model or piecewise, freezes the k of its capture. vLLM keeps its graphs in dictionaries:
``CudaGraphManager.graphs`` for FULL ones, ``CUDAGraphWrapper.concrete_cudagraph_entries`` of every compiled piece for
PIECEWISE ones. We run vLLM's own capture once a budget, each into dictionaries of its own, and a step's change of k
points vLLM at another set. All banks share vLLM's graph memory pool.
"""

from __future__ import annotations

import functools
from typing import Any

from simmoe.live.engine.transport import EngineOptions, names_options
from simmoe.live.engine.worker import set_k


class GraphBanks:
    """The banks of one model runner."""

    def __init__(self, runner: Any) -> None:
        from vllm.compilation.cuda_graph import CUDAGraphWrapper

        self._manager = runner.cudagraph_manager
        self._wrappers = list(CUDAGraphWrapper._all_instances)
        # _banks[k] is (whole-model graphs, graphs of each wrapper)
        self._banks: dict[int, tuple[dict[Any, Any], list[dict[Any, Any]]]] = {}

    def select(self, k: int) -> None:
        """Point vLLM at the graphs of budget k; an empty bank is made the first time, to be captured into."""
        full, pieces = self._banks.setdefault(k, ({}, [{} for _ in self._wrappers]))
        self._manager.graphs = full
        for wrapper, entries in zip(self._wrappers, pieces, strict=True):
            wrapper.concrete_cudagraph_entries = entries


def install() -> None:
    """Make model runners capture a bank a budget, and count them all when memory is set aside. Idempotent.

    An engine without simmoe's options captures as vLLM does.
    """
    from vllm import envs
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    capture, estimate = GPUModelRunner.capture_model, GPUModelRunner.profile_cudagraph_memory
    if hasattr(capture, "simmoe"):
        return

    @functools.wraps(capture)
    def capture_model(self: Any, *, profile_only: bool = False) -> int:
        if not names_options(self.vllm_config):
            return int(capture(self, profile_only=profile_only))
        ks = EngineOptions.of(self.vllm_config).captured_ks
        if profile_only:
            set_k(self.vllm_config, ks[-1])
            return int(capture(self, profile_only=True))
        self.simmoe_banks = GraphBanks(self)
        used_bytes = 0
        for k in reversed(ks):  # the largest first: it sizes the memory pool the others share
            set_k(self.vllm_config, k)
            self.simmoe_banks.select(k)
            used_bytes += int(capture(self, profile_only=False))
        return used_bytes

    @functools.wraps(estimate)
    def profile_cudagraph_memory(self: Any) -> int:
        if not names_options(self.vllm_config):
            return int(estimate(self))
        if not envs.VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS:
            return 0  # vLLM would capture a bank to do no more than warn by its size
        return int(estimate(self)) * len(EngineOptions.of(self.vllm_config).captured_ks)

    capture_model.simmoe = True  # type: ignore[attr-defined]
    GPUModelRunner.capture_model = capture_model
    GPUModelRunner.profile_cudagraph_memory = profile_cudagraph_memory
