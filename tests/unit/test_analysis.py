"""A sweep's arrays: arrangement, winners, the long table."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from simmoe.analysis.grid import SweepGrid
from simmoe.analysis.stats import mean_interval

RATES, POLICIES, SEEDS = (5.0, 10.0), ("slow", "base", "quick"), (0, 1, 2, 3)


def ttft(rate: float, policy: str, seed: int) -> float:
    """Seeds differ widely, policies little: only pairing tells 'quick' from 'base' at rate 10; at 5 they are equal."""
    factor = {"slow": 2.0, "base": 1.0, "quick": 0.9 if rate == 10 else 1.0}[policy]
    return rate * (1 + seed) ** 2 * factor * (1 + 0.001 * ((seed * 7 + len(policy)) % 3))


@pytest.fixture
def grid() -> SweepGrid:
    cells = [
        (rate, policy, seed, {"ttft_mean_s": ttft(rate, policy, seed), "tpot_mean_s": math.nan})
        for rate, policy, seed in itertools.product(RATES, POLICIES, SEEDS)
    ]
    random.Random(0).shuffle(cells)
    return SweepGrid.build(cells, POLICIES, "base", {"slow": 6.0, "base": 8.0, "quick": 9.0})


def test_cells_land_in_their_places_whatever_their_order(grid: SweepGrid) -> None:
    expected = [[[ttft(rate, policy, seed) for seed in SEEDS] for policy in POLICIES] for rate in RATES]
    np.testing.assert_array_equal(grid.values["ttft_mean_s"], expected)
    assert (grid.rates, grid.policies, grid.seeds) == (RATES, POLICIES, SEEDS)


def test_winners_are_told_apart_by_the_paired_interval(grid: SweepGrid) -> None:
    low, high = grid.winners("ttft_mean_s")
    assert low is not None and {low.policy, *low.ties} == {"base", "quick"}
    assert high is not None and (high.policy, high.ties) == ("quick", ())
    unpaired = grid.estimate("ttft_mean_s")
    assert unpaired.mean[1, 2] + unpaired.half_width[1, 2] > unpaired.mean[1, 1], "seeds alone would hide it"


def test_a_metric_no_policy_has_has_no_winner(grid: SweepGrid) -> None:
    assert grid.winners("tpot_mean_s") == [None, None]


def test_long_table_holds_every_metric_of_every_cell(grid: SweepGrid) -> None:
    rows = list(grid.rows())
    assert len(rows) == len(RATES) * len(POLICIES) * 2
    row = next(r for r in rows if (r.rate_per_s, r.policy, r.metric) == (10.0, "quick", "ttft_mean_s"))
    estimate = mean_interval([ttft(10.0, "quick", seed) for seed in SEEDS])
    assert [row.mean, row.ci95_half_width] == [float(estimate.mean), float(estimate.half_width)]
    assert row.num_seeds == 4
    assert row.load == 10 / 8
    changes = [ttft(10.0, "quick", s) / ttft(10.0, "base", s) - 1 for s in SEEDS]
    assert row.change_vs_baseline == pytest.approx(np.mean(changes))
    base = next(r for r in rows if (r.policy, r.metric) == ("base", "ttft_mean_s"))
    assert (base.change_vs_baseline, base.change_ci95_half_width) == (0.0, 0.0)


def test_one_seed_tells_nothing_apart() -> None:
    cells = [(5.0, policy, 0, {"ttft_mean_s": value}) for policy, value in (("a", 1.0), ("b", 9.0))]
    winner = SweepGrid.build(cells, ("a", "b"), "a", {"a": 5.0, "b": 5.0}).winners("ttft_mean_s")[0]
    assert winner is not None and (winner.policy, winner.ties) == ("a", ("b",))
