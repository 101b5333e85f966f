"""A sorted list in blocks: a change moves the entries of one block, not all that follow."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterator
from itertools import accumulate, chain
from typing import Any, Generic, TypeVar

T = TypeVar("T", bound=tuple[Any, ...])

#: A block that grows beyond this many entries is halved. One of a few thousand is moved in less time than its place is
#: found in, and there are few of them.
MOST_IN_BLOCK = 2048


class SortedBlocks(Generic[T]):
    """Tuples in ascending order, no two of them equal.

    Adding and removing cost comparisons as the logarithm of the size. An index costs O(1) in the first block; elsewhere
    the first one after a change counts the blocks, and the others are found by bisection.
    """

    __slots__ = ("_ends", "_lasts", "blocks")

    def __init__(self) -> None:
        self.blocks: list[list[T]] = []
        """None of them empty; read-only outside."""
        self._lasts: list[T] = []
        """[num_blocks] last entry of each block."""
        self._ends: list[int] = []
        """[num_blocks] entries up to the end of each block; empty after a change, until it is asked for."""

    def __bool__(self) -> bool:
        return bool(self.blocks)

    def __iter__(self) -> Iterator[T]:
        return chain.from_iterable(self.blocks)

    def __getitem__(self, index: int) -> T:
        """Return the entry at a position from 0 on."""
        blocks = self.blocks
        if index < len(blocks[0]):
            return blocks[0][index]
        ends = self._ends
        if not ends:
            ends = self._ends = list(accumulate(map(len, blocks)))
        number = bisect_right(ends, index)
        return blocks[number][index - ends[number - 1]]

    def add(self, entry: T) -> None:
        """Add an entry. One that cannot be compared adds nothing."""
        blocks, lasts = self.blocks, self._lasts
        if not blocks:
            blocks.append([entry])
            lasts.append(entry)
            return
        if lasts[-1] < entry:
            number = len(blocks) - 1
            block = blocks[number]
            block.append(entry)
            lasts[number] = entry
        else:
            number = bisect_left(lasts, entry)
            block = blocks[number]
            insort(block, entry)
        self._ends = []
        if len(block) > MOST_IN_BLOCK:
            half = len(block) // 2
            blocks.insert(number + 1, block[half:])
            del block[half:]
            lasts.insert(number, block[-1])

    def remove(self, entry: T) -> None:
        """Remove an entry that is there."""
        number = bisect_left(self._lasts, entry)
        block = self.blocks[number]
        index = bisect_left(block, entry)
        assert block[index] == entry
        del block[index]
        self._ends = []
        if not block:
            del self.blocks[number], self._lasts[number]
        elif index == len(block):
            self._lasts[number] = block[-1]

    def remove_first(self) -> None:
        """Remove the least entry; no comparison is made."""
        block = self.blocks[0]
        del block[0]
        self._ends = []
        if not block:
            del self.blocks[0], self._lasts[0]
