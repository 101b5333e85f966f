"""Options and arguments that would have no effect beside others, refused rather than ignored."""

from __future__ import annotations

from collections.abc import Collection

import click

from simmoe.errors import UsageError


def refuse_given(names: Collection[str], why: str) -> None:
    """Refuse parameters of the command at hand that have another value than their default.

    Args:
        names: of its options, and of an argument that takes any number of values.
        why: what is said of one that was given.
    Raises:
        UsageError: one was.
    """
    context = click.get_current_context()
    for parameter in context.command.params:
        if parameter.name in names and _is_given(value := context.params[parameter.name], parameter.default):
            given = parameter.opts[0] if isinstance(parameter, click.Option) else f"'{value[0]}'"
            raise UsageError(f"{given} {why}")


def _is_given(value: object, default: object) -> bool:
    return value is not None and value is not False and value not in ((), default)
