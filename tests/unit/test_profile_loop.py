"""The pace of steps that follow one another: by hand, in trains, and as the simulator's engine runs them."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simmoe.policies.registry import parse_policy
from simmoe.profiles.loop import paces, synchronous_paces
from simmoe.profiles.shape import StepParts, StepShape
from simmoe.profiles.step_cost import ProfileStepCost
from simmoe.profiles.table import HostShare, MixedHost, StepTable
from simmoe.simulator.config import EngineConfig, SimConfig
from simmoe.simulator.simulation import simulate
from simmoe.traces.workload import Workload
from tests.laws.test_step_parts import cost_of, tables_with_updates
from tests.support.worlds import K_MAX, workloads

SECONDS = st.floats(1e-4, 0.1)
FRACTION = st.floats(0, 1)


BACKENDS = st.sampled_from(["uni", "mp"])
SCHEDULING = st.sampled_from(["asynchronous", "synchronous"])


@given(SECONDS, SECONDS, FRACTION, FRACTION)
def test_in_a_train_of_like_steps_each_takes_the_longer_of_device_and_host(
    device_s: float, host_s: float, update: float, wait: float
) -> None:
    parts = StepParts(device_s, host_s, update * host_s, wait * (1 - update) * host_s)
    train = list(paces((i > 0, parts) for i in range(50)))
    assert train[-1] == pytest.approx(max(device_s, host_s))


@given(SECONDS, SECONDS, FRACTION, FRACTION)
def test_workers_of_their_own_launch_a_train_while_the_loop_takes_it_in(
    device_s: float, launch_s: float, update: float, wait: float
) -> None:
    """Two steps are under way: what the loop takes in of either may last as long as the other runs."""
    parts = StepParts(device_s, launch_s + (update_s := update * device_s), update_s, wait * launch_s)
    paced = list(paces(((i > 0, parts) for i in range(400)), "mp"))[200:]
    least_s = max(device_s, launch_s)
    assert np.mean(paced) >= least_s * (1 - 1e-9)
    assert np.mean(paced) <= max(least_s, (device_s + update_s + launch_s) / 2) * (1 + 1e-9)


def test_a_launch_runs_ahead_of_a_long_step_and_is_late_after_a_short_one() -> None:
    """Launches of 5 ms and 1 ms to take in; the fourth takes 30 ms, begun while the device ran the third."""
    decode, prompt = StepParts(10e-3, 6e-3, 1e-3), StepParts(12e-3, 31e-3, 1e-3)
    found = list(paces(zip([False, True, True, True, True, True], [decode] * 3 + [prompt] + [decode] * 2, strict=True)))
    # the first is composed at 0 and done at 10, the second launched at 10 (it is composed when the first is), the third
    # composed at 11; the second is done at 20, the third at 30; the fourth is composed at 21 and launched at 51, the
    # fifth at 52 and launched at 57, when it has run for 5 of its 10 ms, which end at 62
    assert found == pytest.approx([10e-3, 10e-3, 10e-3, 21e-3, 11e-3, 10e-3])


def test_workers_of_their_own_launch_what_is_composed_while_they_are_at_the_step_before() -> None:
    """As above, but a prompt's launch holds up nothing that the loop does, and the step after is composed meanwhile."""
    decode, prompt = StepParts(10e-3, 6e-3, 1e-3), StepParts(12e-3, 31e-3, 1e-3)
    steps = [decode] * 3 + [prompt] + [decode] * 2
    found = list(paces(zip([False, True, True, True, True, True], steps, strict=True), "mp"))
    # the second is composed at once, launched at 10, the third composed at 11; they are done at 20 and 30; the fourth
    # is composed at 21 and launched at 51, the fifth composed at 31 and launched from 51 to 56, the sixth, composed at
    # 52, from 56 to 61; the fifth runs from 51, when its launch begins, to 61
    assert found == pytest.approx([10e-3, 10e-3, 10e-3, 21e-3, 10e-3, 10e-3])
    graph = decode._replace(wait_s=4e-3)
    found = list(paces(zip([False, True, True, True, True, True], [*steps[:4], graph, graph], strict=True), "mp"))
    assert found == pytest.approx([10e-3, 10e-3, 10e-3, 21e-3, 14e-3, 10e-3])


def test_a_graph_begins_nearly_when_all_is_launched() -> None:
    """As above, the fifth and sixth steps' graphs 1 ms before: the fifth runs from 56, the sixth is launched by 63."""
    decode, prompt = StepParts(10e-3, 6e-3, 1e-3), StepParts(12e-3, 31e-3, 1e-3)
    graph = decode._replace(wait_s=4e-3)
    assert graph.tail_s == pytest.approx(1e-3)
    found = list(paces(zip([False, True, True, True, True, True], [decode] * 3 + [prompt] + [graph] * 2, strict=True)))
    assert found == pytest.approx([10e-3, 10e-3, 10e-3, 21e-3, 15e-3, 10e-3])


@given(st.lists(st.tuples(st.booleans(), SECONDS, SECONDS, FRACTION, FRACTION), min_size=1, max_size=40), BACKENDS)
def test_no_step_is_faster_than_its_device_nor_than_the_host_of_itself_and_the_one_before_allows(
    steps: list[tuple[bool, float, float, float, float]], backend: str
) -> None:
    train = [
        (follows and i > 0, StepParts(d, h, u * h, w * (1 - u) * h)) for i, (follows, d, h, u, w) in enumerate(steps)
    ]
    found = list(paces(train, backend))
    for (follows, parts), pace in zip(train, found, strict=True):
        assert pace >= parts.device_s * (1 - 1e-9)
        if not follows:
            assert pace == pytest.approx(max(parts.wait_s + parts.device_s, parts.launch_s))
    no_launch = ((follows, parts._replace(host_s=parts.update_s, wait_s=0.0)) for follows, parts in train)
    quicker = list(paces(no_launch, backend))
    assert sum(quicker) <= sum(found) * (1 + 1e-9)  # a faster host never makes them longer in all


@given(st.lists(st.tuples(SECONDS, SECONDS, FRACTION, FRACTION), min_size=1, max_size=20))
def test_a_synchronous_train_is_as_long_as_each_of_its_steps_alone(
    steps: list[tuple[float, float, float, float]],
) -> None:
    """From the end of one on the device to that of the next: a step is taken in before the next is composed."""
    train = [StepParts(d, h, u * h, w * (1 - u) * h) for d, h, u, w in steps]
    found = list(synchronous_paces((i > 0, parts) for i, parts in enumerate(train)))
    assert sum(found) + train[-1].update_s == pytest.approx(sum(parts.alone_s for parts in train))
    follows_none = list(paces((False, parts) for parts in train))
    for before, parts, pace, alone in zip(train, train[1:], found[1:], follows_none[1:], strict=False):
        assert pace == pytest.approx(before.update_s + alone)
        assert max(parts.device_s, parts.launch_s) * (1 - 1e-12) <= pace


class Heard(ProfileStepCost):
    """A cost that keeps what it was asked for."""

    def __init__(self, table: StepTable, async_scheduling: bool) -> None:
        cost = cost_of(table, async_scheduling)
        self.__dict__.update(cost.__dict__)
        self.parts: list[StepParts] = []

    def parts_s(self, shape: StepShape, /) -> StepParts:
        """Return and keep the parts of a step; each is composed once."""
        self.parts.append(super().parts_s(shape))
        return self.parts[-1]


#: Everything fits, so that nothing waits for a request to leave: the device never idles between two steps.
ROOM = EngineConfig(max_num_seqs=16, num_gpu_blocks=5000, async_scheduling=True)


@given(workloads(), st.integers(16, 70), tables_with_updates(), st.booleans(), BACKENDS, SCHEDULING)
@settings(max_examples=200)
def test_the_simulators_engine_keeps_the_same_pace(
    workload: Workload, token_budget: int, table: StepTable, apart: bool, backend: str, scheduling: str
) -> None:
    """Of requests that are all there at the start, one train: its first step follows none, the others do."""
    is_async = scheduling == "asynchronous"
    engine = dataclasses.replace(
        ROOM,
        max_num_batched_tokens=token_budget,
        distributed_executor_backend=backend,
        async_scheduling=is_async,
    )
    if apart and "piecewise" in table.host:
        share = HostShare(*(2 * value for value in table.host["piecewise"]))
        table = dataclasses.replace(table, mixed_host=MixedHost(8, share))
    workload = dataclasses.replace(workload, arrival_s=0 * workload.arrival_s)
    cost = Heard(table, is_async)
    choice = parse_policy("fifo+round-robin")
    config = SimConfig(k_max=K_MAX, engine=engine, record_steps=True, fast_forward=False)
    found = simulate(workload, config, cost, choice.batch, choice.route)
    assert found.steps is not None
    ends = found.steps["start_s"] + found.steps["duration_s"]
    steps = [(i > 0, parts) for i, parts in enumerate(cost.parts)]
    expected = list(paces(steps, backend) if is_async else synchronous_paces(steps))
    assert len(ends) == len(expected)
    np.testing.assert_allclose(np.diff(ends, prepend=0.0), expected, rtol=1e-9, atol=1e-12)
    if not is_async:  # the last step apart, which nobody has taken in by then
        taken_in_s = ends[-1] + cost.parts[-1].update_s
        assert taken_in_s == pytest.approx(sum(parts.alone_s for parts in cost.parts))
        assert found.end_s == pytest.approx(taken_in_s)
