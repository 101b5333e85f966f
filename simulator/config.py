"""What a simulation is told: vLLM 0.32's engine and front-end settings, with its defaults."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any

from simmoe.errors import UsageError
from simmoe.profiles.shape import UNCAPTURED

#: A microsecond: publications are counted, and shorter intervals would be counted beyond what a double tells apart.
MIN_PUBLISH_INTERVAL_S = 1e-6
#: An hour: no front end holds a request longer.
MAX_DELAY_S = 3600.0
#: Each front end keeps a view of each rank.
MAX_VIEWS = 1_000_000
#: A sequence holds at least one KV block; larger ones than this are no paging.
MAX_BLOCK_SIZE = 65_536
#: vLLM's names: the engine's own thread runs the one worker, or workers run in processes of their own.
EXECUTOR_BACKENDS = ("uni", "mp")


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One rank's engine. Names and defaults are vLLM 0.32's for an API server on a card of 70 GiB or more."""

    max_num_batched_tokens: int = 8192
    """Tokens one step may compute."""
    max_num_seqs: int = 1024
    """Requests that may be running at once."""
    enable_chunked_prefill: bool = True
    """Whether a prompt may be computed over several steps; off, a prompt above the token budget is rejected."""
    block_size: int = 16
    """Tokens a KV block holds."""
    num_gpu_blocks: int = 65536
    """KV blocks, vLLM's null block included: one less can be used."""
    enable_prefix_caching: bool = False
    """Reuse KV of prompts with equal leading blocks and equal budget (the trace's hash ids, salted by k)."""
    async_scheduling: bool = True
    """Compose step n+1 while step n runs (vLLM's default on a GPU): an arrival waits for one more step."""
    distributed_executor_backend: str = "uni"
    """Who launches steps: 'uni', the engine itself, which meanwhile can do nothing else; or 'mp', workers in processes
    of their own, to which it sends each step without waiting (vLLM's default with tensor parallelism). Matters under
    asynchronous scheduling alone: there the engine composes a step while the one before is launched, and takes outputs
    in meanwhile."""
    watermark: float = 0.0
    """Share of blocks kept free when admitting while others run."""
    captured_ks: tuple[int, ...] = ()
    """Budgets that CUDA graphs are captured at, ascending. Empty: every budget."""
    uncaptured_k: str = "eager"
    """How a step runs at another budget: 'eager', at its own without graphs; or 'next', at the next captured one."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "captured_ks", tuple(self.captured_ks))
        ascends = all(1 <= k < above for k, above in pairwise((*self.captured_ks, math.inf)))
        _require(ascends, "captured_ks", list(self.captured_ks), "ascending, from at least 1")
        backend = self.distributed_executor_backend
        _require(
            backend in EXECUTOR_BACKENDS,
            "distributed_executor_backend",
            backend,
            f"one of {', '.join(EXECUTOR_BACKENDS)}",
        )
        _require(self.uncaptured_k in UNCAPTURED, "uncaptured_k", self.uncaptured_k, f"one of {', '.join(UNCAPTURED)}")
        _require(self.max_num_batched_tokens >= 1, "max_num_batched_tokens", self.max_num_batched_tokens, "at least 1")
        _require(self.max_num_seqs >= 1, "max_num_seqs", self.max_num_seqs, "at least 1")
        _require(
            self.max_num_seqs <= self.max_num_batched_tokens,
            "max_num_seqs",
            self.max_num_seqs,
            f"at most max_num_batched_tokens ({self.max_num_batched_tokens}), as vLLM demands",
        )
        _require(
            1 <= self.block_size <= MAX_BLOCK_SIZE,
            "block_size",
            self.block_size,
            f"at least 1, at most {MAX_BLOCK_SIZE}",
        )
        _require(self.num_gpu_blocks >= 2, "num_gpu_blocks", self.num_gpu_blocks, "at least 2 (one is the null block)")
        _require(0 <= self.watermark < 1, "watermark", self.watermark, "in [0, 1)")

    @property
    def next_ks(self) -> tuple[int, ...]:
        """Budgets that steps round up to; empty: each runs at its own."""
        return self.captured_ks if self.uncaptured_k == "next" else ()

    @property
    def graph_ks(self) -> tuple[int, ...]:
        """Budgets at which steps cost what graphs do, and at others what kernels launched one by one do; empty: all."""
        return self.captured_ks if self.uncaptured_k == "eager" else ()


@dataclass(frozen=True, slots=True)
class FrontEndConfig:
    """The process that receives requests and routes them over ranks."""

    publish_interval_s: float = 0.1
    """How often ranks' counts reach the front end (vLLM's coordinator: 100 ms); 0 means always fresh, else at least
    MIN_PUBLISH_INTERVAL_S."""
    num_front_ends: int = 1
    """Front ends that share the ranks; requests are dealt to them in turn."""
    ingress_s: float = 0.0
    """From arrival to the rank's queue: tokenising, process boundary. At most MAX_DELAY_S."""
    egress_s: float = 0.0
    """From the engine having taken in a step's output to the client having its token. At most MAX_DELAY_S."""
    ingress_service_s: float = 0.0
    """A rank's own front end (its API server) works so long on each request, one after the other, before the rank has
    it. At most MAX_DELAY_S."""
    egress_per_token_s: float = 0.0
    """What each token of a step adds until clients have that step's tokens: they are handed over one after the other.
    At most MAX_DELAY_S."""
    wakeup_s: float = 0.0
    """A rank that idles begins to compose so long after it has the request that wakes it: its process has yet to read
    it and its loop to go on. A busy rank pays nothing. At most MAX_DELAY_S."""

    def __post_init__(self) -> None:
        interval = self.publish_interval_s
        _require(
            interval == 0 or MIN_PUBLISH_INTERVAL_S <= interval < math.inf,
            "publish_interval_s",
            interval,
            f"at least {MIN_PUBLISH_INTERVAL_S:g} s and finite, or 0 for always fresh",
        )
        _require(self.num_front_ends >= 1, "num_front_ends", self.num_front_ends, "at least 1")
        for name in ("ingress_s", "egress_s", "ingress_service_s", "egress_per_token_s", "wakeup_s"):
            delay = getattr(self, name)
            _require(0 <= delay <= MAX_DELAY_S, name, delay, f"at least 0 and at most {MAX_DELAY_S:g} s")


@dataclass(frozen=True, slots=True)
class SimConfig:
    """A deployment: ranks, their engines, their front end, and the budgets they serve."""

    num_ranks: int = 1
    """Independent data-parallel engines."""
    k_max: int = 32
    """Largest budget of the deployment, in the workload's units."""
    k_granularity: int = 1
    """Budgets run at multiples of this: 1 for a split model, N for the original one in sub-expert units."""
    engine: EngineConfig = field(default_factory=EngineConfig)
    front_end: FrontEndConfig = field(default_factory=FrontEndConfig)
    record_steps: bool = False
    """Keep one row a step."""
    fast_forward: bool = True
    """Advance stretches of steps in which nothing changes in one event; every result is bit-equal either way."""
    max_time_s: float | None = None
    """Stop the clock here and report what is still running or queued; requests that would arrive later are left out.
    None: until every request has left."""

    def __post_init__(self) -> None:
        _require(self.num_ranks >= 1, "num_ranks", self.num_ranks, "at least 1")
        num_views = self.num_ranks * self.front_end.num_front_ends
        _require(
            num_views <= MAX_VIEWS,
            "num_ranks x num_front_ends",
            num_views,
            f"at most {MAX_VIEWS:,}, for each front end keeps a view of each rank",
        )
        _require(self.k_max >= 1, "k_max", self.k_max, "at least 1")
        _require(self.k_granularity >= 1, "k_granularity", self.k_granularity, "at least 1")
        _require(
            self.k_max % self.k_granularity == 0,
            "k_granularity",
            self.k_granularity,
            f"a divisor of k_max {self.k_max}",
        )
        captured_ks = self.engine.captured_ks
        if captured_ks:
            _require(captured_ks[-1] == self.k_max, "the last of captured_ks", captured_ks[-1], f"k_max, {self.k_max}")
        if self.max_time_s is not None:
            _require(0 < self.max_time_s < math.inf, "max_time_s", self.max_time_s, "above 0 s and finite, or None")

    def as_dict(self) -> dict[str, Any]:
        """Return the resolved configuration as plain data, for the manifest."""
        return _plain(self)


def _plain(config: Any) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for f in fields(config):
        value = getattr(config, f.name)
        plain = list(value) if isinstance(value, tuple) else value
        out[f.name] = _plain(value) if hasattr(value, "__dataclass_fields__") else plain
    return out


def _require(holds: bool, name: str, value: object, must_be: str) -> None:
    if not holds:
        raise UsageError(f"{name} is {value}; it must be {must_be}")
