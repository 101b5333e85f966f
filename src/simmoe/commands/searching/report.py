"""The files and the table of a search."""

from __future__ import annotations

import csv
import io
import json
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
        estimate = mean_interval(rates)
        change = _change(found, policy)
        is_baseline = policy == found.baseline
        saturation = found.saturation.get(policy)
        table.add_row(
            escape(policy),
            _bounds(found, policy) + f"{float(estimate.mean):.4g}",
            _shown(float(estimate.half_width), "{:.2g}"),
            "" if is_baseline else _shown(100 * float(change.mean), "{:+.1f}%"),
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


def _change(found: Found, policy: str) -> Estimate:
    """Return the paired change from the baseline; nan where either has lower bounds alone, which tell no difference."""
    searches = [*found.searches[policy], *found.searches[found.baseline]]
    if any(search.outcome is Outcome.ALWAYS for search in searches):
        return Estimate(np.array(np.nan), np.array(np.nan), np.array(0))
    return paired_change(found.rates(policy), found.rates(found.baseline))


def _summary(found: Found, policy: str) -> dict[str, Any]:
    rates = found.rates(policy)
    estimate, change = mean_interval(rates), _change(found, policy)
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
