"""What ranks tell the front ends about themselves, and when."""

from __future__ import annotations

from typing import NamedTuple


class Counts(NamedTuple):
    """A rank at one instant."""

    num_waiting: int
    num_running: int
    kv_used: float
    """Share of KV blocks in use, 0..1."""
    k_running: int
    """Largest budget among sequences that decode and the prompt in progress; 0 if none."""


class Timetable:
    """When ranks publish: publication i at ``i * interval_s``; the last one its owner has taken note of.

    With an interval of 0 everything is published at every instant, and one is always due.

    >>> timetable = Timetable(0.1)
    >>> timetable.catch_up(0.6)
    >>> timetable.last_s, timetable.next_s, 6 * 0.1 > 0.6
    (0.5, 0.6000000000000001, True)
    """

    __slots__ = ("interval_s", "last_s", "next_s")

    def __init__(self, interval_s: float) -> None:
        self.interval_s = interval_s
        self.last_s = 0.0
        self.next_s = interval_s

    def catch_up(self, now_s: float) -> None:
        """Go on to the last publication at or before ``now_s``."""
        if not self.interval_s:
            self.last_s = now_s
            return
        interval_s = self.interval_s
        number = int(now_s / interval_s)
        last_s, next_s = number * interval_s, (number + 1) * interval_s
        if last_s > now_s:
            last_s, next_s = (number - 1) * interval_s, last_s
        elif next_s <= now_s:
            last_s, next_s = next_s, (number + 2) * interval_s
        self.last_s, self.next_s = last_s, next_s
