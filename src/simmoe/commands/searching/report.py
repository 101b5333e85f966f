"""The files and the table of a search."""

from __future__ import annotations

import csv
import io
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from simmoe.analysis.stats import CONFIDENCE, Estimate, mean_interval, paired_change
from simmoe.commands.notes import versions
from simmoe.commands.searching.bisection import Bisection, Outcome
from simmoe.commands.searching.tuning import Trial
from simmoe.commands.sweeping.store import SweepStore

#: Width of the table where stdout is no terminal.
_FILE_WIDTH = 120


#: A mean rate above this many times saturation cannot be served for long: saturation is measured within a few percent,
#: and a policy that sorts what waits saturates later offline than it can online.
BEYOND = 1.1


class Found(NamedTuple):
    """What a search found."""

    searches: Mapping[str, list[Bisection]]
    """policy -> its search at each seed, the baseline first."""
    seeds: Sequence[int]
    saturation: Mapping[str, float]
    """Saturation rate of each policy, requests/s."""
    trials: Sequence[Trial] = ()
    """Trials of a tuning, made on seeds of their own."""

    @property
    def baseline(self) -> str:
        """The policy others are compared with."""
        return next(iter(self.searches))

    def rates(self, policy: str) -> list[float]:
        """Return a policy's highest rate that holds, seed by seed; 0 where none does."""
        return [search.low for search in self.searches[policy]]


def write_report(store: SweepStore, found: Found, inputs: Mapping[str, Any], about: Mapping[str, Any]) -> list[Path]:
    """Write search.csv, trials.csv of a tuning, and manifest.json, and return their paths.

    Raises:
        OutputError: a file cannot be written.
    """
    names = ["policy", "seed", "holds_at_per_s", "fails_at_per_s", "outcome", "num_rates"]
    rows: list[tuple[Any, ...]] = [
        (policy, seed, search.low, _finite(search.high), search.outcome and search.outcome.value, search.num_asked)
        for policy, searches in found.searches.items()
        for seed, search in zip(found.seeds, searches, strict=True)
    ]
    paths = [store.write("search.csv", _csv(names, rows))]
    if found.trials:
        num_seeds = len(found.trials[0].rates_per_s)
        names = ["trial", "policy", "mean_per_s", *(f"seed_{seed}_per_s" for seed in range(num_seeds))]
        rows = [(i, trial.policy, trial.score, *trial.rates_per_s) for i, trial in enumerate(found.trials)]
        paths.append(store.write("trials.csv", _csv(names, rows)))
    manifest = {
        "schema_version": 1,
        "kind": "search",
        "inputs": inputs,
        **about,
        "saturation_per_s": dict(found.saturation),
        "highest_rate_that_holds": {policy: _summary(found, policy) for policy in found.searches},
        "baseline": found.baseline,
        "confidence": CONFIDENCE,
        "versions": versions(),
    }
    text = json.dumps(manifest, indent=2, sort_keys=True, allow_nan=False) + "\n"
    return [*paths, store.write("manifest.json", text.encode())]


def print_table(found: Found, title: str, note: str) -> None:
    """Print one line a policy on stdout: the rate, its interval, and the paired change from the baseline."""
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else _FILE_WIDTH, highlight=False)
    console.print(f"[bold]{escape(title)}[/bold]")
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in ("policy", "rate/s", "± 95%", "change", "± 95%", "least", "most", "of saturation"):
        table.add_column(name, justify="left" if name == "policy" else "right", overflow="fold")
    for policy in found.searches:
        rates = found.rates(policy)
        estimate, change = _rate(found, policy), _change(found, policy)
        is_baseline = policy == found.baseline
        saturation = found.saturation.get(policy)
        table.add_row(
            escape(policy),
            _bounds(found, policy) + f"{float(estimate.mean):.4g}",
            _shown(float(estimate.half_width), "{:.2g}"),
            "" if is_baseline else _shown(100 * float(change.mean), "{:+z.1f}%"),
            "" if is_baseline else _shown(100 * float(change.half_width), "{:.1f}%"),
            f"{min(rates):.4g}",
            f"{max(rates):.4g}",
            "" if saturation is None else f"{float(estimate.mean) / saturation:.0%}",
        )
    console.print(table)
    if note:
        console.print(note)
    for policy, searches in found.searches.items():
        for outcome, said in (
            (Outcome.NEVER, "no rate tried holds"),
            (Outcome.ALWAYS, "every rate tried holds: these requests end before a queue can grow; raise --requests"),
        ):
            count = sum(search.outcome is outcome for search in searches)
            if count:
                console.print(f"{escape(policy)}: {said} ({count} of {len(searches)} seeds).")
    if beyond := [policy for policy in found.searches if _is_beyond_saturation(found, policy)]:
        console.print(
            f"{escape(', '.join(beyond))}: holds above saturation, where queues grow without end: these requests are "
            f"too few for the objective to notice; raise --requests.",
        )


def _rate(found: Found, policy: str) -> Estimate:
    """Return the mean rate over seeds; its interval is no narrower than the brackets, and nan where a rate is a bound.

    Seeds whose searches end in one bracket agree to the last digit, which says nothing of where in it their limits lie.
    """
    estimate = mean_interval(found.rates(policy))
    width = float(estimate.mean) * _width(found, policy)
    return estimate._replace(half_width=np.maximum(estimate.half_width, width))


def _change(found: Found, policy: str) -> Estimate:
    """Return the paired change from the baseline; nan where either has lower bounds alone, which tell no difference."""
    width = _width(found, policy) + _width(found, found.baseline) if policy != found.baseline else 0.0
    if math.isnan(width) or math.isnan(_width(found, found.baseline)):
        return Estimate(np.array(np.nan), np.array(np.nan), np.array(0))
    change = paired_change(found.rates(policy), found.rates(found.baseline))
    return change._replace(half_width=np.maximum(change.half_width, width))


def _width(found: Found, policy: str) -> float:
    """Return the mean width of the brackets as a share; 0 for a seed where no rate holds, nan if a rate is a bound."""
    shares = {Outcome.NEVER: 0.0, Outcome.ALWAYS: math.nan}
    found_here = found.searches[policy]
    return float(np.mean([shares[s.outcome] if s.outcome in shares else 1 - s.low / s.high for s in found_here]))


def _is_beyond_saturation(found: Found, policy: str) -> bool:
    """Return whether the mean rate is one that the policy cannot serve for long, measurement of both allowed for."""
    saturation = found.saturation.get(policy)
    searches = found.searches[policy]
    if saturation is None or any(search.outcome is Outcome.ALWAYS for search in searches):
        return False
    return float(_rate(found, policy).mean) > BEYOND * saturation


def _summary(found: Found, policy: str) -> dict[str, Any]:
    estimate, change = _rate(found, policy), _change(found, policy)
    return {
        "mean_per_s": float(estimate.mean),
        "ci95_half_width_per_s": _finite(float(estimate.half_width)),
        "change_vs_baseline": _finite(float(change.mean)),
        "change_ci95_half_width": _finite(float(change.half_width)),
        "outcomes": [search.outcome.value for search in found.searches[policy] if search.outcome],
    }


def _bounds(found: Found, policy: str) -> str:
    return ">= " if any(search.outcome is Outcome.ALWAYS for search in found.searches[policy]) else ""


def _shown(value: float, form: str) -> str:
    return "-" if np.isnan(value) else form.format(value)


def _finite(value: float) -> float | None:
    return value if np.isfinite(value) else None


def _csv(names: Sequence[str], rows: Sequence[Sequence[Any]]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows(rows)
    return text.getvalue().encode()
