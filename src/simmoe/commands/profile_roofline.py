"""``simmoe profile roofline``: a table for a card that is not at hand, and how far such tables are off."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import click

from simmoe.commands.asked_layout import require_cards
from simmoe.commands.out_table import require_table_name
from simmoe.errors import UsageError

if TYPE_CHECKING:
    from simmoe.profiles.estimating.held_out import HeldOut
    from simmoe.profiles.table import StepTable

#: What a row of the method's errors had held out, in words.
_HELD_OUT = {
    "model": "every layout of the table's model held out",
    "layout": "the table held out, other layouts of its model not",
    "budgets": "the upper and lower half of the table's budgets in turn",
}


@click.command(short_help="Estimate a table from a card's datasheet.")
@click.option("--gpu", help="The card, such as 'a100-80gb' or 'h100'; a name that is not known lists all.")
@click.option("--model", help="A model that ships ('olmoe-1b-7b', ...), or a Hugging Face config.json.")
@click.option(
    "--split", type=click.IntRange(1), default=4, show_default=True, help="Sub-experts an expert is split into."
)
@click.option(
    "--tensor-parallel", type=click.IntRange(1, 8), default=1, show_default=True, help="Cards that share every step."
)
@click.option("--expert-parallel", is_flag=True, help="Whole experts on each card, instead of a share of every expert.")
@click.option("--out", type=click.Path(path_type=Path), callback=require_table_name, help="Table to write (.json).")
@click.option(
    "--error", is_flag=True, help="Print how far the method is from each measured table it did not learn from."
)
def roofline(
    gpu: str | None,
    model: str | None,
    split: int,
    tensor_parallel: int,
    expert_parallel: bool,
    out: Path | None,
    error: bool,
) -> None:
    """Estimate the table of MODEL on a card from its datasheet, with efficiencies learned on measured tables.

    The table is marked estimated wherever it shows. Without --out it is printed only.
    """
    from rich.console import Console

    from simmoe.commands.profile_view import facts, time_tables
    from simmoe.profiles.catalog import DEFAULT_PROFILE, Profile, layer_times_of, load_profile, profile_names
    from simmoe.profiles.estimating.cards import card_named
    from simmoe.profiles.estimating.estimate import check_layout, estimate
    from simmoe.profiles.estimating.held_out import held_out_errors, over_all_tables
    from simmoe.profiles.estimating.learned import learn_from, measured_models
    from simmoe.profiles.estimating.step_work import Parallelism
    from simmoe.profiles.models import read_model
    from simmoe.profiles.table_file import dump_table, parse_table, write_table

    if not error and (gpu is None or model is None):
        raise UsageError("name the card and the model: --gpu NAME --model NAME (or --error, for the method's errors)")
    require_cards(tensor_parallel, expert_parallel)
    card = card_named(gpu) if gpu is not None else None
    read = read_model(model) if model is not None else None
    tables = [(name, load_profile(name).table) for name in profile_names()]
    measured = measured_models((table, layer_times_of(name, table)) for name, table in tables)
    like = next((one for one in measured if one.table.name == DEFAULT_PROFILE), measured[0])
    parallel = Parallelism(tensor_parallel, expert_parallel)
    if card is not None and read is not None:
        check_layout(like.table, card, read, split, parallel)
    held_out = held_out_errors(measured)
    if error or card is None or read is None:
        for line in (*error_lines(held_out), *_not_learned_from(table for _, table in tables)):
            click.echo(line)
        return
    of_all = [row._asdict() for row in over_all_tables(held_out, tensor_parallel)]
    table = estimate(learn_from(measured), like.table, card, read, split, of_all, parallel, like.weights)
    if out is not None:
        write_table(out, table)
    console = Console(highlight=False, markup=False)
    estimated = Profile(parse_table(dump_table(table).encode(), table.name))
    console.print(f"{estimated.label}: {table.summary}")
    console.print(facts(estimated))
    for times in time_tables(estimated, async_scheduling=True):
        console.print()
        console.print(times)
    if estimated.name in profile_names():
        click.echo(f"the shipped profile '{estimated.name}' was measured on this card", err=True)
    if out is not None:
        click.echo(f"wrote {out}", err=True)


def error_lines(rows: Iterable[HeldOut]) -> Iterator[str]:
    """Yield the method's errors, two tables a way of holding out: a line a measured table, a column a kind of step."""
    for held_out, group in groupby(rows, attrgetter("held_out")):
        found = {(row.table, row.bound_by, row.steps, row.sizes): row for row in group}
        names = list(dict.fromkeys(key[0] for key in found))
        kinds = sorted({key[2:] for key in found}, key=lambda kind: (kind[0], kind[1].startswith("above")))
        width = max(len(name) for name in names)
        yield f"estimated / measured - 1 (mean, median and p95 of its size), {_HELD_OUT[held_out]}"
        for bound_by, called in (("device or host", "all steps"), ("device", "bound by the device")):
            yield ""
            yield f"{called:{width}}" + "".join(f"{' '.join(kind):>22}" for kind in kinds) + "   steps"
            for name in names:
                cells = [found.get((name, bound_by, *kind)) for kind in kinds]
                steps = sum(cell.number for cell in cells if cell)
                yield f"{name:{width}}{''.join(map(_cell, cells))}{steps:>8,}"
        yield ""


def _cell(row: HeldOut | None) -> str:
    if row is None:
        return f"{'-':>9}{'-':>6}{'-':>7}"
    return f"{row.bias:>+z9.1%}{row.median:>6.1%}{row.p95:>7.1%}"


def _not_learned_from(tables: Iterable[StepTable]) -> Iterator[str]:
    """Yield the tables that nothing is learned from, one line a reason."""
    from simmoe.profiles.estimating.learned import left_out

    names: dict[str, list[str]] = {}
    for table in tables:
        reason = left_out(table)
        if reason:
            names.setdefault(reason, []).append(table.name)
    for reason, of in names.items():
        yield f"not learned from: {', '.join(of)} ({reason})"
