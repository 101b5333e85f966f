"""vLLM 0.32's V1 scheduler: what the next step computes. Knows no clock and no events.

As in vLLM, running requests come first, in the order of their admission: one token for each sequence that decodes,
then the rest of an unfinished prompt. When KV blocks run out the newest running request is preempted, to be recomputed
from its first token, and that step admits nobody. Then waiting requests enter, in the order and within the gate of the
batch policy's plan, until the first that does not fit: in the sequences, in the token budget (all of the prompt with
chunked prefill off), or in the free blocks, which must hold the whole prompt although only the chunk's are taken.

At most one prompt is unfinished at a time and it is the newest running request: a prompt is cut only when it uses up
the token budget, and then nobody enters behind it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from heapq import heappop, heappush

from simmoe.policies.asking import Asker
from simmoe.policies.protocols import ADMIT_ALL, BatchPolicy, StepPlan
from simmoe.policies.views import RequestView
from simmoe.profiles.shape import StepCost, StepShape
from simmoe.simulator.config import EngineConfig
from simmoe.simulator.decode_set import DecodeSet
from simmoe.simulator.kv_blocks import blocks_for
from simmoe.simulator.kv_cache import KvCache
from simmoe.simulator.planner import Planner
from simmoe.simulator.prompts import StepPrompts
from simmoe.simulator.request import SimRequest
from simmoe.simulator.result import RankTotals
from simmoe.simulator.step import Step


class Scheduler:
    """The scheduling state of one rank."""

    def __init__(
        self,
        dp_rank: int,
        config: EngineConfig,
        k_max: int,
        policy: BatchPolicy,
        cost: StepCost,
        asker: Asker,
        prefix_block_tokens: int,
        totals: RankTotals,
    ) -> None:
        self.dp_rank = dp_rank
        self.config = config
        self.cost = cost
        self.totals = totals
        self.planner = Planner(dp_rank, config, policy, asker, totals)
        self.waiting = self.planner.waiting
        self.running: dict[SimRequest, None] = {}
        """Admitted and unfinished, in order of admission (a dict for its order and O(1) removal)."""
        self.decodes = DecodeSet(config.block_size, k_max)
        self.partial: SimRequest | None = None
        """The running request whose prompt is unfinished."""
        self.kv = KvCache(config, prefix_block_tokens)
        self.pool = self.kv.pool
        self._least_free_blocks = self.pool.num_free_blocks
        self.watermark_blocks = int(config.watermark * config.num_gpu_blocks)
        self.step_ks = _step_ks(k_max, asker.k_floor(policy), config.next_ks)
        """step_ks[k] is the budget that a step whose largest budget is k runs at."""
        self.host_eases = not config.graph_ks
        """Whether a step takes the host no longer as sequences leave: not where a lower budget may have no graphs."""
        self.next_index = 0
        """Index of the next step to be composed."""
        self.gates_opened = 0
        """Plans overruled because they would have left the rank idle with admissible work."""
        self._lines_run: set[tuple[int, int]] = set()
        """Decode sequences and largest budget of the steps that fast-forward has composed."""
        self._last_outputs: list[tuple[int, int, int, SimRequest]] = []
        """Heap of (finish step, row, preemptions, request) over requests whose prompt is computed; an entry is stale
        once its request has been preempted since."""
        self._leaving: list[SimRequest] = []
        """Those whose last step has been composed and whose last token is not out yet, in order."""

    def add(self, request: SimRequest) -> None:
        """Queue a dispatched request, where the policy's order puts it.

        Raises:
            PolicyError: the policy gives it no key that can be ordered.
        """
        self.planner.add(request)

    def compose(self, now_s: float) -> Step | None:
        """Compose the next step from everything known at ``now_s``; None if there is nothing to compute."""
        index = self.next_index
        if self._last_outputs and self._last_outputs[0][0] < index:
            self._retire(index - 1)
        preempted = not self._extend_decodes(index)
        decodes = self.decodes
        num_decodes = decodes.num_seqs
        k_exec, qos_slots = decodes.k_exec, decodes.sum_k_qos
        kv_tokens = decodes.kv_tokens(index) if num_decodes else 0
        prompts = None
        if self.partial is not None or (not preempted and self.may_admit(now_s)):
            prompts = self._compose_prompts(now_s, preempted)
        if prompts is None:
            if not num_decodes:
                return None
            k_exec = self.step_ks[k_exec]
            shape = StepShape(0, 0, 0, num_decodes, kv_tokens, k_exec)
        else:
            k_exec = self.step_ks[prompts.k_exec]
            qos_slots += prompts.qos_slots
            shape = StepShape(prompts.num_tokens, prompts.kv_pairs, prompts.num_seqs, num_decodes, kv_tokens, k_exec)
        parts = self.cost.parts_s(shape)
        num_waiting, num_running = len(self.waiting.by_id), len(self.running)
        step = Step(index, parts, k_exec, qos_slots, num_decodes, kv_tokens, num_waiting, num_running)
        self.next_index = index + 1
        if prompts is not None:
            self.planner.is_stale = True
            step.num_prefill_tokens = prompts.num_tokens
            step.completed_prompts = prompts.completed
            step.admitted = prompts.admitted
            for request in prompts.completed:
                self._begin_decoding(request, index)
        if self.pool.num_free_blocks < self._least_free_blocks:
            self._note_peak()
        return step

    def finish(self, index: int) -> list[SimRequest]:
        """Deliver step ``index``: free and return, in order, the requests whose last token it yields."""
        if self._last_outputs and self._last_outputs[0][0] <= index:
            self._retire(index)
        leaving = self._leaving
        if not leaving or leaving[0].finish_step > index:
            return []
        done = [request for request in leaving if request.finish_step <= index]
        del leaving[: len(done)]
        for request in done:
            if request in self.running:
                del self.running[request]
                self.kv.free(request, request.finish_step)
        self.planner.is_stale = True
        return done

    def may_admit(self, now_s: float) -> bool:
        """Return whether composing at ``now_s`` would ask the policy who may enter."""
        return bool(self.waiting.by_id) and len(self.running) < self.config.max_num_seqs and self.planner.is_due(now_s)

    def next_finish_step(self) -> int:
        """Return the first step, executing or to come, that yields some decode's last token."""
        if self._leaving:
            return self._leaving[0].finish_step
        heap = self._last_outputs
        while heap[0][3].num_preemptions != heap[0][2]:
            heappop(heap)
        return heap[0][0]

    def skip_decodes(self, num_steps: int) -> None:
        """Compose ``num_steps`` further decode-only steps of the sequences at hand, for which the blocks are free.

        They lie on one line, on which the cost is asked for a single step, once, so that it knows what ran.
        """
        decodes = self.decodes
        self.pool.take(decodes.new_blocks_over(self.next_index, num_steps))
        self.next_index += num_steps
        line = (decodes.num_seqs, decodes.k_exec)
        if line not in self._lines_run:
            self._lines_run.add(line)
            kv_tokens = decodes.kv_tokens(self.next_index - 1)
            self.cost.parts_s(StepShape(0, 0, 0, decodes.num_seqs, kv_tokens, self.step_ks[decodes.k_exec]))
        if self.pool.num_free_blocks < self._least_free_blocks:
            self._note_peak()

    @property
    def k_running(self) -> int:
        """The largest executed budget among running requests, those whose last token is not out yet included."""
        others = [request.k_exec for request in self._leaving if request in self.running]
        if self.partial is not None:
            others.append(self.partial.k_exec)
        return max([self.decodes.k_exec, *others])

    def check_integrity(self) -> None:
        """Assert that every KV block is free or accounted for, and that the aggregates match the requests."""
        last = self.next_index - 1
        self.kv.check_integrity(self.running, last)
        active = [request for request in self.running if request.active]
        assert len(active) == self.decodes.num_seqs
        assert self.decodes.k_exec == max((request.k_exec for request in active), default=0)
        assert self.decodes.kv_tokens(last) == sum(r.prefill_tokens + last - r.prefill_step for r in active)
        assert len(self.running) <= self.config.max_num_seqs

    # ---------------------------------------------------------------------------------------------- running requests

    def _retire(self, index: int) -> None:
        """Drop from the decodes those whose last step is ``index`` or earlier."""
        heap = self._last_outputs
        while heap and heap[0][0] <= index:
            _, _, num_preemptions, request = heappop(heap)
            if request.num_preemptions != num_preemptions:
                continue
            if request.active:
                self.decodes.leave(request)
            self._leaving.append(request)
            self.planner.is_stale = True

    def _extend_decodes(self, index: int) -> bool:
        """Take the blocks the decodes of step ``index`` need; preempt the newest while short. False if any was."""
        need = self.decodes.new_blocks(index)
        if need <= self.pool.num_free_blocks:
            if need:
                self.pool.take(need)
            return True
        growing = [r for r in self.running if r.active and self.decodes.needs_block(r, index)]
        for request in growing:
            while request in self.running and not self.pool.num_free_blocks:
                self._preempt(next(reversed(self.running)), index)
            if request not in self.running:
                break  # itself the newest; all behind it are gone too
            self.pool.take(1)
        return False

    def _preempt(self, request: SimRequest, index: int) -> None:
        """Free a running request while composing step ``index``; it waits, at the front, to be recomputed."""
        del self.running[request]
        self.kv.free(request, index - 1, is_preempted=True)
        request.num_preemptions += 1
        self.totals.num_preemptions += 1
        self.planner.is_stale = True
        if request is self.partial:
            self.partial = None
            self.totals.num_recomputed_tokens += request.num_computed_tokens
        elif request.active:
            self.decodes.leave(request)
            produced = index - request.prefill_step
            self.totals.num_recomputed_tokens += request.prefill_tokens + produced - 1
            request.prefill_tokens += produced
            request.output_left -= produced
            request.prefill_step = request.finish_step = -1
            view = request.view
            request.view = RequestView(view.request_id, view.arrival_s, request.prefill_tokens, 0, view.k_qos)
        else:
            return  # only its last token was on its way, and still is
        request.num_computed_tokens = 0
        self.waiting.add_preempted(request)

    # ---------------------------------------------------------------------------------------------- prompts of a step

    def _compose_prompts(self, now_s: float, preempted: bool) -> StepPrompts | None:
        """Go on with the unfinished prompt and admit who waits, unless the step has preempted; None if nothing fits."""
        prompts = StepPrompts(self.config.max_num_batched_tokens - self.decodes.num_seqs, self.decodes.k_exec)
        request = self.partial
        if request is not None and prompts.budget:
            chunk = min(request.prefill_tokens - request.num_computed_tokens, prompts.budget)
            if self.kv.extend(request, chunk):
                self._compute(request, chunk, prompts)
            else:
                self._preempt(request, self.next_index)  # itself the newest
                preempted = True
        if not preempted and prompts.budget and self.may_admit(now_s):
            self._admit(now_s, prompts)
        return prompts if prompts.num_tokens else None

    def _admit(self, now_s: float, prompts: StepPrompts) -> None:
        """Ask the policy, and move who may and can enter into the running set and the step."""
        plan = self.planner.make_plan(now_s, prompts, self.running, self.next_index - 1, self.pool.num_free_blocks)
        self._let_in(plan, prompts)
        if not self.running and (plan.order is not None or plan.k_max is not None):
            self.gates_opened += 1
            self._let_in(ADMIT_ALL, prompts)

    def _let_in(self, plan: StepPlan, prompts: StepPrompts) -> None:
        for request in self.planner.candidates(plan):
            chunk = self._enter(request, prompts.budget)
            if not chunk:
                return
            prompts.admitted.append(request)
            self._compute(request, chunk, prompts)
            if not prompts.budget or len(self.running) >= self.config.max_num_seqs:
                return

    def _enter(self, request: SimRequest, budget: int) -> int:
        """Move a waiting request into the running set if it fits; return its first chunk's tokens, 0 if it does not."""
        config = self.config
        units, num_cached, num_free = self.kv.find(request)
        cached_tokens = num_cached * config.block_size
        left = request.prefill_tokens - cached_tokens
        # Recomputing after a preemption may exceed the budget that the prompt alone fits: then it is chunked anyway.
        if left > budget and not config.enable_chunked_prefill and not request.num_preemptions:
            return 0
        watermark = self.watermark_blocks if self.running else 0
        if blocks_for(request.prefill_tokens, config.block_size) - num_cached + watermark > num_free:
            return 0
        chunk = min(left, budget)
        self.kv.begin(request, units, num_cached, chunk)
        self.totals.num_cached_tokens += cached_tokens
        self.waiting.remove(request)
        self.running[request] = None
        return chunk

    def _compute(self, request: SimRequest, chunk: int, prompts: StepPrompts) -> None:
        """Put a chunk of a prompt, whose blocks are taken, into the step."""
        self.partial = None if prompts.add(request, chunk) else request
        if request.prefix_hashes:
            self.kv.keep_computed(request)

    def _note_peak(self) -> None:
        self._least_free_blocks = self.pool.num_free_blocks
        self.totals.kv_peak_blocks = self.pool.num_used_blocks

    def _begin_decoding(self, request: SimRequest, index: int) -> None:
        """Record that step ``index`` completes the prompt: decodes follow from the next step on."""
        request.prefill_step = index
        request.finish_step = index + request.output_left - 1
        heappush(self._last_outputs, (request.finish_step, request.row, request.num_preemptions, request))
        if request.output_left > 1:
            self.decodes.join(request)


def _step_ks(k_max: int, k_floor: int, captured_ks: Sequence[int]) -> list[int]:
    """Return, for a step's largest budget 0..k_max, the budget it runs at: the floor, or the next captured budget."""
    floored = [max(k, k_floor) for k in range(k_max + 1)]
    return [captured_ks[bisect_left(captured_ks, k)] for k in floored] if captured_ks else floored
