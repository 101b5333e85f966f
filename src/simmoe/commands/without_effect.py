"""Options that would have no effect beside others, refused rather than ignored."""

from __future__ import annotations

from collections.abc import Collection

import click

from simmoe.errors import UsageError


def refuse_given(names: Collection[str], why: str) -> None:
    """Refuse options of the command at hand that have another value than their default.

    Args:
        names: of its parameters.
        why: what is said of one that was given.
    Raises:
        UsageError: one was.
    """
    context = click.get_current_context()
    for parameter in context.command.params:
        if parameter.name in names and _is_given(context.params[parameter.name], parameter.default):
            raise UsageError(f"{parameter.opts[0]} {why}")


def _is_given(value: object, default: object) -> bool:
    return value is not None and value is not False and value != default
