"""Routing budgets as a list on the command line."""

from __future__ import annotations

import click

from simmoe.errors import UsageError

#: No budget has more digits.
_MAX_DIGITS = 9


def parse_budgets(context: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...]:
    """Return the budgets of a comma-separated list, in its order; none where the option is not given.

    Raises:
        UsageError: an item is no whole number of at least 1.
    """
    items = [] if value is None else [item.strip() for item in value.split(",")]
    if not all(item.isdecimal() and len(item) <= _MAX_DIGITS and int(item) for item in items):
        raise UsageError(f"{parameter.opts[0]} is '{value}'; give budgets as in 8,16,32")
    return tuple(map(int, items))
