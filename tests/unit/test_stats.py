"""Intervals and paired changes against scipy.stats."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from simmoe.analysis.stats import mean_interval, paired_change, t_quantile

samples = st.lists(st.floats(-1e6, 1e6).map(lambda x: round(x, 3)), min_size=2, max_size=20)


@given(samples, st.floats(0.5, 0.999))
def test_interval_is_students(values: list[float], confidence: float) -> None:
    estimate = mean_interval(values, confidence)
    low, high = stats.t.interval(confidence, len(values) - 1, loc=np.mean(values), scale=stats.sem(values) or 1e-300)
    assert estimate.mean == pytest.approx(np.mean(values), abs=1e-9)
    assert estimate.mean - estimate.half_width == pytest.approx(low, rel=1e-9, abs=1e-6)
    assert estimate.mean + estimate.half_width == pytest.approx(high, rel=1e-9, abs=1e-6)


@given(st.lists(st.tuples(st.floats(0.01, 100), st.floats(0.01, 100)), min_size=2, max_size=10, unique=True))
def test_paired_change_is_scipys_paired_interval_on_relative_changes(pairs: list[tuple[float, float]]) -> None:
    values, baseline = np.array(pairs).T
    change = (values - baseline) / baseline
    if np.ptp(change) < 1e-6:  # scipy warns of precision lost on constant differences
        return
    low, high = stats.ttest_rel(values / baseline, np.ones(len(pairs))).confidence_interval(0.95)
    estimate = paired_change(values, baseline)
    assert estimate.mean == pytest.approx((low + high) / 2, abs=1e-9)
    assert estimate.half_width == pytest.approx((high - low) / 2, rel=1e-6)


def test_pairing_cancels_what_seeds_have_in_common() -> None:
    rng = np.random.default_rng(1)
    seed_effect = np.exp(rng.normal(0, 1, 8))
    baseline = seed_effect * np.exp(rng.normal(0, 0.01, 8))
    better = 0.9 * seed_effect * np.exp(rng.normal(0, 0.01, 8))
    apart = paired_change(better, baseline)
    assert apart.mean + apart.half_width < 0
    unpaired = mean_interval(better)
    assert unpaired.mean + unpaired.half_width > mean_interval(baseline).mean


def test_coverage_is_what_it_says() -> None:
    """Of 2,000 intervals over 5 normal samples, the share that holds the mean is 95% within 4 standard errors."""
    estimate = mean_interval(np.random.default_rng(0).normal(3.0, 2.0, (2000, 5)))
    covered = np.mean(np.abs(estimate.mean - 3.0) <= estimate.half_width)
    assert covered == pytest.approx(0.95, abs=4 * np.sqrt(0.95 * 0.05 / 2000))


def test_missing_samples_are_left_out_and_counted() -> None:
    nan = np.nan
    estimate = mean_interval([[1.0, nan, 3.0], [nan, nan, 7.0], [nan, nan, nan]])
    assert estimate.num_samples.tolist() == [2, 1, 0]
    np.testing.assert_array_equal(estimate.mean, [2.0, 7.0, nan])
    np.testing.assert_array_equal(np.isnan(estimate.half_width), [False, True, True])
    assert estimate.half_width[0] == pytest.approx(stats.t.ppf(0.975, 1))


def test_no_change_against_a_baseline_of_zero() -> None:
    estimate = paired_change([1.0, 2.0, 3.0], [0.0, 1.0, 1.5])
    assert (float(estimate.mean), int(estimate.num_samples)) == (1.0, 2)


@pytest.mark.parametrize("freedom", [1, 2, 4, 30, 1000])
def test_quantiles_are_scipys(freedom: int) -> None:
    assert float(t_quantile(0.975, freedom)) == pytest.approx(stats.t.ppf(0.975, freedom), rel=1e-12)
