"""``simmoe traces``: list, describe, fetch and convert request traces."""

from __future__ import annotations

import os
from pathlib import Path

import click

from simmoe.commands.workload_options import spec_from_options, trace_options
from simmoe.errors import UsageError, did_you_mean
from simmoe.traces.catalog import DATA_VARIABLE, TRACES, cache_dir, find, resolve


@click.group()
def traces() -> None:
    """Request traces: lengths and arrivals that workloads are built from."""


@traces.command("list")
def list_traces() -> None:
    """List the traces known by name and where their files are."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False, soft_wrap=True)
    table = Table("trace", "lengths from", "what it is", box=None, pad_edge=False)
    for named in TRACES.values():
        if (path := find(named.file)) is not None:
            where = "user cache" if path.parent == cache_dir() else f"${DATA_VARIABLE}"
        else:
            where = "shipped summary" if named.has_summary else "not here"
        table.add_row(named.name, where, named.about)
    console.print(table)
    console.print(f"${DATA_VARIABLE}: {os.environ.get(DATA_VARIABLE) or 'not set'}; user cache: {cache_dir()}")
    console.print("'simmoe traces fetch NAME' downloads an original; a path to a file works wherever a name does")


@traces.command()
@click.argument("trace", metavar="NAME|FILE")
@trace_options
def describe(trace: str, **options: int | None) -> None:
    """Show lengths and arrivals of a trace, as recorded."""
    from rich.console import Console
    from rich.table import Table

    from simmoe.traces.build import build_workload
    from simmoe.traces.describe import (
        PERCENTILES,
        correlation,
        gap_variation,
        repeated_blocks,
        source_line,
        statistics,
    )

    _, path = resolve(trace)
    workload = build_workload(spec_from_options(trace=trace, rate=None if path else float("inf"), **options))
    console = Console(highlight=False, soft_wrap=True)
    console.print(source_line(workload.source))
    table = Table("tokens", "mean", "min", *(f"p{p}" for p in PERCENTILES), "max", box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, values in statistics(workload).items():
        cells = [f"{value:,.2f}" if key == "mean" else f"{value:,.0f}" for key, value in values.items()]
        table.add_row(name.removesuffix("_tokens"), *cells)
    console.print(table)
    related = correlation(workload)
    console.print(
        f"correlation of prompt and output: {'none, one is constant' if related is None else f'{related:.3f}'}"
    )
    if path is None:
        console.print("arrivals: the summary has none")
        return
    span_s = float(workload.arrival_s[-1])
    variation = gap_variation(workload)
    if variation is None:
        console.print("arrivals: all at one instant")
    else:
        rate = (len(workload) - 1) / span_s
        console.print(
            f"arrivals: {rate:.3f} requests/s over {span_s:,.1f} s; gaps vary by {variation:.2f} (Poisson: 1)"
        )
    if workload.prefix_hashes is not None:
        share = repeated_blocks(workload.prefix_hashes)
        console.print(f"prefix blocks of {workload.prefix_block_tokens} tokens: {share:.1%} seen before")


@traces.command()
@click.argument("names", metavar="NAME...", nargs=-1, required=True)
@click.option("--url", help="Fetch from a mirror; the checksum stays the published one.")
def fetch(names: tuple[str, ...], url: str | None) -> None:
    """Download the originals of named traces into the user cache."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TransferSpeedColumn

    from simmoe.traces.fetch import as_published
    from simmoe.traces.fetch import fetch as download

    for name in names:
        if name not in TRACES:
            raise UsageError(f"no trace '{name}'{did_you_mean(name, TRACES)}; see 'simmoe traces list'")
    files = list(dict.fromkeys(TRACES[name].file for name in names))
    if url is not None and len(files) > 1:
        raise UsageError("--url names one file; fetch one trace at a time")
    for file in files:
        if (present := find(file)) is not None:
            if as_published(file, present):
                click.echo(f"{file.file_name} is already at {present}")
                continue
            click.echo(f"{present} is not {file.file_name} as published; fetching that", err=True)
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(file.file_name, total=None)

            def show(done: int, total: int | None, bar: Progress = bar, task: TaskID = task) -> None:
                bar.update(task, completed=done, total=total)

            path, sha256 = download(file, cache_dir(), url, show)
        checked = "as published" if file.sha256 else "no published checksum; length and header checked"
        click.echo(f"{path}  sha256 {sha256} ({checked})")
        click.echo(f"{file.license}; cite {file.citation}")


@traces.command()
@click.argument("trace", metavar="NAME|FILE")
@click.argument("out", type=click.Path(path_type=Path, dir_okay=False))
@trace_options
def convert(trace: str, out: Path, **options: int | None) -> None:
    """Write a trace, as recorded, with the workload's column names: OUT.csv, .jsonl (or either .gz) or .parquet."""
    from simmoe.traces.build import build_workload
    from simmoe.traces.describe import source_line
    from simmoe.traces.export import write_trace

    workload = build_workload(spec_from_options(trace=trace, **options))
    budgets = workload.source["budgets"]
    assert isinstance(budgets, dict)
    write_trace(out, workload, with_k_qos=budgets["generator"] == "trace")
    click.echo(source_line(workload.source))
    click.echo(f"wrote {len(workload):,} requests to {out}")
