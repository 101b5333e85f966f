"""How much one engine can do, simulated: ``python benchmarks/validation/saturation.py default-graphs`` prints it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict

from plan import EXPERIMENTS, POLICIES, Experiment

from simmoe.analysis.metrics import Slo, summarise
from simmoe.commands.sweeping.cells import Cell
from simmoe.commands.sweeping.saturation import offline_cell, saturation_rate
from simmoe.policies.registry import parse_policy
from simmoe.profiles.catalog import Profile, load_profile
from simmoe.simulator.config import EngineConfig, SimConfig
from simmoe.simulator.simulation import simulate
from simmoe.traces.build import build_workload

DEFAULT_SIZES: tuple[int, ...] = (1, 2, 4, *range(8, 257, 8), *range(272, 513, 16))
"""Token counts vLLM 0.32 captures graphs at by default."""


def engine_of(experiment: Experiment, profile: Profile) -> EngineConfig:
    """Return an experiment's engine, where no record of one tells it."""
    return EngineConfig(
        num_gpu_blocks=profile.num_gpu_blocks,
        distributed_executor_backend=profile.distributed_executor_backend,
        captured_ks=experiment.captured_ks or (),
        uncaptured_k="next",
    )


def saturation(experiment: Experiment, profile: Profile) -> dict[str, float]:
    """Return the requests a second that one engine finishes while requests wait, by system.

    As ``simmoe sweep`` finds them: offline, from many times the requests that can run at once, over the middle half.
    """
    sizes: Sequence[int] | None = DEFAULT_SIZES if experiment.graphs == "default" else None
    cost = profile.captured_at(sizes).cost
    config = SimConfig(k_max=profile.k_max, k_granularity=profile.k_granularity, engine=engine_of(experiment, profile))
    spec = experiment.cells(dict.fromkeys(POLICIES, 1.0))[0].spec
    rates = {}
    for system, policy in POLICIES.items():
        offline = offline_cell(Cell(spec, policy, profile.name, config, Slo())).workload
        choice = parse_policy(policy)
        result = simulate(build_workload(offline), config, cost(), choice.batch, choice.route)
        metrics = summarise(result.requests, [asdict(rank) for rank in result.ranks], result.end_s, Slo())
        rates[system] = round(saturation_rate(metrics, policy), 1)
    return rates


if __name__ == "__main__":
    experiment = EXPERIMENTS[sys.argv[1]]
    print(saturation(experiment, load_profile(sys.argv[2] if len(sys.argv) > 2 else experiment.profile)))
