"""Options of the commands that write a table: unusable ones are refused before anything is read or measured."""

from __future__ import annotations

from pathlib import Path

import click

from simmoe.errors import UsageError


def require_table_name(context: click.Context, parameter: click.Parameter, value: Path | None) -> Path | None:
    """Refuse a file name that no profile is found by: a callback for click's options."""
    if value is not None and value.suffix != ".json":
        raise UsageError(f"{parameter.opts[0]} '{value}' names no table; end it in .json")
    return value


def refuse_blank(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Refuse text without a word in it, what an unset shell variable becomes: a callback for click's options."""
    if value is not None and not value.strip():
        raise UsageError(f"{parameter.opts[0]} is empty; give a value, or leave the option out")
    return value
