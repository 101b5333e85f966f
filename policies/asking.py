"""Asking a policy: its answer checked, its failure named, the view it failed on kept."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from simmoe.errors import PolicyError
from simmoe.policies.loading import describe, pass_ctrl_c
from simmoe.policies.protocols import BatchPolicy, Inspectable, PolicyContext, RoutePolicy, StepPlan
from simmoe.policies.validate import (
    check_k_floor,
    check_plan,
    check_queue_key,
    check_rank,
    check_snapshot,
    keys_call_to_json,
    route_call_to_json,
    view_to_json,
)
from simmoe.policies.views import RankView, RequestView, StepView


class Asker:
    """Calls the policies of one deployment; nothing of a policy is touched but through it.

    A PolicyError it raises names the policy and the line of its file. Where the policy was shown something, the call is
    in ``evidence`` as plain data, ready to be saved as JSON and replayed.
    """

    def __init__(self, context: PolicyContext) -> None:
        self.context = context

    def plan(self, policy: BatchPolicy, view: StepView, is_waiting: Callable[[str], object] | None = None) -> StepPlan:
        """Return a batch policy's plan for ``view``; ``is_waiting`` as :func:`check_plan` takes it.

        Raises:
            PolicyError: it raised, or its plan cannot be applied.
        """
        try:
            return check_plan(policy.plan(view), view, is_waiting)
        except BaseException as error:
            _blame(policy, error, lambda: view_to_json(view, self.context))

    def route(self, policy: RoutePolicy, request: RequestView, ranks: Sequence[RankView], now_s: float) -> int:
        """Return the rank a route policy chooses.

        Raises:
            PolicyError: it raised, or chose no rank there is.
        """
        try:
            return check_rank(policy.route(request, ranks, now_s), ranks)
        except BaseException as error:
            _blame(policy, error, lambda: route_call_to_json(request, ranks, now_s, self.context))

    def orders_queue(self, policy: BatchPolicy) -> bool:
        """Return whether a batch policy has a queue order of its own.

        Raises:
            PolicyError: its ``queue_key`` cannot be read or called.
        """
        try:
            queue_key = _optional(policy, "queue_key", None)
            if queue_key is not None and not callable(queue_key):
                raise PolicyError(f"queue_key is a {type(queue_key).__name__}; it must be a method, or not be there")
        except BaseException as error:
            _blame(policy, error)
        return queue_key is not None

    def enqueue(
        self, policy: Any, request: RequestView, waiting: Sequence[RequestView], insert: Callable[[Any], object]
    ) -> None:
        """Ask a policy that orders the queue for the key of a request, once, and insert the request by it.

        Args:
            policy: a batch policy with a ``queue_key``.
            request: the newcomer.
            waiting: the queue it is compared with.
            insert: takes the key and compares it with those of the queue.
        Raises:
            PolicyError: it raised, or the key cannot be ordered among the others; nothing is inserted.
        """
        try:
            insert(check_queue_key(policy.queue_key(request)))
        except BaseException as error:
            _blame(policy, error, lambda: keys_call_to_json([*waiting, request], self.context))

    def k_floor(self, policy: BatchPolicy) -> int:
        """Return the least budget a batch policy lets any step run at.

        Raises:
            PolicyError: it cannot be read, or is no budget of the deployment.
        """
        try:
            return check_k_floor(_optional(policy, "k_floor", 0), self.context.k_max)
        except BaseException as error:
            _blame(policy, error)

    def snapshot(self, policy: object) -> dict[str, Any] | None:
        """Return a policy's state, None if it shows none.

        Raises:
            PolicyError: it raised, or its state is no plain data.
        """
        try:
            return check_snapshot(policy.snapshot()) if isinstance(policy, Inspectable) else None
        except BaseException as error:
            _blame(policy, error)


def _optional(policy: object, name: str, default: Any) -> Any:
    """Return an attribute a policy may lack; one that is there and raises AttributeError is not lacking."""
    try:
        return getattr(policy, name)
    except AttributeError:
        if inspect.getattr_static(policy, name, None) is None:
            return default
        raise


def _blame(policy: object, error: BaseException, call: Callable[[], dict[str, Any]] | None = None) -> NoReturn:
    """Raise an error that names the policy, the line of its file that raised if one did, and carries the call.

    Ctrl-C goes on as it came. A policy that has written into what it was shown leaves no call that could be saved.
    """
    pass_ctrl_c(error)
    kind = type(policy)
    origin = getattr(sys.modules.get(kind.__module__), "__file__", None)
    blame = PolicyError(f"policy {kind.__qualname__}: {describe(error, None if origin is None else Path(origin))}")
    if call is not None:
        try:
            evidence = call()
            json.dumps(evidence)
        except BaseException as failure:
            pass_ctrl_c(failure)
        else:
            blame.evidence = evidence
    raise blame from error
