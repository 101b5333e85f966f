"""A composed step, on its way through the engine."""

from __future__ import annotations

from collections.abc import Sequence

from simmoe.simulator.request import SimRequest


class Step:
    """What one step computes, what it costs, and whose tokens it yields."""

    __slots__ = (
        "admitted",
        "completed_prompts",
        "duration_s",
        "index",
        "k_exec",
        "kv_tokens",
        "num_decode_seqs",
        "num_prefill_tokens",
        "num_running",
        "num_waiting",
        "qos_slots",
        "start_s",
    )

    def __init__(
        self,
        index: int,
        duration_s: float,
        k_exec: int,
        qos_slots: int,
        num_decode_seqs: int,
        kv_tokens: int,
        num_waiting: int,
        num_running: int,
    ) -> None:
        self.index = index
        self.duration_s = duration_s
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
        self.start_s = 0.0
        """Set when it starts."""
        self.num_prefill_tokens = 0
        self.admitted: Sequence[SimRequest] = ()
        """Requests whose first chunk it computes."""
        self.completed_prompts: Sequence[SimRequest] = ()
        """Requests whose prompt it completes: their next output token comes at its end."""

    @property
    def num_tokens(self) -> int:
        """Tokens it computes."""
        return self.num_prefill_tokens + self.num_decode_seqs
