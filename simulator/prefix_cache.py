"""A prefix cache over the trace's hash ids: vLLM's block pool at the granularity of a hash block.

The unit is what one hash id covers (Mooncake: 512 tokens, 32 blocks of 16). As in vLLM 0.32, freed blocks without a
findable hash are reused first; hashed ones are reused in the order they were freed, a request's last block before its
first, generated tokens included; a hit never covers a whole prompt, since the last token must be computed for its
logits. What a preempted request had computed it finds again, outputs too, while it is there. Differences from vLLM, of
no effect where a unit is one block: a unit is found only once it is wholly computed, and is evicted whole. KV computed
at one budget is not KV at another, so keys carry the budget.
"""

from __future__ import annotations

from collections.abc import Sequence

from simmoe.simulator.kv_blocks import BlockPool

UnitKey = tuple[int, int]
"""(budget, hash id)"""


def own_hash(row: int, position: int) -> int:
    """Return the hash id of a hash block that only one request has, outputs in it: no trace's, which are from 0."""
    return -1 - (row << 32 | position)


class CachedUnit:
    """KV of one hash block, findable by its key until evicted; with no key, tokens that nobody can find."""

    __slots__ = ("key", "num_blocks", "num_references", "ticket")

    def __init__(self, key: UnitKey | None, num_blocks: int) -> None:
        self.key = key
        self.num_blocks = num_blocks
        self.num_references = 1
        self.ticket = -1
        """Place in the eviction order while unreferenced; -1 while referenced."""


class PrefixBlockPool(BlockPool):
    """Blocks that keep their content when freed, until they are needed."""

    def __init__(self, num_usable_blocks: int) -> None:
        super().__init__(num_usable_blocks)
        self._units: dict[UnitKey, CachedUnit] = {}
        self._evictable: dict[int, CachedUnit] = {}
        """ticket -> unreferenced unit, in order of eviction."""
        self._num_blank_blocks = num_usable_blocks
        """Free blocks without content; these go first."""
        self._next_ticket = 0

    def lookup(self, keys: Sequence[UnitKey]) -> list[CachedUnit]:
        """Return the units of the longest cached run of leading keys, without referring to them."""
        found = []
        for key in keys:
            unit = self._units.get(key)
            if unit is None:
                break
            found.append(unit)
        return found

    def num_free_without(self, units: Sequence[CachedUnit]) -> int:
        """Return the free blocks that remain once ``units`` are referred to."""
        return self.num_free_blocks - sum(unit.num_blocks for unit in units if unit.num_references == 0)

    def refer(self, unit: CachedUnit) -> None:
        """Hold a cached unit: it cannot be evicted until released."""
        if unit.num_references == 0:
            del self._evictable[unit.ticket]
            unit.ticket = -1
            self.num_free_blocks -= unit.num_blocks
        unit.num_references += 1

    def insert(self, key: UnitKey, num_blocks: int) -> CachedUnit | None:
        """Make ``num_blocks`` blocks the caller holds findable; None if the key is cached already (a duplicate)."""
        if key in self._units:
            return None
        unit = self._units[key] = CachedUnit(key, num_blocks)
        return unit

    def release(self, unit: CachedUnit) -> None:
        """Let go of a unit; with the last reference its blocks become free, content kept."""
        unit.num_references -= 1
        assert unit.num_references >= 0
        if unit.num_references == 0:
            self._make_evictable(unit)

    def give_generated(self, num_blocks: int) -> None:
        """Take back full blocks of generated tokens: hashed in vLLM, so reused in turn, though no trace finds them."""
        if num_blocks:
            unit = CachedUnit(None, num_blocks)
            unit.num_references = 0
            self._make_evictable(unit)

    def take(self, num_blocks: int) -> None:
        super().take(num_blocks)
        self._num_blank_blocks -= num_blocks
        while self._num_blank_blocks < 0:
            ticket = next(iter(self._evictable))
            unit = self._evictable.pop(ticket)
            if unit.key is not None:
                del self._units[unit.key]
            self._num_blank_blocks += unit.num_blocks

    def give(self, num_blocks: int) -> None:
        super().give(num_blocks)
        self._num_blank_blocks += num_blocks

    def check_integrity(self) -> None:
        """Assert that free blocks are the blank and the evictable ones."""
        evictable = sum(unit.num_blocks for unit in self._evictable.values())
        assert self.num_free_blocks == self._num_blank_blocks + evictable
        assert all(unit.num_references == 0 for unit in self._evictable.values())

    def _make_evictable(self, unit: CachedUnit) -> None:
        unit.ticket = self._next_ticket
        self._next_ticket += 1
        self._evictable[unit.ticket] = unit
        self.num_free_blocks += unit.num_blocks
        assert self.num_free_blocks <= self.num_usable_blocks
