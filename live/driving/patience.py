"""How long the answers of an endpoint are waited for: as long as one of them gets on, or its engines show work."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from simmoe.live.server.stall import shown_work

_LOOKS = 20
"""How often within the limit it is looked whether something has come."""

_LOOKS_BETWEEN_METRICS = 5
"""To be asked for its metrics costs an endpoint something; it is not while something comes."""


class Patience:
    """Gives up all requests that are waited for once nothing has come for any of them for as long as the limit.

    Time in which this process stood still does not count, nor does what an engine spends on prompts, however long or
    many, as long as its metrics show work. Other servers than vLLM's and ``simmoe serve`` show none: they must send.

    Args:
        limit_s: how long; infinite: for ever.
        ask_metrics: asks the endpoint for its metrics, so many seconds at most; empty if it does not tell any.
    """

    def __init__(self, limit_s: float, ask_metrics: Callable[[float], Awaitable[str]]) -> None:
        self._limit_s = limit_s
        self._interval_s = limit_s / _LOOKS
        self._ask_metrics = ask_metrics
        self._waits: set[asyncio.Timeout] = set()
        self._has_heard = False
        self._looking: asyncio.Task[None] | None = None

    def heard(self) -> None:
        """Note that a part of some answer has come."""
        self._has_heard = True

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """Wait within this.

        Raises:
            TimeoutError: patience has run out; the message says with what.
        """
        try:
            async with asyncio.timeout(None) as wait:
                self._waits.add(wait)
                if self._looking is None and self._limit_s < float("inf"):
                    self._looking = asyncio.create_task(self._look())
                try:
                    yield
                finally:
                    self._waits.discard(wait)
                    if not self._waits and self._looking is not None:
                        self._looking.cancel()
                        self._looking = None
        except TimeoutError:
            if not wait.expired():
                raise  # the kernel's, of a host that does not answer
            raise TimeoutError(
                f"nothing came of any answer for {self._limit_s:g} s, nor did an engine show work"
            ) from None

    async def _look(self) -> None:
        still_s, num_looks, shown = 0.0, 0, ""
        looked_s = time.monotonic()
        while still_s < self._limit_s:
            await asyncio.sleep(self._interval_s)
            now = ""
            if not (num_looks % _LOOKS_BETWEEN_METRICS or self._has_heard):
                now = shown_work(await self._ask_metrics(self._interval_s))
            num_looks += 1
            now_s = time.monotonic()
            still_s += min(now_s - looked_s, 2 * self._interval_s)
            looked_s = now_s
            if self._has_heard:
                still_s, num_looks, shown, self._has_heard = 0.0, 0, "", False
            elif now:
                if shown and now != shown:
                    still_s = 0.0
                shown = now
        self._looking = None
        for wait in self._waits:
            wait.reschedule(asyncio.get_running_loop().time())
