"""Means and confidence intervals over seeds, and paired differences under common random numbers."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Samples = npt.NDArray[np.float64]

CONFIDENCE = 0.95


class Estimate(NamedTuple):
    """Means of independent samples and the half-widths of their confidence intervals, arrays of one shape."""

    mean: Samples
    """NaN where no sample is defined."""
    half_width: Samples
    """The interval is mean plus or minus this; NaN where fewer than two samples are defined."""
    num_samples: npt.NDArray[np.int64]
    """Samples that are defined (not NaN)."""


def t_quantile(probability: float, degrees_of_freedom: npt.ArrayLike) -> Samples:
    """Return Student's t quantile; NaN for no degree of freedom.

    >>> round(float(t_quantile(0.975, 4)), 3)
    2.776
    """
    from scipy.special import stdtrit  # scipy.stats has the same number for three times the import

    freedom = np.asarray(degrees_of_freedom, dtype=np.float64)
    return np.asarray(np.where(freedom >= 1, stdtrit(np.maximum(freedom, 1), probability), np.nan))


def mean_interval(samples: npt.ArrayLike, confidence: float = CONFIDENCE) -> Estimate:
    """Return the mean over the last axis and its Student-t confidence interval.

    Args:
        samples: [..., num_seeds] one value a seed; NaN where the metric does not exist, and left out.
        confidence: coverage of the interval, in (0, 1).
    Returns:
        An estimate of shape [...].
    """
    values = np.asarray(samples, dtype=np.float64)
    known = ~np.isnan(values)
    count = known.sum(axis=-1)
    mean = np.where(known, values, 0.0).sum(axis=-1) / np.where(count, count, np.nan)
    squares = np.where(known, (values - mean[..., np.newaxis]) ** 2, 0.0).sum(axis=-1)
    variance = squares / np.where(count > 1, count - 1, np.nan)
    half_width = t_quantile((1 + confidence) / 2, count - 1) * np.sqrt(variance / np.maximum(count, 1))
    return Estimate(mean, half_width, count)


def paired_change(samples: npt.ArrayLike, baseline: npt.ArrayLike, confidence: float = CONFIDENCE) -> Estimate:
    """Return the mean relative change from the baseline, seed by seed, and its confidence interval.

    Under common random numbers sample i and baseline i served the same requests, so what differs between seeds cancels
    and this interval, not the overlap of two unpaired ones, says whether one policy beats another: it does where the
    interval excludes 0.

    Args:
        samples: [..., num_seeds] one value a seed.
        baseline: the same shape, or one that broadcasts to it; a baseline of 0 gives no change for that seed.
        confidence: coverage of the interval, in (0, 1).
    """
    base = np.asarray(baseline, dtype=np.float64)
    change = (np.asarray(samples, dtype=np.float64) - base) / np.where(base == 0, np.nan, base)
    return mean_interval(change, confidence)
