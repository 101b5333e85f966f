"""From what a user asks for to an engine's settings and the plan of what is measured on it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from simmoe.live.measure.engine import CAPTURED_KS, CAPTURED_SIZES, EngineSetup
from simmoe.live.measure.header import on_cpu
from simmoe.live.measure.plan import Plan, default_plan

#: Longest context measured; published models decode at no longer one than their own, but their shapes do not change.
MAX_CONTEXT = 8192

#: Sizes of a synchronous engine, which is measured to check the composition, not to fit a table.
SYNC_SIZES = tuple(1 << i for i in range(14))


def budgets_of(chosen: tuple[int, ...], k_max: int) -> tuple[int, ...]:
    """Return the budgets to measure: those chosen (none: CAPTURED_KS) that the model has, and its largest."""
    return tuple(sorted({*(k for k in chosen or CAPTURED_KS if 1 <= k < k_max), k_max}))


def layout_of(
    model: Path,
    k_max: int,
    *,
    graphs: str,
    async_scheduling: bool,
    budgets: tuple[int, ...],
    max_tokens: int,
    tensor_parallel: int,
    expert_parallel: bool,
    passes: int,
    pin: bool = False,
    memory_utilization: float = EngineSetup.gpu_memory_utilization,
) -> tuple[EngineSetup, Plan]:
    """Return the engine's settings and the plan.

    Args:
        model: folder with the model's config.json.
        k_max: its largest budget.
        graphs: 'banks', 'default' or 'none'; none on a CPU.
        async_scheduling: vLLM's default on a GPU; never on a CPU.
        budgets: ascending; empty takes CAPTURED_KS, three of them for a synchronous engine.
        max_tokens: of the largest step.
        tensor_parallel: cards.
        expert_parallel: whole experts on each.
        passes: over all points.
        pin: main threads to cores of their own.
        memory_utilization: of the card's memory, what weights, activations and KV cache may take; graphs come on top
            where vLLM does not estimate them.
    """
    if on_cpu():
        graphs, async_scheduling = "none", False
    ks = budgets_of(budgets or (CAPTURED_KS if async_scheduling else (k_max // 8, k_max // 2)), k_max)
    if graphs == "default":
        ks = (k_max,)
    sizes = [size for size in (CAPTURED_SIZES if async_scheduling else SYNC_SIZES) if size <= max_tokens]
    overrides: dict[str, Any] = {"moe_backend": "triton"}
    if on_cpu():
        overrides = {"kv_cache_memory_bytes": 1 << 28}
    setup = EngineSetup(
        model=model,
        captured_sizes={"banks": tuple(sizes), "default": None, "none": ()}[graphs],
        captured_ks=() if graphs == "none" else ks,
        async_scheduling=async_scheduling,
        tensor_parallel_size=tensor_parallel,
        expert_parallel=expert_parallel,
        max_num_batched_tokens=max_tokens,
        max_num_seqs=min(1024, max_tokens // 2),
        dtype="float32" if on_cpu() else "bfloat16",
        pin=pin,
        gpu_memory_utilization=memory_utilization,
        overrides=overrides,
    )
    plan = default_plan(tuple(sizes), ks, setup.max_num_seqs, MAX_CONTEXT)
    notes = (
        "random weights: norms 1, embeddings of deviation 1, matrices of fan_in ** -0.5, a tenth of that out of "
        "attention, every layer its own; prompts are uniformly random tokens and output is sampled at temperature 1: "
        "tokens are routed independently and evenly",
        "max_position_embeddings raised where below the longest context measured",
    )
    plan = replace(plan, passes=passes, notes=notes)
    if not async_scheduling:
        plan = replace(
            plan,
            prefill=tuple(p for p in plan.prefill if p.num_prompts == p.num_chunks == 1 and p.num_tokens in sizes),
            decode=tuple(p for p in plan.decode if p.num_seqs in sizes),
            mixed=(),
        )
    if not async_scheduling or graphs != "banks":
        plan = replace(plan, eager=())
    return setup, plan
