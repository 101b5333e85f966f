"""The conformance kit: what every policy must do, checked on yours.

In a test of your own::

    from simmoe.policies.testing import assert_conforms

    def test_my_policy():
        assert_conforms(lambda context: MyPolicy(depth=3))

or, from a shell, ``simmoe policies check my_policy.py:MyPolicy,depth=3``.
"""

from __future__ import annotations

import ast
import copy
import inspect
import json
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from simmoe.errors import UsageError
from simmoe.policies.loading import METHODS, Kind, describe, kind_of, message_of, pass_ctrl_c
from simmoe.policies.protocols import Inspectable, PolicyContext
from simmoe.policies.samples import SAMPLE_CONTEXT, ReadOnly, sample_route_calls, sample_views
from simmoe.policies.validate import (
    KeysCall,
    RouteCall,
    check_k_floor,
    check_plan,
    check_queue_key,
    check_rank,
    check_snapshot,
    route_call_to_json,
    view_to_json,
)
from simmoe.policies.views import RequestView, StepView

Make = Callable[[PolicyContext], Any]
Call = StepView | RouteCall

#: Modules that give a policy a clock, randomness, concurrency or a host of its own.
IMPURE = ("time", "datetime", "random", "secrets", "asyncio", "threading", "numpy.random", "simpy", "torch", "vllm")


@dataclass(frozen=True, slots=True)
class Check:
    """One property, and whether the policy has it."""

    name: str
    passed: bool
    detail: str = ""
    """What went wrong, on one line."""


def assert_conforms(make: Make, context: PolicyContext = SAMPLE_CONTEXT) -> None:
    """Raise AssertionError, naming each failed check, unless ``make(context)`` gives policies that pass all."""
    failed = [f"{check.name}: {check.detail}" for check in check_policy(make, context) if not check.passed]
    assert not failed, "\n".join(failed)


def check_policy(make: Make, context: PolicyContext = SAMPLE_CONTEXT) -> list[Check]:
    """Check the policies ``make`` builds, of either kind, on sample calls.

    Args:
        make: builds a new policy for a deployment, as a host does for each rank or front end.
        context: the deployment to build for. Its T(n, k) must be picklable, or the copies cannot be checked.
    """
    try:
        policy = make(context)
        kind = kind_of(type(policy), type(policy).__qualname__)
    except BaseException as error:
        pass_ctrl_c(error)
        return [Check("can be built", False, describe(error))]
    checks: dict[str, Callable[[], None]] = {
        f"has {METHODS[kind]} as the protocol wants it": partial(_signature, policy, kind),
        "imports neither clock nor randomness": partial(_imports, type(policy)),
        "answers every call validly": partial(_valid_answers, make, context, kind),
        "leaves views as they were": partial(_untouched, make, context, kind),
        "asks for nothing a view does not show": partial(_known_attributes, make, context, kind),
        "answers the same calls alike": partial(_deterministic, make, context, kind),
        "goes on from a copy as from itself": partial(_copies, make, context, kind),
        "shows its state as plain data": partial(_snapshot, make, context, kind),
    }
    if kind == "batch":
        checks["orders the queue by the request alone"] = partial(_queue_key, policy, context)
        checks["sets a floor within the budgets"] = partial(_k_floor, policy, context)
    else:
        checks["routes to a single rank"] = partial(_single_rank, make, context)
    origin = getattr(sys.modules.get(type(policy).__module__), "__file__", None)
    path = None if origin is None else Path(origin)
    return [Check("can be built", True), *(_result(name, run, path) for name, run in checks.items())]


def _result(name: str, run: Callable[[], None], path: Path | None) -> Check:
    """Run a check; where the policy raises, say on which line of its own file."""
    try:
        run()
    except AssertionError as failure:
        return Check(name, False, " ".join(message_of(failure).split()) or describe(failure, path))
    except BaseException as error:
        pass_ctrl_c(error)
        return Check(name, False, describe(error, path))
    return Check(name, True)


def ask(policy: Any, call: Call | KeysCall) -> Any:
    """Return the policy's answer to one call, checked; to a queue's keys, the order they give it."""
    if isinstance(call, StepView):
        return check_plan(policy.plan(call), call)
    if isinstance(call, KeysCall):
        keys = [check_queue_key(policy.queue_key(request)) for request in call.requests]
        order = sorted(range(len(keys)), key=lambda i: (keys[i], call.requests[i].arrival_s))
        return [call.requests[i].request_id for i in order]
    return check_rank(policy.route(call.request, call.ranks, call.now_s), call.ranks)


def _calls(policy: Any, context: PolicyContext, kind: Kind, make_request: Any = RequestView) -> list[Call]:
    if kind == "batch":
        return [*sample_views(context, getattr(policy, "queue_key", None), make_request)]
    return [*sample_route_calls(context, make_request)]


def _answers(policy: Any, calls: list[Call]) -> list[Any]:
    """Return the answers in a form that can be compared."""
    return [_comparable(ask(policy, call)) for call in calls]


def _comparable(answer: Any) -> Any:
    return answer if isinstance(answer, int) else (answer.order and list(answer.order), answer.k_max, answer.wake_at_s)


def _signature(policy: Any, kind: Kind) -> None:
    method = getattr(policy, METHODS[kind])
    arguments = (None,) if kind == "batch" else (None, None, None)
    wanted = "plan(view)" if kind == "batch" else "route(request, ranks, now_s)"
    try:
        inspect.signature(method).bind(*arguments)
    except TypeError as error:
        raise AssertionError(f"it cannot be called as {wanted}: {error}") from None


def _imports(cls: type) -> None:
    source_file = inspect.getsourcefile(cls)
    if source_file is None:
        return
    impure = sorted(set(_impure_imports(ast.parse(Path(source_file).read_text(encoding="utf-8")))))
    assert not impure, f"{source_file} uses {', '.join(impure)}; time arrives in the view, and nothing is drawn"


def _impure_imports(tree: ast.Module) -> Iterator[str]:
    numpy_names = {"numpy"}
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            numpy_names |= {alias.asname for alias in node.names if alias.name == "numpy" and alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.attr == "random":
            names = ["numpy.random"] if node.value.id in numpy_names else []
        yield from (name for name in IMPURE for used in names if used == name or used.startswith(f"{name}."))


def _valid_answers(make: Make, context: PolicyContext, kind: Kind) -> None:
    policy = make(context)
    for call in _calls(policy, context, kind):
        ask(policy, call)
        for sequence in (call.waiting, call.running) if isinstance(call, StepView) else (call.ranks,):
            assert isinstance(sequence, ReadOnly)
            sequence.close()


def _untouched(make: Make, context: PolicyContext, kind: Kind) -> None:
    policy = make(context)
    for call in _calls(policy, context, kind):
        before = json.dumps(_plain(call))
        ask(policy, call)
        assert json.dumps(_plain(call)) == before, "a view was changed; read it, and keep state in the policy"


def _plain(call: Call) -> Mapping[str, Any]:
    if isinstance(call, StepView):
        return view_to_json(call)
    return route_call_to_json(call.request, call.ranks, call.now_s)


def _known_attributes(make: Make, context: PolicyContext, kind: Kind) -> None:
    policy = make(context)
    if getattr(policy, "clairvoyant", False):
        return
    asked: set[str] = set()

    def note(request: RequestView, name: str) -> Any:
        if not name.startswith("__"):
            asked.add(name)
        raise AttributeError(name)

    probe = type("ProbedRequest", (RequestView,), {"__slots__": (), "__getattr__": note})
    try:
        _answers(policy, _calls(policy, context, kind, probe))
    except AttributeError:
        if not asked:
            raise
    assert not asked, f"it read {', '.join(sorted(asked))} of a request; declare 'clairvoyant = True' if it must know"


def _deterministic(make: Make, context: PolicyContext, kind: Kind) -> None:
    one, other = make(context), make(context)
    calls = _calls(one, context, kind)
    for index, (a, b) in enumerate(zip(_answers(one, calls), _answers(other, calls), strict=True)):
        assert a == b, f"two new policies answered call {index} differently: {a} and {b}"


def _copies(make: Make, context: PolicyContext, kind: Kind) -> None:
    policy = make(context)
    calls = _calls(policy, context, kind)
    half = len(calls) // 2
    _answers(policy, calls[:half])
    copies = {"copy.deepcopy": copy.deepcopy(policy), "pickle": pickle.loads(pickle.dumps(policy))}
    wanted = _answers(policy, calls[half:])
    for how, twin in copies.items():
        assert _answers(twin, calls[half:]) == wanted, f"a copy made half way by {how} answers differently"


def _snapshot(make: Make, context: PolicyContext, kind: Kind) -> None:
    policy = make(context)
    if not isinstance(policy, Inspectable):
        return
    for calls in ([], _calls(policy, context, kind)):
        _answers(policy, calls)
        check_snapshot(policy.snapshot())


def _queue_key(policy: Any, context: PolicyContext) -> None:
    queue_key = getattr(policy, "queue_key", None)
    if queue_key is None:
        return
    views = sample_views(context)
    requests = [request for view in views for request in view.waiting]
    before = [check_queue_key(queue_key(request)) for request in requests]
    sorted(before)
    for view in sample_views(context, queue_key):
        ask(policy, view)
    after = [queue_key(request) for request in requests]
    assert before == after, "queue_key changed its answer between steps; it must depend on the request alone"


def _k_floor(policy: Any, context: PolicyContext) -> None:
    check_k_floor(getattr(policy, "k_floor", 0), context.k_max)


def _single_rank(make: Make, context: PolicyContext) -> None:
    alone = replace(context, num_ranks=1)
    try:
        policy = make(alone)
    except UsageError:
        return  # it says that it needs more
    _answers(policy, _calls(policy, alone, "route"))
