"""``simmoe profile layer``: the routed experts of one MoE layer timed alone, on one GPU of this machine."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import click

from simmoe.commands.asked_layout import require_budgets, require_cards
from simmoe.commands.budget_list import parse_budgets
from simmoe.errors import MissingDependency, UsageError

#: What the name of a table's file is followed by, for its layer's times to be found.
SUFFIX = "-layer.json"


def _require_layer_name(context: click.Context, parameter: click.Parameter, value: Path) -> Path:
    """Refuse a file name that belongs to no table."""
    if not value.name.endswith(SUFFIX) or value.name == SUFFIX:
        raise UsageError(f"{parameter.opts[0]} '{value}' belongs to no table; 'profile show' looks for NAME{SUFFIX}")
    return value


@click.command(short_help="Time one MoE layer's experts alone.")
@click.option(
    "--model", default="olmoe-1b-7b", show_default=True, help="A model simmoe ships the shape of, or a config.json."
)
@click.option(
    "--split", type=click.IntRange(1), default=4, show_default=True, help="Sub-experts an expert is split into."
)
@click.option("--budgets", callback=parse_budgets, help="Budgets to time, e.g. 1,8,16; by default up to six.")
@click.option(
    "--tensor-parallel", type=click.IntRange(1), default=1, show_default=True, help="Cards of the layout: one is used."
)
@click.option("--expert-parallel", is_flag=True, help="Whole experts on each card, instead of a share of every expert.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    required=True,
    callback=_require_layer_name,
    help="File to write; NAME-layer.json beside NAME.json is shown with that table.",
)
def layer(
    model: str, split: int, budgets: tuple[int, ...], tensor_parallel: int, expert_parallel: bool, out: Path
) -> None:
    """Time the routed experts of one layer of MODEL by CUDA events, as the first card of a layout holds them.

    No engine is started, and one GPU does for a layout of several: 'profile measure' times the layer of the engine it
    measures; this is for a table that lacks it. Weights are random.
    """
    if find_spec("vllm") is None:
        raise MissingDependency("timing a layer needs vLLM and an NVIDIA GPU: pip install 'simmoe[live]'")
    from simmoe.live.measure import card
    from simmoe.live.measure.layer_alone import held_shape, time_layer_alone
    from simmoe.live.measure.layout import budgets_of
    from simmoe.live.measure.models import read_split
    from simmoe.profiles.layer_times import WHAT, write_layer_times
    from simmoe.profiles.models import model_shape
    from simmoe.writing import check_place

    require_cards(tensor_parallel, expert_parallel)
    _, chosen = read_split(model, split)
    shape = model_shape(chosen.config)
    require_budgets(budgets, shape.top_k)
    held_shape(shape, tensor_parallel, expert_parallel)
    card.refuse_busy()
    check_place(out, WHAT)
    ks = budgets_of(budgets, shape.top_k)
    times = time_layer_alone(chosen, ks, num_cards=tensor_parallel, expert_parallel=expert_parallel)
    write_layer_times(out, times)
    click.echo(f"wrote {out}", err=True)
