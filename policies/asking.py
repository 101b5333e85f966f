"""Asking a policy: its answer checked, its failure named, the view it failed on kept."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from simmoe.errors import PolicyError
from simmoe.policies.loading import describe
from simmoe.policies.protocols import BatchPolicy, PolicyContext, RoutePolicy, StepPlan
from simmoe.policies.validate import check_plan, check_rank, route_call_to_json, view_to_json
from simmoe.policies.views import RankView, RequestView, StepView


class Asker:
    """Calls the policies of one deployment.

    A PolicyError it raises has the call as plain data in ``evidence``, ready to be saved as JSON and replayed.
    """

    def __init__(self, context: PolicyContext) -> None:
        self.context = context

    def plan(self, policy: BatchPolicy, view: StepView, is_waiting: Callable[[str], object]) -> StepPlan:
        """Return a batch policy's plan for ``view``.

        Raises:
            PolicyError: it raised, or its plan cannot be applied.
        """
        try:
            return check_plan(policy.plan(view), view, is_waiting)
        except Exception as error:
            raise _blame(policy, error, view_to_json(view, self.context)) from error

    def route(self, policy: RoutePolicy, request: RequestView, ranks: Sequence[RankView], now_s: float) -> int:
        """Return the rank a route policy chooses.

        Raises:
            PolicyError: it raised, or chose no rank there is.
        """
        try:
            return check_rank(policy.route(request, ranks, now_s), ranks)
        except Exception as error:
            raise _blame(policy, error, route_call_to_json(request, ranks, now_s, self.context)) from error


def _blame(policy: object, error: Exception, evidence: dict[str, Any]) -> PolicyError:
    """Return an error that names the policy, the line of its file that raised if one did, and carries the call."""
    kind = type(policy)
    origin = getattr(sys.modules.get(kind.__module__), "__file__", None)
    blame = PolicyError(f"policy {kind.__qualname__}: {describe(error, None if origin is None else Path(origin))}")
    blame.evidence = evidence
    return blame
