"""What must hold for every workload, engine and policy the simulator is given."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simpy.events import EventPriority

from simmoe.policies.protocols import StepPlan
from simmoe.policies.registry import parse_policy
from simmoe.policies.views import StepView
from simmoe.profiles.shape import LinearStepCost, StepCost
from simmoe.profiles.step_cost import ProfileStepCost, Surfaces
from simmoe.profiles.table import StepTable
from simmoe.simulator.clock import Alarm, Callback, Clock
from simmoe.simulator.config import EXECUTOR_BACKENDS, EngineConfig, FrontEndConfig, SimConfig
from simmoe.simulator.result import SimResult
from simmoe.simulator.scheduler import Scheduler
from simmoe.simulator.simulation import simulate
from simmoe.simulator.step import Step
from simmoe.traces.workload import Workload
from tests.laws.test_profile_laws import tables
from tests.support.reference_engine import ReferenceEngine, fates
from tests.support.worlds import K_MAX, HostedStepCost, costs, engine_configs, workloads

TIMES = ("dispatched_s", "scheduled_s", "first_token_s", "finished_s")
BATCH = ("fifo", "tiers", "fixed-k", "tiers,max_wait_s=0.05")
ROUTE = ("round-robin", "queue-aware", "vllm-0.32", "lanes")

#: Who launches, and whether a step is composed while another runs.
LOOPS: list[dict[str, Any]] = [
    *({"distributed_executor_backend": backend} for backend in EXECUTOR_BACKENDS),
    {"async_scheduling": False},
]

choices = st.builds(lambda batch, route: f"{batch}+{route}", st.sampled_from(BATCH), st.sampled_from(ROUTE))
WAKEUPS_S = st.sampled_from([0.0, 0.001, 0.0023])
front_ends = st.builds(
    FrontEndConfig,
    publish_interval_s=st.sampled_from([0.0, 0.01, 0.1]),
    num_front_ends=st.integers(1, 2),
    ingress_s=st.sampled_from([0.0, 0.003]),
    egress_s=st.sampled_from([0.0, 0.002]),
    ingress_service_s=st.sampled_from([0.0, 0.0007]),
    egress_per_token_s=st.sampled_from([0.0, 0.0013]),
    wakeup_s=WAKEUPS_S,
)


def front_end_like(config: SimConfig, **changed: float) -> SimConfig:
    return dataclasses.replace(config, front_end=dataclasses.replace(config.front_end, **changed))  # type: ignore[arg-type]


@st.composite
def sim_configs(draw: st.DrawFn, /, **fixed: Any) -> SimConfig:
    return SimConfig(
        **{
            "num_ranks": draw(st.integers(1, 3)),
            "k_max": K_MAX,
            "k_granularity": draw(st.sampled_from([1, 4])),
            "engine": draw(engine_configs()),
            "front_end": draw(front_ends),
            "record_steps": True,
            **fixed,
        }
    )


def run(workload: Workload, config: SimConfig, cost: StepCost, policy: str, **options: Any) -> SimResult:
    choice = parse_policy(policy)
    return simulate(workload, config, cost, choice.batch, choice.route, **options)


def assert_equal_tables(a: Any, b: Any) -> None:
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def assert_bit_equal(workload: Workload, config: SimConfig, cost: StepCost, policy: str) -> SimResult:
    """Run with fast-forward and step by step, compare every result, and return the first."""
    fast = run(workload, config, cost, policy)
    slow = run(workload, dataclasses.replace(config, fast_forward=False), cost, policy)
    assert fast.steps is not None and slow.steps is not None
    assert_equal_tables(fast.requests, slow.requests)
    assert_equal_tables(fast.steps, slow.steps)
    assert fast.ranks == slow.ranks
    assert (fast.end_s, fast.policy_state, fast.notes) == (slow.end_s, slow.policy_state, slow.notes)
    return fast


@given(workloads(), engine_configs(), costs(), st.sampled_from(["fifo", "tiers", "fixed-k"]), WAKEUPS_S)
@settings(max_examples=300)
def test_agrees_with_vllms_rules_read_line_by_line(
    workload: Workload, engine: EngineConfig, cost: LinearStepCost, policy: str, wakeup_s: float
) -> None:
    config = SimConfig(num_ranks=1, k_max=K_MAX, engine=engine, front_end=FrontEndConfig(wakeup_s=wakeup_s))
    result = run(workload, config, cost, policy)
    reference = ReferenceEngine(engine, _batch(policy, config, cost), cost, wakeup_s)
    expected = fates(reference.run(workload))
    assert_equal_tables({name: result.requests[name] for name in expected}, expected)
    assert result.ranks[0].num_steps == len(reference.steps)
    assert result.ranks[0].routed_slots == sum(s.shape.num_tokens * s.shape.k_exec for s in reference.steps)


@given(workloads(hashes=True), sim_configs(), costs(), choices, st.booleans())
@settings(max_examples=300)
def test_fast_forward_is_bit_equal_to_step_by_step(
    workload: Workload, config: SimConfig, cost: LinearStepCost, policy: str, caching: bool
) -> None:
    config = dataclasses.replace(config, engine=dataclasses.replace(config.engine, enable_prefix_caching=caching))
    fast = assert_bit_equal(workload, config, cost, policy)
    unrecorded = run(workload, dataclasses.replace(config, record_steps=False), cost, policy)
    assert_equal_tables(fast.requests, unrecorded.requests)
    assert (fast.ranks, fast.policy_state) == (unrecorded.ranks, unrecorded.policy_state)


@given(workloads(max_requests=4), costs(), st.sampled_from([20, 50]), st.sampled_from(LOOPS))
@settings(max_examples=300)
def test_long_stretches_are_bit_equal_too(
    workload: Workload, cost: LinearStepCost, times: int, loop: dict[str, Any]
) -> None:
    """Of more steps than a loop goes through, where the host waits for the device, where it does not, and in turn."""
    longer = dataclasses.replace(workload, output_tokens=times * workload.output_tokens)
    engine = EngineConfig(num_gpu_blocks=20_000, **loop)
    config = SimConfig(k_max=K_MAX, engine=engine, record_steps=True)
    assert_bit_equal(longer, config, cost, "fifo+round-robin")


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(1, 90)), min_size=1, max_size=6),
    st.tuples(*[st.integers(0, 8)] * 3, st.integers(1, 8), st.sampled_from([0.0, 0.25, 1.0])),
    st.sampled_from([0.0, 0.0004]),
    st.sampled_from(LOOPS),
)
@settings(max_examples=400)
def test_stretches_are_bit_equal_whoever_waits_for_whom(
    rows: list[tuple[int, int]], parts: tuple[int, int, int, int, float], per_pair_s: float, loop: dict[str, Any]
) -> None:
    """Launch, update and device each the longest in turn, or as long as one another; prompts longer, or not."""
    launch_prompt, launch_decode, update_seq, base, wait_share = parts
    cost = HostedStepCost(0.004 * launch_prompt, 0.0005 * launch_decode, 0.00025 * update_seq, wait_share,
                          base_s=0.0005 * base, per_pair_s=per_pair_s, per_kv_s=1e-8)  # fmt: skip
    gaps, outputs = (np.array(column) for column in zip(*rows, strict=True))
    ones = np.ones_like(outputs)
    workload = Workload(
        [str(row) for row in range(len(rows))], 0.00071 * (np.cumsum(gaps) - gaps[0]), 40 * ones, outputs, ones
    )
    config = SimConfig(k_max=K_MAX, engine=EngineConfig(**loop), record_steps=True)
    assert_bit_equal(workload, config, cost, "fifo+round-robin")


@given(workloads(), sim_configs(), tables(), choices)
@settings(max_examples=200)
def test_what_lay_outside_the_profile_is_counted_alike_in_both_modes(
    workload: Workload, config: SimConfig, table: StepTable, policy: str
) -> None:
    """A stretch is looked for on a line whose steps an arrival may prevent; only those that run are counted."""
    seen = []
    for fast_forward in (True, False):
        cost = ProfileStepCost(Surfaces.of(table), config.engine.async_scheduling)
        result = run(workload, dataclasses.replace(config, fast_forward=fast_forward), cost, policy)
        seen.append((result, cost.extrapolated))
    (fast, fast_outside), (slow, slow_outside) = seen
    assert_equal_tables(fast.requests, slow.requests)
    assert fast_outside == slow_outside


@given(workloads(), sim_configs(), costs(), choices, st.floats(0.001, 0.5))
@settings(max_examples=150)
def test_stopping_the_clock_leaves_the_past_as_it_was(
    workload: Workload, config: SimConfig, cost: LinearStepCost, policy: str, horizon_s: float
) -> None:
    config = front_end_like(config, egress_per_token_s=0.0)  # so that a finish tells the end of its step
    whole = run(workload, config, cost, policy)
    cut = dataclasses.replace(config, max_time_s=horizon_s)
    fast = run(workload, cut, cost, policy)
    slow = run(workload, dataclasses.replace(cut, fast_forward=False), cost, policy)
    assert_equal_tables(fast.requests, slow.requests)
    assert fast.ranks == slow.ranks
    egress = config.front_end.egress_s
    arrived = len(fast.requests["status"])
    assert arrived == (workload.arrival_s < horizon_s).sum()
    assert fast.notes["requests_after_the_end"] == len(workload) - arrived
    for name in TIMES:
        shift = egress if name in ("first_token_s", "finished_s") else 0.0
        before = whole.requests[name][:arrived] - shift < horizon_s
        np.testing.assert_array_equal(fast.requests[name][before], whole.requests[name][:arrived][before])
        assert np.isnan(fast.requests[name][~before]).all()


@given(workloads(hashes=True), sim_configs(), costs(), choices, st.booleans())
@settings(max_examples=200)
def test_requests_and_blocks_are_conserved_after_each_step(
    workload: Workload, config: SimConfig, cost: LinearStepCost, policy: str, caching: bool
) -> None:
    config = dataclasses.replace(config, engine=dataclasses.replace(config.engine, enable_prefix_caching=caching))
    schedulers: dict[int, Scheduler] = {}

    def check(scheduler: Scheduler) -> None:
        scheduler.check_integrity()
        schedulers[scheduler.dp_rank] = scheduler

    result = run(workload, config, cost, policy, after_compose=check)
    counts = result.record({}).counts()
    assert counts["injected"] == len(workload) == counts["finished"] + counts["rejected"]
    for scheduler in schedulers.values():
        assert scheduler.pool.num_used_blocks == 0
        assert not scheduler.running and not scheduler.waiting


@given(workloads(), sim_configs(), costs(), choices)
@settings(max_examples=200)
def test_steps_keep_within_the_engines_limits(
    workload: Workload, config: SimConfig, cost: LinearStepCost, policy: str
) -> None:
    result = run(workload, config, cost, policy)
    steps = result.steps
    assert steps is not None
    tokens = steps["num_prefill_tokens"] + steps["num_decode_tokens"]
    assert (tokens <= config.engine.max_num_batched_tokens).all()
    assert (tokens >= 1).all()
    assert (steps["num_running"] <= config.engine.max_num_seqs).all()
    assert (steps["duration_s"] > 0).all(), "no event storm at one instant"
    assert (steps["k_exec"] <= config.k_max).all()
    np.testing.assert_array_equal(steps["routed_slots"], tokens * steps["k_exec"])
    for rank, totals in enumerate(result.ranks):
        mine = steps["dp_rank"] == rank
        assert totals.num_steps == mine.sum()
        assert totals.routed_slots == steps["routed_slots"][mine].sum()
        assert totals.routed_slots >= totals.qos_slots, "uniform execution serves at least what was asked for"
        starts, ends = steps["start_s"][mine], (steps["start_s"] + steps["duration_s"])[mine]
        assert (starts[1:] >= ends[:-1]).all(), "a rank runs one step at a time"


@given(*[st.floats(0, 1e6), st.floats(1e-9, 1e3), st.floats(0, 1e3)])
def test_a_step_held_up_by_the_host_ends_where_it_does(start_s: float, device_s: float, held_s: float) -> None:
    step = Step(0, (device_s, 0.0, 0.0, 0.0), 1, 1, 1, 1, 0, 1)
    end_s = start_s + device_s + held_s
    step.start_s, step.end_s = start_s, end_s
    assert step.start_s + step.duration_s <= end_s
    assert abs(step.duration_s - (end_s - start_s)) <= np.spacing(end_s)


@given(workloads(), sim_configs(k_granularity=1), costs(hosted=False), choices)
@settings(max_examples=200)
def test_every_scheduled_request_gets_at_least_its_budget(
    workload: Workload, config: SimConfig, cost: LinearStepCost, policy: str
) -> None:
    config = front_end_like(config, egress_per_token_s=0.0)  # so that a finish tells the end of its step
    result = run(workload, config, cost, policy)
    steps, requests = result.steps, result.requests
    assert steps is not None
    for row in np.flatnonzero(requests["status"] == "finished"):
        # From the first start to the last token the request is in every step of its rank, unless it was preempted.
        if requests["num_preemptions"][row]:
            continue
        inside = (
            (steps["dp_rank"] == requests["dp_rank"][row])
            & (steps["start_s"] >= requests["scheduled_s"][row])
            & (steps["start_s"] + steps["duration_s"] <= requests["finished_s"][row] - config.front_end.egress_s)
        )
        assert (steps["k_exec"][inside] >= requests["k_qos"][row]).all()


@given(workloads(), sim_configs(), costs(), choices)
@settings(max_examples=200)
def test_phases_follow_one_another_and_every_request_leaves(
    workload: Workload, config: SimConfig, cost: LinearStepCost, policy: str
) -> None:
    result = run(workload, config, cost, policy)
    requests = result.requests
    done = requests["status"] == "finished"
    times = np.column_stack([requests["arrival_s"], *(requests[name] for name in TIMES)])[done]
    assert np.isfinite(times).all()
    assert (np.diff(times, axis=1) >= 0).all()
    served_s = config.front_end.ingress_service_s
    passed_s = requests["arrival_s"] + config.front_end.ingress_s + served_s
    for rank in range(config.num_ranks):
        mine = done & (requests["dp_rank"] == rank)
        dispatched_s = requests["dispatched_s"][mine]
        if not served_s:
            np.testing.assert_array_equal(dispatched_s, passed_s[mine])
        assert (dispatched_s >= passed_s[mine]).all()
        assert (np.diff(dispatched_s) >= served_s - 1e-12).all()
    assert np.isnan(requests["dispatched_s"][requests["status"] == "rejected"]).all()
    one = done & (requests["output_tokens"] == 1)
    np.testing.assert_array_equal(requests["first_token_s"][one], requests["finished_s"][one])


@given(workloads(), engine_configs(num_gpu_blocks=2000), costs(), st.sampled_from(["fifo", "tiers", "fixed-k"]))
@settings(max_examples=200)
def test_first_come_first_served_within_a_tier(
    workload: Workload, engine: EngineConfig, cost: LinearStepCost, policy: str
) -> None:
    config = SimConfig(num_ranks=1, k_max=K_MAX, engine=engine)
    requests = run(workload, config, cost, policy).requests
    for k in range(1, K_MAX + 1):
        tier = (requests["k_qos"] == k) & (requests["status"] == "finished")
        assert (np.diff(requests["scheduled_s"][tier]) >= 0).all()


@given(workloads(), sim_configs(), costs(), choices)
@settings(max_examples=150)
def test_never_idle_with_admissible_work(
    workload: Workload, config: SimConfig, cost: HostedStepCost, policy: str
) -> None:
    """While somebody is present the device waits no longer than the host takes to take the last two outputs in, and to
    launch a graph up to where it can begin; or to wake up."""
    config = front_end_like(config, egress_per_token_s=0.0)  # so that a finish tells when its step was taken in
    update_seq_s, wait_s = cost.update_seq_s, cost.wait_s
    result = run(workload, config, cost, policy)
    steps, requests = result.steps, result.requests
    assert steps is not None
    for rank in range(config.num_ranks):
        mine = steps["dp_rank"] == rank
        starts = steps["start_s"][mine]
        ends = starts + steps["duration_s"][mine]
        here = (requests["dp_rank"] == rank) & (requests["status"] == "finished")
        present = requests["dispatched_s"][here]
        gone = requests["finished_s"][here] - config.front_end.egress_s
        seqs = steps["num_running"][mine]
        host_free = ends + update_seq_s * (seqs + np.concatenate(([0], seqs[:-1])))
        can_begin = host_free[:-1] + np.where(steps["num_prefill_tokens"][mine][1:] == 0, wait_s, 0.0)
        # Between two steps that are further apart, nobody is present.
        for left, right in zip(can_begin, starts[1:], strict=True):
            if right > left + 1e-12:
                began = right - config.front_end.wakeup_s
                assert not ((present < began - 1e-12) & (gone > left + 1e-12)).any()


@given(workloads(), engine_configs(async_scheduling=False), costs(hosted=False), st.sampled_from(BATCH))
@settings(max_examples=200)
def test_littles_law_is_exact(workload: Workload, engine: EngineConfig, cost: LinearStepCost, policy: str) -> None:
    """The number present, summed over time from the engine's own counts a step, is the time requests are present."""
    result = run(workload, SimConfig(k_max=K_MAX, engine=engine, record_steps=True), cost, policy)
    steps, requests = result.steps, result.requests
    assert steps is not None
    done = requests["status"] == "finished"
    arrivals = requests["arrival_s"][done]
    starts, ends = steps["start_s"], steps["start_s"] + steps["duration_s"]
    present = float(((steps["num_waiting"] + steps["num_running"]) * steps["duration_s"]).sum())
    for start, end in zip(starts, ends, strict=True):
        present += float((end - arrivals[(arrivals > start) & (arrivals < end)]).sum())
    assert present == pytest.approx(float((requests["finished_s"] - requests["arrival_s"])[done].sum()), rel=1e-9)


class Restless:
    """Lets nobody in while anything runs, and asks to be asked again at once."""

    def plan(self, view: StepView, /) -> StepPlan:
        return StepPlan(order=(), wake_at_s=float(np.nextafter(view.now_s, np.inf)))


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3)), max_size=20), st.integers(0, 6))
def test_alarms_ring_by_time_then_priority_then_in_turn(alarms: list[tuple[int, int]], horizon_s: int) -> None:
    """Each of them sets another at its own instant, and all before the horizon ring, at their times."""
    clock, rung = Clock(), list[tuple[float, int, int]]()

    def at(time_s: float, priority: int, number: int, again: bool) -> None:
        def ring(alarm: Alarm) -> None:
            assert alarm.time_s == clock.now == time_s
            rung.append((time_s, priority, number))
            if again:
                at(time_s, 4, len(alarms) + number, again=False)

        clock.at(time_s, EventPriority(priority), ring)

    for number, (time_s, priority) in enumerate(alarms):
        at(float(time_s), priority, number, again=True)
    clock.run_before(float(horizon_s))
    first = sorted((time_s, priority, number) for number, (time_s, priority) in enumerate(alarms) if time_s < horizon_s)
    again = [(time_s, 4, len(alarms) + number) for time_s, _, number in first]
    assert rung == sorted([*first, *again], key=lambda entry: entry[:2])


@given(workloads(), sim_configs(), costs(), st.sampled_from([*BATCH, "restless"]))
@settings(max_examples=150)
def test_no_event_storm(workload: Workload, config: SimConfig, cost: LinearStepCost, policy: str) -> None:
    """Events are bounded by steps and requests, whatever a policy asks for, and none piles up at an instant."""
    clocks: list[float] = []
    real = Clock.at

    config = front_end_like(config, ingress_service_s=0.0)  # its work on a request is an event of its own

    def counting(clock: Clock, time_s: float, priority: EventPriority, callback: Callback) -> Alarm:
        clocks.append(time_s)
        return real(clock, time_s, priority, callback)

    choice = parse_policy("fifo" if policy == "restless" else policy)
    batch = (lambda _: Restless()) if policy == "restless" else choice.batch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Clock, "at", counting)
        result = simulate(workload, config, cost, batch, choice.route)
    steps = sum(totals.num_steps for totals in result.ranks)
    assert len(clocks) <= steps + 3 * len(workload)
    arrived_s = workload.arrival_s + config.front_end.ingress_s
    arrivals = Counter(arrived_s.tolist())
    for time_s, events in Counter(clocks).items():
        # An arrival stops a stretch early; the alarm at the stretch's end is left to ring for nothing.
        replaced = int((arrived_s < time_s).sum())
        assert events <= 2 * config.num_ranks + 2 * arrivals[time_s] + 1 + replaced
    assert (result.requests["status"] != "queued").all()


@pytest.mark.parametrize("policy", ["tiers,max_wait_s=0.5"])
def test_aging_bounds_how_long_low_tiers_may_pass_a_high_budget_request(policy: str) -> None:
    """A stream of k=1 prompts that saturates the rank, and one k=8 request: it enters once it has waited its time."""
    size = 400
    workload = Workload(
        request_id=[str(row) for row in range(size)],
        arrival_s=np.concatenate(([0.0, 0.0, 0.0], 0.004 * np.arange(1, size - 2))),
        prompt_tokens=np.full(size, 64, dtype=np.int64),
        output_tokens=np.full(size, 8, dtype=np.int64),
        k_qos=np.array([1, 1, 8] + [1] * (size - 3), dtype=np.int64),
    )
    engine = EngineConfig(max_num_seqs=2, max_num_batched_tokens=128, async_scheduling=False)
    cost = LinearStepCost(base_s=0.004)
    bounded = run(workload, SimConfig(k_max=8, engine=engine), cost, policy).requests
    unbounded = run(workload, SimConfig(k_max=8, engine=engine), cost, "tiers").requests
    service_s = 10 * (0.004 + 1e-3)
    assert bounded["scheduled_s"][2] <= 0.5 + service_s
    assert unbounded["scheduled_s"][2] > 2 * bounded["scheduled_s"][2]


def _batch(policy: str, config: SimConfig, cost: LinearStepCost) -> Any:
    from simmoe.policies.protocols import PolicyContext

    engine = config.engine
    return parse_policy(policy).batch(
        PolicyContext(
            prefill_s=cost.prefill_s,
            k_min=1,
            k_max=config.k_max,
            num_ranks=1,
            max_num_seqs=engine.max_num_seqs,
            max_num_batched_tokens=engine.max_num_batched_tokens,
            enable_chunked_prefill=engine.enable_chunked_prefill,
        )
    )
