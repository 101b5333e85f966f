"""What 'simmoe serve' and 'simmoe live run' are told of CUDA graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from simmoe.cli import cli
from simmoe.commands.graph_options import graph_options, take_graphs
from simmoe.errors import UsageError


def taken(*arguments: str) -> dict[str, Any]:
    """Return the fields that a command with these arguments gives to engines."""
    found: dict[str, Any] = {}

    @click.command()
    @graph_options
    def command(**options: Any) -> None:
        found.update(take_graphs(options))
        assert not options

    result = CliRunner().invoke(command, arguments)
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return found


def test_every_budget_is_captured_and_a_step_runs_at_its_own_unless_said_otherwise() -> None:
    assert taken() == {"graphs": "keyed", "captured_ks": (), "graph_memory_gib": 0.0, "uncaptured_k": "eager"}
    given = taken(
        "--captured-ks", "8, 16,32", "--graph-memory-gib", "7.5", "--uncaptured-k", "next", "--graphs=default"
    )
    assert given == {"graphs": "default", "captured_ks": (8, 16, 32), "graph_memory_gib": 7.5, "uncaptured_k": "next"}


@pytest.mark.parametrize("value", ["", "8,,32", "8-32", "8,x", "-1,8", "8.0", "0,8", "²", "9" * 5000])
def test_budgets_that_are_none_are_refused(value: str) -> None:
    with pytest.raises(UsageError, match=f"--captured-ks is '{value}'; give budgets as in 8,16,32"):
        taken("--captured-ks", value)


@pytest.mark.parametrize(
    "option", [("--captured-ks", "8"), ("--graph-memory-gib", "3"), ("--uncaptured-k", "next")], ids=lambda o: o[0]
)
def test_what_is_said_of_graphs_is_refused_where_there_are_none(option: tuple[str, str], tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"{option[0]} is for CUDA graphs, and --graphs none has none"):
        taken("--graphs", "none", *option)
    for command in (["serve"], ["live", "run"], ["validate", "--out", str(tmp_path / "out")]):
        result = CliRunner().invoke(cli, [*command, "--url", "http://127.0.0.1:1", *option], standalone_mode=False)
        assert isinstance(result.exception, UsageError)
        assert f"{option[0]} is for engines started here" in str(result.exception)
