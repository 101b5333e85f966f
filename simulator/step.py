"""A composed step, on its way through the engine."""

from __future__ import annotations

from collections.abc import Sequence
from math import nextafter

from simmoe.simulator.request import SimRequest


class Step:
    """What one step computes, what it costs, and whose tokens it yields."""

    __slots__ = (
        "admitted",
        "completed_prompts",
        "device_s",
        "end_s",
        "index",
        "k_exec",
        "kv_tokens",
        "launch_s",
        "num_decode_seqs",
        "num_prefill_tokens",
        "num_running",
        "num_waiting",
        "qos_slots",
        "start_s",
        "update_s",
        "wait_s",
    )

    start_s: float
    """When it starts on the device; unset until it is launched, as is its end."""
    end_s: float
    """When it ends there."""

    def __init__(
        self,
        index: int,
        parts: tuple[float, float, float, float],
        k_exec: int,
        qos_slots: int,
        num_decode_seqs: int,
        kv_tokens: int,
        num_waiting: int,
        num_running: int,
    ) -> None:
        """Note what it computes; ``parts`` are its seconds as ``StepParts`` has them."""
        self.index = index
        self.device_s, host_s, self.update_s, self.wait_s = parts
        self.launch_s = host_s - self.update_s
        self.k_exec = k_exec
        """The budget every token of it runs at."""
        self.qos_slots = qos_slots
        """Sum over its tokens of the budget their requests asked for."""
        self.num_decode_seqs = num_decode_seqs
        self.kv_tokens = kv_tokens
        """KV tokens its decodes attend to."""
        self.num_waiting = num_waiting
        """Requests left waiting when it was composed."""
        self.num_running = num_running
        """Requests running once it was composed."""
        self.num_prefill_tokens = 0
        self.admitted: Sequence[SimRequest] = ()
        """Requests whose first chunk it computes."""
        self.completed_prompts: Sequence[SimRequest] = ()
        """Requests whose prompt it completes: their next output token comes at its end."""

    @property
    def duration_s(self) -> float:
        """How long it runs: what it takes of the device, unless the host holds it up.

        Start and duration add up to no more than its end: what is noted of a rank's steps never overlaps.
        """
        start_s, end_s = self.start_s, self.end_s
        if end_s == start_s + self.device_s:
            return self.device_s
        duration_s = end_s - start_s
        return duration_s if start_s + duration_s <= end_s else nextafter(duration_s, 0.0)

    @property
    def num_tokens(self) -> int:
        """Tokens it computes."""
        return self.num_prefill_tokens + self.num_decode_seqs
