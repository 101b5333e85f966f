"""The experiments that simulated is held against live by, and the runs of each.

Lengths come from Azure's conversations. Loads and seeds are of this plan alone: no profile was measured or fitted with
them. A load is a share of the least saturation among the systems, so that every one serves the same requests;
saturation is simulated, before any live run, with the profile there was.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from simmoe.live.server.launch import Graphs
from simmoe.profiles.catalog import DEFAULT_PROFILE
from simmoe.profiles.models import read_model
from simmoe.traces.spec import WorkloadSpec

#: What each system of MoE-Prism's comparison is here.
POLICIES = {
    "vllm": "fixed-k+round-robin",
    "vllm+k": "fifo+round-robin",
    "k-aware": "tiers+lanes",
}

BURST = 600
"""Requests of an offline run."""

FRONT_END = "front-end"
"""What the names of runs begin with that are for the front end's times and nothing else."""


@dataclass(frozen=True)
class Run:
    """One run, whatever its model and rate."""

    name: str
    system: str
    """Key of POLICIES."""
    load: float
    """Share of the saturation of ``of``; infinite: all requests at once."""
    seed: int
    num_ranks: int
    of: str = ""
    """System whose saturation counts; empty: the least."""
    rate: float = 0.0
    """Requests a second of all engines, in place of the load's."""
    requests: int = 0
    """0: as many as arrive in the experiment's ``online_s``, or BURST."""


@dataclass(frozen=True)
class Cell:
    """One run at its rate."""

    name: str
    system: str
    rate: float
    """Requests a second, of all engines."""
    load: float
    """That as a share of the system's own saturation; infinite offline."""
    requests: int
    num_ranks: int
    spec: WorkloadSpec
    """The requests."""


@dataclass(frozen=True)
class Experiment:
    """Engines, a mix of budgets, and runs in the order they are made, the most telling first."""

    profile: str
    mu: float
    sigma: float
    runs: tuple[Run, ...]
    saturation: Mapping[str, float] | None = None
    """Requests a second that one engine finishes while requests wait, by system; None: to be simulated."""
    model: str = "olmoe-1b-7b"
    """Name of a shipped configuration."""
    split: int = 4
    """Sub-experts an expert is split into."""
    graphs: Graphs = "keyed"
    captured_ks: tuple[int, ...] | None = None
    """Budgets graphs are captured at, and steps round up to; None: simmoe's ten. Each takes an engine's start 10 to
    21 s, as long as a run: a lowest that few steps reach is left out."""
    online_s: float = 18.0
    """Seconds of arrivals."""

    @property
    def k_max(self) -> int:
        """The largest budget: the model's top-k in sub-experts."""
        return int(read_model(self.model).config["num_experts_per_tok"]) * self.split

    @property
    def num_ranks(self) -> int:
        """Engines it needs, a GPU each."""
        return max(run.num_ranks for run in self.runs)

    def cells(self, saturation: Mapping[str, float]) -> list[Cell]:
        """Return the runs at the rates that a saturation (requests a second of one engine, by system) makes of them."""
        return [self._cell(run, saturation) for run in self.runs]

    def _cell(self, run: Run, saturation: Mapping[str, float]) -> Cell:
        capacity = saturation[run.of] if run.of else min(saturation.values())
        rate = run.load if math.isinf(run.load) else run.rate or round(run.load * capacity * run.num_ranks, 1)
        requests = run.requests or (BURST if math.isinf(rate) else round(rate * self.online_s))
        spec = WorkloadSpec(
            trace="azure",
            rate=rate,
            requests=requests,
            mu=self.mu,
            sigma=self.sigma,
            k_max=self.k_max,
            seed=run.seed,
        )
        load = rate / saturation[run.system] / run.num_ranks
        return Cell(run.name, run.system, rate, load, requests, run.num_ranks, spec)


def _front_end(num_ranks: int, seed: int, load: float = 0.7, requests: int = 270) -> tuple[Run, Run]:
    """Return a burst, for how long a front end works on a request, and a load, for how it hands a step's tokens on and
    for how fast the host is.

    Args:
        num_ranks: engines of the load.
        seed: of its requests.
        load: as a run's.
        requests: an engine's share of them; the default arrives in more than ten seconds at 0.7.
    """
    loaded = Run(f"{FRONT_END}-load", "vllm+k", load, seed, num_ranks, requests=requests * num_ranks)
    return Run(f"{FRONT_END}-burst", "vllm+k", math.inf, seed + 1, 1, requests=64), loaded


def _online(load: float, num_ranks: int, seed: int, *systems: str) -> tuple[Run, ...]:
    return tuple(
        Run(f"{system}-{round(100 * load)}", system, load, seed + round(100 * load), num_ranks)
        for system in systems or POLICIES
    )


def _offline(seed: int, *systems: str) -> tuple[Run, ...]:
    return tuple(Run(f"{system}-offline", system, math.inf, seed, 1) for system in systems)


def _chosen(runs: tuple[Run, ...], *names: str) -> tuple[Run, ...]:
    return tuple(run for name in names for run in runs if run.name == name)


def _again(runs: tuple[Run, ...], *names: str) -> tuple[Run, ...]:
    """Return named runs once more, with the same requests: how far a live run is from itself."""
    return tuple(replace(run, name=f"{run.name}-again") for run in _chosen(runs, *names))


def _grid(seed: int) -> tuple[Run, ...]:
    """Return the runs of two engines at four loads, and of one offline."""
    return (
        *_online(0.7, 2, seed),
        *_online(0.9, 2, seed),
        *_offline(seed, "k-aware", "vllm+k", "vllm"),
        *_online(0.5, 2, seed),
        *_online(0.25, 2, seed),
    )


def _at(capacity: float, *runs: Run) -> tuple[Run, ...]:
    """Return runs at shares of so many requests a second of one engine."""
    return tuple(
        run if math.isinf(run.load) else replace(run, rate=round(run.load * capacity * run.num_ranks, 1))
        for run in runs
    )


#: Named by loads that are shares of a tenth more than engines sustain, from too few requests at once.
_KEYED = (
    *_at(38.0, *_front_end(2, seed=7001, load=0.592, requests=180), *_grid(seed=9000)),
    *_at(41.5, Run("k-aware-90-own", "k-aware", 0.9, 9190, 2, requests=1340)),
    *_at(38.0, *_again(_grid(seed=9000), "k-aware-90")),
)


def _most_telling_first(runs: tuple[Run, ...], *again: str) -> tuple[Run, ...]:
    """Return a grid's runs, first one of every load and kind that was missed before or decides, one of them twice."""
    first = _chosen(runs, "k-aware-70", "vllm+k-50", "k-aware-25", "vllm-25", "k-aware-90", "k-aware-offline")
    second = (*_again(runs, "k-aware-70"), *_chosen(runs, "vllm-90", "vllm+k-70", "vllm-70"))
    rest = tuple(run for run in runs if run not in first and run not in second)
    return (*first, *second, *rest, *_again(runs, *again))


_OTHERS = _grid(seed=9200)
_REPEATED = (
    *_front_end(2, seed=7101),
    *_most_telling_first(_OTHERS, "k-aware-25", "vllm+k-50", "k-aware-90", "k-aware-offline"),
    Run("k-aware-90-own", "k-aware", 0.9, 9390, 2, of="k-aware"),
)

_ONE = (*_online(0.8, 1, 9500), *_online(0.5, 1, 9500), *_offline(9500, "vllm+k"))
#: Named by loads that are shares of what was simulated before launches overlapped the device.
_DEFAULT = _at(
    30.4,
    *_front_end(1, seed=7201, requests=180),
    *_chosen(_ONE, "vllm+k-80", "vllm+k-50"),
    *_again(_ONE, "vllm+k-80"),
    *_chosen(_ONE, "k-aware-80", "vllm-80", "vllm+k-offline"),
    *_again(_ONE, "vllm+k-50"),
    *_chosen(_ONE, "k-aware-50", "vllm-50"),
)

_SECOND_MODEL = (
    *_front_end(2, seed=7301),
    *_most_telling_first(_grid(seed=9700), "vllm+k-50", "k-aware-offline"),
)

_SATURATION = {"vllm": 34.5, "vllm+k": 34.7, "k-aware": 39.4}

EXPERIMENTS = {
    # two engines, graphs captured at every size and keyed by k
    "keyed": Experiment(DEFAULT_PROFILE, 16, 5, _KEYED, _SATURATION),
    # that once more, with other requests, and some runs twice
    "repeated": Experiment(
        DEFAULT_PROFILE,
        16,
        5,
        _REPEATED,
        {"vllm": 34.4, "vllm+k": 34.5, "k-aware": 38.7},
        captured_ks=(8, 12, 16, 20, 24, 28, 32),
    ),
    # one engine, vLLM's own graph sizes; a budget takes up to eleven seconds to capture, so few of them
    "default-graphs": Experiment(
        DEFAULT_PROFILE,
        16,
        5,
        _DEFAULT,
        {"vllm": 32.5, "vllm+k": 32.5, "k-aware": 33.1},
        graphs="default",
        captured_ks=(20, 26, 32),
        online_s=16.0,
    ),
    # another model, with a mix that is to its 24 routed sub-experts as (16, 5) is to 32
    "deepseek": Experiment(
        "deepseek-v2-lite-split4-h200",
        12,
        4,
        _SECOND_MODEL,
        {"vllm": 36.1, "vllm+k": 36.1, "k-aware": 44.6},
        model="deepseek-v2-lite",
        captured_ks=(8, 12, 16, 20, 24),
    ),
}
