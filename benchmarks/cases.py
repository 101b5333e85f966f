"""What is timed, and what the project promises of it."""

from __future__ import annotations

from dataclasses import dataclass

COMMON = "run --trace azure-conv --clip-total-tokens 4096"
#: A policy that ends the process when it is first asked: what came before is start-up.
FIRST_STEP = "benchmarks/first_step.py:FirstStep"


@dataclass(frozen=True)
class Case:
    """One simmoe command, a whole process each time."""

    name: str
    arguments: str
    num_requests: int = 0
    """Requests it simulates; 0 where a rate says nothing."""
    promise: str = ""
    """What is to hold of it, on two ordinary cores."""
    checked: bool = False
    """Whether continuous integration compares it with the baseline."""
    runs: int = 5
    """How often to run it, unless told otherwise."""


def _common(name: str, count: int, rest: str, **options: object) -> Case:
    return Case(name, f"{COMMON} --requests {count} {rest}", count, **options)  # type: ignore[arg-type]


CASES = (
    _common(
        "common: one rank, Poisson 3/s", 10_000, "--rate 3", promise=">= 10,000 requests/CPU-s, <= 120 MB", checked=True
    ),
    _common(
        "two ranks, lanes, 6/s",
        10_000,
        "--rate 6 --ranks 2 --policy lanes",
        promise=">= 5,000 requests/CPU-s",
        checked=True,
    ),
    _common(
        "offline, tiers, 10,000 waiting",
        10_000,
        "--rate inf --policy tiers",
        promise=">= 5,000 requests/CPU-s",
        checked=True,
    ),
    _common("near saturation: one rank, 60/s", 10_000, "--rate 60", promise="as the queue's log", checked=True),
    _common("offline, tiers, 1,000 waiting", 1_000, "--rate inf --policy tiers", promise="as the queue's log"),
    _common(
        "offline, tiers, 100,000 waiting", 100_000, "--rate inf --policy tiers", promise="as the queue's log", runs=3
    ),
    _common("1,000 requests, 3/s", 1_000, "--rate 3", promise="linear"),
    _common("100,000 requests, 3/s", 100_000, "--rate 3", promise="linear", runs=3),
    _common("1,000,000 requests, 3/s", 1_000_000, "--rate 3", promise="linear, <= 400 MB", runs=1),
    _common("step by step: the common case", 10_000, "--rate 3 --step-by-step"),
    Case("start-up: simmoe --help", "--help"),
    Case(
        "start-up: sweep to its first step",
        f"sweep --trace azure-conv --policy {FIRST_STEP} --jobs 1",
        promise="< 0.7 s",
        checked=True,
    ),
    Case("default sweep", "sweep --trace azure --mu 16 --sigma 5", promise="< 30 s wall", runs=1),
)
