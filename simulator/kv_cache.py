"""The KV blocks that the requests of one rank hold, and what of their content is found again."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from simmoe.simulator.config import EngineConfig
from simmoe.simulator.kv_blocks import BlockPool, blocks_for
from simmoe.simulator.prefix_cache import CachedUnit, PrefixBlockPool, own_hash
from simmoe.simulator.request import SimRequest


class KvCache:
    """Takes blocks from the pool for requests and gives them back, with a prefix cache or without.

    Args:
        config: of the engine.
        prefix_block_tokens: tokens that one hash id of a prompt covers.
    """

    def __init__(self, config: EngineConfig, prefix_block_tokens: int) -> None:
        usable = config.num_gpu_blocks - 1
        self.pool = PrefixBlockPool(usable) if config.enable_prefix_caching else BlockPool(usable)
        self._block_size = config.block_size
        self._async_scheduling = config.async_scheduling
        self._unit_tokens = prefix_block_tokens
        self._unit_blocks = prefix_block_tokens // config.block_size

    def find(self, request: SimRequest) -> tuple[list[CachedUnit], int, int]:
        """Return what a waiting request would have of the cache: units that its prompt begins with, short of its last
        token; their blocks; and the blocks that are free beside them.
        """
        pool = self.pool
        if not isinstance(pool, PrefixBlockPool):
            return [], 0, pool.num_free_blocks
        units = pool.lookup([(request.k_exec, h) for h in request.prefix_hashes])
        while units and _num_blocks(units) * self._block_size >= request.prefill_tokens:
            units.pop()
        return units, _num_blocks(units), pool.num_free_without(units)

    def begin(self, request: SimRequest, units: list[CachedUnit], num_cached: int, chunk: int) -> None:
        """Hold the units that were found, of so many blocks, and take those of a first chunk, which are free."""
        pool = self.pool
        if isinstance(pool, PrefixBlockPool):
            for unit in units:
                pool.refer(unit)
            request.cached_units = units
        request.num_computed_tokens = cached_tokens = num_cached * self._block_size
        request.held_blocks = blocks_for(cached_tokens + chunk, self._block_size)
        pool.take(request.held_blocks - num_cached)

    def extend(self, request: SimRequest, chunk: int) -> bool:
        """Take the blocks of the next chunk of an unfinished prompt; False, and none is taken, if too few are free."""
        need = blocks_for(request.num_computed_tokens + chunk, self._block_size) - request.held_blocks
        if need > self.pool.num_free_blocks:
            return False
        self.pool.take(need)
        request.held_blocks += need
        return True

    def keep_computed(self, request: SimRequest) -> None:
        """Make the hash blocks of a prompt computed so far findable, a preempted request's own ones among them."""
        pool = self.pool
        if not isinstance(pool, PrefixBlockPool):
            return
        prompt = min(request.num_computed_tokens, request.prefill_tokens)
        first = len(request.cached_units)
        for position in range(first, len(request.prefix_hashes)):
            if (position + 1) * self._unit_tokens > prompt:
                break
            unit = pool.insert((request.k_exec, request.prefix_hashes[position]), self._unit_blocks)
            if unit is None:
                break  # somebody computed the same block meanwhile; this copy stays anonymous, as in vLLM
            request.cached_units.append(unit)

    def free(self, request: SimRequest, last_step: int, is_preempted: bool = False) -> None:
        """Give back all blocks of a request; ``last_step`` is the last composed step it took part in.

        One that is preempted finds again what is left of them then, its outputs' too, but for a block that ends with an
        output on its way: under asynchronous scheduling nobody knows what is in it.
        """
        held = self._held_blocks(request, last_step)
        pool = self.pool
        if isinstance(pool, PrefixBlockPool):
            tokens = request.num_computed_tokens
            if request.prefill_step >= 0:
                last = min(last_step, request.finish_step)
                tokens = request.prefill_tokens + last - request.prefill_step
                tokens -= is_preempted and self._async_scheduling and last > request.prefill_step
            num_cached = _num_blocks(request.cached_units)
            own = held - num_cached
            hashed = max(0, tokens // self._block_size - num_cached)
            pool.give(own - hashed)
            units = self._keep_units(request, pool, hashed) if is_preempted else []
            pool.give_generated(hashed - _num_blocks(units))
            for unit in reversed(request.cached_units + units):
                pool.release(unit)
            request.cached_units = []
        else:
            pool.give(held)
        request.held_blocks = 0

    def check_integrity(self, running: Collection[SimRequest], last_step: int) -> None:
        """Assert that every block is free or accounted for by those that run, once ``last_step`` has been composed."""
        cached = {id(unit): unit.num_blocks for request in running for unit in request.cached_units}
        own = sum(self._held_blocks(request, last_step) - _num_blocks(request.cached_units) for request in running)
        assert own + sum(cached.values()) == self.pool.num_used_blocks
        if isinstance(self.pool, PrefixBlockPool):
            self.pool.check_integrity()

    def _held_blocks(self, request: SimRequest, last_step: int) -> int:
        if request.prefill_step < 0:
            return request.held_blocks
        last = min(last_step, request.finish_step) if request.finish_step >= 0 else last_step
        return blocks_for(request.prefill_tokens + last - request.prefill_step, self._block_size)

    def _keep_units(self, request: SimRequest, pool: PrefixBlockPool, num_blocks: int) -> list[CachedUnit]:
        """Make the whole hash blocks among the last ``num_blocks`` a preempted request holds findable by itself."""
        first = len(request.cached_units)
        end = first + num_blocks // self._unit_blocks
        hashes = request.prefix_hashes
        request.prefix_hashes = hashes + tuple(own_hash(request.row, i) for i in range(len(hashes), end))
        kept = [pool.insert((request.k_exec, h), self._unit_blocks) for h in request.prefix_hashes[first:end]]
        return [unit for unit in kept if unit is not None]


def _num_blocks(units: Sequence[CachedUnit]) -> int:
    return sum(unit.num_blocks for unit in units)
