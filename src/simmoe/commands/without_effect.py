"""Options and arguments that would have no effect beside others, refused rather than ignored."""

from __future__ import annotations

from collections.abc import Collection

import click
from click.core import ParameterSource

from simmoe.errors import UsageError


def refuse_given(names: Collection[str], why: str) -> None:
    """Refuse parameters of the command at hand that were typed, or that a command that invokes it gave a value.

    Args:
        names: of its options, and of an argument that takes any number of values.
        why: what is said of one that was given.
    Raises:
        UsageError: one was.
    """
    context = click.get_current_context()
    for parameter in context.command.params:
        if parameter.name in names and _is_given(context, parameter):
            given = (
                parameter.opts[0] if isinstance(parameter, click.Option) else f"'{context.params[parameter.name][0]}'"
            )
            raise UsageError(f"{given} {why}")


def _is_given(context: click.Context, parameter: click.Parameter) -> bool:
    assert parameter.name is not None
    source = context.get_parameter_source(parameter.name)
    if source is not None:
        return source is ParameterSource.COMMANDLINE
    value = context.params[parameter.name]  # of a command that another one invoked
    return value is not None and value is not False and value not in ((), parameter.default)
