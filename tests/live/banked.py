"""A model runner that captures into vLLM's own holders without a device, and a scheduler without vLLM's half."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from vllm.compilation.cuda_graph import CUDAGraphWrapper
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor, CudaGraphManager

from simmoe.live.engine.graph_memory import CapturedGraphs
from simmoe.live.engine.scheduler import BudgetMixin
from simmoe.live.engine.steps import BatchSummary
from simmoe.live.engine.transport import EngineOptions
from simmoe.profiles.shape import StepShape

K_MAX = 8
FULL = BatchExecutionDescriptor(CUDAGraphMode.FULL, 4, 4, 1)
PIECEWISE = BatchExecutionDescriptor(CUDAGraphMode.PIECEWISE, 4, None)


class Model:
    """Says which k a piece was captured at."""

    k = K_MAX


class Runner:
    """A model runner whose capture writes into vLLM's holders, as vLLM's does, what k the model had then."""

    def __init__(self, options: dict[str, Any] | None, sizes: Sequence[int], scheduler: type = BudgetMixin) -> None:
        self.model = Model()
        self.vllm_config = SimpleNamespace(
            additional_config=None if options is None else {"simmoe": options},
            model_config=SimpleNamespace(model="m", hf_text_config=SimpleNamespace(num_experts_per_tok=K_MAX)),
            scheduler_config=SimpleNamespace(get_scheduler_cls=lambda: scheduler),
            cache_config=SimpleNamespace(gpu_memory_utilization=0.9),
            model=self.model,
        )
        manager = self.cudagraph_manager = object.__new__(CudaGraphManager)
        manager.graphs, manager._graphs_captured, manager.use_breakable_cg = {}, False, False
        manager._lora_dispatch_map = {}
        manager._candidates = {(n, 0): [FULL, PIECEWISE] for n in range(5)}
        self.wrappers = [object.__new__(CUDAGraphWrapper) for _ in range(3)]
        for wrapper in self.wrappers:
            wrapper.concrete_cudagraph_entries = {}
        self.sizes = iter(sizes)
        self.calls: list[tuple[int, bool]] = []

    def capture_model(self, *, profile_only: bool = False) -> int:
        self.calls.append((self.model.k, profile_only))
        assert FULL not in self.cudagraph_manager.graphs, "vLLM captures into an empty bank"
        self.cudagraph_manager.graphs[FULL] = self.model.k
        self.cudagraph_manager._graphs_captured = True
        for wrapper in self.wrappers:
            wrapper.concrete_cudagraph_entries[PIECEWISE] = self.model.k
        return next(self.sizes)

    def profile_cudagraph_memory(self) -> int:
        taken = self.capture_model(profile_only=True)
        self.cudagraph_manager.graphs.clear()  # vLLM discards what it profiled
        for wrapper in self.wrappers:
            wrapper.concrete_cudagraph_entries.clear()
        self.cudagraph_manager._graphs_captured = False
        return taken

    def dispatched(self, num_tokens: int, uniform: int | None) -> set[int]:
        """Return the k of every graph that a step would replay; none where it launches its kernels one by one."""
        found = self.cudagraph_manager.dispatch(num_tokens, num_tokens, uniform, 0)
        if found.cg_mode == CUDAGraphMode.NONE:
            return set()
        if found.cg_mode == CUDAGraphMode.FULL:
            return {self.cudagraph_manager.graphs[found]}
        return {wrapper.concrete_cudagraph_entries[found] for wrapper in self.wrappers}


class Budgets(BudgetMixin):
    """A scheduler without vLLM's half of it."""

    def __init__(self, told: Sequence[CapturedGraphs | None], **options: Any) -> None:
        self.options = EngineOptions(k_max=K_MAX, **options)
        self.uses_graphs = True
        self.captured = CapturedGraphs()
        self.take_captured(told)

    def runs_at(self, k: int) -> int:
        return self.step_k(BatchSummary(StepShape(0, 0, 0, 1, 1, k), 0))
