"""Whether a test has a card to run on."""

from __future__ import annotations

from importlib.util import find_spec

from simmoe.errors import MissingDependency
from simmoe.live.measure import card


def has_card() -> bool:
    """Return whether there is vLLM and an NVIDIA card, without CUDA in this process: an engine forks from it."""
    if find_spec("vllm") is None or find_spec("torch") is None:
        return False
    try:
        card.query("name")
    except MissingDependency:
        return False
    return True
