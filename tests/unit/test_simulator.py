"""The simulator on worlds small enough to work out by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from simmoe.errors import PolicyError, UsageError
from simmoe.policies.fifo import Fifo
from simmoe.policies.protocols import ADMIT_ALL, BatchPolicy, RoutePolicy, StepPlan
from simmoe.policies.queue_aware import QueueAware
from simmoe.policies.tiers import Tiers
from simmoe.policies.validate import call_from_json
from simmoe.policies.views import RankView, RequestView, StepView
from simmoe.profiles.shape import ConstantStepCost, StepCost, StepShape
from simmoe.simulator.config import EXECUTOR_BACKENDS, EngineConfig, FrontEndConfig, SimConfig
from simmoe.simulator.result import SimResult
from simmoe.simulator.simulation import simulate
from simmoe.traces.workload import Workload
from tests.support.worlds import HostedStepCost


def workload(*rows: tuple[float, int, int, int], hashes: list[tuple[int, ...]] | None = None) -> Workload:
    """Build a workload from rows of (arrival_s, prompt_tokens, output_tokens, k_qos); hash blocks of 8 tokens."""
    arrival, prompt, output, k = (np.array(column) for column in zip(*rows, strict=True))
    return Workload(
        [str(row) for row in range(len(rows))],
        arrival.astype(np.float64),
        prompt,
        output,
        k,
        prefix_hashes=hashes,
        prefix_block_tokens=8,
    )


def run(
    load: Workload,
    cost: StepCost | None = None,
    batch: Callable[[], BatchPolicy] = Fifo,
    route: Callable[[], RoutePolicy] = QueueAware,
    front_end: FrontEndConfig | None = None,
    num_ranks: int = 1,
    k_granularity: int = 1,
    **engine: Any,
) -> SimResult:
    config = SimConfig(
        num_ranks=num_ranks,
        k_max=8,
        k_granularity=k_granularity,
        engine=EngineConfig(**{"block_size": 4, "num_gpu_blocks": 1001, "async_scheduling": False, **engine}),
        front_end=front_end or FrontEndConfig(publish_interval_s=0.0),
        record_steps=True,
    )
    return simulate(load, config, cost or ConstantStepCost(1.0), lambda _: batch(), lambda _: route())


def steps_of(result: SimResult, *columns: str) -> list[tuple[Any, ...]]:
    assert result.steps is not None
    return list(zip(*(result.steps[name].tolist() for name in columns), strict=True))


def test_a_lone_request_prefills_then_decodes() -> None:
    result = run(workload((0.0, 10, 3, 5)))
    assert steps_of(result, "start_s", "num_prefill_tokens", "num_decode_tokens", "kv_tokens", "k_exec") == [
        (0.0, 10, 0, 0, 5),
        (1.0, 0, 1, 11, 5),
        (2.0, 0, 1, 12, 5),
    ]
    row = {name: column[0] for name, column in result.requests.items()}
    assert (row["scheduled_s"], row["first_token_s"], row["finished_s"]) == (0.0, 1.0, 3.0)


def test_a_prompt_above_the_token_budget_is_chunked_and_its_attention_counted() -> None:
    shapes: list[StepShape] = []

    class Spy(ConstantStepCost):
        def step_s(self, shape: StepShape, /) -> float:
            shapes.append(shape)
            return super().step_s(shape)

    run(workload((0.0, 20, 1, 5)), Spy(1.0), max_num_batched_tokens=8, max_num_seqs=8)
    assert [(s.num_prefill_tokens, s.num_prefill_seqs) for s in shapes] == [(8, 1), (8, 1), (4, 1)]
    assert sum(s.prefill_kv_pairs for s in shapes) == 20 * 21 // 2, "every query meets every key before it, once"


def test_a_running_decode_raises_the_budget_of_every_step_it_is_in() -> None:
    result = run(workload((0.0, 4, 4, 8), (0.5, 4, 2, 1)))
    assert steps_of(result, "k_exec") == [(8,), (8,), (8,), (8,)]
    assert result.ranks[0].qos_slots == 8 * (4 + 3) + 1 * (4 + 1)


def test_async_scheduling_composes_a_step_ahead() -> None:
    """A request that arrives while a step runs enters the step after the one that has been composed already."""
    rows = ((0.0, 4, 9, 1), (1.5, 4, 2, 1))
    assert run(workload(*rows)).requests["scheduled_s"].tolist() == [0.0, 2.0]
    assert run(workload(*rows), async_scheduling=True).requests["scheduled_s"].tolist() == [0.0, 3.0]


def test_async_scheduling_runs_no_step_after_the_last_token() -> None:
    result = run(workload((0.0, 4, 5, 1)), async_scheduling=True)
    assert result.ranks[0].num_steps == 5
    assert result.end_s == 5.0


#: A host that takes 5 s to launch a step with prompts, 2 s to launch another, and 1 s a sequence to take its output in;
#: the device is done with either in 1 s, and so waits for every launch.
LAUNCHING = HostedStepCost(launch_prompt_s=5.0, launch_decode_s=2.0, update_seq_s=1.0, base_s=1.0)


@pytest.mark.parametrize(
    ("backend", "starts_s", "ends_s", "first_token_s"),
    [
        # It launches a prompt 0 to 5 and a decode step 5 to 7, takes the prompt in 7 to 8, launches the other 8 to 13,
        # takes the decode step in 13 to 14, launches the last step 14 to 16, and takes the other prompt in 16 to 18.
        ("uni", [0.0, 5.0, 8.0, 14.0], [5.0, 7.0, 13.0, 16.0], [8.0, 18.0]),
        # Workers launch 0 to 5, 5 to 7, 7 to 12 and 12 to 14. The prompt is taken in 5 to 6, the decode step 7 to 8,
        # the other prompt, beside a second sequence, 12 to 14.
        ("mp", [0.0, 5.0, 7.0, 12.0], [5.0, 7.0, 12.0, 14.0], [6.0, 14.0]),
    ],
)
def test_workers_launch_while_the_engine_takes_outputs_in(
    backend: str, starts_s: list[float], ends_s: list[float], first_token_s: list[float]
) -> None:
    load = workload((0.0, 4, 3, 1), (5.5, 4, 2, 1))
    result = run(load, LAUNCHING, async_scheduling=True, distributed_executor_backend=backend)
    steps = steps_of(result, "start_s", "duration_s", "num_prefill_tokens", "num_decode_tokens")
    assert [step[2:] for step in steps] == [(4, 0), (0, 1), (4, 1), (0, 1)]
    assert [step[0] for step in steps] == starts_s
    assert [step[0] + step[1] for step in steps] == ends_s
    assert result.requests["first_token_s"].tolist() == first_token_s


@pytest.mark.parametrize(("backend", "scheduled_s"), [("uni", 5.0), ("mp", 7.0)])
def test_an_engine_with_workers_composes_two_steps_at_once(backend: str, scheduled_s: float) -> None:
    """A request that arrives while the first is launched is too late for the second."""
    load = workload((0.0, 4, 9, 1), (1.0, 4, 2, 1))
    result = run(load, LAUNCHING, async_scheduling=True, distributed_executor_backend=backend)
    assert result.requests["scheduled_s"].tolist() == [0.0, scheduled_s]


def test_a_synchronous_engine_launches_while_the_device_runs_and_then_takes_in() -> None:
    """The device can begin a graph 1.5 s into its launch of 2 s, and then takes 1 s and an eighth for each KV token; a
    prompt begins at once and is done before its launch of 5 s is. Taking in is 1 s a sequence."""
    cost = HostedStepCost(5.0, 2.0, 1.0, wait_share=0.75, base_s=1.0, per_pair_s=0.0, per_kv_s=0.125)
    result = run(workload((0.0, 4, 3, 1), (6.5, 2, 1, 1)), cost)
    steps = steps_of(result, "start_s", "duration_s", "num_prefill_tokens", "num_decode_tokens", "kv_tokens")
    assert steps == [
        (0.0, 5.0, 4, 0, 0),  # taken in at 6, when the next is composed
        (7.5, 1.625, 0, 1, 5),  # done at 9.125, taken in at 10.125
        (10.125, 5.0, 2, 1, 6),  # and that of two sequences at 17.125
    ]
    assert result.requests["scheduled_s"].tolist() == [0.0, 10.125]
    assert result.requests["first_token_s"].tolist() == [6.0, 17.125]
    assert result.requests["finished_s"].tolist() == [17.125, 17.125]


def test_synchronous_scheduling_is_alike_with_either_executor() -> None:
    load = workload((0.0, 4, 9, 1), (1.0, 4, 2, 1))
    one, other = (run(load, LAUNCHING, distributed_executor_backend=backend).requests for backend in EXECUTOR_BACKENDS)
    assert [column.tolist() for column in one.values()] == [column.tolist() for column in other.values()]


def test_an_arrival_at_a_boundary_enters_the_step_composed_there() -> None:
    assert run(workload((0.0, 4, 3, 1), (1.0, 4, 1, 1))).requests["scheduled_s"].tolist() == [0.0, 1.0]


def test_requests_that_arrive_together_share_a_step() -> None:
    result = run(workload((0.0, 4, 1, 1), (0.0, 4, 1, 2), (0.0, 4, 1, 3)), async_scheduling=True)
    assert steps_of(result, "num_prefill_tokens", "k_exec") == [(12, 3)]


def test_out_of_blocks_the_newest_is_preempted_and_recomputed_with_its_outputs() -> None:
    """Two prompts of 8 tokens fill 4 of 5 blocks; the third block the older needs evicts the newer."""
    result = run(workload((0.0, 8, 8, 1), (0.0, 8, 6, 1)), num_gpu_blocks=6)
    assert result.requests["num_preemptions"].tolist() == [0, 1]
    assert (result.requests["status"] == "finished").all()
    # Step 0 prefills both, step 1 gives the last free block to the older: the newer, one token out, must go.
    assert steps_of(result, "num_prefill_tokens", "num_decode_tokens")[:2] == [(16, 0), (0, 1)]
    assert result.ranks[0].num_recomputed_tokens == 8
    assert result.requests["first_token_s"].tolist() == [1.0, 1.0], "a first token is not counted twice"


def test_admission_reserves_room_for_the_whole_prompt() -> None:
    """20 tokens need 5 blocks and 4 are free, so the second request waits although its first chunk would fit."""
    result = run(workload((0.0, 4, 12, 1), (0.0, 20, 1, 1)), num_gpu_blocks=6, max_num_batched_tokens=8, max_num_seqs=4)
    assert result.requests["scheduled_s"][1] == result.requests["finished_s"][0]


def test_what_can_never_fit_is_rejected_counted_and_lets_the_others_finish() -> None:
    load = workload((0.0, 100, 10, 1), (0.0, 4, 2, 1), (0.0, 50, 1, 1))
    result = run(load, num_gpu_blocks=21, enable_chunked_prefill=False, max_num_batched_tokens=32, max_num_seqs=8)
    assert result.requests["status"].tolist() == ["rejected", "finished", "rejected"]
    assert sorted(result.notes["rejected"].values()) == [1, 1]
    assert np.isnan(result.requests["dispatched_s"][[0, 2]]).all()
    counts = result.record({}).counts()
    assert counts["injected"] == counts["finished"] + counts["rejected"] == 3


def test_a_request_that_just_fits_the_cache_finishes_alone() -> None:
    result = run(workload((0.0, 17, 4, 1), (0.0, 17, 4, 1)), num_gpu_blocks=6)
    assert (result.requests["status"] == "finished").all()


def test_one_output_token_finishes_with_its_first() -> None:
    requests = run(workload((0.0, 4, 1, 1))).requests
    assert requests["first_token_s"][0] == requests["finished_s"][0] == 1.0


def test_an_unsplit_model_rounds_budgets_up_and_keeps_what_was_asked() -> None:
    result = run(workload((0.0, 4, 1, 5)), k_granularity=4)
    assert steps_of(result, "k_exec") == [(8,)]
    assert (result.ranks[0].routed_slots, result.ranks[0].qos_slots) == (32, 20)


def test_front_end_delays_show_on_the_clients_clock_only() -> None:
    front_end = FrontEndConfig(ingress_s=0.25, egress_s=0.5)
    requests = run(workload((0.0, 4, 2, 1)), front_end=front_end).requests
    times = [requests[name][0] for name in ("arrival_s", "dispatched_s", "scheduled_s", "first_token_s", "finished_s")]
    assert times == [0.0, 0.25, 0.25, 1.75, 2.75]


def test_a_front_end_serves_requests_one_by_one_and_hands_tokens_out_one_by_one() -> None:
    front_end = FrontEndConfig(ingress_service_s=0.25, egress_per_token_s=0.125)
    requests = run(workload((0.0, 4, 1, 1), (0.0, 4, 1, 1), (5.0, 4, 1, 1)), front_end=front_end).requests
    assert requests["dispatched_s"].tolist() == [0.25, 0.5, 5.25]
    first_s, second_s, third_s = requests["first_token_s"].tolist()
    assert first_s == 0.25 + 1.0 + 0.125  # a step of its own, since the other came after it had begun
    assert second_s == 0.25 + 2.0 + 0.125
    assert third_s == 5.25 + 1.0 + 0.125


def test_an_idle_rank_wakes_up_and_a_busy_one_takes_along_what_has_come() -> None:
    """Steps of a second, each composed as the one before ends. The first wakes the rank, the second comes as it wakes
    and the third at the very instant that it has: all join one step. The fourth comes while that runs, the last to an
    idle rank."""
    front_end = FrontEndConfig(publish_interval_s=0.0, wakeup_s=0.25)
    result = run(workload(*((at_s, 4, 1, 1) for at_s in (0.0, 0.125, 0.25, 0.375, 4.0))), front_end=front_end)
    assert result.requests["dispatched_s"].tolist() == [0.0, 0.125, 0.25, 0.375, 4.0]
    assert result.requests["scheduled_s"].tolist() == [0.25, 0.25, 0.25, 1.25, 4.25]
    assert result.ranks[0].busy_s == 3.0


def test_a_rank_that_is_halted_as_it_wakes_up_has_done_nothing() -> None:
    config = SimConfig(k_max=8, front_end=FrontEndConfig(wakeup_s=0.25), max_time_s=0.2)
    result = simulate(workload((0.0, 4, 1, 1)), config, ConstantStepCost(1.0), lambda _: Fifo(), lambda _: QueueAware())
    assert result.requests["status"].tolist() == ["queued"]
    assert (result.ranks[0].num_steps, result.ranks[0].busy_s) == (0, 0.0)


# ------------------------------------------------------------------------------------------------------- prefix cache


def test_a_cached_prefix_is_not_computed_again_at_the_same_budget_only() -> None:
    blocks = (1, 2, 3)
    load = workload((0.0, 30, 1, 4), (10.0, 30, 1, 4), (20.0, 30, 1, 5), hashes=[blocks, blocks, blocks])
    result = run(load, enable_prefix_caching=True)
    assert steps_of(result, "num_prefill_tokens") == [(30,), (6,), (30,)]
    assert result.ranks[0].num_cached_tokens == 24
    assert run(load).ranks[0].num_cached_tokens == 0


def test_a_wholly_cached_prompt_still_computes_its_last_tokens() -> None:
    result = run(workload((0.0, 16, 1, 4), (10.0, 16, 1, 4), hashes=[(1, 2), (1, 2)]), enable_prefix_caching=True)
    assert steps_of(result, "num_prefill_tokens") == [(16,), (8,)]


def test_cached_blocks_give_way_to_running_requests_oldest_first() -> None:
    rows = ((0.0, 16, 1, 4), (10.0, 16, 1, 4), (20.0, 24, 1, 4), (30.0, 16, 1, 4))
    load = workload(*rows, hashes=[(1, 2), (8, 9), (), (8, 9)])
    result = run(load, enable_prefix_caching=True, num_gpu_blocks=11)
    # 10 blocks: both prompts stay cached in 8; the third needs 6, so it evicts the first prompt's two units (4 blocks).
    assert steps_of(result, "num_prefill_tokens") == [(16,), (16,), (24,), (8,)]


def test_a_preempted_request_finds_what_is_left_of_its_own_outputs() -> None:
    """10 blocks of 4 are full when both have 20 tokens; the older grows on by 3 and then has all of its 31.

    It takes the newer one's last block, which ends in no whole hash block, and the second of its hash blocks. Of the
    21 tokens to compute again, 13 of them outputs, the first 8 are found.
    """
    load = workload((0.0, 8, 24, 4), (0.0, 8, 24, 4))
    result = run(load, enable_prefix_caching=True, num_gpu_blocks=11)
    assert [tokens for (tokens,) in steps_of(result, "num_prefill_tokens") if tokens] == [16, 13]
    assert (result.ranks[0].num_preemptions, result.ranks[0].num_cached_tokens) == (1, 8)


def test_hash_blocks_must_be_whole_kv_blocks() -> None:
    with pytest.raises(UsageError, match="block_size 3 does not divide"):
        run(workload((0.0, 16, 1, 4), hashes=[(1, 2)]), enable_prefix_caching=True, block_size=3)


# --------------------------------------------------------------------------------------------------------- front ends


class Witness:
    """Sends everything to rank 0 and keeps what it was shown."""

    def __init__(self) -> None:
        self.seen: list[list[RankView]] = []

    def route(self, request: RequestView, ranks: Sequence[RankView], now_s: float, /) -> int:
        self.seen.append(list(ranks))
        return 0


def test_a_front_end_knows_the_last_publication_and_what_it_sent_since() -> None:
    witness = Witness()
    rows = [(0.0, 4, 50, 3), (0.25, 4, 1, 1), (0.26, 4, 1, 1), (1.25, 4, 1, 1)]
    run(workload(*rows), route=lambda: witness, front_end=FrontEndConfig(publish_interval_s=0.5), num_ranks=2)
    zero = [ranks[0] for ranks in witness.seen]
    # (waiting, running, in flight, published): nothing is published before 0.5 s, what was sent counts at once.
    assert [(v.num_waiting, v.num_running, v.num_inflight, v.published_s) for v in zero] == [
        (0, 0, 0, 0.0),
        (1, 0, 1, 0.0),
        (2, 0, 2, 0.0),
        (2, 1, 3, 1.0),  # before the step that ends there
    ]
    assert zero[-1].k_running == 3
    assert all(ranks[1].num_inflight == 0 for ranks in witness.seen)


def test_requests_at_the_instant_of_a_publication_see_those_sent_before_them() -> None:
    witness = Witness()
    rows = [(0.0, 4, 50, 3), (0.0, 4, 1, 1), (0.5, 4, 1, 1), (0.5, 4, 1, 1)]
    run(workload(*rows), route=lambda: witness, front_end=FrontEndConfig(publish_interval_s=0.5))
    assert [(ranks[0].num_waiting, ranks[0].num_running) for ranks in witness.seen] == [(0, 0), (1, 0), (0, 2), (1, 2)]


def test_a_fresh_view_counts_nothing_twice() -> None:
    witness = Witness()
    run(workload((0.0, 4, 9, 3), (0.0, 4, 9, 3), (0.5, 4, 9, 3)), route=lambda: witness)
    assert [(ranks[0].num_waiting, ranks[0].num_running) for ranks in witness.seen] == [(0, 0), (1, 0), (0, 2)]


# ----------------------------------------------------------------------------------------------------------- policies


class Holding:
    """Lets nobody in until 10 s have passed."""

    def plan(self, view: StepView, /) -> StepPlan:
        return ADMIT_ALL if view.now_s >= 10.0 else StepPlan(order=(), wake_at_s=10.0)


def test_a_plan_may_hold_requests_back_while_others_run_but_never_idle_the_rank() -> None:
    result = run(workload((0.0, 4, 30, 1), (0.5, 4, 1, 1)), batch=Holding)
    assert result.requests["scheduled_s"].tolist() == [0.0, 10.0]
    assert result.notes["gates_opened"] == 1


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        (StepPlan(order=("nobody",)), "'nobody'"),
        (StepPlan(order=("0", "0")), "twice"),
        (StepPlan(wake_at_s=float("nan")), "wake_at_s nan"),
        (StepPlan(k_max=-1), "k_max -1"),
        (None, "returned None"),
        (ZeroDivisionError("no"), r"test_simulator.py:\d+: ZeroDivisionError: no"),
    ],
)
def test_a_nonsense_plan_is_named_with_the_view_that_led_to_it(answer: Any, complaint: str) -> None:
    class Wrong:
        def plan(self, view: StepView, /) -> StepPlan:
            if isinstance(answer, Exception):
                raise answer
            return answer  # type: ignore[no-any-return]

    with pytest.raises(PolicyError, match=complaint) as caught:
        run(workload((0.0, 4, 30, 7)), batch=Wrong)
    assert "Wrong" in str(caught.value)
    call, deployment = call_from_json(caught.value.evidence, "evidence")
    assert isinstance(call, StepView) and [request.k_qos for request in call.waiting] == [7]
    assert deployment["k_max"] == 8


def test_a_rank_that_does_not_exist_is_named() -> None:
    class Lost:
        def route(self, request: RequestView, ranks: Sequence[RankView], now_s: float, /) -> int:
            return 7

    with pytest.raises(PolicyError, match=r"Lost.*returned 7.*0, 1"):
        run(workload((0.0, 4, 30, 7)), route=Lost, num_ranks=2)


def test_policies_see_running_requests_advance() -> None:
    seen: list[tuple[int, int]] = []

    class Looking:
        def plan(self, view: StepView, /) -> StepPlan:
            seen.extend((r.prompt_tokens, r.num_computed_tokens) for r in view.running)
            assert len(view.running) == len(list(view.running)) == len(view.running[:])
            return ADMIT_ALL

    run(workload((0.0, 10, 9, 1), (2.5, 4, 1, 1)), batch=Looking)
    assert seen == [(10, 12)], "ten prompt tokens and the two output tokens computed by 3 s"


@pytest.mark.parametrize(("believed_s", "merged"), [(lambda n, k: 1.0, True), (lambda n, k: float(k * n), False)])
def test_a_policy_may_believe_other_step_times_than_there_are(
    believed_s: Callable[[int, int], float], merged: bool
) -> None:
    """Two tiers merge where a larger step is believed to cost no more; steps take what they take either way."""
    config = SimConfig(k_max=8, engine=EngineConfig(block_size=4, num_gpu_blocks=1001), record_steps=True)
    load = workload((0.0, 4, 1, 2), (0.0, 4, 1, 8))
    result = simulate(load, config, ConstantStepCost(1.0), Tiers, lambda _: QueueAware(), prefill_s=believed_s)
    expected = [(8, 8, 1.0)] if merged else [(4, 2, 1.0), (4, 8, 1.0)]
    assert steps_of(result, "num_prefill_tokens", "k_exec", "duration_s") == expected


# ------------------------------------------------------------------------------------------------------------- limits


def test_budgets_beyond_the_deployment_are_named() -> None:
    with pytest.raises(UsageError, match=r"request '1' \(row 1\) asks for k_qos 9.*1..8"):
        run(workload((0.0, 4, 1, 1), (0.0, 4, 1, 9)))


@pytest.mark.parametrize(("captured_ks", "refusal"), [((4, 2), "ascending"), ((0, 8), "ascending"), ((4,), "k_max, 8")])
def test_captured_budgets_ascend_to_the_largest(captured_ks: tuple[int, ...], refusal: str) -> None:
    with pytest.raises(UsageError, match=rf"captured_ks is .*{refusal}"):
        SimConfig(k_max=8, engine=EngineConfig(captured_ks=captured_ks))


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("max_num_seqs", 0),
        ("max_num_seqs", 9999),
        ("block_size", 0),
        ("num_gpu_blocks", 1),
        ("watermark", 1.0),
        ("distributed_executor_backend", "ray"),
    ],
)
def test_engine_settings_out_of_range_are_named(setting: str, value: object) -> None:
    with pytest.raises(UsageError, match=f"{setting} is {value}"):
        EngineConfig(**{setting: value})  # type: ignore[arg-type]


def test_an_empty_workload_gives_an_empty_result() -> None:
    empty = np.zeros(0, dtype=np.int64)
    result = run(Workload([], np.zeros(0), empty, empty, empty))
    assert (len(result.requests["status"]), result.end_s, result.ranks[0].num_steps) == (0, 0.0, 0)
