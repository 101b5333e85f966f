"""Whether what was measured keeps within a limit, and whether another run could change the answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

#: Fewer runs bound no median; of five, all on one side of a limit, the median is there too 31 times in 32.
FEWEST_RUNS = 5

#: Runs after which the median decides, wherever its interval lies.
MOST_RUNS = 15

#: Error that a one-sided bound on the median may have: what FEWEST_RUNS reach.
_ERROR = 1 / 32


def median_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return bounds on the median of what values are drawn from, each wrong at most once in 32, whatever the shape.

    The number of values below the median is binomial, so order statistics bound it; outliers, which a busy machine
    produces, do not move them. Below five values there is no such bound: minus and plus infinity.
    """
    ordered, count = sorted(values), len(values)
    rank, below = 0, 0.0
    while (below := below + math.comb(count, rank) / 2**count) <= _ERROR:
        rank += 1
    return (ordered[rank - 1], ordered[count - rank]) if rank else (-math.inf, math.inf)


def is_decided(values: Sequence[float], limit: float) -> bool:
    """Return whether the median's bounds lie on one side of the limit, or there have been runs enough."""
    low, high = median_interval(values)
    return low > limit or high <= limit or len(values) >= MOST_RUNS


def growth(sizes: Sequence[int], costs: Sequence[float]) -> list[float]:
    """Return how the cost of one more request grows along a series of runs, from each pair of sizes to the next.

    Args:
        sizes: [n >= 3] requests, ascending.
        costs: [n] cost of a run; what every run costs (start-up) cancels.
    Returns:
        [n - 2] ratio of consecutive slopes; 1 where cost is linear.
    """
    slopes = [(costs[i + 1] - costs[i]) / (sizes[i + 1] - sizes[i]) for i in range(len(sizes) - 1)]
    return [later / earlier for earlier, later in pairwise(slopes)]
