"""The paged KV cache of one rank, counted in blocks."""

from __future__ import annotations


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Return how many blocks ``num_tokens`` tokens of KV take.

    >>> blocks_for(16, 16), blocks_for(17, 16), blocks_for(0, 16)
    (1, 2, 0)
    """
    return -(-num_tokens // block_size)


class BlockPool:
    """Free and used KV blocks without a prefix cache: two counts that always sum to the usable blocks."""

    def __init__(self, num_usable_blocks: int) -> None:
        self.num_usable_blocks = num_usable_blocks
        self.num_free_blocks = num_usable_blocks

    @property
    def num_used_blocks(self) -> int:
        """Blocks held by requests."""
        return self.num_usable_blocks - self.num_free_blocks

    def take(self, num_blocks: int) -> None:
        """Hand out blocks; the caller has checked that they are free."""
        assert 0 <= num_blocks <= self.num_free_blocks, (num_blocks, self.num_free_blocks)
        self.num_free_blocks -= num_blocks

    def give(self, num_blocks: int) -> None:
        """Take back blocks nobody can find again."""
        self.num_free_blocks += num_blocks
        assert num_blocks >= 0 and self.num_free_blocks <= self.num_usable_blocks
