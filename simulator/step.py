"""A composed step, on its way through the engine."""

from __future__ import annotations

from collections.abc import Sequence

from simmoe.profiles.shape import StepShape
from simmoe.simulator.request import SimRequest


class Step:
    """What one step computes, what it costs, and whose tokens it yields."""

    __slots__ = (
        "admitted",
        "completed_prompts",
        "duration_s",
        "index",
        "num_running",
        "num_waiting",
        "qos_slots",
        "shape",
        "start_s",
    )

    def __init__(self, index: int, shape: StepShape, duration_s: float, qos_slots: int) -> None:
        self.index = index
        self.shape = shape
        self.duration_s = duration_s
        self.qos_slots = qos_slots
        """Sum over its tokens of the budget their requests asked for."""
        self.start_s = 0.0
        """Set when it starts."""
        self.num_waiting = 0
        """Requests left waiting when it was composed."""
        self.num_running = 0
        """Requests running once it was composed."""
        self.admitted: Sequence[SimRequest] = ()
        """Requests whose first chunk it computes."""
        self.completed_prompts: Sequence[SimRequest] = ()
        """Requests whose prompt it completes: their next output token comes at its end."""

    @property
    def decode_only(self) -> bool:
        """Whether it computes nothing but one token of each active sequence."""
        return not self.shape.num_prefill_tokens
