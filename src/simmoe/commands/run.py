"""``simmoe run``: one simulation, its summary on stdout and its record in a folder."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import click

from simmoe.analysis.metrics import Slo, summarise
from simmoe.commands.deployment_options import (
    Deployment,
    deployment_options,
    resolve_deployment,
    slo_options,
    take_deployment,
    take_slo,
)
from simmoe.commands.evidence import save_evidence
from simmoe.commands.notes import describe_caching, describe_extrapolation, describe_profile, describe_trace, versions
from simmoe.commands.out_folder import refuse_empty
from simmoe.commands.record_folder import record_folder
from simmoe.commands.run_summary import format_summary
from simmoe.commands.workload_options import spec_from_options, workload_options
from simmoe.errors import Interrupted, PolicyError, UsageError
from simmoe.interrupts import ctrl_c_once
from simmoe.policies.registry import PolicyChoice, parse_policy
from simmoe.records import write_record
from simmoe.simulator.simulation import simulate
from simmoe.traces.build import build_workload
from simmoe.traces.spec import WorkloadSpec


@click.command()
@workload_options(one_run=True)
@deployment_options(ranks=1)
@click.option("--policy", default="fifo", show_default=True, metavar="POLICY", help="See 'simmoe policies list'.")
@slo_options
@click.option("--max-time-s", type=float, help="Stop the clock here.  [default: when every request has left]")
@click.option("--record-steps", is_flag=True, help="Keep one row a step, in steps.parquet.")
@click.option("--step-by-step", is_flag=True, help="Pass no stretch of equal steps at once: slower, the same results.")
@click.option(
    "--out", metavar="DIR", callback=refuse_empty, help="Folder of the run record.  [default: print the summary alone]"
)
def run(
    policy: str, max_time_s: float | None, record_steps: bool, step_by_step: bool, out: str | None, **options: Any
) -> int:
    """Simulate one workload under one policy.

    Ctrl-C leaves the folder as it was: a run takes seconds to repeat, and half of it would answer nothing.
    """
    slo = take_slo(options)
    if max_time_s is not None and not 0 < max_time_s < float("inf"):
        raise UsageError(f"--max-time-s is {max_time_s}; it must be a number of seconds above 0")
    deployment = resolve_deployment(
        take_deployment(options), record_steps=record_steps, fast_forward=not step_by_step, max_time_s=max_time_s
    )
    spec = spec_from_options(deployment.config.k_max, **options)
    choice = parse_policy(policy)
    workload = build_workload(spec)
    click.echo(describe_trace(workload.source), err=True)
    click.echo(describe_profile(deployment.profile), err=True)
    if note := describe_caching(deployment.config.engine, workload.source):
        click.echo(note, err=True)
    cost = deployment.profile.cost(async_scheduling=deployment.config.engine.async_scheduling)
    manifest = _manifest(spec, workload.source, deployment, choice, slo)
    try:
        with ctrl_c_once(), record_folder(out, manifest) if out else nullcontext() as folder:
            try:
                result = simulate(workload, deployment.config, cost, choice.batch, choice.route)
            except PolicyError as error:
                raise save_evidence(error, folder) from error
            summary = summarise(result.requests, [asdict(rank) for rank in result.ranks], result.end_s, slo)
            if folder:
                manifest |= {"extrapolated": dict(cost.extrapolated), "summary": _plain(summary)}
                write_record(folder, result.record(manifest))
    except KeyboardInterrupt:
        raise Interrupted("interrupted; nothing was written") from None
    title = f"{choice.text}, {deployment.config.num_ranks} rank(s) of {deployment.profile.label}"
    click.echo(format_summary(title, summary, result.ranks, slo))
    if note := describe_extrapolation(cost.extrapolated):
        click.echo(note, err=True)
    for reason, count in result.notes.get("rejected", {}).items():
        click.echo(f"note: {count} rejected: {reason}", err=True)
    if folder:
        click.echo(f"record: {folder}", err=True)
    return 0


def _manifest(
    spec: WorkloadSpec, source: dict[str, object], deployment: Deployment, choice: PolicyChoice, slo: Slo
) -> dict[str, Any]:
    profile = deployment.profile
    return {
        "kind": "run",
        "versions": versions(),
        "workload": {"spec": spec.as_dict(), **source},
        "config": deployment.config.as_dict(),
        "profile": {"name": profile.name, "status": profile.status, "sha256": profile.sha256},
        "policy": {
            "given": choice.text,
            "parameters": choice.parameters,
            "files": choice.files,
            "clairvoyant": choice.clairvoyant,
        },
        "seed": spec.seed,
        "slo": asdict(slo),
    }


def _plain(summary: dict[str, float]) -> dict[str, float | None]:
    return {name: None if value != value else value for name, value in summary.items()}
