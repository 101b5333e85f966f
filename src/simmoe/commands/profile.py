"""``simmoe profile``: list, show, plot, check, compare, estimate, fit and measure step-cost tables."""

from __future__ import annotations

from pathlib import Path

import click

from simmoe.commands.profile_check import check
from simmoe.commands.profile_diff import diff
from simmoe.commands.profile_roofline import roofline
from simmoe.errors import UsageError


@click.group()
def profile() -> None:
    """Step-cost tables T(n, k): how long a step of n tokens takes at routing budget k."""


profile.add_command(check)
profile.add_command(diff)
profile.add_command(roofline)


@profile.command("list")
def list_profiles() -> None:
    """List the profiles that ship with simmoe."""
    from rich.console import Console
    from rich.table import Table

    from simmoe.profiles.catalog import DEFAULT_PROFILE, load_profile, profile_names

    table = Table("profile", "status", "k", "what it is", box=None, pad_edge=False)
    for name in profile_names():
        loaded = load_profile(name)
        default = " (default)" if name == DEFAULT_PROFILE else ""
        table.add_row(name + default, loaded.status, f"1..{loaded.k_max}", loaded.table.summary)
    Console().print(table)


@profile.command()
@click.argument("name", required=False)
@click.option("--sync", is_flag=True, help="Synchronous scheduling: the host's time adds to the device's.")
def show(name: str | None, sync: bool) -> None:
    """Show where profile NAME (or a table's path) comes from, and its times in milliseconds."""
    from rich.console import Console

    from simmoe.commands.profile_view import facts, time_tables
    from simmoe.profiles.catalog import DEFAULT_PROFILE, load_profile

    loaded = load_profile(name or DEFAULT_PROFILE)
    console = Console(highlight=False)
    console.print(f"[bold]{loaded.label}[/bold]: {loaded.table.summary}")
    console.print(facts(loaded))
    for table in time_tables(loaded, async_scheduling=not sync):
        console.print()
        console.print(table)


@profile.command()
@click.argument("name", required=False)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Picture to write (.png, .svg or .pdf).")
@click.option("--sync", is_flag=True, help="Synchronous scheduling: the host's time adds to the device's.")
def plot(name: str | None, out: Path, sync: bool) -> None:
    """Plot T against n and decode steps against batch, by k, and the share of the card's roofline they reach."""
    from simmoe.commands.profile_plot import plot_profile
    from simmoe.profiles.catalog import DEFAULT_PROFILE, load_profile

    plot_profile(load_profile(name or DEFAULT_PROFILE), out, async_scheduling=not sync)
    click.echo(f"wrote {out}", err=True)


@profile.command()
@click.argument("raw", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Table to write (.json).")
@click.option("--name", help="Name of the profile; by default that of --out without its suffix.")
@click.option("--summary", help="One line on model, card and execution mode; by default made from the samples' header.")
@click.option(
    "--synthetic", is_flag=True, help="Mark the table as made up: for samples that no engine was measured for."
)
def fit(raw: tuple[Path, ...], out: Path, name: str | None, summary: str | None, synthetic: bool) -> None:
    """Fit a table to RAW sample files of one engine, and print how far it is from them.

    Recordings among RAW take no part in the fit; the table is checked on their steps.
    """
    from rich.console import Console

    from simmoe.commands.profile_view import residual_table
    from simmoe.profiles.fit import fit_table
    from simmoe.profiles.recorded_steps import is_recording, read_recorded_steps
    from simmoe.profiles.samples import read_samples
    from simmoe.profiles.table_file import write_table

    runs = [read_samples(path) for path in raw if not is_recording(path)]
    if not runs:
        raise UsageError(f"no sample file among {', '.join(map(str, raw))}; a table is fitted to at least one")
    header = runs[0][0]
    recorded = [step for path in raw if is_recording(path) for step in read_recorded_steps(path, header.captured_sizes)]
    status = "synthetic" if synthetic else "measured"
    summary = summary or f"{header.model} on {header.card}"
    table = fit_table(runs, name or out.stem, status, summary, recorded)
    write_table(out, table)
    Console().print(residual_table(table.provenance["fit"]["residuals"]))
    click.echo(f"wrote {out}", err=True)


@profile.command()
@click.option("--model", default="olmoe-1b-7b", show_default=True, help="'olmoe-1b-7b', or a Hugging Face config.json.")
@click.option(
    "--split", type=click.IntRange(1), default=4, show_default=True, help="Sub-experts an expert is split into."
)
@click.option(
    "--raw",
    type=click.Path(path_type=Path),
    required=True,
    help="Sample file to write (.jsonl); points already in it are not measured again.",
)
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Table to write (.json).")
@click.option("--eager", is_flag=True, help="Without CUDA graphs.")
@click.pass_context
def measure(ctx: click.Context, model: str, split: int, raw: Path, out: Path, eager: bool) -> None:
    """Measure a model on this machine's GPU through vLLM, prove the k that ran, and fit the table."""
    from simmoe.commands.profile_measure import measure_samples

    measure_samples(model, split, raw, eager=eager)
    ctx.invoke(fit, raw=(raw,), out=out)
