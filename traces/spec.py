"""What a workload is made of: trace, filter, arrivals, budgets, seed."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import PurePath
from typing import Any

from simmoe.errors import UsageError, did_you_mean
from simmoe.traces.budgets import check_mix
from simmoe.traces.cells import MAX_TOKENS

ARRIVALS = ("poisson", "gamma", "constant", "replay", "onoff")
BUDGETS = ("normal", "fixed", "mix", "trace")

#: The paper's budgets, MoE-Prism, section V.
_MU, _SIGMA = 16.0, 5.0

#: Requests a second, apart from infinity: a request in eleven days, to a million a second.
RATES = (1e-6, 1e6)
#: Of gamma gaps. Beyond, single gaps are as long as all others together, or the process is regular.
CVS = (1e-3, 100.0)
#: Seconds an on or off phase may last on average: from a microsecond to eleven days.
PHASES_S = (1e-6, 1e6)
#: Of the budgets' normal distribution: far beyond any k_max.
MAX_NORMAL = 1e6
#: A workload is held in columns, about 150 bytes a request while it is built: 1.5 GB.
MAX_REQUESTS = 10_000_000
#: Prompt and output of MAX_TOKENS each.
MAX_TOTAL_TOKENS = 2 * MAX_TOKENS


@dataclass(frozen=True, slots=True)
class WorkloadSpec:
    """One workload, reproducible from these values and the trace file.

    Without ``budgets``, parameters imply them: ``mix`` means mixed budgets, ``k`` fixed ones, ``mu`` or ``sigma`` other
    than their defaults normal ones.

    Raises:
        UsageError: a value out of range, or parameters that do not go together; the message names the field.
    """

    trace: str = "azure"
    """A name of ``simmoe traces list``, or a path."""
    arrivals: str | None = None
    """One of ARRIVALS; None: replay at the recorded times without a rate, Poisson with one."""
    rate: float | None = None
    """Mean requests a second, within RATES; infinite: all at 0 s (offline); None: as recorded (replay alone)."""
    cv: float = 2.0
    """Coefficient of variation of gamma gaps, within CVS; 1 is Poisson, more is burstier."""
    on_s: float = 10.0
    """Mean length of an on phase, seconds, within PHASES_S (onoff)."""
    off_s: float = 10.0
    """Mean length of an off phase, seconds, 0 to the end of PHASES_S (onoff)."""
    requests: int | None = None
    """How many, at most MAX_REQUESTS; None: one for every row that the filter keeps."""
    min_total_tokens: int | None = None
    """Leave out rows with fewer prompt + output tokens; None: as the trace's name says, no bound for a path."""
    max_total_tokens: int | None = None
    """Leave out rows with more prompt + output tokens; None: as the trace's name says, no bound for a path."""
    clip_total_tokens: int | None = None
    """Shorten prompts so that prompt + output fits; outputs stay as they are."""
    budgets: str | None = None
    """One of BUDGETS; None: as the parameters given imply, else the trace's k_qos column if it has one, else normal."""
    mu: float = _MU
    """Mean of the normal budgets before rounding, sub-expert units."""
    sigma: float = _SIGMA
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
        if self.rate is not None:
            check_rate(self.rate, "rate")
        _require(CVS[0] <= self.cv <= CVS[1], "cv", self.cv, f"in {_span(CVS)}")
        _require(PHASES_S[0] <= self.on_s <= PHASES_S[1], "on_s", self.on_s, f"in {_span(PHASES_S)} s")
        _require(0 <= self.off_s <= PHASES_S[1], "off_s", self.off_s, f"in 0..{PHASES_S[1]:g} s")
        if self.requests is not None:
            _require(self.requests >= 1, "requests", self.requests, "at least 1")
            why = f"at most {MAX_REQUESTS:,}, for each takes about 150 bytes of memory"
            _require(self.requests <= MAX_REQUESTS, "requests", self.requests, why)
        for name in ("min_total_tokens", "max_total_tokens", "clip_total_tokens"):
            value = getattr(self, name)
            if value is not None:
                _require(value >= 2, name, value, "at least 2 (a prompt token and an output token)")
                _require(
                    value <= MAX_TOTAL_TOKENS, name, value, f"at most {MAX_TOTAL_TOKENS:,}, as long as rows may be"
                )
        low, high = self.min_total_tokens, self.max_total_tokens
        if low is not None and high is not None:
            _require(low <= high, "min_total_tokens", low, f"at most max_total_tokens ({high})")
        _require(abs(self.mu) <= MAX_NORMAL, "mu", self.mu, f"in {-MAX_NORMAL:g}..{MAX_NORMAL:g}")
        _require(0 <= self.sigma <= MAX_NORMAL, "sigma", self.sigma, f"in 0..{MAX_NORMAL:g}")
        _require(self.k_max >= 1, "k_max", self.k_max, "at least 1")
        _require(self.k is None or 1 <= self.k <= self.k_max, "k", self.k, f"in 1..k_max ({self.k_max})")
        _require(self.seed >= 0, "seed", self.seed, "at least 0")
        check_mix(self.mix)
        for k, _ in self.mix:
            _require(k <= self.k_max, "mix", k, f"of budgets in 1..k_max ({self.k_max})")
        self._imply_budgets()
        if self.budgets == "mix" and not self.mix:
            raise UsageError("mixed budgets need their tiers; give mix, as in 4:0.2,16:0.5,32:0.3")

    def _imply_budgets(self) -> None:
        """Let the parameters given name the budgets' generator; refuse tiers or a budget beside another generator."""
        given = {"mix": "mix"} if self.mix else {}
        if self.k is not None:
            given["fixed"] = "k"
        for kind, name in given.items():
            if self.budgets not in (None, kind):
                raise UsageError(f"{name} needs budgets {kind}, not {self.budgets}; leave one of them out")
        if self.budgets is not None:
            return
        for name, default in (("mu", _MU), ("sigma", _SIGMA)):
            if getattr(self, name) != default:
                given["normal"] = name
        if len(given) > 1:
            first, second = list(given.values())[:2]
            raise UsageError(f"{first} and {second} contradict each other; give one, or choose budgets")
        for kind in given:
            object.__setattr__(self, "budgets", kind)

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


def check_rate(rate: float, name: str) -> None:
    """Raise UsageError, with the value's ``name``, unless ``rate`` is a mean of requests a second; inf is one."""
    low, high = RATES
    wanted = f"above 0 requests a second, in {_span(RATES)}, or inf for all at once"
    _require(low <= rate <= high or rate == math.inf, name, rate, wanted)


def _span(bounds: tuple[float, float]) -> str:
    return f"{bounds[0]:g}..{bounds[1]:g}"


def _require(holds: bool, name: str, value: object, must_be: str) -> None:
    if not holds:
        raise UsageError(f"{name} is {value}; it must be {must_be}")
