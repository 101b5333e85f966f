"""Time simmoe as whole processes: start-up, simulation and the written record.

    python benchmarks/run.py [--runs N | --check | --store] [--data DIR] [NAME ...]

Prints, per case, the median CPU seconds with their spread, requests a CPU-second, wall time and peak memory, how the
median compares with the stored baseline, and how much of what is promised it uses. Times are compared in units of a
calibration loop that runs in turns with the case, so that neither another machine nor a busy one counts as a
regression; promised times are scaled by how fast the loop was where the baseline was taken. Needs the original Azure
conversation trace in DIR, $SIMMOE_DATA or the user cache (`simmoe traces fetch azure-conv`).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TypedDict

from cases import CASES, SERIES, Case, Series
from measure import Measurement, measure
from verdict import FEWEST_RUNS, MOST_RUNS, growth, is_decided

BASELINE = Path(__file__).with_name("baseline.json")

#: A case fails the check above this multiple of its baseline, in time or in memory.
ALLOWED = 1.25

#: No run beyond the fewest is begun after a case has taken this long: the check ends on any machine.
CASE_S = 30.0

#: Runs of a case that takes long, the first of which settles it unless it is above its limit.
LONG_RUNS = 3


class Stored(TypedDict):
    """What the baseline keeps of a case."""

    ratio: float
    peak_mb: float


class Baseline(TypedDict):
    """What was measured once, where, to compare with."""

    calibration_s: float
    """CPU time of one calibration on that machine, quiet."""
    python: str
    """Its Python, major and minor."""
    cases: dict[str, Stored]


@dataclass(frozen=True)
class Outcome:
    """A case, its runs, and what they are held to."""

    case: Case
    runs: Sequence[Measurement]
    baseline: Baseline

    @property
    def ratio(self) -> float:
        """Median CPU time in units of the calibration."""
        return median(run.ratio for run in self.runs)

    @property
    def peak_mb(self) -> float:
        """Median peak memory."""
        return median(run.peak_mb for run in self.runs)

    @property
    def stored(self) -> Stored | None:
        """What the baseline says of the case."""
        return self.baseline["cases"].get(self.case.name)

    @property
    def limits(self) -> dict[str, float]:
        """Most the ratio may be, by what says so."""
        found = {}
        if self.stored:
            found["more than 25% slower than the baseline"] = ALLOWED * self.stored["ratio"]
        if self.case.promise.cpu_s is not None:
            found[f"slower than promised ({self.case.promise.text})"] = (
                self.case.promise.cpu_s / self.baseline["calibration_s"]
            )
        return found

    def faults(self) -> list[str]:
        """Return what the medians break."""
        found = [what for what, limit in self.limits.items() if self.ratio > limit]
        if self.stored and self.peak_mb > ALLOWED * self.stored["peak_mb"]:
            found.append("more than 25% above the baseline in memory")
        if self.case.promise.peak_mb is not None and self.peak_mb > self.case.promise.peak_mb:
            found.append(f"{self.peak_mb:.0f} MB, promised {self.case.promise.peak_mb:g}")
        return found

    def is_settled(self) -> bool:
        """Return whether no further run is wanted."""
        limit, ratios = min(self.limits.values()), [run.ratio for run in self.runs]
        if self.case.long:
            return self.ratio <= limit or len(ratios) >= LONG_RUNS
        return len(ratios) >= FEWEST_RUNS and is_decided(ratios, limit)

    def line(self) -> str:
        """Return its line of the table."""
        seconds = sorted(run.cpu_s for run in self.runs)
        spread = f"{seconds[0]:.2f}..{seconds[-1]:.2f}"
        rate = f"{self.case.num_requests / median(seconds):,.0f}" if self.case.num_requests else ""
        wall = median(run.wall_s for run in self.runs)
        change = f"{self.ratio / self.stored['ratio'] - 1:+z.0%}" if self.stored else "none"
        used = ""
        if self.case.promise.cpu_s is not None:
            used = f"{self.ratio * self.baseline['calibration_s'] / self.case.promise.cpu_s:.0%} of"
        return (
            f"{self.case.name:<34}{len(self.runs):>5}{median(seconds):>8.2f}{spread:>14}{rate:>16}{wall:>8.2f}"
            f"{self.peak_mb:>9.0f}{change:>10}{used:>9} {self.case.promise.text}"
        ).rstrip()


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="cases whose name contains this; default: all")
    parser.add_argument("--data", help="folder of the original traces; default: $SIMMOE_DATA")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--runs", type=int, help=f"runs a case; default: {FEWEST_RUNS}, 1 of a long one")
    what.add_argument("--check", action="store_true", help="fail if a case regressed or breaks a promise")
    what.add_argument("--store", action="store_true", help="make what is measured the baseline")
    options = parser.parse_args()
    cases = [
        case
        for case in CASES
        if (not options.names or any(name in case.name for name in options.names))
        and (case.checked or not options.check)
    ]
    if not cases:
        sys.exit(f"no case matches {', '.join(options.names)}; the cases are: {'; '.join(case.name for case in CASES)}")
    baseline: Baseline = json.loads(BASELINE.read_text())
    if options.check and (missing := [case.name for case in cases if case.name not in baseline["cases"]]):
        sys.exit(f"{BASELINE.name} lacks {', '.join(missing)}; run with --store")
    if (python := ".".join(platform.python_version_tuple()[:2])) != baseline["python"]:
        print(f"note: the baseline is of Python {baseline['python']}, this is {python}", file=sys.stderr)
    print(
        f"{'case':<34}{'runs':>5}{'CPU s':>8}{'min..max':>14}{'requests/CPU-s':>16}{'wall s':>8}{'peak MB':>9}"
        f"{'baseline':>10}{'used':>9} promise"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    if options.data:
        environment["SIMMOE_DATA"] = options.data
    outcomes = []
    for case in cases:
        outcomes.append(_run(case, baseline, environment, options.runs, options.check))
        print(outcomes[-1].line(), flush=True)
    ratios = {outcome.case.name: outcome.ratio for outcome in outcomes}
    for series in SERIES:
        if options.check and set(series.names) <= ratios.keys() and _growth(series, ratios)[1]:
            # It takes small differences of large times: runs that told enough of each case may be too few for it.
            outcomes = [_again(o, environment) if o.case.name in series.names else o for o in outcomes]
            ratios = {outcome.case.name: outcome.ratio for outcome in outcomes}
    faults = [f"{outcome.case.name}: {fault}" for outcome in outcomes for fault in outcome.faults()]
    for series in SERIES:
        if set(series.names) <= ratios.keys():
            said, fault = _growth(series, ratios)
            print(said)
            faults += [fault] if fault else []
    if options.store:
        BASELINE.write_text(json.dumps(_stored(outcomes, baseline, python, every=not options.names), indent=2) + "\n")
    if options.check and faults:
        sys.exit("\n".join(faults))


def _run(case: Case, baseline: Baseline, environment: Mapping[str, str], count: int | None, is_check: bool) -> Outcome:
    """Run a case ``count`` times; by default as often as it takes to tell, for a check, else as its length allows."""
    began = time.perf_counter()
    if not case.long:
        measure(case.arguments, environment)  # warms the page cache and the bytecode
    runs: list[Measurement] = []
    wanted = count or (1 if case.long else FEWEST_RUNS)
    while True:
        runs.append(measure(case.arguments, environment))
        outcome = Outcome(case, runs, baseline)
        late = time.perf_counter() - began > CASE_S and not case.long
        if len(runs) >= wanted and (not is_check or late or outcome.is_settled()):
            return outcome


def _again(outcome: Outcome, environment: Mapping[str, str]) -> Outcome:
    """Return a case with as many runs as decide in any event."""
    most = LONG_RUNS if outcome.case.long else MOST_RUNS
    more = [measure(outcome.case.arguments, environment) for _ in range(most - len(outcome.runs))]
    return Outcome(outcome.case, [*outcome.runs, *more], outcome.baseline)


def _growth(series: Series, ratios: Mapping[str, float]) -> tuple[str, str | None]:
    """Return what is said of a series' growth, and what is wrong with it."""
    found = growth(series.sizes, [ratios[name] for name in series.names])
    shown = ", ".join(f"x{value:.2f}" for value in found)
    said = f"cost of one more request, {series.text}: {shown} along {', '.join(f'{size:,}' for size in series.sizes)}"
    broken = [value for value, most in zip(found, series.most, strict=True) if value > most]
    return said, f"{said}; promised {', '.join(f'x{most:.2f}' for most in series.most)}" if broken else None


def _stored(outcomes: Sequence[Outcome], before: Baseline, python: str, every: bool) -> Baseline:
    """Return the new baseline: of ``every`` case, or with these cases renewed."""
    cases: dict[str, Stored] = {} if every else dict(before["cases"])
    for outcome in outcomes:
        cases[outcome.case.name] = {"ratio": round(outcome.ratio, 3), "peak_mb": round(outcome.peak_mb, 1)}
    # What else a machine does slows the loop too: the fastest is what this one can do.
    fastest = min(run.calibration_s for outcome in outcomes for run in outcome.runs)
    return {
        "calibration_s": round(fastest, 6) if every else before["calibration_s"],
        "python": python if every else before["python"],
        "cases": cases,
    }


if __name__ == "__main__":
    main()
