"""First come, first served: what vLLM does, with the step's budget following its requests (vLLM+K)."""

from __future__ import annotations

from simmoe.policies.protocols import ADMIT_ALL, StepPlan
from simmoe.policies.views import StepView


class Fifo:
    """vLLM+K: first come, first served; a step runs at the largest budget among its requests.

    Source: MoE-Prism, section V-A.
    """

    def plan(self, view: StepView, /) -> StepPlan:
        """Let everything in, in order of arrival."""
        return ADMIT_ALL
