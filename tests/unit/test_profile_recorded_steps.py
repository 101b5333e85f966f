"""Steps of a recorded run become samples only where nothing but the step decided how long it took."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from simmoe.errors import ProfileError
from simmoe.profiles.recorded_steps import CALIBRATION, is_recording, read_recorded_steps, read_updates
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


def test_the_hosts_time_to_launch_follows_a_step_of_the_calibration(tmp_path: Path) -> None:
    """Where it was recorded, and of no other recording: those take no part in a fit."""
    head = {**HEAD, "steps": [*COLUMNS, "launch_s"]}
    lines = [[*FIRST, 0.003], [*BUSY, 0.004], [*BUSY[:2], 0.02, *BUSY[3:], None]]
    path = written(tmp_path, head, {"recording": CALIBRATION}, *lines, {"recording": "burst"}, *lines)
    samples = read_recorded_steps(path, [4])
    assert [(s.clock, s.held_out) for s in samples[:3]] == [("step", False), ("host", False), ("step", False)]
    assert samples[1].median_s == pytest.approx(0.004) and samples[1].shape == samples[0].shape
    assert all(s.clock == "step" and s.held_out for s in samples[3:])


LOOP = {**HEAD, "steps": [*COLUMNS, "device_end_s", "launch_s", "schedule_end_s", "update_end_s"]}


def test_taking_a_step_in_begins_when_the_device_is_done_and_the_next_is_launched(tmp_path: Path) -> None:
    """The first step's tokens came after the second's launch, at 9 ms; the second's after the device, at 15."""
    first, second = [*FIRST, 0.007, 0.002, 0.001, 0.0105], [*BUSY, 0.015, 0.003, 0.006, 0.0165]
    third = ["step", 0.0115, 0.02, *BUSY[3:], 0.019, 0.002, 0.012, 0.021]
    path = written(tmp_path, LOOP, {"recording": CALIBRATION}, first, second, third, third)
    found = read_updates(path)
    assert [update.num_seqs for update in found] == [1, 2]
    assert [update.seconds for update in found] == pytest.approx([0.0015, 0.0015])
    # other recordings take no part in a fit
    assert not read_updates(written(tmp_path, LOOP, {"recording": "burst"}, first, second, third, third))


def test_where_its_end_was_not_recorded_the_next_but_one_step_begins_when_a_step_was_taken_in(tmp_path: Path) -> None:
    """The second step's output came 1 ms after the device, so the host was late: only the first tells."""
    head = {**HEAD, "steps": [*COLUMNS, "device_end_s", "launch_s"]}
    lines = [[*FIRST, 0.0096, 0.002], [*BUSY, 0.015, 0.002], ["step", 0.0102, 0.02, *BUSY[3:], 0.019, 0.002]]
    path = written(tmp_path, head, {"recording": CALIBRATION}, *lines, lines[-1])
    (update,) = read_updates(path)
    assert update.num_seqs == 1
    assert update.seconds == pytest.approx(0.0006)
    assert not read_updates(written(tmp_path, HEAD, {"recording": CALIBRATION}, FIRST, BUSY, BUSY))


def test_a_time_that_is_none_is_named(tmp_path: Path) -> None:
    path = written(tmp_path, LOOP, {"recording": CALIBRATION}, [*FIRST, 0.0096, "fast", 0.001, 0.01])
    with pytest.raises(ProfileError, match=r"run\.jsonl' line 3: launch_s is 'fast', no float and no null"):
        read_updates(path)


def test_a_step_above_the_captured_sizes_ran_eagerly(tmp_path: Path) -> None:
    path = written(tmp_path, HEAD, FIRST, BUSY)
    assert read_recorded_steps(path, [1])[0].mode == read_recorded_steps(path, [])[0].mode == "eager"


def test_gzipped_recordings_are_read_and_recognised(tmp_path: Path) -> None:
    path = written(tmp_path, HEAD, FIRST, BUSY)
    packed = tmp_path / "run.jsonl.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert read_recorded_steps(packed, [4]) == read_recorded_steps(path, [4])
    assert is_recording(packed) and is_recording(path)
    assert not is_recording(tmp_path / "absent.jsonl") and not is_recording(Path(__file__))


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([{"format": "csv"}], "is no recording of version 1"),
        ([{**HEAD, "version": 2}], "is no recording of version 1"),
        ([{**HEAD, "steps": COLUMNS[:-2]}], "records steps without k_exec"),
        ([HEAD, FIRST[:-1]], "line 2 has 8 values for 9 columns"),
        ([HEAD, FIRST, [*BUSY[:8], 0, 3]], "line 3: k is 0"),
    ],
)
def test_a_fault_is_named(tmp_path: Path, lines: list[Any], message: str) -> None:
    with pytest.raises(ProfileError, match=message) as error:
        read_recorded_steps(written(tmp_path, *lines), [4])
    assert "run.jsonl" in str(error.value)
