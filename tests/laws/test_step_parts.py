"""What a step takes of device and host, by a profile: how the parts hang together, and fast-forward over them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simmoe.policies.registry import parse_policy
from simmoe.profiles.shape import StepShape
from simmoe.profiles.step_cost import ProfileStepCost, Surfaces
from simmoe.profiles.table import HostShare, StepTable
from simmoe.simulator.config import EngineConfig, SimConfig
from simmoe.simulator.simulation import simulate
from simmoe.traces.workload import Workload
from tests.laws.test_profile_laws import shapes, tables
from tests.support.worlds import K_MAX, engine_configs, workloads


@st.composite
def tables_with_updates(draw: st.DrawFn) -> StepTable:
    """Tables some of whose host's time follows a step's output; in some, more than a launch path has."""
    update = HostShare(draw(st.sampled_from([0.0, 3e-4, 0.02])), draw(st.sampled_from([0.0, 9e-6, 2e-4])))
    return dataclasses.replace(draw(tables()), update=update)


def cost_of(table: StepTable, async_scheduling: bool = True) -> ProfileStepCost:
    return ProfileStepCost(Surfaces.of(table), async_scheduling)


@given(tables_with_updates(), shapes())
def test_a_step_is_the_larger_of_its_parts_and_a_synchronous_one_no_more_than_both(
    table: StepTable, shape: StepShape
) -> None:
    parts = cost_of(table).parts_s(shape)
    assert cost_of(table).step_s(shape) == max(parts.device_s, parts.host_s)
    synchronous = cost_of(table, async_scheduling=False)
    alone = synchronous.parts_s(shape)
    assert alone._replace(wait_s=parts.wait_s) == parts
    assert synchronous.step_s(shape) == max(alone.host_s, alone.wait_s + alone.device_s + alone.update_s)
    assert max(parts) <= synchronous.step_s(shape) <= (parts.device_s + parts.host_s) * (1 + 1e-12)


@given(tables_with_updates(), shapes(), st.floats(0.0, 3e-3))
def test_a_synchronous_device_begins_when_the_graph_of_as_many_sequences_would(
    table: StepTable, shape: StepShape, tail_s: float
) -> None:
    """Whatever is launched, its inputs are prepared before; where nothing tells how long that takes, a graph begins
    when all of it is launched, and host and device add up."""
    table = dataclasses.replace(table, graph_tail_s=tail_s if table.captured_sizes else None)
    synchronous = cost_of(table, async_scheduling=False)
    num_seqs = shape.num_prefill_seqs + shape.num_decode_seqs
    graph = cost_of(dataclasses.replace(table, captured_sizes=(10**6,)) if table.captured_sizes else table)
    wait_s = graph.parts_s(StepShape(0, 0, 0, num_seqs, num_seqs, 1)).wait_s
    parts = synchronous.parts_s(shape)
    assert parts.wait_s == pytest.approx(min(wait_s, parts.launch_s), abs=1e-15)
    if table.captured_sizes and not shape.num_prefill_tokens and num_seqs <= table.captured_sizes[-1]:
        untold = cost_of(dataclasses.replace(table, graph_tail_s=None), async_scheduling=False)
        assert untold.step_s(shape) == pytest.approx(parts.device_s + parts.host_s, rel=1e-12)


@given(tables_with_updates(), shapes(), st.integers(0, 600))
def test_the_host_has_no_more_to_launch_and_to_take_in_when_sequences_leave(
    table: StepTable, shape: StepShape, leaving: int
) -> None:
    cost = cost_of(table)
    staying = max(shape.num_decode_seqs - leaving, 1 - bool(shape.num_prefill_tokens))
    fewer, parts = cost.parts_s(shape._replace(num_decode_seqs=staying)), cost.parts_s(shape)
    assert 0 <= fewer.update_s <= parts.update_s <= parts.host_s
    assert -1e-12 <= fewer.launch_s <= parts.launch_s + 1e-12


@given(tables_with_updates(), shapes())
def test_a_graph_can_begin_its_tail_before_all_is_launched_and_other_steps_at_once(
    table: StepTable, shape: StepShape
) -> None:
    parts = cost_of(table).parts_s(shape)
    graph = not shape.num_prefill_tokens and shape.num_decode_seqs <= max(table.captured_sizes, default=0)
    if graph and table.graph_tail_s is not None:
        assert parts.wait_s == max(0.0, parts.launch_s - table.graph_tail_s) <= parts.launch_s
    else:
        assert parts.wait_s == 0.0
    assert parts._replace(wait_s=0.0) == cost_of(dataclasses.replace(table, graph_tail_s=None)).parts_s(shape)


@given(tables_with_updates(), st.integers(1, 600), st.integers(1, 64), st.integers(1, 10**7), st.booleans())
def test_a_decode_line_has_the_parts_of_its_steps(
    table: StepTable, num_seqs: int, k: int, kv: int, async_scheduling: bool
) -> None:
    line = cost_of(table, async_scheduling).decode_line(num_seqs, k)
    parts = cost_of(table, async_scheduling).parts_s(StepShape(0, 0, 0, num_seqs, kv, k))
    assert parts == (line.base_s + line.per_kv_token_s * kv, line.floor_s, line.update_s, line.wait_s)


@given(
    workloads(), engine_configs(), tables_with_updates(), st.sampled_from(["fifo", "tiers"]), st.sampled_from([1, 30])
)
@settings(max_examples=200)
def test_fast_forward_is_bit_equal_under_a_profile(
    workload: Workload, engine: EngineConfig, table: StepTable, policy: str, times: int
) -> None:
    if times > 1:  # stretches of more steps than a loop goes through, in a cache that holds them
        workload = dataclasses.replace(workload, output_tokens=times * workload.output_tokens)
        engine = dataclasses.replace(engine, num_gpu_blocks=30_000)
    choice = parse_policy(f"{policy}+round-robin")
    config = SimConfig(k_max=K_MAX, engine=engine, record_steps=True)
    fast, slow = (
        simulate(
            workload,
            dataclasses.replace(config, fast_forward=fast_forward),
            cost_of(table, engine.async_scheduling),
            choice.batch,
            choice.route,
        )
        for fast_forward in (True, False)
    )
    assert fast.steps is not None and slow.steps is not None
    for one, other in ((fast.requests, slow.requests), (fast.steps, slow.steps)):
        for name in one:
            np.testing.assert_array_equal(one[name], other[name], err_msg=name)
    assert (fast.ranks, fast.end_s) == (slow.ranks, slow.end_s)


@given(tables_with_updates(), shapes(), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_on_another_host_the_device_need_not_wait_for_as_much_of_a_launch(
    table: StepTable, shape: StepShape, launch_s: float, update_s: float
) -> None:
    parts = cost_of(table).parts_s(shape)
    other = parts.on_host(launch_s, update_s)
    assert (other.device_s, other.update_s) == (parts.device_s, update_s)
    assert other.launch_s == pytest.approx(launch_s)
    if parts.wait_s:
        assert other.tail_s == pytest.approx(min(launch_s, parts.tail_s))
    else:
        assert other.wait_s == 0.0
