"""The weights an engine's times were taken with, by name: how tokens are routed decides what small steps cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

LOAD_FORMAT = "simmoe-dummy"
"""vLLM's name for simmoe's random weights (:mod:`simmoe.live.measure.dummy_weights`), whichever revision draws them."""

REVISION_1 = "dummy"
"""All matrices fan_in ** -0.5, embeddings among them, every layer a copy of the first: attention drowns the tokens of a
prompt in what they have in common, and routes them nearly alike."""

WEIGHTS = "simmoe-dummy 2"
"""What that load format draws now: tokens of a prompt are routed as independently as decoding sequences."""

REAL = "real"

NONE = "none"
"""Of an engine that was made up."""

_MEANING = {
    REVISION_1: "random, revision 1: tokens of one prompt are routed nearly alike",
    WEIGHTS: "random, revision 2: tokens of one prompt are routed independently",
}


def weights_of(header: Mapping[str, Any]) -> str:
    """Return the weights a header, a recording's or an estimate's, is of; those that do not say are of revision 1."""
    return str(header.get("weights", REVISION_1))


def are_others(weights: str, other: str) -> bool:
    """Return whether two engines route differently for their weights alone; one that was made up has none to differ."""
    return weights != other and NONE not in (weights, other)


def weights_of_table(provenance: Mapping[str, Any]) -> str | None:
    """Return the weights a table's times are of; None where its provenance names no engine."""
    estimate = provenance.get("estimate")
    run = estimate or next(iter(provenance.get("runs", [])), None)
    return weights_of(run) if run else None


def weights_served(arguments: Sequence[str]) -> str:
    """Return the weights of an engine that is started with these arguments of ``vllm serve``."""
    given = ""
    for argument, value in pairwise([*arguments, ""]):
        name, _, attached = argument.partition("=")
        if name.replace("_", "-") == "--load-format":
            given = attached or value
    return {LOAD_FORMAT: WEIGHTS, "dummy": "vLLM's dummy"}.get(given, REAL)


def described(weights: str) -> str:
    """Return the name with what it means for the times, where that is known."""
    return f"{weights} ({_MEANING[weights]})" if weights in _MEANING else weights
