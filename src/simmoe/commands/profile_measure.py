"""``simmoe profile measure``: the default plan for a model, on the GPU of this machine."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from simmoe.errors import MissingDependency, UsageError


def measure_samples(model: str, split: int, raw: Path, *, eager: bool) -> None:
    """Measure the default plan into a sample file; a file that is there is continued.

    Args:
        model: 'olmoe-1b-7b', or the path of a Hugging Face config.json.
        split: sub-experts every routed expert is split into; 1 measures the model as published.
        raw: sample file. The reference logits k is proved against, and the model's config, are kept beside it.
        eager: without CUDA graphs.
    Raises:
        MissingDependency: vLLM, or a GPU, is not here.
        UsageError: no such config.
        LiveError: the card is busy, the model cannot be split so, or the k that ran is not the k named.
    """
    if find_spec("vllm") is None:
        raise MissingDependency("measuring a profile needs vLLM and an NVIDIA GPU: pip install 'simmoe[live]'")
    from rich.console import Console
    from rich.progress import Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    from simmoe.live.measure import MeasuredModel, Measuring, measure
    from simmoe.live.measure.engine import CAPTURED_KS, CAPTURED_SIZES, EngineSetup
    from simmoe.live.measure.models import split_config, write_model
    from simmoe.live.measure.plan import default_plan
    from simmoe.live.measure.run import PROBE_BATCHES, write_reference

    name, published = _published(model)
    command = f"simmoe profile measure --model {name} --split {split}{' --eager' if eager else ''}"
    config = split_config(published, split)
    k_max = int(config["num_experts_per_tok"])
    ks = tuple(sorted({*(k for k in CAPTURED_KS if k < k_max), k_max}))
    setup = EngineSetup(
        model=raw.with_suffix(".model"),
        captured_sizes=() if eager else CAPTURED_SIZES,
        captured_ks=() if eager else ks,
        overrides={"moe_backend": "triton"},
    )
    write_model(config, setup.model, setup.max_model_len)
    reference = raw.with_suffix(".reference.npz")
    with Progress(
        TextColumn("{task.description}"), TaskProgressColumn(), TimeRemainingColumn(), console=Console(stderr=True)
    ) as progress:
        task = progress.add_task("reference logits", total=None)
        if not reference.exists():
            write_reference(replace(setup, captured_sizes=(), captured_ks=()), ks, reference, PROBE_BATCHES)
        measure(
            Measuring(
                model=MeasuredModel(name if split == 1 else f"{name} split by {split}", config),
                setup=setup,
                plan=default_plan(CAPTURED_SIZES, ks, setup.max_num_seqs, 4096),
                out=raw,
                reference=reference,
                command=command,
            ),
            lambda what, done, total: progress.update(task, description=what, completed=done, total=total),
        )


def _published(model: str) -> tuple[str, dict[str, Any]]:
    from simmoe.live.measure.models import OLMOE_1B_7B

    if model == "olmoe-1b-7b":
        return "allenai/OLMoE-1B-7B-0924", OLMOE_1B_7B
    path = Path(model)
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"--model '{model}' is neither 'olmoe-1b-7b' nor a readable Hugging Face config.json: {error}"
        ) from None
    return str(config.get("_name_or_path") or path.parent.name), config
