"""The simulator's scheduler beside a live one: told of the same arrivals, asked at the same times."""

from __future__ import annotations

from simmoe.policies.asking import Asker
from simmoe.policies.protocols import PolicyContext
from simmoe.policies.registry import parse_policy
from simmoe.policies.views import RequestView
from simmoe.profiles.catalog import DEFAULT_PROFILE, load_profile
from simmoe.simulator.config import EngineConfig
from simmoe.simulator.request import SimRequest
from simmoe.simulator.result import RankTotals
from simmoe.simulator.scheduler import Scheduler

K_MAX = 8
"""Of the tiny model."""


class Twin:
    """One rank under one policy."""

    def __init__(self, policy: str, config: EngineConfig, prefix_block_tokens: int = 512) -> None:
        cost = load_profile(DEFAULT_PROFILE).cost(config.async_scheduling)
        context = PolicyContext(
            cost.prefill_s, 1, K_MAX, 1, config.max_num_seqs, config.max_num_batched_tokens,
            config.enable_chunked_prefill,
        )  # fmt: skip
        self.totals = RankTotals()
        batch = parse_policy(policy).batch(context)
        self.scheduler = Scheduler(0, config, K_MAX, batch, cost, Asker(context), prefix_block_tokens, self.totals)
        self._num_requests = 0

    def add(self, view: RequestView, output_tokens: int, prefix_hashes: tuple[int, ...] = ()) -> None:
        """Queue a request."""
        self.scheduler.add(SimRequest(self._num_requests, view, output_tokens, view.k_qos, 0, prefix_hashes))
        self._num_requests += 1
