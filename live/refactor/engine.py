"""From a model directory and calibration text to a refactored checkpoint: profile, partition, gate, write."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from simmoe.errors import MissingDependency, RefactorError
from simmoe.live.refactor.anneal import PUBLISHED, Schedule, anneal
from simmoe.live.refactor.checkpoint import Checkpoint, check_new
from simmoe.live.refactor.families import check_splits, family_of, has_complex_gate, moe_shape
from simmoe.live.refactor.gates import (
    ALLOCATIONS,
    DownProj,
    allocation_table,
    calibrate,
    check_gate_neurons,
    choose_gate_neurons,
)
from simmoe.live.refactor.partition import contiguous, drop_coefficients, greedy, uniform_random
from simmoe.live.refactor.profiler import LayerProfile, calibration_batches, coverage_report, profile_model
from simmoe.live.refactor.transform import LayerPlan, check_complete, write_refactored

PARTITIONS = ("annealed", "greedy", "random", "contiguous")
GATES = ("complex", "linear")


@dataclass(frozen=True)
class RefactorConfig:
    """Every choice of one refactoring; saved in the new checkpoint's config.json."""

    splits: int = 4
    """N, sub-experts an expert."""
    gate: str = "complex"
    """complex (CG) or linear (LG)."""
    partition: str = "annealed"
    """annealed, or a control: greedy, random, contiguous."""
    schedule: Schedule = PUBLISHED
    """Of the annealing."""
    k_drop: int | None = None
    """Sub-experts dropped in the objective; None averages over 1..N-1."""
    gate_neurons: int = 4
    """r, gate neurons a sub-expert (CG)."""
    allocation: str = "energy"
    """How CG shares a budget among ranked experts."""
    tokens_per_expert: int = 2048
    """Activations kept an expert."""
    calibration_tokens: int = 131_072
    """Tokens of calibration text run through the model."""
    context_tokens: int = 2048
    """Calibration window, cut to what the model takes."""
    seed: int = 0
    """Of the reservoirs, the random partition and the annealing."""


def load_model(path: Path, *, device: str | None = None, dtype: str = "auto", **options: Any) -> Any:
    """A transformers model on ``device`` (a GPU if there is one).

    Code in the directory is run for CG checkpoints alone: what published checkpoints bring (DeepSeek-V2's does) is of
    older transformers and unlike the classes that the profiler hooks.

    Raises:
        MissingDependency: transformers or the device is not there.
        RefactorError: transformers cannot load the directory.
    """
    try:
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging
    except ImportError as error:
        raise MissingDependency("this needs torch and transformers; pip install 'simmoe[refactor]'") from error
    logging.disable_progress_bar()
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise MissingDependency(f"--device {device}: not usable here ({_first_line(error)}); try cpu") from error
    own_code = has_complex_gate(Checkpoint(path).config)
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, trust_remote_code=own_code, **options)
    except Exception as error:  # a configuration that contradicts the tensors fails in as many ways as there are keys
        raise RefactorError(f"{path}: transformers cannot load it ({_first_line(error)})") from error
    return model.to(device).eval()


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__


def read_text(path: Path, option: str) -> str:
    """A UTF-8 text file.

    Raises:
        RefactorError: it cannot be read; the message names ``option``.
    """
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RefactorError(f"{option} {path}: cannot be read as UTF-8 text ({error})") from error


def load_tokenizer(path: Path) -> Any:
    """The tokeniser in a model directory.

    Raises:
        RefactorError: there is none.
    """
    from transformers import AutoTokenizer

    # without any of these transformers makes up an empty tokeniser of the family's default class
    files = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tokenizer_config.json")
    if not any((path / name).exists() for name in files):
        raise RefactorError(f"{path}: no usable tokeniser (no {files[0]}); copy the model's tokenizer files there")
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=has_complex_gate(Checkpoint(path).config))
    except Exception as error:  # as of a model, and malformed tokenizer.json raises a bare Exception
        raise RefactorError(
            f"{path}: no usable tokeniser ({_first_line(error)}); copy the model's tokenizer files there"
        ) from error


def profile_checkpoint(
    path: Path, calibration: Path, config: RefactorConfig, say: Callable[[str], None], device: str | None = None
) -> list[LayerProfile]:
    """Load the model, run the calibration text, return the profiles; the model is let go.

    Raises:
        RefactorError: model, tokeniser or text cannot be used, or an activation is not finite.
    """
    tokenizer = load_tokenizer(path)
    source_config = Checkpoint(path).config
    context = min(config.context_tokens, int(source_config.get("max_position_embeddings", config.context_tokens)))
    content = read_text(calibration, "--calibration")
    batches = calibration_batches(tokenizer, content, max_tokens=config.calibration_tokens, context_tokens=context)
    model = load_model(path, device=device)
    profiles: list[LayerProfile] = profile_model(
        model, batches, tokens_per_expert=config.tokens_per_expert, seed=config.seed
    )
    for profile in profiles:
        finite = profile.activations.isfinite().all(dim=2).all(dim=1)
        if not finite.all():
            expert = int(finite.int().argmin())
            raise RefactorError(
                f"{path}: layer {profile.layer} expert {expert} has activations that are not finite; its weights are "
                "damaged, or exceed their dtype: download the checkpoint again"
            )
    say(f"calibration: {sum(batch.numel() for batch in batches)} tokens. {coverage_report(profiles)}")
    return profiles


def solve(profile: LayerProfile, config: RefactorConfig) -> torch.Tensor:
    """[num_experts, width] partitions of one layer's experts."""
    num_experts, _, width = profile.activations.shape
    if config.partition == "contiguous":
        return contiguous(num_experts, width)
    if config.partition == "random":
        return uniform_random(num_experts, width, config.splits, config.seed * 1009 + profile.layer)
    start = greedy(profile.activations, config.splits)
    start[profile.kept == 0] = torch.arange(width)
    if config.partition == "greedy":
        return start
    return anneal(
        profile.activations, start, config.splits, schedule=config.schedule, k_drop=config.k_drop,
        seed=config.seed * 1009 + profile.layer,
    )  # fmt: skip


def down_proj_of(source: Checkpoint) -> DownProj:
    """Output weights of the original experts, read one by one."""
    return lambda layer, expert: source.tensor(f"model.layers.{layer}.mlp.experts.{expert}.down_proj.weight")


def plan(
    profiles: Sequence[LayerProfile], config: RefactorConfig, source: Checkpoint, say: Callable[[str], None]
) -> tuple[list[LayerPlan], list[list[int]] | None]:
    """Partitions, gate neurons and allocation table for the profiled layers of ``source``.

    Returns:
        (one plan a layer, [m * N][m] kappa table for a complex gate or None).
    """
    began = time.monotonic()
    orders = []
    for profile in profiles:
        orders.append(solve(profile, config))
        say(f"layer {profile.layer}: {config.partition} partition, {time.monotonic() - began:.1f} s")
    if config.gate == "linear":
        return [LayerPlan(profile.layer, order) for profile, order in zip(profiles, orders, strict=True)], None
    neurons = [
        choose_gate_neurons(profile, order, config.splits, config.gate_neurons)
        for profile, order in zip(profiles, orders, strict=True)
    ]
    top_k = moe_shape(source.config, family_of(source.config)).top_k
    seen = calibrate(profiles, orders, neurons, config.splits, top_k, down_proj_of(source))
    table = allocation_table(config.allocation, config.splits, top_k, seen)
    plans = [LayerPlan(p.layer, order, chosen) for p, order, chosen in zip(profiles, orders, neurons, strict=True)]
    return plans, table


def record_of(
    config: RefactorConfig, source: Checkpoint, calibration: Path, kappa: list[list[int]] | None
) -> dict[str, Any]:
    """What the new config.json says under ``simmoe_refactor``."""
    shape = moe_shape(source.config, family_of(source.config))
    record: dict[str, Any] = {
        **asdict(config),
        "original": {"num_experts": shape.num_experts, "top_k": shape.top_k, "width": shape.width},
        "calibration": {"file": calibration.name, "sha256": hashlib.sha256(calibration.read_bytes()).hexdigest()},
    }
    if kappa is None:
        for key in ("gate_neurons", "allocation"):
            del record[key]
    else:
        record["kappa"] = kappa
    return record


def refactor(
    path: Path,
    calibration: Path,
    out: Path,
    config: RefactorConfig,
    *,
    say: Callable[[str], None] = lambda line: None,
    device: str | None = None,
) -> None:
    """Refactor the checkpoint at ``path`` into the new directory ``out``.

    Everything that can be refused is refused before the model is loaded.

    Raises:
        RefactorError: see :mod:`families`, :mod:`checkpoint`, :mod:`profiler`.
        OutputError: ``out`` exists or cannot be written.
    """
    check_new(out)
    if config.gate not in GATES or config.partition not in PARTITIONS or config.allocation not in ALLOCATIONS:
        raise RefactorError(
            f"gate {config.gate!r}, partition {config.partition!r}, allocation {config.allocation!r}: unknown"
        )
    source = Checkpoint(path)
    family = family_of(source.config)
    shape = moe_shape(source.config, family)
    check_splits(shape, config.splits, family)
    drop_coefficients(config.splits, config.k_drop)
    if config.gate == "complex":
        check_gate_neurons(config.gate_neurons, shape.width // config.splits)
    check_complete(source, shape)
    profiles = profile_checkpoint(path, calibration, config, say, device)
    plans, kappa = plan(profiles, config, source, say)
    del profiles
    write_refactored(source, out, plans, record_of(config, source, calibration, kappa))
    say(f"{out}: {shape.num_experts * config.splits} sub-experts of width {shape.width // config.splits} a layer")
