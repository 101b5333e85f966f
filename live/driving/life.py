"""What became of one request, as its sender saw it."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any, Protocol

#: What only the sender knows of a request.
_SENDERS = ("index", "due_s", "sent_s", "dp_rank")


@dataclass(slots=True)
class Life:
    """One request. Times are ``time.monotonic()`` of this machine, NaN until they come."""

    index: int
    """Row in the workload."""
    due_s: float = math.nan
    """When it was to be sent: the workload's arrival."""
    sent_s: float = math.nan
    """When the sender began to send it."""
    received_s: float = math.nan
    """When its engine's front end had it."""
    dispatched_s: float = math.nan
    """When that front end had handed it to the engine, at most ``queued_s``; as sent where none tells."""
    queued_s: float = math.nan
    """When the engine had taken it into its queue, which it does between steps (the engine's clock)."""
    scheduled_s: float = math.nan
    """When its engine first scheduled it (the engine's clock)."""
    first_output_s: float = math.nan
    """When its first token left the engine (the engine's clock)."""
    first_token_s: float = math.nan
    """When its front end, or the client of an endpoint, had its first token."""
    last_output_s: float = math.nan
    """When its last token left the engine (the engine's clock)."""
    finished_s: float = math.nan
    """When its front end, or the client of an endpoint, had its last token."""
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

    def told(self) -> dict[str, Any]:
        """Return what a front end knows of the request, as plain data; times that never came are left out."""
        return {name: value for name, value in asdict(self).items() if name not in _SENDERS and value == value}

    def hear(self, told: dict[str, Any]) -> None:
        """Take over what a front end told."""
        for name, value in told.items():
            setattr(self, name, value)


class Target(Protocol):
    """Whom requests are sent to."""

    async def send(self, life: Life, prompt: list[int], output_tokens: int, k: int) -> None:
        """Send one request, wait for its end, and note times and status in ``life``; raise for nothing it can hold."""
        ...
