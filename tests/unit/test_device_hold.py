"""Holding the device before a step, on an imagined device that runs kernels in order while a host launches them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simmoe.live.engine.steps import StepRecord
from simmoe.live.measure.device_hold import MARGIN, DeviceHold, held_steps
from simmoe.live.measure.held import FIRST_HOLD_S, GIVEN_UP_AFTER, LONGEST_HOLD_S, OVER_LAUNCH, HeldPoints
from simmoe.live.measure.plan import DecodePoint, MixedPoint, PrefillPoint
from simmoe.live.measure.times import TimedStep, timed_steps

K = 4


class Machine:
    """One stream, one host: what is launched waits for what was launched before, and begins when it is launched."""

    def __init__(self, launch_s: float, kernel_s: float, kernels: int) -> None:
        self.launch_s, self.kernel_s, self.kernels = launch_s, kernel_s, kernels
        self.host_s = self.device_s = 0.0

    def run(self, seconds: float) -> None:
        """Launch a kernel that takes so long."""
        self.device_s = max(self.device_s, self.host_s) + seconds

    def steps(self, number: int, hold_s: float) -> list[TimedStep]:
        """Return the steps, the host launching the next before it sees the output of the one before."""
        records: list[StepRecord] = []
        for step in range(number):
            schedule_s = self.host_s
            if hold_s:
                self.run(hold_s * MARGIN)
            start_s, begun_s = max(self.device_s, self.host_s), self.host_s
            for _ in range(self.kernels):
                self.host_s += self.launch_s
                self.run(self.kernel_s)
            record = StepRecord(step, schedule_s, schedule_s, 0.0, 0.0, 0, 0, 0, 1, 9, K, K, K, 0, 1, 0)
            record = record._replace(device_start_s=start_s, device_end_s=self.device_s)
            records.append(record._replace(launch_s=self.host_s - begun_s))
            if step:  # two steps are under way at most
                self.host_s = max(self.host_s, float(records[-2].device_end_s or 0.0))
        seen = [
            r._replace(output_s=float(r.device_end_s or 0), update_end_s=float(r.device_end_s or 0)) for r in records
        ]
        return timed_steps(seen, async_scheduling=True)


@given(
    launch_s=st.floats(1e-6, 1e-3),
    kernel_s=st.floats(1e-6, 1e-3),
    kernels=st.integers(1, 200),
    hold_s=st.floats(1e-5, 0.3),
)
def test_a_held_step_takes_its_kernels_time_whatever_the_host_takes(
    launch_s: float, kernel_s: float, kernels: int, hold_s: float
) -> None:
    held = held_steps(Machine(launch_s, kernel_s, kernels).steps(6, hold_s), hold_s)
    for t in held.steps:
        assert t.clock == "held"
        assert t.seconds == pytest.approx(kernels * kernel_s, rel=1e-6)
    assert held.launches_s == pytest.approx([kernels * launch_s] * 5)
    # all of them, when all was launched in time; none at all otherwise
    if abs(kernels * launch_s / hold_s - 1) > 1e-6:
        assert len(held.steps) == (5 if kernels * launch_s < hold_s else 0)


def test_steps_before_which_the_device_was_not_held_do_not_count() -> None:
    timed = Machine(launch_s=1e-5, kernel_s=1e-4, kernels=50).steps(6, 0.0)
    assert not held_steps(timed, 2e-3).steps


@given(rates=st.lists(st.floats(0.3e9, 3e9), min_size=3, max_size=3), seconds=st.floats(1e-4, 1.0))
def test_a_hold_is_not_shorter_than_asked_at_any_rate_that_was_read(rates: list[float], seconds: float) -> None:
    spun: list[int] = []
    left = list(rates)

    def seconds_of(work: Callable[[], None]) -> float:
        work()
        return spun[-1] / left.pop()

    hold = DeviceHold(spun.append, seconds_of)
    hold(seconds)
    assert all(spun[-1] + 1 >= seconds * rate for rate in rates)


class Engine:
    """Answers to ``call_worker``; its machine's steps are measured under whatever hold was asked for last."""

    def __init__(self, captured_sizes: tuple[int, ...], launch_s: float) -> None:
        self.captured_sizes = captured_sizes
        self.launch_s = launch_s
        self.hold_s = 0.0
        self.holds: list[float] = []

    async def call_worker(self, method: str, seconds: float) -> None:
        assert method == "hold_device"
        self.hold_s = seconds
        self.holds.append(seconds)

    async def measured(self, group: Mapping[Any, list[int]]) -> list[TimedStep]:
        assert self.hold_s > 0
        return Machine(self.launch_s / 10, 1e-4, 10).steps(6, self.hold_s)


def take(points: HeldPoints, engine: Engine, point: Any, *, eager: bool = False) -> list[TimedStep]:
    return asyncio.run(points.measure({point: [K]}, engine.measured, eager=eager))


@pytest.mark.parametrize(
    ("point", "eager", "path"),
    [
        (DecodePoint(8, 512), False, "full"),
        (PrefillPoint(64), False, "piecewise"),
        (MixedPoint(32, 8, 512), False, "piecewise"),
        (PrefillPoint(128), False, "eager"),
        (DecodePoint(8, 512), True, "eager"),
    ],
)
def test_each_launch_path_is_held_as_long_as_its_launches_take(point: Any, eager: bool, path: str) -> None:
    launch_s = FIRST_HOLD_S[path] / 2
    engine = Engine((8, 64), launch_s)
    points = HeldPoints(engine)  # type: ignore[arg-type]
    for _ in range(2):
        assert len(take(points, engine, point, eager=eager)) == 5
    assert engine.holds == pytest.approx([FIRST_HOLD_S[path], 0.0, OVER_LAUNCH * launch_s, 0.0])


def test_what_was_not_launched_in_time_is_measured_again_with_a_longer_hold() -> None:
    engine = Engine((8, 64), 2 * FIRST_HOLD_S["full"])
    assert len(take(HeldPoints(engine), engine, DecodePoint(8, 512))) == 5  # type: ignore[arg-type]
    assert engine.holds == pytest.approx([FIRST_HOLD_S["full"], 0.0, OVER_LAUNCH * engine.launch_s, 0.0])


def test_what_no_hold_covers_is_given_up_and_other_paths_are_not() -> None:
    engine = Engine((8, 64), 2 * LONGEST_HOLD_S)
    points = HeldPoints(engine)  # type: ignore[arg-type]
    assert take(points, engine, DecodePoint(8, 512)) == []
    assert engine.holds == pytest.approx([FIRST_HOLD_S["full"], 0.0, LONGEST_HOLD_S, 0.0])
    engine.holds.clear()
    assert take(points, engine, DecodePoint(4, 512)) == []
    assert not engine.holds
    engine.launch_s = 1e-3
    assert len(take(points, engine, PrefillPoint(64))) == 5


def test_a_path_whose_launches_wait_for_the_device_is_given_up_after_points_in_a_row() -> None:
    """Whatever the hold, a launch takes longer; now and then a step is launched in time."""
    engine = Engine((8, 64), 1e-3)
    points = HeldPoints(engine)  # type: ignore[arg-type]
    taken: list[float] = []

    async def waits(group: Mapping[Any, list[int]]) -> list[TimedStep]:
        taken.append(engine.hold_s)
        late = Machine(1.2 * engine.hold_s / 10, 1e-4, 10).steps(6, engine.hold_s)
        return [*late, *Machine(1e-5, 1e-4, 10).steps(2, engine.hold_s)]

    def one(point: Any) -> list[TimedStep]:
        return asyncio.run(points.measure({point: [K]}, waits, eager=False))

    found = [len(one(PrefillPoint(n))) for n in (8, 16, 24, 32)]
    assert found == [2] * GIVEN_UP_AFTER + [0] * (4 - GIVEN_UP_AFTER)
    assert len(taken) == 2 * GIVEN_UP_AFTER
    assert taken == sorted(taken)
    assert one(DecodePoint(8, 512)), "another path"


def test_prompts_that_never_kept_the_engine_busy_give_their_path_up_and_batches_that_do_not_fit_do_not() -> None:
    engine = Engine((8, 64), 1e-3)
    points = HeldPoints(engine)  # type: ignore[arg-type]
    taken: list[Any] = []

    async def nothing(group: Mapping[Any, list[int]]) -> list[TimedStep]:
        taken.extend(group)
        return []

    for point in (PrefillPoint(n) for n in (8, 16, 24, 32)):
        assert asyncio.run(points.measure({point: [K]}, nothing, eager=False)) == []
    assert len(taken) == GIVEN_UP_AFTER
    for batch in (64, 32, 16):
        assert asyncio.run(points.measure({DecodePoint(batch, 8192): [K]}, nothing, eager=False)) == []
    assert len(take(points, engine, DecodePoint(8, 512))) == 5


def test_the_device_is_let_go_where_measuring_fails() -> None:
    engine = Engine((8, 64), 1e-3)

    async def fails(group: Mapping[Any, list[int]]) -> list[TimedStep]:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        asyncio.run(HeldPoints(engine).measure({DecodePoint(8, 512): [K]}, fails, eager=False))  # type: ignore[arg-type]
    assert engine.holds[-1] == 0.0
