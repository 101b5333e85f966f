"""The prompt tokens of a step being composed."""

from __future__ import annotations

from simmoe.simulator.request import SimRequest


class StepPrompts:
    """What a step computes of prompts, beside its decodes.

    Args:
        budget: tokens the step can take.
        k_exec: the largest budget among its decodes; 0 if there are none.
    """

    __slots__ = ("admitted", "budget", "completed", "k_exec", "kv_pairs", "num_seqs", "num_tokens", "qos_slots")

    def __init__(self, budget: int, k_exec: int) -> None:
        self.budget = budget
        """Tokens the step can still take."""
        self.k_exec = k_exec
        """The largest budget in the step so far."""
        self.num_tokens = self.num_seqs = self.kv_pairs = self.qos_slots = 0
        self.admitted: list[SimRequest] = []
        """Requests that begin with this step, in order."""
        self.completed: list[SimRequest] = []
        """Requests whose prompt this step completes, in order."""

    def add(self, request: SimRequest, chunk: int) -> bool:
        """Compute the next ``chunk`` tokens of a prompt; return whether that completes it."""
        before = request.num_computed_tokens
        request.num_computed_tokens = before + chunk
        self.budget -= chunk
        self.num_tokens += chunk
        self.num_seqs += 1
        self.kv_pairs += chunk * before + chunk * (chunk + 1) // 2
        self.qos_slots += chunk * request.k_qos
        if request.k_exec > self.k_exec:
            self.k_exec = request.k_exec
        if before + chunk < request.prefill_tokens:
            return False
        self.completed.append(request)
        return True
