"""``simmoe search``: the highest rate at which latency objectives hold, and the parameters that raise it."""

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
from simmoe.commands.searching.capacity import CapacitySearch
from simmoe.commands.searching.objective import DEFAULT_STATISTIC, STATISTICS, Objective
from simmoe.commands.searching.ranges import Variation
from simmoe.commands.searching.report import Found, print_table, write_report
from simmoe.commands.searching.tuning import import_optuna, tune
from simmoe.commands.sweep import DEFAULT_REQUESTS
from simmoe.commands.sweeping.choices import DEFAULT_POLICIES, baseline_of, build_once, check_seeds, parse_choices
from simmoe.commands.sweeping.executor_options import executor_options, take_executor
from simmoe.commands.sweeping.progress import open_progress
from simmoe.commands.sweeping.sources import code_sources, digest, policy_sources
from simmoe.commands.sweeping.store import SweepStore
from simmoe.commands.workload_options import spec_from_options, workload_options
from simmoe.errors import Interrupted, UsageError
from simmoe.interrupts import ctrl_c_once
from simmoe.policies.registry import parse_policy
from simmoe.traces.build import build_workload
from simmoe.traces.spec import WorkloadSpec


@click.command()
@workload_options(one_run=False, requests=DEFAULT_REQUESTS)
@deployment_options(ranks=2)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    metavar="POLICY",
    help=f"A policy to search for; repeat.  [default: {', '.join(DEFAULT_POLICIES)}]",
)
@click.option("--seeds", type=int, default=5, show_default=True, help="Seeds a policy: 0, 1, ...")
@slo_options
@click.option(
    "--at",
    "statistic",
    type=click.Choice(STATISTICS),
    help=f"Which statistic of TTFT and TPOT must keep within the objectives.  [default: {DEFAULT_STATISTIC}]",
)
@click.option("--attainment", type=float, metavar="SHARE", help="Instead: the share of requests within all of them.")
@click.option("--tolerance", type=float, default=0.02, show_default=True, help="Width of the last bracket, a share.")
@click.option(
    "--vary",
    multiple=True,
    metavar="NAME=RANGE",
    help="Tune a parameter of the one --policy: LOW..HIGH, LOW..HIGH:log or A|B|C; repeat.",
)
@click.option("--trials", type=int, default=32, show_default=True, help="Sets of parameters to try with --vary.")
@click.option(
    "--out",
    metavar="DIR",
    callback=refuse_empty,
    help="Folder of the results.  [default: searches/NAME, by the inputs]",
)
@executor_options
def search(
    policies: tuple[str, ...],
    seeds: int,
    statistic: str | None,
    attainment: float | None,
    tolerance: float,
    vary: tuple[str, ...],
    trials: int,
    out: str | None,
    **options: Any,
) -> int:
    """Find the highest rate at which --slo-ttft and --slo-tpot hold, by bisection at each seed.

    Writes OUT/search.csv and manifest.json, and trials.csv when tuning. Repeated, it resumes what was interrupted.
    """
    if statistic is not None and attainment is not None:
        raise UsageError(f"--at {statistic} and --attainment {attainment:g} are two objectives; give one of them")
    objective = Objective(take_slo(options), statistic or DEFAULT_STATISTIC, attainment)
    executor = take_executor(options)
    deployment = resolve_deployment(take_deployment(options))
    spec = spec_from_options(deployment.config.k_max, **options)
    check_seeds(seeds)
    if not 0.001 <= tolerance <= 0.5:
        raise UsageError(f"--tolerance is {tolerance:g}; it must be between 0.001 and 0.5")
    if trials < 1:
        raise UsageError(f"--trials is {trials}; it must be at least 1")
    choices = parse_choices(policies or DEFAULT_POLICIES)
    build_once(choices, deployment)
    variation = None
    if vary:
        if len(policies) != 1:
            raise UsageError(
                f"--vary needs exactly one --policy, whose parameters it varies; {len(policies)} are given"
            )
        variation = Variation(policies[0].strip(), vary)
        for corner in variation.corners():
            build_once({corner: parse_policy(corner)}, deployment)
        import_optuna()
    source = build_workload(replace(spec, rate=1.0)).source
    inputs = {
        "workload": {k: v for k, v in replace(spec, rate=1.0).as_dict().items() if k not in ("rate", "seed")},
        "policies": list(choices),
        "seeds": seeds,
        "objective": objective.as_dict(),
        "tolerance": tolerance,
        "vary": list(vary),
        "trials": trials if vary else None,
        "profile": deployment.profile_name,
        "config": deployment.config.as_dict(),
        "sources": {
            **code_sources(),
            "profile_sha256": deployment.profile.sha256,
            "trace_sha256": source["sha256"],
        },
        "policy_sources": {name: policy_sources(choice) for name, choice in choices.items()},
    }
    folder = Path(out) if out else Path("searches") / _default_name(spec, deployment, inputs)
    click.echo(describe_trace(source), err=True)
    click.echo(describe_profile(deployment.profile), err=True)
    if note := describe_caching(deployment.config.engine, source):
        click.echo(note, err=True)
    with ctrl_c_once(), SweepStore(folder, inputs, what="search") as store:
        progress = open_progress("search")
        capacity = CapacitySearch(
            spec, deployment.profile_name, deployment.config, objective, tolerance, store, executor, progress
        )
        try:
            found = _search(capacity, list(choices), baseline_of(choices), seeds, variation, trials)
            outside = dict(sorted(capacity.extrapolated_in.items()))
            about = {
                "profile": {"name": deployment.profile.name, "status": deployment.profile.status},
                "cells": capacity.num_cells,
                "extrapolated_in_cells": outside,
            }
            paths = write_report(store, found, inputs, about)
        except KeyboardInterrupt:
            raise Interrupted(store.interrupted()) from None
        finally:
            progress.close()
    print_table(found, f"Highest rate at which {objective}: {_title(spec, deployment)}", _note(found, seeds))
    if note := describe_extrapolated_cells(outside):
        click.echo(note, err=True)
    click.echo(f"Files in {paths[0].parent}: {', '.join(path.name for path in paths)}")
    return 0


def _search(
    capacity: CapacitySearch, policies: list[str], baseline: str, seeds: int, variation: Variation | None, trials: int
) -> Found:
    ordered = [baseline, *(policy for policy in policies if policy != baseline)]
    saturation = capacity.saturation(ordered)
    if variation is None:
        return Found(capacity.run(saturation, range(seeds), "bisecting"), range(seeds), saturation)
    tried = tune(capacity, variation, saturation[baseline], range(seeds), trials)
    best = max(tried, key=lambda trial: trial.score)
    # The best of many trials was lucky on its seeds: what it is worth is measured on others.
    fresh = range(seeds, 2 * seeds)
    guesses = {trial.policy: max(trial.score, saturation[baseline] / 8) for trial in (tried[0], best)}
    return Found(capacity.run(guesses, fresh, "confirming"), fresh, saturation, tried)


def _note(found: Found, seeds: int) -> str:
    if not found.trials:
        return ""
    tuned = f"{len(found.trials) - 1} sets of parameters tried on seeds 0 to {seeds - 1}"
    if len(found.searches) == 1:
        return f"{tuned}: none holds more than the policy as given."
    return f"{tuned}; the table is from seeds {found.seeds[0]} to {found.seeds[-1]}, which chose nothing."


def _default_name(spec: WorkloadSpec, deployment: Deployment, inputs: dict[str, Any]) -> str:
    trace = re.sub(r"[^A-Za-z0-9]+", "-", Path(spec.trace).stem).strip("-")
    return f"{trace}-{deployment.config.num_ranks}ranks-{digest(inputs)[:8]}"


def _title(spec: WorkloadSpec, deployment: Deployment) -> str:
    ranks = deployment.config.num_ranks
    return f"{spec.requests:,} requests, {ranks} rank{'s' if ranks > 1 else ''} of {deployment.profile.label}"
