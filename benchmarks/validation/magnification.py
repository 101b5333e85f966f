"""What a queue makes of a bias in every step: ``python benchmarks/validation/magnification.py keyed``.

Simulated twice at each load, with every step one per cent longer and one per cent shorter: the ratio of mean TTFT, p99
TTFT and mean TPOT, on a logarithmic scale over that of the steps, is what one per cent in them does. A mean over seeds,
with its standard error: who shares a step with whom changes with the steps' times too.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from plan import EXPERIMENTS, POLICIES, Experiment
from saturation import DEFAULT_SIZES, engine_of
from sensitivity import BIAS, FloatArray, Slower
from tables import markdown, put_into

from simmoe.analysis.metrics import request_latencies
from simmoe.policies.registry import parse_policy
from simmoe.profiles.catalog import Profile, load_profile
from simmoe.simulator.config import FrontEndConfig, SimConfig
from simmoe.simulator.simulation import simulate
from simmoe.traces.build import build_workload
from simmoe.traces.spec import WorkloadSpec

LOADS = (0.25, 0.5, 0.7, 0.8, 0.9, 0.95)
SEEDS = range(6)
ONLINE_S = 40.0


def main() -> None:
    """Print the table of an experiment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiment", choices=EXPERIMENTS)
    parser.add_argument("--page", type=Path, help="documentation to put the table into")
    arguments = parser.parse_args()
    experiment = EXPERIMENTS[arguments.experiment]
    profile = load_profile(experiment.profile)
    head = ("load", *(f"{system}: mean TTFT / p99 TTFT / mean TPOT" for system in POLICIES))
    rows = [
        (f"{load:.0%}", *(_cell(grows_by(experiment, profile, system, load)) for system in POLICIES)) for load in LOADS
    ]
    text = markdown(head, rows)
    print(text)
    if arguments.page:
        put_into(arguments.page, {f"{arguments.experiment} magnification": text})


def _cell(grown: Sequence[tuple[float, float]]) -> str:
    """Return the three, p99 with its standard error; the means' is small."""
    (ttft, _), (p99, error), (tpot, _) = grown
    return f"{ttft:.1f} / {p99:.1f} ± {error:.1f} / {tpot:.1f}"


def grows_by(
    experiment: Experiment, profile: Profile, system: str, load: float, seeds: Sequence[int] = SEEDS
) -> list[tuple[float, float]]:
    """Return by how many per cent mean TTFT, p99 TTFT and mean TPOT grow for one in every step, with standard errors.

    Args:
        experiment: its engines and mix of budgets.
        profile: step times.
        system: key of POLICIES.
        load: share of the system's own saturation.
        seeds: of arrivals and lengths.
    """
    assert experiment.saturation is not None
    rate = load * experiment.saturation[system] * experiment.num_ranks
    values = []
    for seed in seeds:
        spec = WorkloadSpec(
            trace="azure", rate=rate, requests=round(rate * ONLINE_S), mu=experiment.mu, sigma=experiment.sigma,
            k_max=experiment.k_max, seed=seed,
        )  # fmt: skip
        longer, shorter = (_latencies(experiment, profile, system, spec, factor) for factor in (1 + BIAS, 1 - BIAS))
        values.append(np.log(longer / shorter) / np.log((1 + BIAS) / (1 - BIAS)))
    return list(zip(np.mean(values, axis=0), np.std(values, axis=0, ddof=1) / len(seeds) ** 0.5, strict=True))


def _latencies(experiment: Experiment, profile: Profile, system: str, spec: WorkloadSpec, factor: float) -> FloatArray:
    front_end = FrontEndConfig(ingress_s=profile.front_end.ingress_s, egress_s=profile.front_end.egress_s)
    config = SimConfig(
        num_ranks=experiment.num_ranks, k_max=profile.k_max, k_granularity=profile.k_granularity,
        engine=engine_of(experiment, profile), front_end=front_end,
    )  # fmt: skip
    own = profile.captured_at(DEFAULT_SIZES if experiment.graphs == "default" else None)
    choice = parse_policy(POLICIES[system])
    requests = simulate(
        build_workload(spec), config, Slower(own.cost(), factor), choice.batch, choice.route,
        prefill_s=own.cost().prefill_s,
    ).requests  # fmt: skip
    latencies = request_latencies(requests)
    ttft_s, tpot_s = latencies["ttft"], latencies["tpot"]
    return np.array([np.nanmean(ttft_s), np.nanpercentile(ttft_s, 99), np.nanmean(tpot_s)])


if __name__ == "__main__":
    main()
