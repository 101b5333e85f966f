"""How much memory CUDA graphs may take, and whether one more bank of them fits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

GIB = 1 << 30

SHARE_BEFORE_KV = 0.25
"""Default bound while memory for the KV cache is not set aside yet: of what weights and activations leave of
``gpu_memory_utilization``. An engine that would start without graphs keeps three quarters of its KV cache with them."""

SHARE_AFTER_KV = 0.75
"""Default bound once it is: of what the device still has beyond activations, which serves nothing else."""


class CapturedGraphs(NamedTuple):
    """What a worker captured, as plain data."""

    ks: tuple[int, ...] = ()
    """Budgets with a bank, ascending."""
    taken_bytes: int = 0
    """Memory of all banks."""
    bound_bytes: int = 0
    """What they might have taken."""


@dataclass
class GraphMemory:
    """The bound of one model runner, and what was seen of its banks."""

    bound_bytes: int
    """What all banks together may take."""
    estimate_bytes: int = 0
    """What vLLM says that a bank will take; 0 where it was not asked."""
    taken: list[int] = field(default_factory=list)
    """What each bank took, in bytes, in the order they were captured."""

    @property
    def taken_bytes(self) -> int:
        """What the banks so far take together."""
        return sum(self.taken)

    @property
    def next_bytes(self) -> int:
        """What the next bank is expected to take: as much as the largest so far, vLLM's estimate before there is one.

        The first holds the pool that all share, and none so far was more than 4% from another (0.69 to 2.0 GiB on
        H200s, by model).
        """
        return max(self.taken, default=self.estimate_bytes)

    def reserved_bytes(self, num_banks: int) -> int:
        """Return what is to be set aside for so many banks: whole ones, within the bound."""
        if not self.estimate_bytes:
            return 0
        return min(num_banks, self.bound_bytes // self.estimate_bytes) * self.estimate_bytes

    def has_room(self, of_all: Callable[[int], int] = int) -> bool:
        """Return whether another bank is expected to stay within the bound.

        Args:
            of_all: takes this worker's room in bytes and returns the least of all workers': they replay together, so
                they capture alike.
        """
        return of_all(self.bound_bytes - self.taken_bytes - self.next_bytes) >= 0


def bound_bytes(graph_memory_gib: float, left_bytes: int, share: float) -> int:
    """Return the bound in bytes: the one named, or a share of what is left where that is 0.

    >>> bound_bytes(0.5, 0, 0.25) == GIB // 2, bound_bytes(0, 8 * GIB, 0.25) == 2 * GIB, bound_bytes(0, -5, 0.25)
    (True, True, 0)
    """
    return int(graph_memory_gib * GIB) if graph_memory_gib else max(0, int(share * left_bytes))
