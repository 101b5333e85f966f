"""What is timed, and what the project promises of it."""

from __future__ import annotations

from dataclasses import dataclass
from math import log

COMMON = "run --trace azure-conv --clip-total-tokens 4096"
#: A policy that ends the process when it is first asked: what came before is start-up.
FIRST_STEP = "benchmarks/first_step.py:FirstStep"


@dataclass(frozen=True)
class Promise:
    """What is to hold of a case, on a machine as fast as the one of the baseline."""

    cpu_s: float | None = None
    """Most CPU seconds."""
    peak_mb: float | None = None
    """Largest resident set; on any machine."""
    text: str = ""
    """Both, as they are spoken of."""


@dataclass(frozen=True)
class Case:
    """One simmoe command, a whole process each time."""

    name: str
    arguments: str
    num_requests: int = 0
    """Requests it simulates; 0 where a rate says nothing."""
    promise: Promise = Promise()
    checked: bool = True
    """Whether continuous integration compares it with the baseline and with what is promised."""
    long: bool = False
    """Whether it takes so long that once must do, unless told otherwise; what else the machine does averages out."""


@dataclass(frozen=True)
class Series:
    """Cases that differ in size alone, and how the cost of one more request may grow along them."""

    text: str
    names: tuple[str, ...]
    sizes: tuple[int, ...]
    """Requests of each."""
    most: tuple[float, ...]
    """Most that the slope between two of them may be of the one before, measurement included."""


def _common(name: str, count: int, rest: str, promise: Promise, checked: bool = True, long: bool = False) -> Case:
    return Case(name, f"{COMMON} --requests {count} {rest}", count, promise, checked, long)


def _rate(num_requests: int, requests_per_cpu_s: int, peak_mb: float | None = None) -> Promise:
    memory = "" if peak_mb is None else f", <= {peak_mb:g} MB"
    return Promise(num_requests / requests_per_cpu_s, peak_mb, f">= {requests_per_cpu_s:,} requests/CPU-s{memory}")


CASES = (
    _common("common: one rank, Poisson 3/s", 10_000, "--rate 3", _rate(10_000, 10_000, 120)),
    _common("two ranks, lanes, 6/s", 10_000, "--rate 6 --ranks 2 --policy lanes", _rate(10_000, 5_000)),
    _common("near saturation: one rank, 60/s", 10_000, "--rate 60", Promise()),
    _common("offline, tiers, 1,000 waiting", 1_000, "--rate inf --policy tiers", Promise()),
    _common("offline, tiers, 10,000 waiting", 10_000, "--rate inf --policy tiers", _rate(10_000, 5_000)),
    _common("offline, tiers, 100,000 waiting", 100_000, "--rate inf --policy tiers", Promise(), long=True),
    _common("1,000 requests, 3/s", 1_000, "--rate 3", Promise()),
    _common("100,000 requests, 3/s", 100_000, "--rate 3", Promise(), long=True),
    _common("1,000,000 requests, 3/s", 1_000_000, "--rate 3", Promise(peak_mb=400, text="<= 400 MB"), long=True),
    _common("step by step: the common case", 10_000, "--rate 3 --step-by-step", Promise(), checked=False),
    Case("start-up: simmoe --help", "--help", checked=False),
    Case(
        "start-up: sweep to its first step",
        f"sweep --trace azure-conv --policy {FIRST_STEP} --jobs 1",
        promise=Promise(cpu_s=0.7, text="< 0.7 s"),
    ),
    Case(
        "default sweep",
        "sweep --trace azure --mu 16 --sigma 5",
        promise=Promise(cpu_s=60, text="< 60 CPU-s: 30 s on two cores"),
        long=True,
    ),
)

#: Measurement may add this to the growth that is promised: it takes small differences of large times.
_NOISE = 1.5

SERIES = (
    Series(
        "at 3/s",
        ("1,000 requests, 3/s", "common: one rank, Poisson 3/s", "100,000 requests, 3/s", "1,000,000 requests, 3/s"),
        (1_000, 10_000, 100_000, 1_000_000),
        (_NOISE, _NOISE),
    ),
    Series(
        "offline under tiers",
        (
            "offline, tiers, 1,000 waiting",
            "offline, tiers, 10,000 waiting",
            "offline, tiers, 100,000 waiting",
        ),
        (1_000, 10_000, 100_000),
        (_NOISE * log(100_000) / log(10_000),),
    ),
)
