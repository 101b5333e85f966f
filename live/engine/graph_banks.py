"""CUDA graphs keyed by (size, k): one bank of captured graphs a budget, within a bound of memory.

A captured graph, whole-model or piecewise, freezes the k of its capture. vLLM keeps its graphs in dictionaries:
``CudaGraphManager.graphs`` for FULL ones, ``CUDAGraphWrapper.concrete_cudagraph_entries`` of every compiled piece for
PIECEWISE ones. We run vLLM's own capture once a budget, each into dictionaries of its own, and a step's change of k
points vLLM at another set. All banks share vLLM's graph memory pool. A budget without a bank has vLLM's dispatcher find
no graph: the step launches its kernels one by one, at that k.

The largest budget is captured first: it sizes the pool that the others share, and a step runs at the largest budget of
its batch, so where the bound leaves some out, those that most steps of mixed batches run at have graphs.
"""

from __future__ import annotations

import functools
from typing import Any

from simmoe.errors import LiveError
from simmoe.live.engine.graph_memory import SHARE_AFTER_KV, SHARE_BEFORE_KV, CapturedGraphs, GraphMemory, bound_bytes
from simmoe.live.engine.transport import EngineOptions, follows_budgets
from simmoe.live.engine.worker import set_k


class GraphBanks:
    """The banks of one model runner.

    Args:
        manager: vLLM's ``CudaGraphManager`` of the runner.
        wrappers: every ``CUDAGraphWrapper``.
        memory: their bound.
    """

    def __init__(self, manager: Any, wrappers: list[Any], memory: GraphMemory) -> None:
        self.memory = memory
        self._manager = manager
        self._wrappers = wrappers
        # _banks[k] is (whole-model graphs, graphs of each wrapper)
        self._banks: dict[int, tuple[dict[Any, Any], list[dict[Any, Any]]]] = {}
        self._selected = False  # whether the budget selected last has a bank
        self._aside = False

    @property
    def captured(self) -> CapturedGraphs:
        """What there is."""
        return CapturedGraphs(tuple(sorted(self._banks)), self.memory.taken_bytes, self.memory.bound_bytes)

    def add(self, k: int) -> None:
        """Point vLLM at an empty bank of budget k, to be captured into."""
        self._banks[k] = {}, [{} for _ in self._wrappers]
        self.select(k)

    def select(self, k: int) -> None:
        """Point vLLM at the graphs of budget k, or at none where it has no bank."""
        bank = self._banks.get(k)
        self._selected = bank is not None
        self._let_find()
        if bank is None:
            return
        self._manager.graphs, pieces = bank
        for wrapper, entries in zip(self._wrappers, pieces, strict=True):
            wrapper.concrete_cudagraph_entries = entries

    def leave_aside(self, aside: bool) -> None:
        """Have steps launch their kernels one by one, whatever budgets are selected, until told otherwise."""
        self._aside = aside
        self._let_find()

    def _let_find(self) -> None:
        self._manager._graphs_captured = self._selected and not self._aside  # what its dispatcher asks first


def install() -> None:
    """Make model runners capture a bank a budget, and count them all when memory is set aside. Idempotent.

    An engine whose scheduler is none of simmoe's captures as vLLM does.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    key_graphs(GPUModelRunner)


def key_graphs(runner: type[Any]) -> None:
    """Replace the methods of a model runner's class that capture, and estimate what that takes. Idempotent."""
    from vllm import envs

    capture, estimate = runner.capture_model, runner.profile_cudagraph_memory
    if hasattr(capture, "simmoe"):
        return

    @functools.wraps(capture)
    def capture_model(self: Any, *, profile_only: bool = False) -> int:
        if not follows_budgets(self.vllm_config):
            return int(capture(self, profile_only=profile_only))
        if self.cudagraph_manager.use_breakable_cg:
            raise LiveError("breakable CUDA graphs are not keyed by k: leave VLLM_USE_BREAKABLE_CUDAGRAPH unset")
        options = EngineOptions.of(self.vllm_config)
        if profile_only:
            set_k(self.vllm_config, options.k_max)
            return int(capture(self, profile_only=True))
        banks = GraphBanks(self.cudagraph_manager, _wrappers(), getattr(self, "simmoe_memory", None) or _memory(self))
        for k in reversed(options.captured_ks):
            if not banks.memory.has_room(_least_of_all):
                break
            set_k(self.vllm_config, k)
            banks.add(k)
            banks.memory.taken.append(int(capture(self, profile_only=False)))
        set_k(self.vllm_config, options.k_max)
        banks.select(options.k_max)
        self.simmoe_banks = banks
        return banks.memory.taken_bytes

    @functools.wraps(estimate)
    def profile_cudagraph_memory(self: Any) -> int:
        if not follows_budgets(self.vllm_config):
            return int(estimate(self))
        self.simmoe_activation_bytes = _activation_bytes()
        if not envs.VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS:
            return 0  # vLLM would capture a bank to do no more than warn by its size
        options = EngineOptions.of(self.vllm_config)
        bound = bound_bytes(options.graph_memory_gib, _left_bytes(self), SHARE_BEFORE_KV)
        self.simmoe_memory = memory = GraphMemory(bound, int(estimate(self)))
        return memory.reserved_bytes(len(options.captured_ks))

    capture_model.simmoe = True  # type: ignore[attr-defined]
    runner.capture_model = capture_model
    runner.profile_cudagraph_memory = profile_cudagraph_memory


def _wrappers() -> list[Any]:
    from vllm.compilation.cuda_graph import CUDAGraphWrapper

    return list(CUDAGraphWrapper._all_instances)


def _memory(runner: Any) -> GraphMemory:
    """Return the bound of a runner whose KV cache was set aside without an estimate of its graphs."""
    import torch

    free = torch.accelerator.get_memory_info()[0] - getattr(runner, "simmoe_activation_bytes", 0)
    gib = EngineOptions.of(runner.vllm_config).graph_memory_gib
    return GraphMemory(bound_bytes(gib, free, SHARE_AFTER_KV))


def _left_bytes(runner: Any) -> int:
    """Return what weights and activations leave of ``gpu_memory_utilization``, right after vLLM has tried both."""
    import torch

    free, total = torch.accelerator.get_memory_info()
    asked = int(runner.vllm_config.cache_config.gpu_memory_utilization * total)
    return int(asked - (total - free) - runner.simmoe_activation_bytes)


def _activation_bytes() -> int:
    """Return what the largest step had on the device beyond what stays, right after vLLM has tried it."""
    import torch

    stats = torch.accelerator.memory_stats()
    return int(stats["allocated_bytes.all.peak"] - stats["allocated_bytes.all.current"])


def _least_of_all(value: int) -> int:
    """Return the least that any worker of the engine passes; all call this at once."""
    import torch
    from vllm.distributed.parallel_state import get_world_group

    group = get_world_group()
    if group.world_size == 1:
        return value
    values = torch.tensor([value], dtype=torch.int64)
    torch.distributed.all_reduce(values, torch.distributed.ReduceOp.MIN, group=group.cpu_group)
    return int(values.item())
