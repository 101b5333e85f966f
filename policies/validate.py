"""What hosts do around a policy's calls: check each answer before applying it, and save the call that failed.

A saved call is plain JSON data, to be asked again offline (``simmoe policies check --replay``).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from numbers import Integral, Real
from typing import Any

from simmoe.errors import DataError, PolicyError
from simmoe.policies.protocols import PolicyContext, StepPlan
from simmoe.policies.views import RankView, RequestView, StepView


def check_plan(plan: object, view: StepView, is_waiting: Callable[[str], object] | None = None) -> StepPlan:
    """Return ``plan`` in plain types, if it is one that a host can apply to ``view``.

    What the policy keeps of its plan, or computes as it is read, is read once, here.

    Args:
        plan: what a batch policy answered.
        view: what it was asked.
        is_waiting: tells whether a request id waits on this rank, for hosts that know without reading the queue.
    Raises:
        PolicyError: no StepPlan; an id that does not wait or is listed twice; a gate that is no budget; a wake-up time
            that is not finite or not after ``view.now_s``.
    """
    if not isinstance(plan, StepPlan):
        raise PolicyError(f"plan returned {_shown(plan)}; it must return a StepPlan")
    order, k_max, wake_at_s = plan.order, plan.k_max, plan.wake_at_s
    if type(plan) is StepPlan and order is None and k_max is None and wake_at_s is None:
        return plan  # the usual one, plain already
    if order is not None:
        order = _checked_order(order, view, is_waiting)
    if k_max is not None:
        if isinstance(k_max, bool) or not isinstance(k_max, Integral) or k_max < 0:
            raise PolicyError(f"plan returned k_max {_shown(k_max)}; it must be None or a whole number, at least 0")
        k_max = int(k_max)
    if wake_at_s is not None:
        if not (isinstance(wake_at_s, Real) and view.now_s < float(wake_at_s) < math.inf):
            raise PolicyError(
                f"plan returned wake_at_s {_shown(wake_at_s)} at {view.now_s} s; "
                f"it must be None or a later, finite time"
            )
        wake_at_s = float(wake_at_s)
    return StepPlan(order, k_max, wake_at_s)


def check_rank(rank: object, ranks: Sequence[RankView]) -> int:
    """Return ``rank`` as an int if it is the ``dp_rank`` of one of ``ranks``.

    Raises:
        PolicyError: it is not.
    """
    if type(rank) is int and 0 <= rank < len(ranks) and ranks[rank].dp_rank == rank:
        return rank  # the usual case, at no cost that grows with the ranks
    if isinstance(rank, Integral) and not isinstance(rank, bool):
        for view in ranks:
            if view.dp_rank == rank:
                return int(rank)
    known = ", ".join(str(view.dp_rank) for view in ranks)
    raise PolicyError(f"route returned {_shown(rank)}; it must return one of the dp_ranks {known}")


def check_queue_key(key: Any) -> Any:
    """Return ``key`` if queues can be ordered by keys like it.

    Raises:
        PolicyError: it is no number, text or tuple of such, or has a NaN, which nothing can be compared with.
    """
    for value in key if isinstance(key, tuple) and not isinstance(key, RequestView) else (key,):
        if isinstance(value, tuple) and value is not key:
            check_queue_key(value)
        elif not isinstance(value, (Real, str)):
            raise PolicyError(f"queue_key returned {_shown(key)}; it must be a number, a text, or a tuple of such")
        elif value != value:
            raise PolicyError(f"queue_key returned {_shown(key)}; nothing can be compared with NaN")
    return key


def check_k_floor(k_floor: Any, k_max: int) -> int:
    """Return ``k_floor`` as an int if it is a budget that a deployment of ``k_max`` can run every step at.

    Raises:
        PolicyError: it is not.
    """
    if isinstance(k_floor, Integral) and not isinstance(k_floor, bool) and 0 <= int(k_floor) <= k_max:
        return int(k_floor)
    raise PolicyError(f"k_floor is {_shown(k_floor)}; it must be a whole number in 0..{k_max}, the deployment's k_max")


def check_snapshot(snapshot: Any) -> dict[str, Any]:
    """Return ``snapshot`` as a dict if it is plain data that JSON can hold.

    Raises:
        PolicyError: it is not.
    """
    if not isinstance(snapshot, Mapping):
        raise PolicyError(f"snapshot returned {_shown(snapshot)}; it must return a mapping of plain data")
    state = dict(snapshot)
    try:
        json.dumps(state, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise PolicyError(f"snapshot returned what JSON cannot hold: {error}; give plain, finite data") from error
    return state


@dataclass(frozen=True, slots=True)
class RouteCall:
    """The arguments of one ``route`` call."""

    request: RequestView
    ranks: Sequence[RankView]
    now_s: float


@dataclass(frozen=True, slots=True)
class KeysCall:
    """The arguments of the ``queue_key`` calls whose answers order one queue."""

    requests: Sequence[RequestView]
    """Those that wait, the newest last."""


def view_to_json(view: StepView, context: PolicyContext | None = None) -> dict[str, Any]:
    """Return one call of ``plan`` as JSON data, with the deployment it was made for if given.

    Costs O(waiting + running): for the call that failed, not for each.
    """
    data = view._asdict()
    data["waiting"] = [request._asdict() for request in view.waiting]
    data["running"] = [request._asdict() for request in view.running]
    data["oldest"] = None if view.oldest is None else view.oldest._asdict()
    return {"call": "plan", "view": data, "deployment": _deployment(context)}


def route_call_to_json(
    request: RequestView, ranks: Sequence[RankView], now_s: float, context: PolicyContext | None = None
) -> dict[str, Any]:
    """Return one call of ``route`` as JSON data, with the deployment it was made for if given."""
    view = {"request": request._asdict(), "ranks": [rank._asdict() for rank in ranks], "now_s": now_s}
    return {"call": "route", "view": view, "deployment": _deployment(context)}


def keys_call_to_json(requests: Sequence[RequestView], context: PolicyContext | None = None) -> dict[str, Any]:
    """Return the calls of ``queue_key`` that order one queue as JSON data, with the deployment if given."""
    view = {"requests": [request._asdict() for request in requests]}
    return {"call": "queue_key", "view": view, "deployment": _deployment(context)}


def call_from_json(saved: Any, where: str) -> tuple[StepView | RouteCall | KeysCall, dict[str, Any]]:
    """Return the call that one of the functions above saved, and the deployment's numbers (empty if not saved).

    Raises:
        DataError: the data is no saved call; the message names ``where`` it was found.
    """
    try:
        view, deployment = dict(saved["view"]), dict(saved["deployment"])
        unknown = sorted(deployment.keys() - {field.name for field in fields(PolicyContext)})
        if unknown:
            raise ValueError(f"its deployment has an unknown '{unknown[0]}'")
        if saved["call"] == "plan":
            view["waiting"] = tuple(RequestView(**request) for request in view["waiting"])
            view["running"] = tuple(RequestView(**request) for request in view["running"])
            view["oldest"] = None if view["oldest"] is None else RequestView(**view["oldest"])
            return StepView(**view), deployment
        if saved["call"] == "route":
            ranks = tuple(RankView(**rank) for rank in view["ranks"])
            return RouteCall(RequestView(**view["request"]), ranks, view["now_s"]), deployment
        if saved["call"] == "queue_key":
            return KeysCall(tuple(RequestView(**request) for request in view["requests"])), deployment
        raise ValueError(f"its call is '{saved['call']}', neither plan, route nor queue_key")
    except (ValueError, KeyError, TypeError) as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise DataError(f"'{where}' is no saved policy call: {what}; give a file that a failed run wrote") from None


def _deployment(context: PolicyContext | None) -> dict[str, Any]:
    if context is None:
        return {}
    return {field.name: getattr(context, field.name) for field in fields(context) if field.name != "prefill_s"}


def _checked_order(order: object, view: StepView, is_waiting: Callable[[str], object] | None) -> tuple[str, ...]:
    if isinstance(order, str | RequestView) or not isinstance(order, Sequence):
        raise PolicyError(f"plan returned order {_shown(order)}; it must be None or a sequence of request ids")
    if is_waiting is None:
        is_waiting = {request.request_id for request in view.waiting}.__contains__
    # one id more than wait, and one of them is none or comes twice: a sequence without end is none too many
    request_ids = tuple(islice(order, len(view.waiting) + 1))
    listed: set[str] = set()
    for request_id in request_ids:
        if not isinstance(request_id, str) or not is_waiting(request_id):
            raise PolicyError(f"plan lets in {_shown(request_id)}, which does not wait on rank {view.dp_rank}")
        if request_id in listed:
            raise PolicyError(f"plan lets in {_shown(request_id)} twice")
        listed.add(request_id)
    return request_ids


def _shown(value: object) -> str:
    try:
        text = " ".join(repr(value).splitlines())
    except Exception:
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."
