"""vLLM's ``--additional-config``: what a command puts there, and what its user adds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from simmoe.errors import UsageError

FLAG = "--additional-config"

_OPTIONS = {
    "policy": "--policy", "profile": "--profile", "default_k": "--default-k", "num_ranks": "--replicas",
    "captured_ks": "--captured-ks", "graph_memory_gib": "--graph-memory-gib", "uncaptured_k": "--uncaptured-k",
    "decisions": "--record-decisions",
}  # fmt: skip
"""What of it has an option of its own."""


def with_given(ours: Mapping[str, Any], arguments: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Return what the command sets together with what its user gave, and the other arguments.

    Args:
        ours: set by the command.
        arguments: of ``vllm serve``, the user's.
    Raises:
        UsageError: the user's is no JSON object, or says otherwise than the command.
    """
    config, rest = dict(ours), []
    left = iter(arguments)
    for argument in left:
        name, equals, value = argument.partition("=")
        name = name.replace("_", "-")
        if name.startswith(f"{FLAG}."):
            raise UsageError(f"'{argument}' would replace what this command sets; give {FLAG} as one JSON object")
        # vLLM takes an unambiguous beginning for the whole
        if FLAG.startswith(name) and name.startswith("--ad"):
            config = _merged(config, _parsed(value if equals else next(left, "")), "")
        else:
            rest.append(argument)
    return config, rest


def _parsed(text: str) -> Mapping[str, Any]:
    try:
        given = json.loads(text)
    except ValueError as error:
        raise UsageError(f"{FLAG} is '{text}', no JSON: {error}") from None
    if not isinstance(given, dict):
        raise UsageError(f"{FLAG} is '{text}'; it must be a JSON object")
    return given


def _merged(ours: Mapping[str, Any], theirs: Mapping[str, Any], within: str) -> dict[str, Any]:
    merged = dict(ours)
    for key, value in theirs.items():
        if key not in ours:
            merged[key] = value
        elif isinstance(ours[key], dict) and isinstance(value, dict):
            merged[key] = _merged(ours[key], value, f"{within}{key}.")
        elif ours[key] != value:
            remedy = f"give {_OPTIONS[key]}" if key in _OPTIONS else "leave it out"
            raise UsageError(f"{FLAG} has {within}{key} {value!r}, the command says {ours[key]!r}; {remedy}")
    return merged
