"""Every measurement that ships with simmoe, in the order it is taken: layers, tests, tables, live records.

Expected seconds are guesses from what docs/profiles.md and docs/validation.md say of starts and of whole runs; a
campaign's ``job.json`` files say what was seen.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from job import Job

ROOT = Path(__file__).resolve().parents[2]

#: As the shipped tables were measured: graphs fit into what is left of the card, vLLM's own sampler compiles nothing.
ENVIRONMENT = {
    "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
#: Likewise, of two cards: no collectives of vLLM's that use NVLink multicast.
TWO_CARDS = {
    **ENVIRONMENT,
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_USE_NCCL_SYMM_MEM": "0",
}

#: Names, --model, --split, --budgets, --max-tokens, --gpu-memory-utilization.
OLMOE_SPLIT4 = ("olmoe-1b-7b-split4", "olmoe-1b-7b", 4, "1,2,4,8,12,16,20,24,28,32", 8192, 0.9)
DEEPSEEK_SPLIT4 = ("deepseek-v2-lite-split4", "deepseek-v2-lite", 4, "1,6,12,24", 8192, 0.87)
QWEN3_SPLIT4 = ("qwen3-30b-a3b-split4", "qwen3-30b-a3b", 4, "1,8,16,32", 4096, 0.85)
OLMOE = ("olmoe-1b-7b", "olmoe-1b-7b", 1, "1,2,4,8", 8192, 0.9)
DEEPSEEK = ("deepseek-v2-lite", "deepseek-v2-lite", 1, "1,2,4,6", 8192, 0.87)
QWEN3 = ("qwen3-30b-a3b", "qwen3-30b-a3b", 1, "1,2,4,8", 4096, 0.85)
OLMOE_TP2 = ("olmoe-1b-7b-tp2", "olmoe-1b-7b", 1, "4,8", 8192, 0.9)
DEEPSEEK_TP2 = ("deepseek-v2-lite-tp2", "deepseek-v2-lite", 1, "3,6", 8192, 0.87)
QWEN3_TP2 = ("qwen3-30b-a3b-tp2", "qwen3-30b-a3b", 1, "4,8", 4096, 0.85)

Layout = tuple[str, str, int, str, int, float]

RECORDING_S = 48
"""Of Poisson arrivals: 40 s of them in two recordings that are held out, and a burst, are more than 3,000 steps of any
table. Not shortened for want of time, as no time limit is named: a recording is whole, or taken again."""

SIMMOE = ("{python}", "-P", "-m", "simmoe")


def with_whole_experts(layout: Layout) -> Layout:
    """Return the name of the same layout under expert parallelism, with the rest."""
    return (f"{layout[0]}-ep", *layout[1:])


def _cards(layout: Layout) -> tuple[str, ...]:
    name = layout[0]
    if "-tp2" not in name:
        return ()
    return ("--tensor-parallel", "2", *(("--expert-parallel",) if name.endswith("-ep") else ()))


def layer(layout: Layout) -> Job:
    """Return the timing of a layout's MoE layer by itself, on one card."""
    name, model, split, budgets, _, _ = layout
    made = f"{name}-h200-layer.json"
    command = (*SIMMOE, "profile", "layer", "--model", model, "--split", str(split), "--budgets", budgets)
    return Job(f"layer-{name}", (*command, *_cards(layout), "--out", f"{{job}}/{made}"), (made,), expected_s=120.0)


def table(layout: Layout, *further: str, made: Sequence[str] = ("", "-recording", "-layer"), expected_s: float) -> Job:
    """Return the measuring of a table.

    Args:
        layout: what is measured.
        further: options.
        made: of the sample file ("") and those beside it, what follows the name. With all three a table is fitted.
        expected_s: of the whole of it.
    """
    name, model, split, budgets, max_tokens, memory = layout
    stem = f"{name}-h200"
    options: tuple[str, ...] = ("--model", model, "--split", str(split), "--max-tokens", str(max_tokens))
    options += ("--budgets", budgets) if budgets else ()
    options += (*_cards(layout), "--passes", "1", "--recording-seconds", str(RECORDING_S), "--pin")
    options += ("--gpu-memory-utilization", str(memory), *further)
    makes = tuple(f"{stem}{each}.json{'l' * (each != '-layer')}" for each in made)
    files: tuple[str, ...] = ("--raw", f"{{job}}/{stem}.jsonl")
    if "-layer" in made:
        files += ("--out", f"{{job}}/{stem}.json")
        makes += (f"{stem}.json",)
    num_gpus = 2 if "-tp2" in name else 1
    return Job(
        f"table-{name}",
        (*SIMMOE, "profile", "measure", *options, *files),
        makes,
        expected_s=expected_s,
        num_gpus=num_gpus,
        resumes=True,
        least_s=300.0,
        fast_host=True,
        environment=TWO_CARDS if num_gpus == 2 else ENVIRONMENT,
    )


def test(file: str, expected_s: float, chosen: str = "") -> Job:
    """Return a file of tests/gpu, or those of it whose names have ``chosen`` in them.

    A process each: what an engine leaves in a process, and what was imported there, is the next one's.
    """
    only = ("-k", chosen) if chosen else ()
    command = ("{python}", "-m", "pytest", "-p", "no:cacheprovider", "-rA", f"tests/gpu/{file}.py", *only)
    name = f"{file.replace('_', '-')}-{chosen}" if chosen else file.replace("_", "-")
    return Job(name, (*command, "--junitxml", "{job}/tests.xml"), ("tests.xml",), expected_s, environment=ENVIRONMENT)


def records(experiment: str, expected_s: float) -> Job:
    """Return the live records of a validation experiment."""
    found = _experiments()[experiment]
    return Job(
        f"records-{experiment}",
        # a script has its own folder on the path, and the repository is not
        ("{python}", "benchmarks/validation/record.py", experiment, "--out", "{job}/records", "--limit-s", "{left_s}"),
        tuple(f"records/{run.name}/manifest.json" for run in found.runs),
        expected_s=expected_s,
        num_gpus=found.num_ranks,
        resumes=True,
        least_s=300.0,
        fast_host=True,
        environment=TWO_CARDS if found.num_ranks > 1 else ENVIRONMENT,
    )


def _experiments() -> dict[str, Any]:
    """Return the experiments of benchmarks/validation/plan.py, by name."""
    spec = importlib.util.spec_from_file_location("validation_plan", ROOT / "benchmarks" / "validation" / "plan.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    experiments: dict[str, Any] = module.EXPERIMENTS
    return experiments


def jobs() -> Iterator[Job]:
    """Yield all jobs, the most wanted first."""
    yield from (layer(with_whole_experts(layout)) for layout in (OLMOE_TP2, DEEPSEEK_TP2, QWEN3_TP2))
    # against the shipped olmoe-1b-7b-split4-h200-layer-alone.json, of the same budgets
    yield layer((*OLMOE_SPLIT4[:3], "1,8,16,24,32", *OLMOE_SPLIT4[4:]))
    for model in ("olmoe", "qwen3", "deepseek"):
        yield test("test_families", 180.0, model)
    yield test("test_graph_banks", 180.0)
    yield test("test_device_hold", 60.0)
    yield test("test_refactor_anneal", 180.0)
    yield table(QWEN3_SPLIT4, expected_s=1000.0)
    yield table(OLMOE_SPLIT4, expected_s=1200.0)
    yield table(DEEPSEEK_SPLIT4, expected_s=1000.0)
    for layout in (OLMOE, DEEPSEEK, QWEN3):
        yield table(layout, expected_s=1000.0)
    yield table(DEEPSEEK_TP2, expected_s=800.0)
    yield records("repeated", 570.0)
    for layout in (DEEPSEEK_TP2, OLMOE_TP2, QWEN3_TP2):
        yield table(with_whole_experts(layout), expected_s=800.0)
    for layout in (OLMOE_TP2, QWEN3_TP2):
        yield table(layout, expected_s=800.0)
    yield records("keyed", 570.0)
    yield records("deepseek", 570.0)
    # samples and recordings that no table is shipped of
    default = ("olmoe-1b-7b-split4-default", *OLMOE_SPLIT4[1:3], "", *OLMOE_SPLIT4[4:])
    yield table(default, "--graphs", "default", made=("", "-recording"), expected_s=600.0)
    sync = ("olmoe-1b-7b-split4-sync", *default[1:])
    yield table(sync, "--sync", made=("",), expected_s=500.0)
    yield records("default-graphs", 270.0)
