"""Arrival processes: when ``n`` requests come, the first at 0 s.

Every process is drawn at unit mean gap and then scaled, so one seed gives the same pattern at every rate (common random
numbers across a sweep's loads).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from simmoe.traces.streams import ARRIVALS, PHASES, stream

FloatColumn = npt.NDArray[np.float64]

_PHASE_BLOCK = 256


def poisson(n: int, rate: float, seed: int) -> FloatColumn:
    """Return [n] arrivals with independent exponential gaps of mean ``1 / rate`` seconds."""
    return _from_gaps(stream(seed, ARRIVALS).standard_exponential(n - 1) / rate)


def gamma(n: int, rate: float, cv: float, seed: int) -> FloatColumn:
    """Return [n] arrivals with independent gamma gaps of mean ``1 / rate`` and coefficient of variation ``cv`` > 0.

    ``cv`` 1 is Poisson in law; above 1 burstier, below 1 more regular.
    """
    shape = 1.0 / cv**2
    return _from_gaps(stream(seed, ARRIVALS).standard_gamma(shape, n - 1) / (shape * rate))


def constant(n: int, rate: float) -> FloatColumn:
    """Return [n] arrivals exactly ``1 / rate`` seconds apart."""
    return np.arange(n, dtype=np.float64) / rate


def onoff(n: int, rate: float, on_s: float, off_s: float, seed: int) -> FloatColumn:
    """Return [n] arrivals of an interrupted Poisson process whose long-run mean is ``rate``.

    On and off phases alternate, exponential with means ``on_s`` > 0 and ``off_s`` >= 0 seconds, on first; arrivals are
    Poisson at ``rate * (on_s + off_s) / on_s`` while on, and none come while off. ``off_s`` 0 is Poisson.
    """
    # while_on_s[i]: how long the process had been on, all phases together, when request i came.
    while_on_s = poisson(n, rate * (on_s + off_s) / on_s, seed)
    # ends[j]: time spent on, and off, by the end of the j-th pair of phases; ends[0] is before the first.
    rng = stream(seed, PHASES)
    ends = np.zeros((1, 2))
    while ends[-1, 0] <= while_on_s[-1]:
        phases = rng.standard_exponential((max(_PHASE_BLOCK, len(ends)), 2)) * (on_s, off_s)
        ends = np.concatenate([ends, ends[-1] + np.cumsum(phases, axis=0)])
    phase = np.searchsorted(ends[:, 0], while_on_s, side="right") - 1
    off_before_s: FloatColumn = ends[phase, 1]
    return while_on_s + off_before_s


def rescaled(recorded_s: FloatColumn, rate: float) -> FloatColumn:
    """Return recorded arrivals stretched so that their mean rate, ``(n - 1) / span``, is ``rate``.

    ``recorded_s`` starts at 0 and must span some time unless it holds one request or ``rate`` is infinite.
    """
    if len(recorded_s) == 1 or math.isinf(rate):
        return np.zeros(len(recorded_s))
    return recorded_s * ((len(recorded_s) - 1) / (rate * float(recorded_s[-1])))


def _from_gaps(gaps_s: FloatColumn) -> FloatColumn:
    arrivals = np.zeros(len(gaps_s) + 1)
    np.cumsum(gaps_s, out=arrivals[1:])
    return arrivals
