"""``simmoe sweep``: rates x policies x seeds; which policy, at which load."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from simmoe.commands.deployment_options import (
    Deployment,
    deployment_options,
    resolve_deployment,
    slo_options,
    take_deployment,
    take_slo,
)
from simmoe.commands.notes import describe_caching, describe_extrapolated_cells, describe_profile, describe_trace
from simmoe.commands.out_folder import refuse_empty
from simmoe.commands.sweeping.choices import DEFAULT_POLICIES, baseline_of, build_once, check_seeds, parse_choices
from simmoe.commands.sweeping.executor import Executor
from simmoe.commands.sweeping.executor_options import executor_options, take_executor
from simmoe.commands.sweeping.progress import open_progress
from simmoe.commands.sweeping.sources import code_sources, digest, policy_sources
from simmoe.commands.sweeping.store import SweepStore
from simmoe.commands.sweeping.study import Study, conduct
from simmoe.commands.workload_options import spec_from_options, workload_options
from simmoe.errors import Interrupted, UsageError
from simmoe.interrupts import ctrl_c_once
from simmoe.policies.registry import PolicyChoice
from simmoe.traces.build import build_workload
from simmoe.traces.spec import RATES

#: Enough that arrivals last several times as long as a request stays: fewer, and the run is all filling and draining.
DEFAULT_REQUESTS = 4096


@click.command()
@workload_options(one_run=False, requests=DEFAULT_REQUESTS)
@deployment_options(ranks=2)
@click.option("--rates", metavar="R,R,...", help="Offered loads, requests/s.  [default: found around saturation]")
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="POLICY",
    help=f"A policy to compare; repeat.  [default: {', '.join(DEFAULT_POLICIES)}]",
)
@click.option("--seeds", type=int, default=5, show_default=True, help="Seeds a rate and policy: 0, 1, ...")
@slo_options
@click.option(
    "--out", metavar="DIR", callback=refuse_empty, help="Folder of the results.  [default: sweeps/NAME, by the inputs]"
)
@executor_options
def sweep(rates: str | None, policies: tuple[str, ...], seeds: int, out: str | None, **options: Any) -> int:
    """Simulate every policy at every rate with the same requests, and say which policy is best at which load.

    Writes OUT/sweep.csv, cells.parquet, sweep.png and manifest.json. Repeated, it resumes what was interrupted.
    """
    slo = take_slo(options)
    executor = take_executor(options)
    deployment = resolve_deployment(take_deployment(options))
    spec = spec_from_options(deployment.config.k_max, **options)
    choices = parse_choices(policies or DEFAULT_POLICIES)
    check_seeds(seeds)
    build_once(choices, deployment)
    # One workload is built here so that a fault of the trace shows before any work, and workers inherit the file.
    source = build_workload(replace(spec, rate=1.0)).source
    study = Study(
        workload=spec,
        policies=tuple(choices),
        baseline=baseline_of(choices),
        rates=_parse_rates(rates),
        num_seeds=seeds,
        profile=deployment.profile_name,
        config=deployment.config,
        slo=slo,
        sources={
            **code_sources(),
            "profile_sha256": deployment.profile.sha256,
            "trace_sha256": source["sha256"],
        },
        policy_sources={name: policy_sources(choice) for name, choice in choices.items()},
    )
    folder = Path(out) if out else Path("sweeps") / _default_name(study)
    click.echo(describe_trace(source), err=True)
    click.echo(describe_profile(deployment.profile), err=True)
    if note := describe_caching(deployment.config.engine, source):
        click.echo(note, err=True)
    return _run(study, folder, executor, source, deployment, choices)


def _run(
    study: Study,
    folder: Path,
    executor: Executor,
    source: dict[str, object],
    deployment: Deployment,
    choices: dict[str, PolicyChoice],
) -> int:
    from simmoe.commands.sweeping.cells import extrapolated_in
    from simmoe.commands.sweeping.report import total_counts, write_report
    from simmoe.commands.sweeping.tables import print_tables

    with ctrl_c_once(), SweepStore(folder, study.inputs()) as store:
        progress = open_progress("sweep")
        try:
            result = conduct(study, store, executor, progress)
            about = {
                "workload": {name: value for name, value in source.items() if name not in ("seed", "arrivals")},
                "profile": {"name": deployment.profile.name, "status": deployment.profile.status},
                "policies": {
                    name: {"policy": choice.text, "parameters": choice.parameters, "clairvoyant": choice.clairvoyant}
                    for name, choice in choices.items()
                },
            }
            paths = write_report(store, study, result, _title(study, deployment), about)
        except KeyboardInterrupt:
            raise Interrupted(store.interrupted()) from None
        finally:
            progress.close()
    print_tables(result.grid, total_counts(result), goodput=bool(study.slo))
    if note := describe_extrapolated_cells(extrapolated_in(cell for _, cell in result.cells)):
        click.echo(note, err=True)
    click.echo(f"Files in {paths[0].parent}: {', '.join(path.name for path in paths)}")
    return 0


def _parse_rates(text: str | None) -> tuple[float, ...] | None:
    if text is None:
        return None
    rates = set()
    for word in text.split(","):
        try:
            rate = float(word)
        except ValueError:
            raise UsageError(f"--rates has '{word.strip()}', which is no number; write them as in 5,10,20") from None
        if not RATES[0] <= rate <= RATES[1]:
            raise UsageError(
                f"--rates has {word.strip()}; a rate must be a finite number of requests/s above 0, "
                f"in {RATES[0]:g}..{RATES[1]:g}"
            )
        if rate in rates:
            raise UsageError(f"--rates has {rate:g} twice; give each rate once")
        rates.add(rate)
    return tuple(sorted(rates))


def _default_name(study: Study) -> str:
    """Name a sweep's folder after its inputs: readable first, then enough of their hash to be its own."""
    spec = study.workload
    trace = re.sub(r"[^A-Za-z0-9]+", "-", Path(spec.trace).stem).strip("-")
    budgets = f"mu{spec.mu:g}-sigma{spec.sigma:g}" if spec.budgets in (None, "normal") else spec.budgets
    return f"{trace}-{budgets}-{study.config.num_ranks}ranks-{digest(study.inputs())[:8]}"


def _title(study: Study, deployment: Deployment) -> str:
    spec, ranks = study.workload, study.config.num_ranks
    budgets = f"k ~ N({spec.mu:g}, {spec.sigma:g})" if spec.budgets in (None, "normal") else f"{spec.budgets} budgets"
    return (
        f"{Path(spec.trace).name}: {spec.requests:,} requests, {budgets}, "
        f"{ranks} rank{'s' if ranks > 1 else ''} of {deployment.profile.label}"
    )
