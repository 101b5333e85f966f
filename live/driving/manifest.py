"""What the one who starts engines knows of a live run; the run itself adds what it finds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simmoe.live.engine.versions import live_versions
from simmoe.live.server.launch import EngineLaunch, described_policy
from simmoe.policies.registry import PolicyChoice
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
        **launch.described(),
        "kind": "live",
        "versions": {**versions, **live_versions()},
        "workload": {"spec": spec.as_dict(), **source},
        "config": {"num_ranks": num_ranks, "k_max": launch.k_max},
        "policy": described_policy(choice),
        "seed": spec.seed,
    }
