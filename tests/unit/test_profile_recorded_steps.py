"""Steps of a recorded run become samples only where nothing but the step decided how long it took."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from simmoe.errors import ProfileError
from simmoe.profiles.recorded_steps import CALIBRATION, read_recorded_steps, read_recording
from simmoe.profiles.recording_file import is_recording, read_header
from simmoe.profiles.shape import StepShape

COLUMNS = [
    "start_s",
    "output_s",
    "num_prefill_tokens",
    "prefill_kv_pairs",
    "num_prefill_seqs",
    "num_decode_seqs",
    "decode_kv_tokens",
    "k_exec",
    "num_waiting",
]
HEAD = {"format": "simmoe-recording", "version": 1, "steps": COLUMNS, "requests": []}
FIRST = ["step", 0.0, 0.010, 8, 36, 1, 0, 0, 4, 0]
BUSY = ["step", 0.005, 0.016, 0, 0, 0, 2, 40, 8, 3]
IDLE_BEFORE = ["step", 0.017, 0.030, 8, 36, 1, 1, 20, 4, 0]


def written(tmp_path: Path, *lines: Any) -> Path:
    path = tmp_path / "run.jsonl"
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n")
    return path


def test_only_steps_that_followed_without_a_pause_count(tmp_path: Path) -> None:
    path = written(
        tmp_path, HEAD, {"recording": "a"}, ["request", 1], FIRST, BUSY, IDLE_BEFORE, {"recording": "b"}, BUSY
    )
    (sample,) = read_recorded_steps(path, [1, 2, 4])
    assert sample.shape == StepShape(0, 0, 0, 2, 40, 8)
    assert sample.median_s == pytest.approx(0.006)
    assert (sample.kind, sample.mode, sample.clock, sample.held_out) == ("decode", "graphs", "step", True)


def test_steps_end_on_the_device_where_it_was_timed(tmp_path: Path) -> None:
    """The host sees the first output 4 ms late, the second 1 ms: the pace is the device's."""
    head = {**HEAD, "steps": [*COLUMNS, "device_end_s"]}
    path = written(tmp_path, head, [*FIRST, 0.006], [*BUSY, 0.015])
    assert read_recorded_steps(path, [4])[0].median_s == pytest.approx(0.009)
    path = written(tmp_path, head, [*FIRST, None], [*BUSY, 0.015])
    assert read_recorded_steps(path, [4])[0].median_s == pytest.approx(0.006)


def test_the_calibration_alone_may_be_fitted(tmp_path: Path) -> None:
    path = written(tmp_path, HEAD, {"recording": CALIBRATION}, FIRST, BUSY, {"recording": "burst"}, FIRST, BUSY)
    assert [s.held_out for s in read_recorded_steps(path, [4])] == [False, True]


def test_every_step_is_read_with_what_the_worker_took_to_launch_it(tmp_path: Path) -> None:
    """A step on an idle engine too: it follows none, and lasts from its scheduling to its output."""
    head = {**HEAD, "steps": [*COLUMNS, "launch_s"]}
    lines = [[*FIRST, 0.003], [*BUSY, 0.004], [*BUSY[:2], 0.02, *BUSY[3:], None]]
    path = written(tmp_path, head, {"recording": CALIBRATION}, *lines, {"recording": "burst"}, *lines)
    steps = read_recording(path, [4])
    assert [step.follows for step in steps] == [False, True, True] * 2
    assert [step.worker_launch_s for step in steps] == [0.003, 0.004, None] * 2
    assert [step.load for step in steps] == [CALIBRATION] * 3 + ["burst"] * 3
    assert [step.sample.held_out for step in steps] == [False] * 3 + [True] * 3
    assert steps[0].sample.median_s == pytest.approx(0.010)
    assert all((step.device_bound, step.launch_s, step.update_s) == (None, None, None) for step in steps)


LOOP = {**HEAD, "steps": [*COLUMNS, "device_end_s", "launch_s", "schedule_end_s", "update_end_s"]}


def test_taking_a_step_in_begins_when_the_device_is_done_and_the_next_is_launched(tmp_path: Path) -> None:
    """The first step's tokens came after the second's launch, at 9 ms; the second's after the device, at 15."""
    first, second = [*FIRST, 0.007, 0.002, 0.001, 0.0105], [*BUSY, 0.015, 0.003, 0.006, 0.0165]
    third = ["step", 0.0115, 0.02, 0, *BUSY[4:], 0.019, 0.002, 0.012, 0.021]
    fourth = ["step", 0.018, 0.03, 0, *BUSY[4:], 0.029, 0.002, 0.019, 0.031]
    path = written(tmp_path, LOOP, {"recording": CALIBRATION}, first, second, third, fourth)
    steps = read_recording(path, [4])
    assert [step.num_seqs for step in steps[:2]] == [1, 2]
    assert [step.update_s for step in steps[:2]] == pytest.approx([0.0015, 0.0015])
    assert [step.update_s for step in steps[2:]] == [None, None]  # it is not seen what came after
    # the third was begun after the first was taken in, at 10.5 ms, and launched at 14
    assert [step.launch_s for step in steps[:2]] == [None, None]
    assert steps[2].launch_s == pytest.approx(0.0035)


def test_workers_of_their_own_launch_one_step_after_another_while_the_loop_goes_on(tmp_path: Path) -> None:
    """The second is composed at 2 ms, while the workers are at the first until 6, and launched at 9."""
    first, second = [*FIRST, 0.007, 0.005, 0.001, 0.008], [*BUSY, 0.015, 0.003, 0.002, 0.0165]
    third = ["step", 0.0082, 0.02, 0, *BUSY[4:], 0.019, 0.002, 0.0085, 0.021]
    fourth = ["step", 0.0166, 0.03, 0, *BUSY[4:], 0.029, 0.002, 0.0168, 0.031]
    path = written(tmp_path, LOOP, {"recording": CALIBRATION}, first, second, third, fourth)
    steps = read_recording(path, [4], distributed_executor_backend="mp")
    assert steps[1].late_s == pytest.approx(0.002)  # after the device was done with the first, at 7 ms
    assert steps[2].late_s == pytest.approx(0.011 - 0.015)  # composed at 8.5, launched from 9 on
    assert [step.launch_s for step in steps] == [None, None, 0.002, 0.002]  # the workers' own
    # the third is composed 1.5 ms after the device was done with the first, the fourth 1.8 after the second
    assert [step.update_s for step in steps] == [pytest.approx(0.0015), pytest.approx(0.0018), None, None]


def test_a_loop_that_is_late_takes_a_step_in_once_it_has_composed_the_one_after(tmp_path: Path) -> None:
    """The device is done with the first at 7 ms, while the loop still composes the second, until 9."""
    first, second = [*FIRST, 0.007, 0.005, 0.001, 0.0095], [*BUSY, 0.015, 0.003, 0.009, 0.0165]
    third = ["step", 0.0096, 0.02, 0, *BUSY[4:], 0.019, 0.002, 0.010, 0.021]
    path = written(tmp_path, LOOP, {"recording": CALIBRATION}, first, second, third)
    steps = read_recording(path, [4], distributed_executor_backend="mp")
    assert [step.update_s for step in steps] == [pytest.approx(0.001), None, None]


def test_a_synchronous_engine_is_busy_where_it_goes_on_once_it_has_taken_a_step_in(tmp_path: Path) -> None:
    """No step of it is begun before the output of the one before: asynchronously it would have paused each time."""
    head = {**HEAD, "steps": [*COLUMNS, "device_end_s", "launch_s", "schedule_end_s", "update_end_s"]}
    first = [*FIRST, 0.0095, 0.004, 0.0005, 0.012]
    at_once = ["step", 0.0124, 0.018, *BUSY[3:], 0.0175, 0.003, 0.0127, 0.019]
    paused = ["step", 0.0231, 0.030, *BUSY[3:], 0.0292, 0.003, 0.0234, 0.031]
    path = written(tmp_path, head, {"recording": "burst"}, first, at_once, paused)
    assert not any(step.follows for step in read_recording(path, [4]))
    steps = read_recording(path, [4], async_scheduling=False)
    assert [step.follows for step in steps] == [False, True, False]
    assert steps[1].sample.median_s == pytest.approx(0.008)
    assert all((step.launch_s, step.update_s, step.late_s, step.device_bound) == (None,) * 4 for step in steps)


def test_where_its_end_was_not_recorded_the_next_but_one_step_begins_when_a_step_was_taken_in(tmp_path: Path) -> None:
    """The second step's output came 1 ms after the device, so the host was late: only the first tells."""
    head = {**HEAD, "steps": [*COLUMNS, "device_end_s", "launch_s"]}
    lines = [[*FIRST, 0.0096, 0.002], [*BUSY, 0.015, 0.002], ["step", 0.0102, 0.02, 0, *BUSY[4:], 0.019, 0.002]]
    lines.append(["step", 0.0162, 0.03, 0, *BUSY[4:], 0.029, 0.002])
    path = written(tmp_path, head, {"recording": CALIBRATION}, *lines)
    steps = read_recording(path, [4])
    assert steps[0].update_s == pytest.approx(0.0006)
    assert all(step.update_s is None and step.launch_s is None for step in steps[1:])
    path = written(tmp_path, HEAD, {"recording": CALIBRATION}, FIRST, BUSY, lines[2][:-2])
    assert all(step.update_s is None for step in read_recording(path, [4]))


@pytest.mark.parametrize(
    ("prompt_tokens", "begins_s", "launch_s", "bound"),
    [
        (0, 0.007, 0.0005, True),  # one graph, launched while the step before ran
        (0, 0.007, 0.0015, False),  # launched half a millisecond after that was done
        (0, 0.0074, 0.0005, False),  # the device idled
        (8, 0.007, 0.0080, True),  # a step with prompts begins as its pieces are launched: 1 ms of 8 was left
        (8, 0.007, 0.0089, True),
        (8, 0.007, 0.0091, True),
        (8, 0.007, 0.0100, False),  # the device was done as soon as all was launched
    ],
)
def test_the_clocks_of_loop_and_device_tell_what_bound_a_step(
    tmp_path: Path, prompt_tokens: int, begins_s: float, launch_s: float, bound: bool
) -> None:
    """The step before ends at 7 ms, this one is scheduled at 6 and ends at 17."""
    head = {**HEAD, "steps": [*COLUMNS, "device_start_s", "device_end_s", "launch_s", "schedule_end_s"]}
    prompts = [prompt_tokens, 36, 1] if prompt_tokens else [0, 0, 0]
    step = ["step", 0.005, 0.018, *prompts, *BUSY[6:], begins_s, 0.017, launch_s, 0.006]
    path = written(tmp_path, head, {"recording": CALIBRATION}, [*FIRST, 0.0, 0.007, 0.001, 0.001], step)
    found = read_recording(path, [16])
    assert found[1].device_bound is bound
    assert found[0].late_s is None
    assert found[1].late_s == pytest.approx(launch_s - 0.001)  # after the device was done with the step before
    step[-1] = None
    path = written(tmp_path, head, {"recording": CALIBRATION}, [*FIRST, 0.0, 0.007, 0.001, 0.001], step)
    assert read_recording(path, [16])[1].device_bound is None
    assert read_recording(path, [16])[1].late_s is None


def test_a_time_that_is_none_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, LOOP, {"recording": CALIBRATION}, [*FIRST, 0.0096, "fast", 0.001, 0.01])
    with pytest.raises(ProfileError, match=r"run\.jsonl' line 3: launch_s is 'fast', no float and no null"):
        read_recording(path, [4])


def test_a_step_above_the_captured_sizes_ran_eagerly(tmp_path: Path) -> None:
    path = written(tmp_path, HEAD, FIRST, BUSY)
    assert read_recorded_steps(path, [1])[0].mode == read_recorded_steps(path, [])[0].mode == "eager"


def test_a_step_between_the_captured_budgets_ran_eagerly(tmp_path: Path) -> None:
    """BUSY ran at 8."""
    path = written(tmp_path, HEAD, FIRST, BUSY)
    modes = [read_recorded_steps(path, [4], ks)[0].mode for ks in ([6, 10], [6, 8, 10], [])]
    assert modes == ["eager", "graphs", "graphs"]


def test_no_more_than_the_first_line_is_read_to_tell_a_recording(tmp_path: Path) -> None:
    """What follows it may be no text, or no longer there to unpack."""
    path = written(tmp_path, HEAD, {"recording": CALIBRATION}, *([FIRST, BUSY] * 20_000))
    whole = path.read_bytes()
    path.write_bytes(whole + b"\xff\n")
    packed = tmp_path / "run.jsonl.gz"
    packed.write_bytes(gzip.compress(whole)[:-1000])
    for file, fault in ((path, "it is no text"), (packed, "cannot unpack")):
        assert is_recording(file) and read_header(file) == HEAD
        with pytest.raises(ProfileError, match=fault):
            read_recording(file, [4])


def test_gzipped_recordings_are_read_and_recognised(tmp_path: Path) -> None:
    path = written(tmp_path, HEAD, FIRST, BUSY)
    packed = tmp_path / "run.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read_recorded_steps(packed, [4]) == read_recorded_steps(path, [4])
    assert is_recording(packed) and is_recording(path)
    assert not is_recording(Path(__file__))
    with pytest.raises(ProfileError, match="cannot read the recording"):
        is_recording(tmp_path / "absent.jsonl")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"format": "csv"}], "is no recording, whose first line says format 'simmoe-recording'"),
        ([{**HEAD, "version": 2}], "is a recording of version 2; this simmoe reads 1"),
        ([{**HEAD, "steps": None}], "names no columns"),
        ([{**HEAD, "steps": [*COLUMNS, 5]}], "names no columns"),
        ([{**HEAD, "steps": [*COLUMNS, "start_s"]}], "names a column of its steps twice"),
        ([{**HEAD, "engine_flags": None}], "line 1: engine_flags is None; it must be dict"),
        ([{**HEAD, "async_scheduling": "no"}], "line 1: async_scheduling is 'no'; it must be bool"),
        ([{**HEAD, "k_max": True}], "line 1: k_max is True; it must be int"),
        ([{**HEAD, "k_max": 4}, FIRST, BUSY], "line 3: k_exec is 8; the first line's k_max is 4"),
        ([HEAD, {"recording": 5}], "line 2 has recording 5; it must be a name"),
        ([HEAD, {"load": "a"}], "line 2 has recording None; it must be a name"),
        ([HEAD, ["pause", 1]], "line 2 is neither a recording's name nor a row of a step or request"),
        ([HEAD, ["step", float("nan"), *FIRST[2:]]], "line 2: start_s is nan; it must be finite"),
        ([HEAD, [*FIRST[:2], float("inf"), *FIRST[3:]]], "line 2: output_s is inf; it must be finite"),
        ([HEAD, [*FIRST[:2], -1.0, *FIRST[3:]]], "line 2: output_s -1.0 is before start_s 0.0"),
        ([HEAD, BUSY, FIRST], "line 3: start_s is 0.0, before the 0.005 of the step before"),
        (
            [{**HEAD, "steps": [*COLUMNS, "launch_s"]}, [*FIRST, -0.1]],
            "line 2: launch_s is -0.1; it must be at least 0",
        ),
        ([{**HEAD, "steps": [*COLUMNS, "update_end_s"]}, [*FIRST, float("inf")]], "update_end_s is inf"),
        ([HEAD, [*FIRST[:7], 10**30, *FIRST[8:]]], "line 2 has the number 100000000… of 31 digits"),
        ([{**HEAD, "steps": COLUMNS[:-2]}], "records steps without k_exec"),
        ([HEAD, FIRST[:-1]], "line 2 has 8 values for 9 columns"),
        ([HEAD, FIRST, [*BUSY[:8], 0, 3]], "line 3: k is 0"),
    ],
)
def test_a_fault_is_named(tmp_path: Path, lines: list[Any], message: str) -> None:
    with pytest.raises(ProfileError, match=message) as error:
        read_recorded_steps(written(tmp_path, *lines), [4])
    assert "run.jsonl" in str(error.value)
