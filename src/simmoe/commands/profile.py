"""``simmoe profile``: list, show, plot, check, compare, estimate, fit and measure step-cost tables."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from simmoe.commands.budget_list import parse_budgets
from simmoe.commands.out_table import refuse_blank, require_table_name
from simmoe.commands.profile_check import check
from simmoe.commands.profile_diff import diff
from simmoe.commands.profile_layer import layer
from simmoe.commands.profile_roofline import roofline
from simmoe.errors import OutputError, UsageError
from simmoe.profiles.catalog import DEFAULT_PROFILE


@click.group()
def profile() -> None:
    """Step-cost tables T(n, k): how long a step of n tokens takes at routing budget k."""


profile.add_command(check)
profile.add_command(diff)
profile.add_command(layer)
profile.add_command(roofline)


@profile.command("list")
def list_profiles() -> None:
    """List the profiles that ship with simmoe."""
    from rich.console import Console
    from rich.table import Table

    from simmoe.profiles.catalog import load_profile, profile_names

    table = Table("profile", "status", "k", "what it is", box=None, pad_edge=False)
    for name in profile_names():
        loaded = load_profile(name)
        default = " (default)" if name == DEFAULT_PROFILE else ""
        table.add_row(name + default, loaded.status, f"1..{loaded.k_max}", loaded.table.summary)
    Console().print(table)


@profile.command(short_help="A table's provenance, times and errors.")
@click.argument("name", default=DEFAULT_PROFILE)
@click.option("--sync", is_flag=True, help="Synchronous scheduling: each step is taken in before the next is composed.")
@click.option("--parts", is_flag=True, help="What of a step is dense layers, experts, attention, head, host.")
def show(name: str, sync: bool, parts: bool) -> None:
    """Show where profile NAME (or a table's path) comes from, and its times in milliseconds."""
    from rich.console import Console

    from simmoe.commands.profile_view import facts, layer_tables, time_tables
    from simmoe.profiles.catalog import layer_times_of, load_profile

    loaded = load_profile(name)
    layer = layer_times_of(name, loaded.table)
    console = Console(highlight=False, markup=False)
    if parts:
        from simmoe.commands.profile_parts import part_tables

        for shown in part_tables(loaded, layer, async_scheduling=not sync):
            console.print(shown, soft_wrap=isinstance(shown, str))
        return
    console.print(f"{loaded.label}: {loaded.table.summary}")
    console.print(facts(loaded))
    for table in time_tables(loaded, async_scheduling=not sync):
        console.print()
        console.print(table)
    for part in layer_tables(layer) if layer else ():
        console.print(part, soft_wrap=isinstance(part, str))


@profile.command(short_help="T against n by k, and share of the roofline.")
@click.argument("name", default=DEFAULT_PROFILE)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Picture to write (.png, .svg or .pdf).")
@click.option("--sync", is_flag=True, help="Synchronous scheduling: each step is taken in before the next is composed.")
def plot(name: str, out: Path, sync: bool) -> None:
    """Plot T against n and decode steps against batch, by k, and the share of the card's roofline they reach."""
    from simmoe.commands.profile_plot import plot_profile
    from simmoe.commands.profile_view import are_ceilings
    from simmoe.profiles.catalog import layer_times_of, load_profile

    loaded = load_profile(name)
    layer = layer_times_of(name, loaded.table)
    ceilings = (layer.matmul_flop_s, layer.copy_byte_s) if layer and are_ceilings(layer) else None
    plot_profile(loaded, out, async_scheduling=not sync, ceilings=ceilings)
    click.echo(f"wrote {out}", err=True)


@profile.command(short_help="Fit a table to raw samples.")
@click.argument("raw", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    callback=require_table_name,
    help="Table to write (.json).",
)
@click.option("--name", callback=refuse_blank, help="Name of the profile; by default that of --out without its suffix.")
@click.option(
    "--summary",
    callback=refuse_blank,
    help="One line on model, card and execution mode; by default made from the samples' header.",
)
@click.option(
    "--synthetic", is_flag=True, help="Mark the table as made up: for samples that no engine was measured for."
)
@click.option(
    "--graph-tail-of",
    "tail_of",
    callback=refuse_blank,
    metavar="PROFILE",
    help="Take from it how long before the end of its launch a graph begins: of a like engine whose recording has the "
    "clocks that tell, where those among RAW lack them.",
)
@click.option(
    "--num-gpu-blocks",
    type=click.IntRange(2),
    help="KV blocks the engine has where it has its cards to itself; by default those it was measured with.",
)
def fit(
    raw: tuple[Path, ...],
    out: Path,
    name: str | None,
    summary: str | None,
    synthetic: bool,
    tail_of: str | None,
    num_gpu_blocks: int | None,
) -> None:
    """Fit a table to RAW sample files of one engine, and print how far it is from them.

    Of recordings among RAW, the load named 'calibration' takes part in the fit; the table is checked on the others.
    """
    from rich.console import Console

    from simmoe.commands.profile_view import residual_table
    from simmoe.profiles.catalog import load_profile
    from simmoe.profiles.checking.same_engine import require_same_engine
    from simmoe.profiles.fitting.fit import fit_table
    from simmoe.profiles.recorded_steps import read_recording
    from simmoe.profiles.recording_file import is_recording, read_header
    from simmoe.profiles.samples import read_samples
    from simmoe.profiles.table import executor_of
    from simmoe.profiles.table_file import write_table

    repeated = [path for place, path in enumerate(raw) if path.resolve() in {p.resolve() for p in raw[:place]}]
    if repeated:
        raise UsageError(f"'{repeated[0]}' is named twice; its samples would count twice")
    runs = [read_samples(path) for path in raw if not is_recording(path)]
    if not runs:
        raise UsageError(f"no sample file among {', '.join(map(str, raw))}; a table is fitted to at least one")
    header = runs[0][0]
    recordings = [path for path in raw if is_recording(path)]
    for path in recordings:
        require_same_engine(read_header(path), asdict(header), str(path), "the sample file", "fit one engine at a time")
    engine = header.captured_sizes, header.captured_ks, executor_of(header.num_cards)
    recorded = [step for path in recordings for step in read_recording(path, *engine)]
    status = "synthetic" if synthetic else "measured"
    summary = summary or f"{header.model} on {header.card}"
    like = load_profile(tail_of).table if tail_of is not None else None
    if like is not None and like.graph_tail_s is None:
        raise UsageError(f"--graph-tail-of {tail_of}: that profile has no graph_tail")
    table = fit_table(runs, name or out.stem, status, summary, recorded, like, num_gpu_blocks)
    if like is not None and "graph_tail_of" not in table.provenance["fit"]:
        raise UsageError(f"--graph-tail-of {tail_of} has no effect: no graphs, or the recordings tell it themselves")
    write_table(out, table)
    Console().print(residual_table(table.provenance["fit"]["residuals"]))
    click.echo(f"wrote {out}", err=True)


@profile.command()
@click.option(
    "--model", default="olmoe-1b-7b", show_default=True, help="A model simmoe ships the shape of, or a config.json."
)
@click.option(
    "--split", type=click.IntRange(1), default=4, show_default=True, help="Sub-experts an expert is split into."
)
@click.option(
    "--raw",
    type=click.Path(path_type=Path),
    required=True,
    help="Sample file to write (.jsonl), recordings and the MoE layer's times beside it; what is there is not measured "
    "again.",
)
@click.option(
    "--out", type=click.Path(path_type=Path), callback=require_table_name, help="Table to fit and write (.json)."
)
@click.option(
    "--graphs",
    type=click.Choice(["banks", "default", "none"]),
    default="banks",
    show_default=True,
    help="CUDA graphs: a bank a budget, vLLM's own sizes at the largest k alone, or none.",
)
@click.option("--sync", is_flag=True, help="Synchronous scheduling, fewer points: to check steps' composition.")
@click.option("--budgets", callback=parse_budgets, help="Budgets to measure, e.g. 1,8,16; by default up to ten.")
@click.option("--max-tokens", type=click.IntRange(16), default=8192, show_default=True, help="Of the largest step.")
@click.option("--tensor-parallel", type=click.IntRange(1), default=1, show_default=True, help="Cards.")
@click.option("--expert-parallel", is_flag=True, help="Whole experts on each card.")
@click.option("--passes", type=click.IntRange(1), default=3, show_default=True, help="Over all points.")
@click.option(
    "--recording-seconds",
    type=click.FloatRange(6),
    default=48.0,
    show_default=True,
    help="Of Poisson arrivals, in all recordings together; the burst is shortened alike.",
)
@click.option(
    "--gpu-memory-utilization",
    type=click.FloatRange(0, 1, min_open=True),
    default=0.9,
    show_default=True,
    help="Share of the card's memory for weights, activations and KV cache.",
)
@click.option("--pin", is_flag=True, help="Give the threads that schedule and launch physical cores of their own.")
@click.option(
    "--time-limit", type=click.FloatRange(min=60), help="Seconds, the engine's start included; run again to go on."
)
@click.pass_context
def measure(
    ctx: click.Context,
    model: str,
    split: int,
    raw: Path,
    out: Path | None,
    graphs: str,
    sync: bool,
    budgets: tuple[int, ...],
    max_tokens: int,
    tensor_parallel: int,
    expert_parallel: bool,
    passes: int,
    recording_seconds: float,
    gpu_memory_utilization: float,
    pin: bool,
    time_limit: float | None,
) -> None:
    """Measure a model on this machine's GPU through vLLM, prove the k that ran, and fit the table."""
    from simmoe.commands.profile_measure import MeasureOptions, measure_samples
    from simmoe.writing import check_place

    limit_s = float("inf") if time_limit is None else time_limit
    ascending = tuple(sorted(set(budgets)))
    options = MeasureOptions(
        model, split, raw, graphs, sync, ascending, max_tokens, tensor_parallel, expert_parallel, passes,
        recording_seconds, pin, gpu_memory_utilization, limit_s,
    )  # fmt: skip
    check_place(raw, "the samples")
    if raw.suffix == ".gz":
        raise OutputError(f"cannot write samples to '{raw}': rows are appended plain; compress it afterwards")
    if out is not None:
        check_place(out, "the table")
    left = measure_samples(options)
    click.echo(
        f"wrote {raw}" + (f"; still to be measured, by the same command: {', '.join(left)}" if left else ""), err=True
    )
    if out is not None:
        recording = raw.with_name(f"{raw.stem}-recording.jsonl")
        ctx.invoke(fit, raw=(raw, recording) if recording.exists() else (raw,), out=out)
