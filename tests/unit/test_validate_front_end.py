"""The front end's times, recovered from the clocks of a run whose front end has known ones."""

from __future__ import annotations

import csv
import io
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from simmoe.cli import run as cli
from simmoe.commands.front_end import at_engine, front_end_times, read_clocks, service_time
from simmoe.live.driving.recording import CLOCKS_FILE
from simmoe.policies.registry import parse_policy
from simmoe.profiles.catalog import load_profile
from simmoe.records import Columns, RunRecord, write_record
from simmoe.simulator.config import EngineConfig, FrontEndConfig, SimConfig
from simmoe.simulator.simulation import simulate
from simmoe.traces.build import build_workload
from simmoe.traces.spec import WorkloadSpec

PROFILE = "synthetic-olmoe-split4"
GIVEN = FrontEndConfig(ingress_s=0.0014, egress_s=0.0011, ingress_service_s=0.0004, egress_per_token_s=0.00003)
TAKEN_S = 0.0006
"""Of the ingress: from the front end to the engine's queue."""


def live(rate: float, requests: int, front_end: FrontEndConfig = GIVEN, seed: int = 5) -> tuple[RunRecord, Columns]:
    """Return a record as a live run leaves it, of engines that are the simulator, and its clocks."""
    profile = load_profile(PROFILE)
    engine = EngineConfig(num_gpu_blocks=profile.num_gpu_blocks)
    config = SimConfig(num_ranks=2, engine=engine, front_end=front_end, record_steps=True)
    choice = parse_policy("fifo+round-robin")
    spec = WorkloadSpec(trace="azure", rate=rate, requests=requests, seed=seed)
    record = simulate(build_workload(spec), config, profile.cost(), choice.batch, choice.route).record({})
    columns = dict(record.requests)
    queued_s = columns["dispatched_s"]
    columns["dispatched_s"] = queued_s - TAKEN_S
    held_up_s = np.random.default_rng(seed).exponential(0.003, requests)  # by the engine's loop
    clocks = {
        "queued_s": queued_s + held_up_s,
        "first_output_s": columns["first_token_s"] - front_end.egress_s - front_end.egress_per_token_s * tokens(record),
    }
    manifest = {
        "kind": "live",
        "config": {"num_ranks": 2, "k_max": config.k_max, "engine": config.as_dict()["engine"]},
        "policy": {"given": choice.text},
        "workload": {"spec": spec.as_dict()},
    }
    return RunRecord(columns, manifest, record.steps), clocks


def tokens(record: RunRecord) -> np.ndarray:
    """[num_requests] tokens of the step each request was scheduled in."""
    steps, requests = record.steps, record.requests
    assert steps is not None
    found = np.zeros(len(requests["dp_rank"]))
    for rank in (0, 1):
        mine, own = requests["dp_rank"] == rank, steps["dp_rank"] == rank
        step = np.searchsorted(steps["start_s"][own], requests["scheduled_s"][mine] + 1e-9) - 1
        found[mine] = steps["num_decode_tokens"][own][step] + 1
    return found


def test_of_a_load_all_times_are_found() -> None:
    found = front_end_times(*live(rate=45.0, requests=600))
    arrive_s = [times.ingress_s + times.ingress_service_s for times in (found, GIVEN)]
    assert arrive_s[0] == pytest.approx(arrive_s[1], rel=0.03)
    assert found.egress_s == pytest.approx(GIVEN.egress_s, rel=0.1)
    assert found.egress_per_token_s == pytest.approx(GIVEN.egress_per_token_s, rel=0.1)


def test_of_a_burst_the_work_on_a_request_is_found_exactly() -> None:
    record, _ = live(rate=math.inf, requests=64)
    assert service_time(record) == pytest.approx(GIVEN.ingress_service_s, rel=1e-6)


def test_of_a_load_the_work_on_a_request_is_found_where_some_wait() -> None:
    busy = replace(GIVEN, ingress_service_s=0.004)
    record, _ = live(rate=60.0, requests=800, front_end=busy)
    assert service_time(record) == pytest.approx(0.004, rel=0.02)


def test_nobody_waits_for_a_front_end_that_does_nothing() -> None:
    assert service_time(live(rate=20.0, requests=100, front_end=replace(GIVEN, ingress_service_s=0.0))[0]) == 0.0


def test_requests_that_never_came_count_for_nothing() -> None:
    record, clocks = live(rate=45.0, requests=300)
    expected = front_end_times(record, clocks)
    lost = {name: np.append(column, column[-1]) for name, column in record.requests.items()}
    for name in ("dispatched_s", "scheduled_s", "first_token_s", "finished_s"):
        lost[name][-1] = math.nan
    lost["dp_rank"][-1] = -1
    clocks = {name: np.append(column, math.nan) for name, column in clocks.items()}
    assert front_end_times(replace(record, requests=lost), clocks) == expected


def write_live(folder: Path, record: RunRecord, clocks: Columns) -> Path:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["request_id", *clocks])
    values = [["" if math.isnan(x) else f"{x:.6f}" for x in column] for column in clocks.values()]
    writer.writerows(zip(record.requests["request_id"], *values, strict=True))
    return write_record(folder, replace(record, files={CLOCKS_FILE: text.getvalue().encode()}))


def test_validating_takes_them_from_the_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record, clocks = live(rate=45.0, requests=600)
    folder = write_live(tmp_path / "live", record, clocks)
    read = read_clocks(folder)
    assert read is not None and all(np.allclose(read[name], clocks[name], atol=1e-6) for name in clocks)
    options = ["validate", "--live", str(folder), "--profile", PROFILE, "--out", str(tmp_path / "out")]
    assert cli(options) == 0
    content = json.loads((tmp_path / "out" / "compare" / "compare.json").read_text())
    errors = {(row["metric"], row["statistic"]): row["error"] for row in content["differences"]}
    assert abs(errors["ttft", "mean"]) < 0.005 and abs(errors["ttft", "p99"]) < 0.02
    lines = (folder / CLOCKS_FILE).read_text().splitlines()
    for spoilt, message in (
        (lines[:-1], "clocks.csv is of 599 requests; the record has 600"),
        ([lines[0].replace("queued_s", "other_s"), *lines[1:]], "clocks.csv' has no column queued_s"),
        ([lines[0], lines[1].replace(".", "x"), *lines[2:]], "clocks.csv' line 2: "),
    ):
        (folder / CLOCKS_FILE).write_text("\n".join(spoilt) + "\n")
        assert cli([*options[:-1], str(tmp_path / "spoilt")]) == 3
        assert message in capsys.readouterr().err
    (folder / CLOCKS_FILE).unlink()
    assert cli([*options[:-1], str(tmp_path / "without")]) == 0
    assert "the record keeps no clocks" in capsys.readouterr().err


def test_dispatch_is_compared_where_the_engine_has_the_request(tmp_path: Path) -> None:
    """Both sides mean the engine's queue: what the handover takes is no difference, nor is it the queue's."""
    folder, out = write_live(tmp_path / "live", *live(rate=45.0, requests=600)), tmp_path / "out"
    assert cli(["validate", "--live", str(folder), "--profile", PROFILE, "--out", str(out)]) == 0

    def causes_s() -> dict[str, float]:
        told: dict[str, float] = json.loads((out / "compare" / "compare.json").read_text())["causes"]["ttft_s"]
        return told

    at_queue_s = causes_s()
    (folder / CLOCKS_FILE).unlink()
    assert cli(["compare", str(out / "sim"), str(folder), "--out", str(out / "compare")]) == 0
    handed_over_s = causes_s()
    assert abs(at_queue_s["dispatch"]) < TAKEN_S / 5
    assert handed_over_s["dispatch"] == pytest.approx(at_queue_s["dispatch"] - TAKEN_S, abs=TAKEN_S / 5)
    assert sum(handed_over_s.values()) == pytest.approx(sum(at_queue_s.values()), abs=1e-9)


def test_the_engine_has_a_request_once_it_is_handed_over_and_before_it_is_begun() -> None:
    record, clocks = live(rate=45.0, requests=300)
    requests = {name: column.copy() for name, column in record.requests.items()}
    requests["dispatched_s"][7] = math.nan
    for name in clocks:
        clocks[name][8] = math.nan
    clocks["queued_s"][9] = requests["dispatched_s"][9] - 0.1  # a clock's jitter
    reached_s = at_engine(replace(record, requests=requests), clocks).requests["dispatched_s"]
    took_s = reached_s - requests["dispatched_s"]
    assert np.flatnonzero(np.isnan(took_s)).tolist() == [7]
    known = np.arange(300) != 7
    assert (took_s[known] >= 0).all() and (reached_s <= requests["scheduled_s"])[known].all()
    assert took_s[9] == 0 and took_s[8] == pytest.approx(TAKEN_S, rel=0.2)
    assert np.median(took_s[known]) == pytest.approx(TAKEN_S, rel=0.2)
    assert at_engine(record, clocks, 0.0).requests["dispatched_s"] == pytest.approx(record.requests["dispatched_s"])
