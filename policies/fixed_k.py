"""One budget for every step: stock vLLM, which knows no budget a request."""

from __future__ import annotations

from simmoe.errors import UsageError
from simmoe.policies.protocols import ADMIT_ALL, PolicyContext, StepPlan
from simmoe.policies.views import StepView


class FixedK:
    """Stock vLLM: first come, first served, every step at one fixed budget.

    Args:
        k: the budget; none: the deployment's k_max. A step never runs below what one of its requests asks for, so
            with a smaller ``k`` this is a floor.
    Raises:
        UsageError: ``k`` outside 1..k_max.
    Source: MoE-Prism, section V-A.
    """

    def __init__(self, context: PolicyContext, k: int | None = None) -> None:
        if k is not None and not 1 <= k <= context.k_max:
            raise UsageError(f"fixed-k: k is {k}; it must be in 1..{context.k_max}, the deployment's budgets")
        self.k_floor = context.k_max if k is None else k

    def plan(self, view: StepView, /) -> StepPlan:
        """Let everything in, in order of arrival."""
        return ADMIT_ALL
