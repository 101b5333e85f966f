"""A policy's parameters: what its constructor takes, and ``key=value`` text turned into it."""

from __future__ import annotations

import inspect
import math
import sys
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from simmoe.errors import PolicyError, UsageError, did_you_mean
from simmoe.policies.loading import message_of, pass_ctrl_c

Value = int | float | bool | str | None

#: The constructor parameter that receives the deployment.
CONTEXT = "context"

_WORDS: Mapping[str, bool] = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a policy's constructor."""

    name: str
    kind: type
    """int, float, bool or str."""
    optional: bool
    """Whether ``none`` is a value."""
    required: bool
    default: Value

    def __str__(self) -> str:
        return self.name if self.required else f"{self.name}={format_value(self.default)}"

    def parse(self, text: str, policy: str) -> Value:
        """Return the value ``text`` stands for.

        Raises:
            UsageError: it stands for none of the parameter's type.
        """
        if self.optional and text.lower() == "none":
            return None
        try:
            if self.kind is bool:
                return _WORDS[text.lower()]
            if self.kind is float and math.isnan(float(text)):
                raise ValueError
            return self.kind(text)  # type: ignore[no-any-return]
        except (ValueError, KeyError):
            wanted = {bool: "true or false", int: "a whole number", float: "a number"}[self.kind]
            none = ", or none" if self.optional else ""
            raise UsageError(f"policy '{policy}': {self.name} is '{text}'; it must be {wanted}{none}") from None


def parameters_of(cls: type, policy: str) -> dict[str, Parameter]:
    """Return the parameters of a policy class's constructor in their order, ``context`` left out.

    Raises:
        PolicyError: a parameter that a command line cannot give.
    """
    parameters: dict[str, Parameter] = {}
    for name, parameter in _signature(cls, policy).parameters.items():
        if name == CONTEXT or parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
            continue
        required = parameter.default is parameter.empty
        hint = _annotation(cls, parameter, policy)
        members = list(typing.get_args(hint)) if _is_union(hint) else [hint]
        kinds = [member for member in members if member is not type(None)]
        is_number = len(kinds) == 2 and int in kinds and float in kinds
        kind = float if is_number else next(iter(kinds), None)
        if kind not in (int, float, bool, str) or (len(kinds) > 1 and not is_number):
            raise PolicyError(
                f"policy '{policy}': parameter '{name}' is annotated {hint}; annotate int, float, bool or str, "
                f"each optionally with None"
            )
        default = None if required else parameter.default
        optional = type(None) in members or parameter.default is None
        parameters[name] = Parameter(name, kind, optional, required, default)
    return parameters


def takes_context(cls: type) -> bool:
    """Return whether the constructor wants the deployment's PolicyContext."""
    return CONTEXT in _signature(cls, cls.__qualname__).parameters


def parse_parameters(texts: Sequence[str], parameters: Mapping[str, Parameter], policy: str) -> dict[str, Value]:
    """Return the values of ``key=value`` texts, in the constructor's order.

    Raises:
        UsageError: no '=', an unknown or repeated key, an unusable value, or a required parameter without one.
    """
    given: dict[str, Value] = {}
    for text in texts:
        key, equals, value = (word.strip() for word in text.partition("="))
        if not equals:
            raise UsageError(f"policy '{policy}': '{text}' is no parameter; write key=value")
        if key not in parameters:
            hint = did_you_mean(key, parameters) or " (it takes none)"
            raise UsageError(f"policy '{policy}' has no parameter '{key}'{hint}")
        if key in given:
            raise UsageError(f"policy '{policy}': {key} is given twice; give it once")
        given[key] = parameters[key].parse(value, policy)
    for parameter in parameters.values():
        if parameter.required and parameter.name not in given:
            raise UsageError(f"policy '{policy}' needs {parameter.name}; add ',{parameter.name}=...'")
    return {name: given[name] for name in parameters if name in given}


def format_value(value: Value) -> str:
    """Return the text that :meth:`Parameter.parse` reads as ``value``."""
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _annotation(cls: type, parameter: inspect.Parameter, policy: str) -> Any:
    """Return a parameter's type: as annotated, else its default's, else str."""
    hint = parameter.annotation
    if hint is parameter.empty:
        return str if parameter.default in (None, parameter.empty) else type(parameter.default)
    if isinstance(hint, str):  # from __future__ import annotations
        try:
            return eval(hint, vars(sys.modules[cls.__module__]))
        except BaseException as error:
            pass_ctrl_c(error)
            raise PolicyError(
                f"policy '{policy}': the annotation of '{parameter.name}' is unknown: {message_of(error)}"
            ) from None
    return hint


def _signature(cls: type, policy: str) -> inspect.Signature:
    try:
        return inspect.signature(cls)
    except BaseException as error:
        pass_ctrl_c(error)
        raise PolicyError(f"policy '{policy}': its constructor cannot be looked at: {message_of(error)}") from error


def _is_union(hint: object) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)
