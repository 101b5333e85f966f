"""The queue that stands in for vLLM's: against a list sorted anew each time, and what its gate lets through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simmoe.live.engine.policy_queue import PolicyQueue
from simmoe.policies.protocols import StepPlan
from simmoe.policies.views import RequestView


@dataclass(eq=False)
class Request:
    """What the queue asks of vLLM's request."""

    request_id: str
    view: RequestView
    num_preemptions: int = 0


def by_budget(view: RequestView) -> int:
    return view.k_qos


def ordered(queue_key: Callable[[RequestView], Any] = by_budget) -> PolicyQueue:
    """Return a queue in the order of a policy's key."""

    def enqueue(view: RequestView, waiting: Sequence[RequestView], insert: Callable[[Any], object]) -> None:
        insert(queue_key(view))

    return PolicyQueue(lambda request: request.view, enqueue)


def make(name: int, k: int, arrival_s: float) -> Request:
    return Request(str(name), RequestView(str(name), arrival_s, 10, 0, k))


OPERATIONS = st.lists(
    st.tuples(
        st.sampled_from(("add", "add", "add", "pop", "abort", "preempt", "skip")), st.integers(1, 4), st.integers(0, 5)
    ),
    max_size=60,
)


@given(OPERATIONS, st.booleans())
def test_it_is_a_sorted_list_with_the_preempted_in_front(operations: list[tuple[str, int, int]], keyed: bool) -> None:
    queue = ordered() if keyed else PolicyQueue(lambda request: request.view)
    preempted: list[Request] = []
    rest: list[tuple[tuple[float, ...], Request]] = []
    running: list[Request] = []

    def expected() -> list[Request]:
        return preempted + [request for _, request in sorted(rest, key=lambda item: item[0])]

    def forget(request: Request) -> None:
        if request in preempted:
            preempted.remove(request)
        rest[:] = [item for item in rest if item[1] is not request]

    for row, (operation, k, number) in enumerate(operations):
        waiting = expected()
        if operation == "add":
            request = make(row, k, float(number))
            queue.add_request(request)
            rest.append(((k if keyed else 0, float(number), row), request))
        elif operation == "preempt" and running:
            request = running.pop()
            request.num_preemptions += 1
            queue.prepend_request(request)
            preempted.insert(0, request)
        elif operation == "pop" and waiting:
            assert queue.pop_request() is waiting[0]
            forget(waiting[0])
            running.append(waiting[0])
        elif operation == "abort" and waiting:
            gone = waiting[number % len(waiting) :: 2]
            queue.remove_requests([*gone, make(-1, 1, 0.0)])
            for request in gone:
                forget(request)
        elif operation == "skip" and waiting:
            # vLLM pops what it must skip, and hands it back last first
            queue.arm(StepPlan, lambda: False)
            skipped = [queue.pop_request() for _ in range(min(number, len(waiting)))]
            queue.prepend_requests(reversed(skipped))
            queue.disarm()
        waiting = expected()
        view = queue.view
        assert list(queue) == waiting and len(queue) == len(view) == len(waiting) and bool(queue) == bool(waiting)
        assert list(view) == view[:] == [view[i] for i in range(len(view))] == [r.view for r in waiting]
        assert queue.num_preempted == len(preempted)
        oldest = queue.oldest()
        if waiting:
            assert view[-1] == waiting[-1].view
            assert oldest is not None and oldest.arrival_s == min(r.view.arrival_s for r in waiting)
        else:
            assert oldest is None
        for index in (len(view), -len(view) - 1):
            with pytest.raises(IndexError):
                view[index]


def admitted(queue: PolicyQueue, plan: StepPlan | None, idle: bool = False) -> list[str]:
    """Return who vLLM's loop would take, were there room for all."""
    names: list[str] = []
    queue.arm(lambda: plan, lambda: idle and not names)
    while queue:
        names.append(queue.peek_request().request_id)
        assert queue.pop_request().request_id == names[-1]
    queue.disarm()
    return names


@pytest.mark.parametrize(
    ("plan", "idle", "who"),
    [
        (StepPlan(), False, ["0", "1", "2", "3"]),
        (StepPlan(k_max=2), False, ["0", "1"]),
        (StepPlan(k_max=0), False, []),
        (StepPlan(k_max=0), True, ["0", "1", "2", "3"]),
        (StepPlan(order=["3", "0"]), False, ["3", "0"]),
        (StepPlan(order=["0", "3", "1"], k_max=3), False, ["0"]),
        (StepPlan(order=[]), True, ["0", "1", "2", "3"]),
        (StepPlan(order=["2"]), True, ["2"]),
        (None, True, []),
    ],
)
def test_the_gate_lets_in_whom_the_plan_names(plan: StepPlan | None, idle: bool, who: list[str]) -> None:
    queue = ordered()
    for name in range(4):
        queue.add_request(make(name, name + 1, 0.0))
    assert admitted(queue, plan, idle) == who
    assert len(queue) == 4 - len(who)
    assert queue.gates_opened == (idle and plan is not None and plan.order != ["2"])


def test_a_key_that_cannot_be_had_queues_nothing() -> None:
    queue = ordered(lambda view: 1 / (view.k_qos - 3))
    queue.add_request(make(0, 1, 0.0))
    with pytest.raises(ZeroDivisionError):
        queue.add_request(make(1, 3, 0.0))
    mixed = ordered(lambda view: "low" if view.k_qos < 3 else view.k_qos)
    mixed.add_request(make(0, 1, 0.0))
    with pytest.raises(TypeError, match="'<' not supported"):
        mixed.add_request(make(1, 3, 0.0))
    assert len(queue) == len(mixed) == 1
