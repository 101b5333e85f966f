"""The boundary between two lanes: its window of budgets, and when pressure moves it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BoundaryRule:
    """How wide a window a boundary carries, and what it takes to move it."""

    window: int
    """Consecutive budgets around the boundary that may take either lane; 0: none, a hard boundary."""
    hysteresis: float
    """Share of the heavier lane's pressure by which the other must be lighter; 0: any imbalance moves."""
    hysteresis_growth: float
    """Growth of that share with each budget the boundary has drifted from its start; 0: constant."""
    min_gap: float
    """Least difference in pressure that moves the boundary (4: one waiting request a rank)."""
    cooldown_s: float
    """Least time between two moves; 0: none."""


@dataclass(frozen=True, slots=True)
class BoundaryMove:
    """One move of one boundary, and the pressures that caused it."""

    at_s: float
    boundary: int
    """Which boundary: the one between lanes ``boundary`` and ``boundary + 1``."""
    moved_from: int
    moved_to: int
    pressure_below: float
    """Mean 4 W + R a rank of the lower lane when it moved."""
    pressure_above: float


class Boundary:
    """A boundary b: the largest budget that would prefer the lower lane if there were no window."""

    def __init__(self, start: int, rule: BoundaryRule) -> None:
        self.start = start
        self.value = start
        self.moved_at_s: float | None = None
        self._rule = rule

    def window(self, k_min: int, k_max: int) -> tuple[int, int]:
        """Return the first and last budget that may take either lane; (b + 1, b) if the window is empty."""
        width = self._rule.window
        return max(k_min, self.value - (width - 1) // 2), min(k_max, self.value + width // 2)

    @property
    def hysteresis(self) -> float:
        """The share of the heavier lane's pressure that moves the boundary now, its drift accounted for."""
        return self._rule.hysteresis * (1 + self._rule.hysteresis_growth * abs(self.value - self.start))

    def wanted_step(self, now_s: float, pressure_below: float, pressure_above: float) -> int:
        """Return +1 to give the lower lane one more budget, -1 to give it one less, 0 to stay."""
        if self.moved_at_s is not None and now_s < self.moved_at_s + self._rule.cooldown_s:
            return 0
        gap = pressure_above - pressure_below
        heavier = max(pressure_below, pressure_above)
        if gap == 0 or abs(gap) < self._rule.min_gap or abs(gap) < self.hysteresis * heavier:
            return 0
        return 1 if gap > 0 else -1
