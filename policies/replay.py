"""Calls of a policy as JSON: a host saves the one that failed, and it can be asked again offline."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from simmoe.errors import DataError
from simmoe.policies.protocols import PolicyContext
from simmoe.policies.views import RankView, RequestView, StepView


@dataclass(frozen=True, slots=True)
class RouteCall:
    """The arguments of one ``route`` call."""

    request: RequestView
    ranks: Sequence[RankView]
    now_s: float


@dataclass(frozen=True, slots=True)
class SavedCall:
    """A call read back."""

    call: StepView | RouteCall
    deployment: Mapping[str, Any]
    """The context's numbers, T(n, k) left out; empty if they were not saved."""


def view_to_json(call: StepView | RouteCall, context: PolicyContext | None = None) -> str:
    """Return one call of ``plan`` or ``route`` as JSON, with the deployment it was made for.

    Costs O(waiting + running): for the call that failed, not for each.
    """
    if isinstance(call, StepView):
        data: dict[str, Any] = {field.name: getattr(call, field.name) for field in fields(StepView)}
        data["waiting"] = [asdict(request) for request in call.waiting]
        data["running"] = [asdict(request) for request in call.running]
        data["oldest"] = None if call.oldest is None else asdict(call.oldest)
        saved: dict[str, Any] = {"call": "plan", "view": data}
    else:
        ranks = [asdict(rank) for rank in call.ranks]
        saved = {"call": "route", "view": {"request": asdict(call.request), "ranks": ranks, "now_s": call.now_s}}
    if context is not None:
        names = [field.name for field in fields(PolicyContext) if field.name != "prefill_s"]
        saved["deployment"] = {name: getattr(context, name) for name in names}
    return json.dumps(saved, indent=1) + "\n"


def view_from_json(text: str, where: str = "the saved call") -> SavedCall:
    """Return the call that :func:`view_to_json` wrote.

    Raises:
        DataError: the text is no saved call; the message names ``where``.
    """
    try:
        saved = json.loads(text)
        view = dict(saved["view"])
        deployment = dict(saved.get("deployment", {}))
        call: StepView | RouteCall
        if saved["call"] == "plan":
            view["waiting"] = tuple(RequestView(**request) for request in view["waiting"])
            view["running"] = tuple(RequestView(**request) for request in view["running"])
            view["oldest"] = None if view["oldest"] is None else RequestView(**view["oldest"])
            call = StepView(**view)
        elif saved["call"] == "route":
            ranks = tuple(RankView(**rank) for rank in view["ranks"])
            call = RouteCall(RequestView(**view["request"]), ranks, view["now_s"])
        else:
            raise ValueError(f"its call is '{saved['call']}', neither 'plan' nor 'route'")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        what = f"it has no {error}" if isinstance(error, KeyError) else str(error)
        raise DataError(f"'{where}' is no saved policy call: {what}; give a file that a failed run wrote") from None
    return SavedCall(call, deployment)
