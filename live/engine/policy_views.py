"""What a policy is shown of vLLM's scheduler: read-only views over its own queues, built when they are looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

from simmoe.live.engine.policy_queue import PolicyQueue
from simmoe.policies.views import RequestView, StepView


class RunningShare:
    """What running requests have taken of the step being composed, told by vLLM's own block allocations.

    vLLM keeps a step's remaining token budget in a local variable. Each running request it gives tokens to passes
    through ``KVCacheManager.allocate_slots`` exactly once with success, so the sum there is what is gone. This is on
    the path of every running request in every step: it notes, and whoever asks adds up.

    Args:
        kv_cache_manager: vLLM's.
        ks: every request's budget, by request id; kept by the scheduler.
    """

    def __init__(self, kv_cache_manager: Any, ks: dict[str, int]) -> None:
        tokens: list[int] = []
        budgets: list[int] = []
        chunks: dict[str, int] = {}
        allocate = kv_cache_manager.allocate_slots

        def allocate_slots(request: Any, num_new_tokens: int, *args: Any, **kwargs: Any) -> Any:
            blocks = allocate(request, num_new_tokens, *args, **kwargs)
            if blocks is not None and "full_sequence_must_fit" not in kwargs:  # which vLLM passes for those that wait
                request_id = request.request_id
                tokens.append(num_new_tokens)
                budgets.append(ks[request_id])
                if request.is_prefill_chunk:
                    chunks[request_id] = num_new_tokens
            return blocks

        kv_cache_manager.allocate_slots = allocate_slots
        self._tokens, self._budgets = tokens, budgets
        self.chunks = chunks
        """Tokens given to prompts in progress, by request id."""

    def clear(self) -> None:
        """Begin a step."""
        self._tokens.clear()
        self._budgets.clear()
        self.chunks.clear()

    @property
    def num_seqs(self) -> int:
        """Running requests that were given tokens."""
        return len(self._tokens)

    @property
    def num_tokens(self) -> int:
        """Tokens they were given."""
        return sum(self._tokens)

    @property
    def largest_k(self) -> int:
        """The largest budget among them; 0 if there are none."""
        return max(self._budgets, default=0)


class ViewBuilder:
    """Builds the views of one rank.

    Args:
        scheduler: vLLM's, with ``request_ks`` beside it.
        wall_offset_s: what to subtract from the wall clock to have the scheduler's.
    """

    def __init__(self, scheduler: Any, wall_offset_s: float) -> None:
        self._scheduler = scheduler
        self.dp_rank = 0
        """Which rank it is."""
        self.wall_offset_s = wall_offset_s
        self.share = RunningShare(scheduler.kv_cache_manager, scheduler.request_ks)
        self._recomputed: dict[str, int] = {}
        """Prompt tokens of requests that were preempted, outputs before the last preemption included."""

    def request(self, request: Any) -> RequestView:
        """Return a waiting request's view; after a preemption its outputs so far are to be computed again too."""
        if request.num_preemptions:
            self._recomputed[request.request_id] = request.num_tokens
        return self._view(request, 0)

    def running(self, request: Any) -> RequestView:
        """Return a running request's view, its chunk of the step at hand included while its prompt is in progress."""
        chunk = self.share.chunks.get(request.request_id, 0)
        return self._view(request, request.num_computed_tokens + chunk)

    def forget(self, request_id: str) -> None:
        """Drop what is kept of a request that has left."""
        self._recomputed.pop(request_id, None)

    def step(self, now_s: float, queue: PolicyQueue) -> StepView:
        """Return the view of the step being composed, running requests having taken their share."""
        scheduler = self._scheduler
        queue.look_again()
        return StepView(
            now_s=now_s,
            dp_rank=self.dp_rank,
            waiting=queue.view,
            running=RunningView(scheduler, self.running),
            token_budget=scheduler.max_num_scheduled_tokens - self.share.num_tokens,
            max_num_seqs=scheduler.max_num_active_reqs,
            free_kv_blocks=scheduler.kv_cache_manager.block_pool.get_num_free_blocks(),
            block_size=scheduler.block_size,
            k_running=self.share.largest_k,
            oldest=queue.oldest(),
            num_preempted=queue.num_preempted,
        )

    def anew(self, view: StepView, queue: PolicyQueue) -> StepView:
        """Return a step's view with sequences that no policy has had in its hands."""
        return view._replace(waiting=queue.view, running=RunningView(self._scheduler, self.running))

    def _view(self, request: Any, num_computed_tokens: int) -> RequestView:
        request_id = request.request_id
        return RequestView(
            request_id=request_id,
            arrival_s=request.arrival_time - self.wall_offset_s,
            prompt_tokens=self._recomputed.get(request_id, request.num_prompt_tokens),
            num_computed_tokens=num_computed_tokens,
            k_qos=self._scheduler.request_ks[request_id],
        )


class RunningView(Sequence[RequestView]):
    """The running set as a policy sees it; items are built when they are asked for."""

    __slots__ = ("_build", "_scheduler")

    def __init__(self, scheduler: Any, build: Callable[[Any], RequestView]) -> None:
        self._scheduler = scheduler
        self._build = build

    def __len__(self) -> int:
        return len(self._scheduler.running)

    def __iter__(self) -> Iterator[RequestView]:
        return map(self._build, self._scheduler.running)

    @overload
    def __getitem__(self, index: int) -> RequestView: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[RequestView]: ...
    def __getitem__(self, index: int | slice) -> RequestView | Sequence[RequestView]:
        found = self._scheduler.running[index]
        return [self._build(request) for request in found] if isinstance(index, slice) else self._build(found)
