"""Time simmoe as whole processes: start-up, simulation and the written record.

    python benchmarks/run.py [--runs N] [--data DIR] [--check | --store] [NAME ...]

Prints, per case, the median CPU seconds with their spread, requests a CPU-second, wall time and peak memory, and how
the median compares with the stored baseline. Times are compared in units of a calibration loop timed before and after
each run, so that neither another machine nor a busy one counts as a regression. Needs the original Azure conversation
trace in DIR, $SIMMOE_DATA or the user cache (`simmoe traces fetch azure-conv`).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TypedDict

from cases import CASES, Case
from measure import Measurement, measure

BASELINE = Path(__file__).with_name("baseline.json")

#: A case fails the check above this multiple of its baseline, in time or in memory.
ALLOWED = 1.25

#: Rounds a case gets to prove that it was the machine: the best one counts.
ROUNDS = 3


class Stored(TypedDict):
    """What the baseline keeps of a case."""

    ratio: float
    peak_mb: float


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="cases whose name contains this; default: all")
    parser.add_argument("--runs", type=int, help="runs a case; default: each case's own")
    parser.add_argument("--data", help="folder of the original traces; default: $SIMMOE_DATA")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--check", action="store_true", help="the checked cases alone; fail if one regressed")
    what.add_argument("--store", action="store_true", help="make what is measured the baseline")
    options = parser.parse_args()
    environment = {**os.environ, **({"SIMMOE_DATA": options.data} if options.data else {})}
    baseline: dict[str, Stored] = json.loads(BASELINE.read_text()) if BASELINE.exists() else {}
    regressed = []
    cases = [
        case
        for case in CASES
        if (not options.names or any(name in case.name for name in options.names))
        and (case.checked or not options.check)
    ]
    if not cases:
        sys.exit(f"no case matches {', '.join(options.names)}; the cases are: {'; '.join(case.name for case in CASES)}")
    if options.check and (missing := [case.name for case in cases if case.name not in baseline]):
        sys.exit(f"{BASELINE.name} lacks {', '.join(missing)}; run with --store")
    print(
        f"{'case':<34}{'CPU s':>8}{'min..max':>14}{'requests/CPU-s':>16}{'wall s':>8}{'peak MB':>9}{'baseline':>10}"
        f"  promise"
    )
    for case in cases:
        runs = options.runs or case.runs
        if runs > 1:
            measure(case.arguments, environment)  # warms the page cache and the bytecode
        stored = baseline.get(case.name)
        rounds = [[measure(case.arguments, environment) for _ in range(runs)]]
        while options.check and stored and _is_above(rounds, stored) and len(rounds) < ROUNDS:
            rounds.append([measure(case.arguments, environment) for _ in range(runs)])
        print(_line(case, min(rounds, key=_ratio), stored), flush=True)
        if options.check and stored and _is_above(rounds, stored):
            regressed.append(case.name)
        if options.store:
            best = min(rounds, key=_ratio)
            baseline[case.name] = {"ratio": round(_ratio(best), 3), "peak_mb": round(_peak(best), 1)}
    if options.store:
        BASELINE.write_text(json.dumps(baseline, indent=2) + "\n")
    if regressed:
        sys.exit(f"more than {ALLOWED - 1:.0%} above the baseline: {', '.join(regressed)}")


def _ratio(runs: Sequence[Measurement]) -> float:
    return statistics.median(run.ratio for run in runs)


def _peak(runs: Sequence[Measurement]) -> float:
    return statistics.median(run.peak_mb for run in runs)


def _is_above(rounds: Sequence[Sequence[Measurement]], stored: Stored) -> bool:
    time_ratio = min(map(_ratio, rounds)) / stored["ratio"]
    return max(time_ratio, min(map(_peak, rounds)) / stored["peak_mb"]) > ALLOWED


def _line(case: Case, runs: Sequence[Measurement], stored: Stored | None) -> str:
    seconds = sorted(run.cpu_s for run in runs)
    median = statistics.median(seconds)
    spread = f"{seconds[0]:.2f}..{seconds[-1]:.2f}"
    rate = f"{case.num_requests / median:,.0f}" if case.num_requests else ""
    wall = statistics.median(run.wall_s for run in runs)
    change = f"{_ratio(runs) / stored['ratio'] - 1:+.0%}" if stored else "none"
    return (
        f"{case.name:<34}{median:>8.2f}{spread:>14}{rate:>16}{wall:>8.2f}{_peak(runs):>9.0f}{change:>10}"
        f"  {case.promise}"
    )


if __name__ == "__main__":
    main()
