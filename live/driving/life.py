"""What became of one request, as its sender saw it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol


@dataclass(slots=True)
class Life:
    """One request. Times are ``time.monotonic()`` of this machine, NaN until they come."""

    index: int
    """Row in the workload."""
    due_s: float = math.nan
    """When it was to be sent: the workload's arrival."""
    sent_s: float = math.nan
    """When the sender began to send it."""
    dispatched_s: float = math.nan
    """When it was in its engine's queue (the engine's clock); as sent where no engine tells."""
    scheduled_s: float = math.nan
    """When its engine first scheduled it, where it tells."""
    first_token_s: float = math.nan
    """When the sender had its first token."""
    finished_s: float = math.nan
    """When the sender had its last one."""
    output_tokens: int = 0
    dp_rank: int = -1
    num_preemptions: int = 0
    status: str = "queued"
    """As records.STATUSES; ``queued`` was never sent."""
    reason: str = ""
    """Why it was rejected or failed."""

    def end(self, status: str, reason: str = "") -> None:
        """Note how it ended."""
        self.status, self.reason = status, reason


class Target(Protocol):
    """Whom requests are sent to."""

    async def send(self, life: Life, prompt: list[int], output_tokens: int, k: int) -> None:
        """Send one request, wait for its end, and note times and status in ``life``; raise for nothing it can hold."""
        ...
