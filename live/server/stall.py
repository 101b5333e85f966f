"""Whether an engine gets on with its work, as any server shows it: one that does not hangs inside a step."""

from __future__ import annotations

import re
import time

STALL_TIMEOUT_S = 300.0
"""An engine that has requests and makes no step for so long is dead: vLLM waits as long for a step of its workers."""

_MOST_BETWEEN_LOOKS_S = 1.0
"""More than that from one look to the next this process itself has stood still."""

_OF_ENGINES = re.compile(r"^(?:vllm:|simmoe_).*$", re.MULTILINE)


def shown_work(metrics: str) -> str:
    """Return what of a server's metrics changes only as its engines work; empty if it tells nothing of them.

    >>> shown_work("http_requests_total 7.0\\nvllm:kv_cache_usage_perc 0.25\\n")
    'vllm:kv_cache_usage_perc 0.25'
    """
    return "\n".join(_OF_ENGINES.findall(metrics))


class StallWatch:
    """Counts the time in which an engine was waited for and showed no work. Looked at often; it counts as of then.

    vLLM's statistics change with each step, that of a part of a prompt included. So nothing but a step as long as the
    limit is taken for a hang, however slow the engine and however many requests wait for their first token.

    Args:
        limit_s: how long a stall is; infinite: nothing is one.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s = limit_s
        self._still_s = 0.0
        self._looked_s = time.monotonic()
        self._shown = ""

    def look(self, *, has_answered: bool, is_awaited: bool, metrics: str) -> bool:
        """Return whether the engine is stalled: it remains so until it shows work again.

        Args:
            has_answered: whether a part of an answer has come since the last look.
            is_awaited: whether somebody waits for one.
            metrics: its server's, now; empty where they are not known.
        """
        now_s = time.monotonic()
        passed_s = min(now_s - self._looked_s, _MOST_BETWEEN_LOOKS_S)
        self._looked_s = now_s
        if has_answered:
            self._still_s, self._shown = 0.0, ""
        elif (is_awaited or self._still_s) and (shown := shown_work(metrics)):
            if shown != self._shown:
                self._still_s, self._shown = 0.0, shown
            elif is_awaited:
                self._still_s += passed_s
        return self._still_s >= self.limit_s
