"""Options and arguments that would have no effect beside others, refused rather than ignored."""

from __future__ import annotations

from collections.abc import Collection

import click
from click.core import ParameterSource

from simmoe.errors import UsageError


def refuse_given(names: Collection[str], why: str) -> None:
    """Refuse parameters of the command at hand that were typed.

    Args:
        names: of its options, and of an argument that takes any number of values.
        why: what is said of one that was given.
    Raises:
        UsageError: one was.
    """
    context = click.get_current_context()
    for parameter in context.command.params:
        name = parameter.name
        if name in names and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            given = parameter.opts[0] if isinstance(parameter, click.Option) else f"'{context.params[name][0]}'"
            raise UsageError(f"{given} {why}")
