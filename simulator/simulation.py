"""Run a workload through ranks and a front end."""

from __future__ import annotations

from collections.abc import Callable

from simmoe.policies.protocols import BatchPolicy, PolicyContext, RoutePolicy
from simmoe.profiles.shape import StepCost
from simmoe.simulator.config import SimConfig
from simmoe.simulator.result import SimResult
from simmoe.traces.workload import Workload


def simulate(
    workload: Workload,
    config: SimConfig,
    cost: StepCost,
    batch_policy: Callable[[PolicyContext], BatchPolicy],
    route_policy: Callable[[PolicyContext], RoutePolicy],
) -> SimResult:
    """Simulate ``workload`` on ``config`` and return every request's fate.

    Args:
        workload: requests to replay, open loop.
        config: the deployment.
        cost: seconds of each step.
        batch_policy: makes one batch policy a rank.
        route_policy: makes one route policy a front end.
    Raises:
        UsageError: a budget of the workload outside 1..k_max.
        PolicyError: a policy raised or answered nonsense; the message names the file its view was saved to.
    """
    raise NotImplementedError
