"""The highest rate that holds, for one stream of requests: a bracket grown from a guess, then halved."""

from __future__ import annotations

from enum import Enum

from simmoe.traces.spec import RATES

#: First step away from the guess; each further one is the square of the last, so that no guess is too far off.
FIRST_STEP = 1.25

#: Steps before a bracket is given up as having no end: 1.25^(1 + 2 + 4 + 8) is 28 times the guess.
MAX_STEPS = 4


class Outcome(Enum):
    """How a search ended."""

    FOUND = "found"
    NEVER = "never"
    """Not even far below the guess."""
    ALWAYS = "always"
    """Even far above the guess: the requests end before a queue can grow."""


class Bisection:
    """Asks for one rate at a time, and is told whether it holds.

    Args:
        guess: where to begin, requests/s.
        tolerance: stop when the bracket is this share of its upper end.
    """

    def __init__(self, guess: float, tolerance: float) -> None:
        self.outcome: Outcome | None = None
        self.low = 0.0
        """The highest rate known to hold."""
        self.high = float("inf")
        """The lowest rate known not to hold."""
        self.num_asked = 0
        self._tolerance = tolerance
        self._step = FIRST_STEP
        self._next = _rounded(guess)

    @property
    def rate(self) -> float | None:
        """The rate to try next, to four significant digits; None once the search has ended."""
        return None if self.outcome else self._next

    def tell(self, holds: bool) -> None:
        """Learn whether the rate asked for holds."""
        rate = self._next
        self.num_asked += 1
        if holds:
            self.low = rate
        else:
            self.high = rate
        if self.low and self.high < float("inf"):
            self._next = _rounded((self.low + self.high) / 2)
            if self.high - self.low <= self._tolerance * self.high or not self.low < self._next < self.high:
                self.outcome = Outcome.FOUND
        elif self.num_asked > MAX_STEPS:
            self.outcome = Outcome.ALWAYS if holds else Outcome.NEVER
        else:
            self._next = _rounded(rate * self._step if holds else rate / self._step)
            self._step **= 2
            lowest, highest = RATES
            if not lowest <= self._next <= highest:
                self.outcome = Outcome.ALWAYS if holds else Outcome.NEVER


def _rounded(rate: float) -> float:
    return float(f"{rate:.4g}")
