"""``simmoe profile roofline``: a table for a card that is not at hand, and how far such tables are off."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from simmoe.errors import UsageError

if TYPE_CHECKING:
    from rich.table import Table


@click.command(short_help="Estimate a table from a card's datasheet.")
@click.option("--gpu", help="The card, such as 'a100-80gb' or 'h100'; a name that is not known lists all.")
@click.option("--model", help="A model that ships ('olmoe-1b-7b', ...), or a Hugging Face config.json.")
@click.option(
    "--splits", type=click.IntRange(1), default=4, show_default=True, help="Sub-experts an expert is split into."
)
@click.option("--out", type=click.Path(path_type=Path), help="Table to write (.json).")
@click.option(
    "--error", is_flag=True, help="Print how far the method is from each measured table it did not learn from."
)
def roofline(gpu: str | None, model: str | None, splits: int, out: Path | None, error: bool) -> None:
    """Estimate the table of MODEL on a card from its datasheet, with efficiencies learned on measured tables.

    The table is marked estimated wherever it shows. Without --out it is printed only.
    """
    from rich.console import Console

    from simmoe.commands.profile_view import facts, time_tables
    from simmoe.profiles.cards import card_named
    from simmoe.profiles.catalog import DEFAULT_PROFILE, Profile, layer_times_of, load_profile, profile_names
    from simmoe.profiles.estimate import estimate
    from simmoe.profiles.held_out import held_out_errors
    from simmoe.profiles.learned import learn_from, measured_models
    from simmoe.profiles.models import read_model
    from simmoe.profiles.table_file import dump_table, parse_table, write_table

    if not error and (gpu is None or model is None):
        raise UsageError("name the card and the model: --gpu NAME --model NAME (or --error, for the method's errors)")
    if out is not None and out.suffix != ".json":
        raise UsageError(f"--out '{out}' names no table; end it in .json")
    card = card_named(gpu) if gpu is not None else None
    read = read_model(model) if model is not None else None
    tables = [(name, load_profile(name).table) for name in profile_names()]
    measured = measured_models((table, layer_times_of(name, table)) for name, table in tables)
    held_out = [row._asdict() for row in held_out_errors(measured)]
    console = Console(highlight=False, markup=False)
    if error or card is None or read is None:
        for errors in held_out_tables(held_out):
            console.print(errors, soft_wrap=True)
        return
    like = next((one.table for one in measured if one.table.name == DEFAULT_PROFILE), measured[0].table)
    table = estimate(learn_from(measured), like, card, read, splits, held_out)
    if out is not None:
        write_table(out, table)
    estimated = Profile(parse_table(dump_table(table).encode(), table.name))
    console.print(f"{estimated.label}: {table.summary}")
    console.print(facts(estimated))
    for times in time_tables(estimated, async_scheduling=True):
        console.print()
        console.print(times)
    if out is not None:
        click.echo(f"wrote {out}", err=True)


def held_out_tables(rows: Iterable[Mapping[str, Any]]) -> Iterator[str | Table]:
    """Yield a heading and the method's errors for each measured table, one row a kind of step and what binds it."""
    from rich.table import Table

    for (name, held_out, source), group in groupby(rows, itemgetter("table", "held_out", "learned_from")):
        yield f"{name}: estimated / measured - 1; {held_out} held out, learned from {source}"
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
        table.add_column("steps")
        table.add_column("bound by")
        for column in ("number", "bias", "median", "p95"):
            table.add_column(column, justify="right")
        for row in group:
            errors = (f"{row['bias']:+.1%}", f"{row['median']:.1%}", f"{row['p95']:.1%}")
            table.add_row(row["steps"], row["bound_by"], f"{row['number']:,}", *errors)
        yield table
