"""Reading simmoe's options from vLLM's ``additional_config``, which checks nothing: strictly."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, fields
from numbers import Integral
from typing import Any

from simmoe.errors import LiveError, did_you_mean

_KINDS = {str: "text", int: "an integer", bool: "true or false", float: "a number", tuple: "a list of integers"}


def read_options(cls: type, key: str, given: Any) -> dict[str, Any]:
    """Return options as they are to be given to a dataclass, lists of integers as tuples.

    Args:
        cls: the dataclass; those of its fields that have a default are options, of the default's type.
        key: the options' own in ``additional_config``.
        given: what is there.
    Raises:
        LiveError: no mapping, an option that does not exist, or a value of another type.
    """
    if not isinstance(given, Mapping):
        raise LiveError(f"additional_config['{key}'] is a {type(given).__name__}; it must be an object")
    known = {field.name: field for field in fields(cls) if isinstance(field.default, tuple(_KINDS))}
    for name in given:
        if name not in known:
            raise LiveError(f"additional_config['{key}'] has no option '{name}'{did_you_mean(name, list(known))}")
    return {name: _read(value, known[name], key) for name, value in given.items()}


def _read(value: Any, field: Field[Any], key: str) -> Any:
    kind = type(field.default)
    if kind is tuple and isinstance(value, list | tuple) and all(_is_integer(item) for item in value):
        return tuple(map(int, value))
    if kind is float and _is_integer(value):
        return float(value)
    if type(value) is not kind or kind is tuple:
        raise LiveError(f"additional_config['{key}']['{field.name}'] is {value!r}; it must be {_KINDS[kind]}")
    return value


def _is_integer(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
