"""How late requests were sent, and whether that spoils what was measured.

TTFT counts from the time a request was due, so a late sender adds its own lag to it, and bends the arrival process. The
rule: TTFT is reported only if the mean lag is at most 2 % of the mean TTFT, and the 99th percentile of the lag at most
5 % of the 99th percentile of TTFT.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

MEAN_SHARE = 0.02
P99_SHARE = 0.05

RULE = (
    f"TTFT is reported only if the mean send lag is at most {MEAN_SHARE:.0%} of mean TTFT and its p99 at most "
    f"{P99_SHARE:.0%} of p99 TTFT"
)


@dataclass(frozen=True, slots=True)
class SendLag:
    """Statistics of sent - due over the requests sent, seconds."""

    mean_s: float
    p99_s: float
    max_s: float
    refusal: str
    """Why TTFT is not reported; empty if it is."""

    def as_dict(self) -> dict[str, Any]:
        """Return it as plain data, with the rule."""
        return {**asdict(self), "ttft_reported": not self.refusal, "rule": RULE}


def judge_lag(lag_s: npt.NDArray[np.float64], ttft_s: npt.NDArray[np.float64]) -> SendLag:
    """Return the lag's statistics and whether TTFT may be reported.

    Args:
        lag_s: [num_sent] sent - due.
        ttft_s: [num_answered] first token - due, of the requests that got one.

    >>> judge_lag(np.array([0.001, 0.001]), np.array([0.1, 0.2])).refusal
    ''
    >>> judge_lag(np.array([0.001, 0.03]), np.array([0.1, 0.2])).refusal
    'the mean send lag, 15.500 ms, is above 2% of the mean TTFT, 150.000 ms'
    """
    if not len(lag_s) or not len(ttft_s):
        return SendLag(0.0, 0.0, 0.0, "nothing was answered")
    mean_s, p99_s, max_s = float(lag_s.mean()), float(np.percentile(lag_s, 99)), float(lag_s.max())
    ttft_mean_s, ttft_p99_s = float(ttft_s.mean()), float(np.percentile(ttft_s, 99))
    refusal = ""
    if mean_s > MEAN_SHARE * ttft_mean_s:
        refusal = _too_late("mean", mean_s, MEAN_SHARE, ttft_mean_s)
    elif p99_s > P99_SHARE * ttft_p99_s:
        refusal = _too_late("p99", p99_s, P99_SHARE, ttft_p99_s)
    return SendLag(mean_s, p99_s, max_s, refusal)


def _too_late(which: str, lag_s: float, share: float, ttft_s: float) -> str:
    return (
        f"the {which} send lag, {1e3 * lag_s:.3f} ms, is above {share:.0%} of the {which} TTFT, {1e3 * ttft_s:.3f} ms"
    )
