"""What a workload is made of: trace, filter, arrivals, budgets, seed."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any

from simmoe.errors import UsageError, did_you_mean
from simmoe.traces.budgets import check_mix

ARRIVALS = ("poisson", "gamma", "constant", "replay", "onoff")
BUDGETS = ("normal", "fixed", "mix", "trace")


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """One workload, reproducible from these values and the trace file.

    Raises:
        UsageError: a value out of range; the message names the field.
    """

    trace: str = "azure"
    """A name of ``simmoe traces list``, or a path."""
    arrivals: str | None = None
    """One of ARRIVALS; None: replay at the recorded times without a rate, Poisson with one."""
    rate: float | None = None
    """Mean requests a second; infinite: all at 0 s (offline); None: as recorded (replay alone)."""
    cv: float = 2.0
    """Coefficient of variation of gamma gaps; 1 is Poisson, more is burstier."""
    on_s: float = 10.0
    """Mean length of an on phase, seconds (onoff)."""
    off_s: float = 10.0
    """Mean length of an off phase, seconds (onoff)."""
    requests: int | None = None
    """How many; None: one for every row that the filter keeps."""
    min_total_tokens: int | None = None
    """Leave out rows with fewer prompt + output tokens; None: as the trace's name says, no bound for a path."""
    max_total_tokens: int | None = None
    """Leave out rows with more prompt + output tokens; None: as the trace's name says, no bound for a path."""
    clip_total_tokens: int | None = None
    """Shorten prompts so that prompt + output fits; outputs stay as they are."""
    budgets: str | None = None
    """One of BUDGETS; None: the trace's k_qos column if it has one, else normal."""
    mu: float = 16.0
    """Mean of the normal budgets before rounding, sub-expert units."""
    sigma: float = 5.0
    """Standard deviation of the normal budgets before rounding, sub-expert units."""
    k: int | None = None
    """The budget of every request (fixed); None: k_max."""
    mix: tuple[tuple[int, float], ...] = ()
    """Tiers (budget, relative weight) of mixed budgets."""
    k_max: int = 32
    """Largest budget the deployment can run, sub-expert units."""
    seed: int = 0
    """Root of the named random streams."""

    def __post_init__(self) -> None:
        if self.arrivals is not None and self.arrivals not in ARRIVALS:
            raise UsageError(f"no arrival process '{self.arrivals}'{did_you_mean(self.arrivals, ARRIVALS)}")
        if self.budgets is not None and self.budgets not in BUDGETS:
            raise UsageError(f"no budget generator '{self.budgets}'{did_you_mean(self.budgets, BUDGETS)}")
        _require(self.rate is None or self.rate > 0, "rate", self.rate, "above 0 requests a second")
        _require(0 < self.cv < math.inf, "cv", self.cv, "above 0 and finite")
        _require(0 < self.on_s < math.inf, "on_s", self.on_s, "above 0 s and finite")
        _require(0 <= self.off_s < math.inf, "off_s", self.off_s, "at least 0 s and finite")
        _require(self.requests is None or self.requests >= 1, "requests", self.requests, "at least 1")
        for name in ("min_total_tokens", "max_total_tokens", "clip_total_tokens"):
            value = getattr(self, name)
            _require(value is None or value >= 2, name, value, "at least 2 (a prompt token and an output token)")
        low, high = self.min_total_tokens, self.max_total_tokens
        if low is not None and high is not None:
            _require(low <= high, "min_total_tokens", low, f"at most max_total_tokens ({high})")
        _require(math.isfinite(self.mu), "mu", self.mu, "finite")
        _require(0 <= self.sigma < math.inf, "sigma", self.sigma, "at least 0 and finite")
        _require(self.k_max >= 1, "k_max", self.k_max, "at least 1")
        _require(self.k is None or 1 <= self.k <= self.k_max, "k", self.k, f"in 1..k_max ({self.k_max})")
        _require(self.seed >= 0, "seed", self.seed, "at least 0")
        check_mix(self.mix)
        for k, _ in self.mix:
            _require(k <= self.k_max, "mix", k, f"of budgets in 1..k_max ({self.k_max})")
        if self.budgets == "mix" and not self.mix:
            raise UsageError("mixed budgets need their tiers; give mix, as in 4:0.2,16:0.5,32:0.3")

    @property
    def arrival_process(self) -> str:
        """The arrival process that ``arrivals`` and ``rate`` together name."""
        if self.arrivals is not None:
            return self.arrivals
        return "replay" if self.rate is None else "poisson"

    def as_dict(self) -> dict[str, Any]:
        """Return the values as plain JSON data, for the manifest; of a path, the file's name alone."""
        values = asdict(self)
        values["trace"] = PurePath(self.trace).name
        values["arrivals"] = self.arrival_process
        values["rate"] = "inf" if self.rate == math.inf else self.rate
        values["mix"] = [list(tier) for tier in self.mix]
        return values


def _require(holds: bool, name: str, value: object, must_be: str) -> None:
    if not holds:
        raise UsageError(f"{name} is {value}; it must be {must_be}")
