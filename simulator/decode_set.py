"""The sequences that decode on a rank, as sums: a step costs the same however many there are."""

from __future__ import annotations

from simmoe.simulator.request import SimRequest


class DecodeSet:
    """Aggregates over active decodes, each of which takes part in every step from its prefill step + 1 on.

    With P prefill tokens completed by step s0, the step c > s0 of a sequence attends to P + c - s0 KV tokens and needs
    the blocks of that many: a new one whenever P + c - s0 is 1 modulo the block size.
    """

    def __init__(self, block_size: int, k_max: int) -> None:
        self.block_size = block_size
        self.num_seqs = 0
        self.sum_k_qos = 0
        self._kv_offset = 0
        """Sum of P - s0, so that a step c attends to ``_kv_offset + num_seqs * c`` KV tokens."""
        self._growing = [0] * block_size
        """_growing[c % block_size] is how many sequences need a new block at step c."""
        self._k_counts = [0] * (k_max + 1)
        """_k_counts[k] is the number of sequences of executed budget k."""
        self.k_exec = 0
        """The largest budget among them; 0 if none."""

    def join(self, request: SimRequest) -> None:
        """Add a sequence whose prompt was completed by ``request.prefill_step``."""
        offset = request.prefill_tokens - request.prefill_step
        self.num_seqs += 1
        self.sum_k_qos += request.k_qos
        self._kv_offset += offset
        self._growing[(1 - offset) % self.block_size] += 1
        self._k_counts[request.k_exec] += 1
        if request.k_exec > self.k_exec:
            self.k_exec = request.k_exec
        request.active = True

    def leave(self, request: SimRequest) -> None:
        """Remove a sequence."""
        offset = request.prefill_tokens - request.prefill_step
        self.num_seqs -= 1
        self.sum_k_qos -= request.k_qos
        self._kv_offset -= offset
        self._growing[(1 - offset) % self.block_size] -= 1
        self._k_counts[request.k_exec] -= 1
        k = self.k_exec if self.num_seqs else 0
        while k and not self._k_counts[k]:
            k -= 1
        self.k_exec = k
        request.active = False

    def kv_tokens(self, step: int) -> int:
        """Return the KV tokens step ``step`` attends to."""
        return self._kv_offset + self.num_seqs * step

    def new_blocks(self, step: int) -> int:
        """Return the blocks step ``step`` must take."""
        return self._growing[step % self.block_size]

    def new_blocks_over(self, first_step: int, num_steps: int) -> int:
        """Return the blocks that ``num_steps`` steps from ``first_step`` on must take."""
        cycles, rest = divmod(num_steps, self.block_size)
        start = first_step % self.block_size
        growing = self._growing
        taken = cycles * self.num_seqs + sum(growing[start : start + rest])
        beyond = start + rest - self.block_size
        return taken + sum(growing[:beyond]) if beyond > 0 else taken

    def steps_within(self, first_step: int, num_steps: int, num_free_blocks: int) -> int:
        """Return how many of ``num_steps`` steps from ``first_step`` on fit in ``num_free_blocks``."""
        if (num_steps // self.block_size + 1) * self.num_seqs <= num_free_blocks:
            return num_steps
        if self.new_blocks_over(first_step, num_steps) <= num_free_blocks:
            return num_steps
        cycles = num_free_blocks // self.num_seqs
        fit, free = cycles * self.block_size, num_free_blocks - cycles * self.num_seqs
        while (need := self.new_blocks(first_step + fit)) <= free:
            free -= need
            fit += 1
        return fit

    def needs_block(self, request: SimRequest, step: int) -> bool:
        """Return whether this sequence needs a new block at step ``step``."""
        return (request.prefill_tokens + step - request.prefill_step) % self.block_size == 1 % self.block_size
