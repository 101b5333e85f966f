"""``simmoe profile measure``: the default plan for a model, on the GPU of this machine."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

from simmoe.errors import MissingDependency


def measure_samples(model: str, split: int, raw: Path, *, eager: bool) -> None:
    """Measure the default plan into a sample file; a file that is there is continued.

    Args:
        model: a shipped model's name, or the path of a Hugging Face config.json.
        split: sub-experts every routed expert is split into; 1 measures the model as published.
        raw: sample file. The reference logits k is proved against, and the model's config, are kept beside it.
        eager: without CUDA graphs.
    Raises:
        MissingDependency: vLLM, or a GPU, is not here.
        UsageError: no such model, or experts that cannot be split so.
        DataError: a configuration that is not supported.
        LiveError: the card is busy, or the k that ran is not the k named.
    """
    if find_spec("vllm") is None:
        raise MissingDependency("measuring a profile needs vLLM and an NVIDIA GPU: pip install 'simmoe[live]'")
    from rich.console import Console
    from rich.progress import Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    from simmoe.live.measure import MeasuredModel, Measuring, measure
    from simmoe.live.measure.engine import CAPTURED_KS, CAPTURED_SIZES, EngineSetup
    from simmoe.live.measure.models import write_model
    from simmoe.live.measure.plan import default_plan
    from simmoe.live.measure.run import PROBE_BATCHES, write_reference
    from simmoe.profiles.models import read_model, split_config

    _, name, published = read_model(model)
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
