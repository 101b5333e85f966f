"""The host's pace: millions of turns a second of a Python loop that does nothing but look at the clock.

Tables are the host's times as much as the card's, and hosts differ by a factor of three; one that is shared changes
from second to second. See ``profiles/data/raw/README.md``.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable

EVERY_S = 0.5
"""Between samples: twice a second."""

TRIES, TRY_S = 4, 0.0005
"""The best of so many short tries is a sample: what interrupts one of them is no matter of pace."""


def turns_per_second() -> float:
    """Return millions of turns a second, now, on the CPU this thread is on."""
    best = 0.0
    for _ in range(TRIES):
        turns, began_s = 0, time.monotonic()
        until_s = now_s = began_s + TRY_S
        while (now_s := time.monotonic()) < until_s:
            turns += 1
        best = max(best, turns / (now_s - began_s) / 1e6)
    return best


class Pace:
    """Samples the pace in a thread of its own, on the first CPU this process may use."""

    def __init__(self, sample: Callable[[], float] = turns_per_second, every_s: float = EVERY_S) -> None:
        self._sample, self._every_s = sample, every_s
        self.samples: list[tuple[float, float]] = []
        """(``time.monotonic()``, millions of turns a second)."""
        self._stop = threading.Event()
        self._enough = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="pace", daemon=True)

    def start(self) -> None:
        """Begin to sample."""
        self._thread.start()

    def stop(self) -> None:
        """End sampling."""
        self._stop.set()
        self._thread.join()

    def first(self, number: int) -> float:
        """Return the median of the first samples, once there are so many."""
        with self._enough:
            self._enough.wait_for(lambda: len(self.samples) >= number)
        return statistics.median(pace for _, pace in self.samples[:number])

    def since(self, began_s: float) -> float | None:
        """Return the median from a moment of ``time.monotonic()`` on; None without a sample."""
        found = [pace for at_s, pace in self.samples if at_s >= began_s]
        return round(statistics.median(found), 1) if found else None

    def _run(self) -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # of this thread alone
        while True:
            sample = self._sample()
            with self._enough:
                self.samples.append((time.monotonic(), sample))
                self._enough.notify_all()
            if self._stop.wait(self._every_s):
                return
