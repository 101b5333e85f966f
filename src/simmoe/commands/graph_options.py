"""Options on the CUDA graphs of engines that a command starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from simmoe.commands.budget_list import parse_budgets
from simmoe.commands.without_effect import refuse_given
from simmoe.profiles.shape import UNCAPTURED

Command = TypeVar("Command", bound=Callable[..., Any])

GRAPH_OPTIONS = ("graphs", "captured_ks", "graph_memory_gib", "uncaptured_k")


def graph_options(command: Command) -> Command:
    """Add the options; :func:`take_graphs` takes them."""
    options = (
        click.option(
            "--graphs",
            type=click.Choice(("keyed", "default", "none")),
            default="keyed",
            show_default=True,
            help="GPU: CUDA graphs keyed by k at every size, at vLLM's default sizes, or none.",
        ),
        click.option(
            "--captured-ks",
            metavar="K,...",
            callback=parse_budgets,
            help="Budgets that graphs are captured at, ascending to the model's largest.  [default: every budget]",
        ),
        click.option(
            "--graph-memory-gib",
            type=click.FloatRange(min=0, min_open=True),
            help="Memory for graphs; the largest budgets are captured.  [default: a quarter of what is left]",
        ),
        click.option(
            "--uncaptured-k",
            type=click.Choice(UNCAPTURED),
            default="eager",
            show_default=True,
            help="A step at another budget runs without graphs, or at the next budget that has some.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def take_graphs(options: dict[str, Any]) -> dict[str, Any]:
    """Take the options out of a command's; return them as fields of ``EngineLaunch``.

    Raises:
        UsageError: options of graphs, and there are to be none.
    """
    taken = {name: options.pop(name) for name in GRAPH_OPTIONS}
    if taken["graphs"] == "none":
        refuse_given(GRAPH_OPTIONS[1:], "is for CUDA graphs, and --graphs none has none; leave one of them out")
    return {**taken, "graph_memory_gib": taken["graph_memory_gib"] or 0.0}
