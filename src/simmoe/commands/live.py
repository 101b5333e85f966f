"""``simmoe live run``: a workload against live engines, its summary on stdout and its record in a folder."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from simmoe.analysis.metrics import summarise
from simmoe.commands.deployment_options import slo_options, take_slo
from simmoe.commands.graph_options import GRAPH_OPTIONS, graph_options, take_graphs
from simmoe.commands.notes import describe_profile, describe_trace, versions
from simmoe.commands.out_folder import refuse_empty
from simmoe.commands.record_folder import record_folder
from simmoe.commands.run_summary import format_summary
from simmoe.commands.serve import check_default_k, require_server_packages, stall_timeout_option
from simmoe.commands.without_effect import refuse_given
from simmoe.commands.workload_options import spec_from_options, workload_options
from simmoe.errors import Interrupted, LiveError, UsageError
from simmoe.interrupts import ctrl_c_later
from simmoe.policies.registry import parse_policy
from simmoe.profiles.catalog import DEFAULT_PROFILE, load_profile
from simmoe.records import RunRecord, write_record
from simmoe.simulator.result import RankTotals
from simmoe.traces.build import build_workload

if TYPE_CHECKING:
    from simmoe.live.driving.live_run import LiveResult
    from simmoe.live.server.launch import EngineLaunch

#: Lines of the summary that only steps can tell.
_FROM_STEPS = ("budget k", "busy", "KV")

#: What says how engines are started, and what says how an endpoint is asked.
_ENGINE_OPTIONS = (
    "replicas", "policy", *GRAPH_OPTIONS, "max_num_seqs", "max_num_batched_tokens", "default_k", "record_decisions",
    "vllm_arguments",
)  # fmt: skip
_ENDPOINT_OPTIONS = ("served_model", "api_key", "vocab_size", "k_max")


@click.group()
def live() -> None:
    """Drive live engines."""


@live.command()
@workload_options(one_run=True)
@click.option("--model", metavar="DIR", help="Folder of the model; engines are started from it.")
@click.option("--replicas", type=click.IntRange(min=1), default=1, show_default=True, help="Engines, one a GPU.")
@click.option("--url", metavar="URL", help="An OpenAI endpoint, instead of --model: 'simmoe serve', vLLM.")
@click.option("--served-model", default="", metavar="NAME", help="Model name at --url.  [default: its first]")
@click.option("--api-key", default="", metavar="KEY", help="For --url; or VLLM_API_KEY.")
@click.option(
    "--vocab-size",
    type=click.IntRange(min=3),
    default=32000,
    show_default=True,
    help="Where the endpoint does not tell.",
)
@click.option("--k-max", type=click.IntRange(min=1), help="Largest budget of the workload with --url.  [default: 32]")
@stall_timeout_option("Longest wait while an engine, or an endpoint, gets on with nothing; inf: for ever.")
@click.option("--policy", metavar="POLICY", help="With --model.  [default: fifo+queue-aware]")
@click.option("--profile", default=DEFAULT_PROFILE, show_default=True, help="Step-cost profile T(n, k) comes from.")
@graph_options
@click.option("--max-num-seqs", type=click.IntRange(min=1), help="Requests that may run at once on an engine.")
@click.option("--max-num-batched-tokens", type=click.IntRange(min=1), help="Tokens one step may compute.")
@click.option("--default-k", type=int, help="Budget of a request that names none.  [default: the largest]")
@click.option("--record-decisions", is_flag=True, help="Keep all that policies saw and answered beside the record.")
@slo_options
@click.option(
    "--out", metavar="DIR", callback=refuse_empty, help="Folder of the run record.  [default: print the summary alone]"
)
@click.argument("vllm_arguments", nargs=-1, type=click.UNPROCESSED)
def run(**options: Any) -> int:
    """Replay a workload open loop; '--rate inf' sends everything at once.

    Arguments after '--' are arguments of 'vllm serve' for the engines.
    """
    return drive(**options)


def drive(
    *,
    model: str | None,
    replicas: int,
    url: str | None,
    served_model: str,
    api_key: str,
    vocab_size: int,
    k_max: int | None,
    stall_timeout_s: float,
    policy: str | None,
    profile: str,
    max_num_seqs: int | None,
    max_num_batched_tokens: int | None,
    default_k: int | None,
    record_decisions: bool,
    out: str | None,
    vllm_arguments: Sequence[str],
    before_starting: Callable[[EngineLaunch], None] = lambda launch: None,
    before_sending: Callable[[RunRecord], None] = lambda record: None,
    **options: Any,
) -> int:
    """Do what the command does, for a command that has its options.

    Args:
        model, replicas, ..., vllm_arguments, options: as given to the command.
        before_starting: told how engines will be started here, before any is.
        before_sending: see :func:`simmoe.live.driving.live_run.run_live`.
    """
    if bool(model) == bool(url):
        raise UsageError("give --model DIR to start engines, or --url URL of an endpoint")
    if url:
        refuse_given(_ENGINE_OPTIONS, "is for engines started here; give --model instead of --url")
    else:
        refuse_given(_ENDPOINT_OPTIONS, "is for an endpoint; give --url instead of --model")
    graphs = take_graphs(options)
    if record_decisions and not out:
        raise UsageError("--record-decisions needs --out")
    require_server_packages(needs_vllm=model is not None)

    from simmoe.live.driving.live_run import endpoint_host, engine_host, run_live
    from simmoe.live.driving.manifest import engine_manifest
    from simmoe.live.server.launch import EngineLaunch, read_k_max

    slo = take_slo(options)
    choice = parse_policy(policy or "fifo")
    if choice.clairvoyant:
        raise UsageError(f"policy '{policy}' is clairvoyant: it needs output lengths, which no engine knows")
    largest = read_k_max(Path(model)) if model else (k_max or 32)
    check_default_k(default_k, largest)
    spec = spec_from_options(largest, **options)
    workload = build_workload(spec)
    click.echo(describe_trace(workload.source), err=True)
    launch = None
    if model:
        loaded = load_profile(profile)
        click.echo(describe_profile(loaded), err=True)
        launch = EngineLaunch(
            model=Path(model),
            choice=choice,
            k_max=largest,
            default_k=default_k or 0,
            num_ranks=replicas,
            profile=profile,
            **graphs,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            record_steps=True,
            decisions=out or "" if record_decisions else "",
            further=vllm_arguments,
        )
        launch.check_devices()
        launch.check_options()
        launch.check_policy(loaded.cost().prefill_s)
        before_starting(launch)
    with record_folder(out) if out else nullcontext() as folder:
        if launch:
            os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
            manifest = engine_manifest(launch, choice, replicas, spec, workload.source, versions())
            host = engine_host(
                launch, loaded.cost().prefill_s, lambda what: click.echo(what, err=True), stall_timeout_s
            )
        else:
            manifest = {
                "kind": "live",
                "versions": versions(),
                "workload": {"spec": spec.as_dict(), **workload.source},
                "config": {"num_ranks": None, "k_max": largest},
                "profile": None,
                "policy": None,
                "target": {"url": url, "served_model": served_model},
                "flags": [],
                "seed": spec.seed,
            }
            key = api_key or os.environ.get("VLLM_API_KEY", "")
            host = endpoint_host(url or "", served_model, key, stall_timeout_s)
        result = run_live(
            workload,
            host,
            {**manifest, "slo": asdict(slo)},
            vocab_size=vocab_size,
            seed=spec.seed,
            before_sending=before_sending,
            on_progress=lambda sent, done: click.echo(f"{sent} of {len(workload)} sent, {done} ended", err=True),
        )
        if folder:
            with ctrl_c_later():  # the run is not to be had again
                write_record(folder, result.record)
            click.echo(f"record: {folder}", err=True)
    title = f"{choice.text}, {replicas} engine(s) of {model}" if launch else f"{url}"
    _report(title, result, slo)
    return 0


def _report(title: str, result: LiveResult, slo: Any) -> None:
    """Print the summary, without what is not known or not to be trusted."""
    record = result.record
    summary = summarise(record.requests, result.ranks, record.manifest["end_s"], slo)
    if result.lag.refusal:
        summary |= {name: float("nan") for name in summary if name.startswith("ttft_")}
    totals = [RankTotals(**rank) for rank in result.ranks]  # type: ignore[arg-type]
    hidden = () if record.steps is not None else _FROM_STEPS
    lines = format_summary(title, summary, totals, slo).splitlines()
    click.echo("\n".join(line for line in lines if not line.startswith(hidden or "\0")))
    lag = result.lag
    click.echo(f"send lag    {1e3 * lag.mean_s:.3f} ms mean, {1e3 * lag.p99_s:.3f} p99, {1e3 * lag.max_s:.3f} most")
    for reason, count in result.reasons.items():
        click.echo(f"note: {count} {reason}", err=True)
    notes = record.manifest["notes"]
    if lost := notes["steps_lost_on_ranks"]:
        why = notes["steps_lost_because"]
        click.echo(f"note: the last steps of rank {', '.join(map(str, lost))} are lost: {why}", err=True)
    if result.is_interrupted:
        raise Interrupted("interrupted")
    if lag.refusal:
        remedy = "send from a machine with more time to spare" if record.counts()["finished"] else "see the notes above"
        raise LiveError(f"TTFT is not reported: {lag.refusal}; {remedy}")
