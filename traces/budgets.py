"""Routing budgets: which ``k_qos`` each request brings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from simmoe.errors import UsageError
from simmoe.traces.streams import BUDGETS, stream

IntColumn = npt.NDArray[np.int64]
Mix = tuple[tuple[int, float], ...]

#: Of a tier: relative, so that nobody needs more, and sums stay exact enough.
WEIGHTS = (1e-9, 1e9)


def truncated_normal(n: int, mu: float, sigma: float, k_max: int, seed: int) -> IntColumn:
    """Return [n] budgets ``clip(round(x), 1, k_max)`` with ``x ~ N(mu, sigma**2)``; halves round to even.

    Source: MoE-Prism, Eq. 7.
    """
    x = mu + sigma * stream(seed, BUDGETS).standard_normal(n)
    return np.asarray(np.clip(np.rint(x), 1, k_max), dtype=np.int64)


def weighted_mix(n: int, mix: Mix, seed: int) -> IntColumn:
    """Return [n] budgets drawn independently from tiers ``(k, weight)``; weights are relative."""
    tiers = np.array([k for k, _ in mix], dtype=np.int64)
    edges = np.cumsum([weight for _, weight in mix])
    u = stream(seed, BUDGETS).random(n) * edges[-1]
    return np.asarray(tiers[np.minimum(np.searchsorted(edges, u, side="right"), len(tiers) - 1)])


def parse_mix(text: str) -> Mix:
    """Parse ``"4:0.2,16:0.5,32:0.3"``: budget, colon, relative weight.

    Raises:
        UsageError: the text is not of that form, a weight is outside WEIGHTS, or a budget stands twice.
    """
    tiers: list[tuple[int, float]] = []
    for part in text.split(","):
        k_text, _, weight_text = part.partition(":")
        try:
            k, weight = int(k_text), float(weight_text)
        except ValueError:
            raise UsageError(f"mix '{text}': '{part}' is not K:WEIGHT, as in 4:0.2,16:0.5,32:0.3") from None
        tiers.append((k, weight))
    check_mix(tiers)
    return tuple(tiers)


def check_mix(mix: Sequence[tuple[int, float]]) -> None:
    """Raise UsageError unless budgets are distinct and at least 1, and weights within WEIGHTS."""
    seen = set()
    for k, weight in mix:
        if k < 1:
            raise UsageError(f"mix has the budget {k}; it must be at least 1")
        if not WEIGHTS[0] <= weight <= WEIGHTS[1]:
            raise UsageError(
                f"mix gives budget {k} the weight {weight}; it must be above 0, in {WEIGHTS[0]:g}..{WEIGHTS[1]:g}"
            )
        if k in seen:
            raise UsageError(f"mix has the budget {k} twice; give each once")
        seen.add(k)
