"""The two protocols of a policy, what it answers, and what it may be told when it is built.

A policy is a plain object: no clock, no randomness of its own, no I/O. Time arrives in the view. It may keep state (a
lane boundary); a policy that does offers it through :class:`Inspectable`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

from simmoe.policies.views import RankView, RequestView, StepView


class StepPlan(NamedTuple):
    """Which waiting requests may enter the next step. The default lets all of them in, in queue order.

    The host applies it within its own limits (token budget, sequences, KV blocks), stopping at the first request that
    does not fit, and opens the gate by itself when the plan would leave it idle with admissible work.
    """

    order: Sequence[str] | None = None
    """Exactly these request ids may enter, in this order. None: every waiting request, in queue order."""
    k_max: int | None = None
    """Only requests with ``k_qos <= k_max`` may enter; the scan stops at the first above it. None: no gate."""
    wake_at_s: float | None = None
    """The plan stands until the queue or the running set changes; ask again at this time even if they do not."""


ADMIT_ALL = StepPlan()
"""The plan that leaves everything to the host: vLLM's own first come, first served."""


@runtime_checkable
class BatchPolicy(Protocol):
    """Decides, on one rank, which waiting requests may enter the next step.

    Asked when something waits and the queue, the running set or the chunk in progress has changed since the last plan
    (or its ``wake_at_s`` has come). Two optional attributes a host reads with ``getattr``:

    ``queue_key(request) -> tuple``
        The order the host keeps the waiting queue in: static, it must depend on the request alone. Default: arrival.
        Ties fall back to (arrival_s, order of arrival).
    ``k_floor: int``
        The least budget any step of this rank runs at (fixed-k serving); 0 by default.
    """

    def plan(self, view: StepView, /) -> StepPlan:
        """Return the plan for the step about to be composed."""
        ...


@runtime_checkable
class RoutePolicy(Protocol):
    """Decides, at a front end, which rank a request goes to; asked once a request."""

    def route(self, request: RequestView, ranks: Sequence[RankView], now_s: float, /) -> int:
        """Return the ``dp_rank`` of one of ``ranks``: all of the deployment's, ``ranks[i].dp_rank == i``."""
        ...


@runtime_checkable
class Inspectable(Protocol):
    """A policy with state worth keeping beside the results (JSON-serialisable)."""

    def snapshot(self) -> Mapping[str, Any]:
        """Return the state, history included, as plain data."""
        ...


@dataclass(frozen=True, slots=True)
class PolicyContext:
    """The deployment a policy is built for. A constructor that has a parameter named ``context`` receives it."""

    prefill_s: Callable[[int, int], float]
    """T(n, k): seconds a step of n prompt tokens takes when budget k is asked for (the profile's model)."""
    k_min: int
    k_max: int
    num_ranks: int
    max_num_seqs: int
    max_num_batched_tokens: int
    enable_chunked_prefill: bool = True
    """Whether a prompt may enter with fewer tokens than it has left."""
    front_end_index: int = 0
    """Which of the front ends a route policy serves; 0 for batch policies."""
    num_front_ends: int = 1
