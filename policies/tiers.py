"""Quality-tiered batching: waiting requests enter in ascending budget, tiers merged where that raises throughput."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from operator import attrgetter

from simmoe.errors import UsageError
from simmoe.policies.protocols import ADMIT_ALL, PolicyContext, StepPlan
from simmoe.policies.views import RequestView, StepView


class Tiers:
    """Quality-tiered batching: low budgets first, adjacent tiers merged iff that raises token throughput (Eq. 5).

    A tier is the waiting requests of one budget, oldest first. Tiers fill the step's token budget in ascending k. When
    one leaves a residual of n_cur tokens at k, and the next would add n_next at k_next, they merge iff
    ``(n_cur + n_next) / T(n_cur + n_next, k_next) >= n_cur / T(n_cur, k)``; otherwise the residual is dispatched at k.

    A tier contributes what the host could admit: a prompt counts in part where chunked prefill would cut it, and a
    batch out of free sequences or KV blocks is as full as one out of tokens. Preempted requests re-enter first,
    whatever their budget, and start the batch; tiers at or below their budget are then compared at that budget.

    A plan costs O(tiers + requests that fit the step), not O(waiting requests).

    Args:
        max_wait_s: aging. Requests that arrived this long ago enter first, by arrival, so that ascending tiers can pass
            a high budget over for a bounded time only; none: never (the paper, offline).
        count_running: compare at no less than the largest running budget, since a decode in flight already raises the
            step to it; false: exactly Eq. 5.
    Raises:
        UsageError: ``max_wait_s`` is not above 0.
    Source: MoE-Prism, section III-C2.
    """

    def __init__(self, context: PolicyContext, max_wait_s: float | None = None, count_running: bool = False) -> None:
        if max_wait_s is not None and not 0 < max_wait_s < math.inf:
            raise UsageError(
                f"tiers: max_wait_s is {max_wait_s}; it must be above 0 seconds and finite, or none for no aging"
            )
        self._prefill_s = context.prefill_s
        self._chunked = context.enable_chunked_prefill
        self._max_wait_s = max_wait_s
        self._count_running = count_running

    def queue_key(self, request: RequestView, /) -> tuple[int, float]:
        """Order the queue by tier, then by arrival."""
        return request.k_qos, request.arrival_s

    def plan(self, view: StepView, /) -> StepPlan:
        """Return a gate at the batch's budget, or an order where preempted or aged requests come first."""
        waiting = view.waiting
        if not waiting:
            return ADMIT_ALL
        batch = _Batch(view, self._chunked)
        for i in range(view.num_preempted):
            if not batch.add(waiting[i]):
                break
        wake_at_s = self._add_aged(batch, view)
        if batch.refused is not None:  # it stays first in line, and nothing passes it
            return StepPlan(order=[*batch.order, batch.refused], wake_at_s=wake_at_s)
        comes_first = bool(batch.order)
        self._fill(batch, view)
        if comes_first:
            return StepPlan(order=batch.order, wake_at_s=wake_at_s)
        return StepPlan(k_max=batch.k or waiting[0].k_qos, wake_at_s=wake_at_s)

    def _add_aged(self, batch: _Batch, view: StepView) -> float | None:
        """Add requests that have waited max_wait_s, oldest first; return when the next one will have, if that matters.

        Once the batch is full, further aging changes nothing before the queue or the running set does.
        """
        oldest = view.oldest
        if self._max_wait_s is None or oldest is None:
            return None
        if oldest.arrival_s + self._max_wait_s > view.now_s:
            return oldest.arrival_s + self._max_wait_s
        for request in _by_arrival(view.waiting, view.num_preempted):
            aged_at_s = request.arrival_s + self._max_wait_s
            if aged_at_s > view.now_s:
                return aged_at_s
            if not batch.add(request):
                break
        return None

    def _fill(self, batch: _Batch, view: StepView) -> None:
        """Add tiers in ascending k for as long as Eq. 5 merges them."""
        if batch.full:
            return
        waiting = view.waiting
        entered = frozenset(batch.order)
        k_floor = view.k_running if self._count_running else 0
        rate = batch.tokens / self._prefill_s(batch.tokens, max(batch.k, k_floor)) if batch.tokens else 0.0
        i, end = view.num_preempted, len(waiting)
        while i < end and not batch.full:
            k_tier = waiting[i].k_qos
            length, k = len(batch.order), batch.k
            while i < end and (request := waiting[i]).k_qos == k_tier:
                if request.request_id not in entered and not batch.add(request):
                    break
                i += 1
            if len(batch.order) == length:
                continue
            merged_rate = batch.tokens / self._prefill_s(batch.tokens, max(batch.k, k_floor))
            if merged_rate < rate:
                batch.dispatch(length, k)
                return
            rate = merged_rate


class _Batch:
    """A batch under composition, within what the host could admit."""

    def __init__(self, view: StepView, chunked: bool) -> None:
        self.order: list[str] = []
        self.tokens = 0
        """Prompt tokens the batch computes."""
        self.k = 0
        """The largest budget among its requests."""
        self.refused: str | None = None
        """The first request that did not fit, if one was tried."""
        self._token_budget = view.token_budget
        self._seats = view.max_num_seqs - len(view.running)
        self._blocks = view.free_kv_blocks
        self._block_size = view.block_size
        self._chunked = chunked
        self.full = view.token_budget <= 0 or self._seats <= 0
        """Whether nothing more can be admitted, tokens, sequences or KV blocks being used up."""

    def add(self, request: RequestView) -> bool:
        """Add a request, in part if chunked prefill cuts it; return whether any of it fits."""
        if self.full:
            return False
        tokens = request.prompt_tokens - request.num_computed_tokens
        blocks = -(-tokens // self._block_size)
        left = self._token_budget - self.tokens
        if blocks > self._blocks or (tokens > left and not self._chunked):
            self.refused = request.request_id
            self.full = True
            return False
        self.order.append(request.request_id)
        self.k = max(self.k, request.k_qos)
        self.tokens += min(tokens, left)
        self._blocks -= blocks
        self.full = tokens >= left or len(self.order) == self._seats
        return True

    def dispatch(self, length: int, k: int) -> None:
        """Close the batch at its first ``length`` requests, which run at ``k``."""
        del self.order[length:]
        self.k = k
        self.full = True


def _by_arrival(waiting: Sequence[RequestView], start: int) -> Iterator[RequestView]:
    """Yield ``waiting[start:]``, sorted by (k_qos, arrival_s), by arrival instead, reading only what is asked for."""
    tiers = []
    while start < len(waiting):
        end = bisect_right(waiting, waiting[start].k_qos, lo=start, key=attrgetter("k_qos"))
        tiers.append(map(waiting.__getitem__, range(start, end)))
        start = end
    return heapq.merge(*tiers, key=attrgetter("arrival_s"))
