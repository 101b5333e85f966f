"""The runs that simulated is held against live by: OLMoE-1B-7B split by 4, budgets N(16, 5), Azure conversations.

Loads and seeds are of this plan alone: no profile was measured or fitted with them. Loads were chosen beforehand, by
simulating with the profile there was: shares of the least saturation, so that every policy serves the same requests.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from simmoe.traces.spec import WorkloadSpec

#: What each system of MoE-Prism's comparison is here.
POLICIES = {
    "vllm": "fixed-k+round-robin",
    "vllm+k": "fifo+round-robin",
    "k-aware": "tiers+lanes",
}

#: Requests a second that two engines finish for as long as some wait, as simulated beforehand.
SATURATION = {"vllm": 76.0, "vllm+k": 77.0, "k-aware": 83.0}

ONLINE_S = 18.0
"""Seconds of arrivals."""

BURST = 600
"""Requests of an offline run."""


@dataclass(frozen=True)
class Cell:
    """One run."""

    name: str
    system: str
    """Key of POLICIES."""
    rate: float
    requests: int
    seed: int
    num_ranks: int

    @property
    def spec(self) -> WorkloadSpec:
        """The requests."""
        return WorkloadSpec(trace="azure", rate=self.rate, requests=self.requests, mu=16, sigma=5, seed=self.seed)

    @property
    def load(self) -> float:
        """Offered load as a share of the system's own saturation; infinite offline."""
        return self.rate / SATURATION[self.system] * 2 / self.num_ranks


def _online(system: str, load: float, num_ranks: int, seed: int) -> Cell:
    rate = round(load * min(SATURATION.values()) * num_ranks / 2, 1)
    return Cell(f"{system}-{round(100 * load)}", system, rate, round(rate * ONLINE_S), seed, num_ranks)


def _offline(system: str, seed: int) -> Cell:
    return Cell(f"{system}-offline", system, math.inf, BURST, seed, 1)


#: What the front end's times are taken from, and nothing else: a burst (how long it works on a request) and a load (how
#: long a step's tokens take to be handed over).
FRONT_END = (
    Cell("front-end-burst", "vllm+k", math.inf, 64, 7002, 1),
    Cell("front-end-load", "vllm+k", 45.0, 360, 7001, 2),
)

#: Two engines, graphs captured at every size and keyed by k; in the order they are run, the most telling first. What is
#: run again with the same requests tells how far a live run is from itself.
KEYED = (
    *FRONT_END,
    *(_online(system, load, 2, seed=9000 + round(100 * load)) for load in (0.7, 0.9) for system in POLICIES),
    *(_offline(system, seed=9000) for system in ("k-aware", "vllm+k", "vllm")),
    *(_online(system, load, 2, seed=9000 + round(100 * load)) for load in (0.5, 0.25) for system in POLICIES),
    Cell("k-aware-90-own", "k-aware", round(0.9 * SATURATION["k-aware"], 1), 1340, 9190, 2),
    replace(_online("k-aware", 0.9, 2, seed=9090), name="k-aware-90-again"),
)

#: One engine, vLLM's own graph sizes.
DEFAULT = (
    *(_online("vllm+k", load, 1, seed=9500 + round(100 * load)) for load in (0.5, 0.8)),
    replace(_online("vllm+k", 0.8, 1, seed=9580), name="vllm+k-80-again"),
    _online("k-aware", 0.8, 1, seed=9580),
    _offline("vllm+k", seed=9600),
)

EXPERIMENTS = {"keyed": KEYED, "default-graphs": DEFAULT}
