"""The device's timeline told on the host's clock: an imagined device whose clock drifts and whose work lags behind."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simmoe.live.engine.device_clock import DeviceClock, DeviceTimes, HostTimeline, Mark
from simmoe.live.engine.steps import StepRecord, TimedSteps

START_S = 1000.0


class Device:
    """Runs marks in order; the test says when. Its clock gains ``drift`` on the host's, and starts elsewhere."""

    def __init__(self, drift: float = 0.0) -> None:
        self.now_s = START_S
        self.rate = 1 + drift
        self.open: list[FakeMark] = []
        self.is_fresh = True

    def mark(self) -> Mark:
        mark = FakeMark(self)
        if self.is_fresh:  # the clock's own first mark
            self.is_fresh, mark.passed_s = False, self.now_s
        else:
            self.open.append(mark)
        return mark

    def reach(self, now_s: float) -> None:
        """Pass the oldest open mark at this time of the host's clock."""
        self.now_s = now_s
        self.open.pop(0).passed_s = now_s

    def readings(self, number: int) -> Iterator[tuple[Mark, float, float]]:
        for width_s in (0.5, 2e-6, 0.1):
            mark = FakeMark(self)
            # a wide reading is a bad one
            mark.passed_s = self.now_s + (width_s if width_s > 0.05 else width_s / 2)
            yield mark, self.now_s, self.now_s + width_s


class FakeMark:
    def __init__(self, device: Device) -> None:
        self.device = device
        self.passed_s: float | None = None

    def query(self) -> bool:
        return self.passed_s is not None

    def elapsed_time(self, later: FakeMark, /) -> float:
        assert self.passed_s is not None and later.passed_s is not None, "a mark was read before the device passed it"
        return (later.passed_s - self.passed_s) * self.device.rate * 1e3


@given(
    st.lists(st.tuples(st.floats(0, 0.5), st.floats(1e-4, 0.5), st.booleans()), min_size=1, max_size=40),
    st.floats(-1e-4, 1e-4),
)
def test_steps_are_told_on_the_hosts_clock(steps: list[tuple[float, float, bool]], drift: float) -> None:
    """Each step: the device's idle seconds before it, its busy seconds, and whether rows are drained after it."""
    device = Device(drift)
    clock = DeviceClock(device)
    truth, told = [], []
    for number, (idle_s, busy_s, drained) in enumerate(steps):
        clock.begin(number)
        clock.end()
        start_s = device.now_s + idle_s
        device.reach(start_s)
        device.reach(start_s + busy_s)
        truth.append((number, start_s, start_s + busy_s))
        if drained:
            told += clock.drain()
    told += clock.drain()
    assert [row.step for row in told] == [number for number, _, _ in truth]
    span_s = truth[-1][2] - START_S
    for row, (_, start_s, end_s) in zip(told, truth, strict=True):
        # below a second between readings the drift is not corrected; a reading is good to a microsecond
        tolerance = abs(drift) + 1e-5 * (1 + span_s)
        assert row.start_s == pytest.approx(start_s, abs=tolerance)
        assert row.end_s == pytest.approx(end_s, abs=tolerance)


def test_steps_the_device_has_not_done_are_left_for_later_without_waiting() -> None:
    device = Device()
    clock = DeviceClock(device)
    for number in range(3):
        clock.begin(number)
        clock.end()
    device.reach(START_S + 1)
    device.reach(START_S + 2)  # step 0 is done
    device.reach(START_S + 2)  # step 1 has begun
    assert [row.step for row in clock.drain()] == [0]
    for seconds in (3.0, 3.0, 4.0):
        device.reach(START_S + seconds)
    rows = clock.drain()
    assert [row.step for row in rows] == [1, 2]
    assert rows[1].end_s - rows[0].end_s == pytest.approx(1.0)


def test_rows_nobody_drains_do_not_pile_up() -> None:
    device = Device()
    clock = DeviceClock(device, limit=4)
    for number in range(10):
        clock.begin(number)
        clock.end()
        device.reach(device.now_s + 1)
        device.reach(device.now_s + 1)
    assert [row.step for row in clock.drain()] == [6, 7, 8, 9]


def test_an_end_without_a_beginning_marks_nothing() -> None:
    clock = DeviceClock(HostTimeline())
    clock.end()
    assert clock.drain() == []


def test_on_a_cpu_work_ends_when_its_call_returns() -> None:
    clock = DeviceClock(HostTimeline())
    before_s = time.monotonic()
    clock.begin(7)
    clock.end()
    after_s = time.monotonic()
    (row,) = clock.drain()
    assert row.step == 7
    # to the resolution of adding up milliseconds in floats
    assert before_s - 1e-6 <= row.start_s <= row.end_s <= after_s + 1e-6


def test_records_get_the_times_of_their_own_step() -> None:
    clock = DeviceClock(HostTimeline())
    clock.begin(1)
    clock.end()
    records = [StepRecord(number, 0.0, 0.0, 1.0, 1.0, 8, 36, 1, 0, 0, 4, 4, 32, 0, 1, 0) for number in (0, 1)]
    times = clock.drain()
    without, timed = TimedSteps().join(records, times)
    assert without == records[0] and without.device_end_s is None
    assert timed == records[1]._replace(
        device_start_s=times[0].start_s, device_end_s=times[0].end_s, launch_s=times[0].launch_s
    )


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2)), max_size=20))
def test_every_record_gets_its_time_however_the_two_are_drained(drains: list[tuple[int, int]]) -> None:
    """The worker is drained after the scheduler, so it may tell of steps whose records come with a later drain."""
    joined: list[StepRecord] = []
    timed, num_records, num_times = TimedSteps(), 0, 0
    for records, ahead in drains:
        upto, told = num_records + records, max(num_times, num_records + records + ahead)
        rows = [StepRecord(n, 0.0, 0.0, 1.0, 1.0, 8, 36, 1, 0, 0, 4, 4, 32, 0, 1, 0) for n in range(num_records, upto)]
        joined += timed.join(rows, [DeviceTimes(n, n + 0.25, n + 0.75, 0.1) for n in range(num_times, told)])
        num_records, num_times = upto, told
    assert [(row.step, row.device_start_s, row.device_end_s) for row in joined] == [
        (n, n + 0.25, n + 0.75) for n in range(num_records)
    ]
