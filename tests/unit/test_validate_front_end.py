"""The front end's times, recovered from the clocks of a run whose front end has known ones."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from simmoe.cli import run as cli
from simmoe.commands.front_end import at_engine, front_end_times, handover, read_clocks, service_time
from simmoe.commands.joining import joining_cut, read_loop
from simmoe.commands.recorded_config import simulated_config
from simmoe.live.driving.recording import CLOCKS_FILE, HOST_COLUMNS, HOST_FILE
from simmoe.policies.registry import parse_policy
from simmoe.profiles.catalog import load_profile
from simmoe.profiles.shape import StepShape
from simmoe.records import Columns, RunRecord, read_record, write_record
from simmoe.simulator.config import EngineConfig, FrontEndConfig, SimConfig
from simmoe.simulator.simulation import simulate
from simmoe.traces.build import build_workload
from simmoe.traces.spec import WorkloadSpec

PROFILE = "synthetic-olmoe-split4"
GIVEN = FrontEndConfig(ingress_s=0.0014, egress_s=0.0011, ingress_service_s=0.0004, egress_per_token_s=0.00003)
TAKEN_S = 0.0006
"""Of the ingress: from the front end until the engine can take a request along."""


def live(rate: float, requests: int, front_end: FrontEndConfig = GIVEN, seed: int = 5) -> tuple[RunRecord, Columns]:
    """Return a record as a live run leaves it, of engines that are the simulator, and its clocks."""
    profile = load_profile(PROFILE)
    engine = EngineConfig(num_gpu_blocks=profile.num_gpu_blocks)
    config = SimConfig(num_ranks=2, engine=engine, front_end=front_end, record_steps=True)
    choice = parse_policy("fifo+round-robin")
    spec = WorkloadSpec(trace="azure", rate=rate, requests=requests, seed=seed)
    record = simulate(build_workload(spec), config, profile.cost(), choice.batch, choice.route).record({})
    columns = dict(record.requests)
    queued_s = columns["dispatched_s"] + front_end.wakeup_s
    columns["dispatched_s"] = columns["dispatched_s"] - TAKEN_S
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


def loop(record: RunRecord) -> Columns:
    """Return what the host took for each step; a step's prompts are one, which the profile's host hardly tells."""
    steps, cost = record.steps, load_profile(PROFILE).cost()
    assert steps is not None
    rows = []
    names = ("num_prefill_tokens", "num_decode_tokens", "kv_tokens", "k_exec")
    for n, decodes, kv, k in zip(*(steps[name].tolist() for name in names), strict=True):
        parts = cost.parts_s(StepShape(n, n * (n + 1) // 2, min(n, 1), decodes, kv, k))
        rows.append((min(n, 1), parts.launch_s, parts.update_s))
    return dict(zip(HOST_COLUMNS, np.array(rows).T, strict=True))


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


def test_of_a_load_is_found_what_only_an_idle_engine_takes() -> None:
    """A busy one takes requests along in its loop's time, whenever they were queued."""
    given = replace(GIVEN, wakeup_s=0.0005)
    record, clocks = live(rate=45.0, requests=600, front_end=given)
    service_s = given.ingress_service_s
    found, unknown = (front_end_times(record, clocks, host, service_s) for host in (loop(record), None))
    assert found.wakeup_s == pytest.approx(given.wakeup_s, abs=5e-5)
    assert found.ingress_s == pytest.approx(given.ingress_s, abs=5e-5)
    # without the loop's times all of it is taken for the way to any engine, and an idle one's total is the same
    assert unknown.wakeup_s == 0.0
    assert unknown.ingress_s == pytest.approx(found.ingress_s + found.wakeup_s, abs=1e-12)


@pytest.mark.parametrize("cut_s", [0.0, 0.0003])
def test_when_requests_join_a_step_is_told_by_which_they_joined(
    cut_s: float,
) -> None:
    """One engine whose steps of 10 ms are composed 1 ms after the end of the one before last."""
    rng, num_steps, update_s = np.random.default_rng(1), 2000, 0.001
    start_s = 0.010 * np.arange(num_steps)
    dispatched_s = np.sort(rng.uniform(0.1, start_s[-10], 5000))
    composed_s = np.concatenate([[np.nan, np.nan], start_s[1:-1] + update_s])
    scheduled_s = start_s[2 + np.searchsorted(composed_s[2:], dispatched_s + cut_s)]
    ones = np.ones(num_steps)
    steps = {"dp_rank": 0 * ones, "start_s": start_s, "duration_s": 0.010 * ones}
    requests = {"dp_rank": np.zeros(5000), "dispatched_s": dispatched_s, "scheduled_s": scheduled_s}
    manifest = {"kind": "live", "config": {"engine": {"async_scheduling": True}}}
    record = RunRecord(requests, manifest, steps)
    host = {"launch_s": 0.004 * ones, "update_s": update_s * ones}
    cut = joining_cut(record, host, cut_s + 0.0005)
    assert cut is not None and cut.seconds == pytest.approx(cut_s, abs=2.1e-5) and cut.wrong < 0.002
    # who came in half a millisecond of each ten joins sooner than told: of the two steps offered one is told wrongly
    assert cut.wrong_at_least == pytest.approx(0.025, abs=0.005)


def test_where_it_is_not_known_when_steps_were_composed_no_cut_is_told() -> None:
    record, clocks = live(rate=45.0, requests=100)
    known = loop(record)
    assert joining_cut(record, known, TAKEN_S) is not None
    unknown = {name: np.full_like(column, np.nan) for name, column in known.items()}
    engine = record.manifest["config"]["engine"]
    others = [
        replace(record, manifest={"config": {"engine": {**engine, **other}}})
        for other in ({"async_scheduling": False}, {"distributed_executor_backend": "mp"})
    ]
    for other, host in ((record, None), (record, unknown), *((other, known) for other in others)):
        assert joining_cut(other, host, TAKEN_S) is None
        reach_s, wakeup_s = handover(other, clocks, host)
        assert reach_s == pytest.approx(TAKEN_S, rel=0.2) and wakeup_s == 0.0


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


def write_live(folder: Path, record: RunRecord, clocks: Columns, host: Columns | None = None) -> Path:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["request_id", *clocks])
    values = [["" if math.isnan(x) else f"{x:.6f}" for x in column] for column in clocks.values()]
    writer.writerows(zip(record.requests["request_id"], *values, strict=True))
    files = {CLOCKS_FILE: text.getvalue().encode()}
    if host is not None:
        lines = [
            ",".join(HOST_COLUMNS),
            *(",".join(f"{x:.9f}" for x in row) for row in zip(*host.values(), strict=True)),
        ]
        files[HOST_FILE] = gzip.compress(("\n".join(lines) + "\n").encode())
    return write_record(folder, replace(record, files=files))


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


def test_validating_simulates_what_an_idle_and_a_busy_engine_take(tmp_path: Path) -> None:
    """Of a record with its loop's times; dispatch is compared where a busy engine can take a request along."""
    given = replace(GIVEN, wakeup_s=0.0005)
    record, clocks = live(rate=45.0, requests=600, front_end=given)
    folder, out = write_live(tmp_path / "live", record, clocks, loop(record)), tmp_path / "out"
    host = read_loop(folder, record)
    assert host is not None and all(np.allclose(host[name], column) for name, column in loop(record).items())
    assert cli(["validate", "--live", str(folder), "--profile", PROFILE, "--out", str(out)]) == 0
    assert read_record(out / "sim").manifest["config"]["front_end"]["wakeup_s"] == pytest.approx(0.0005, abs=5e-5)
    content = json.loads((out / "compare" / "compare.json").read_text())
    errors = {(row["metric"], row["statistic"]): row["error"] for row in content["differences"]}
    assert abs(errors["ttft", "mean"]) < 0.005 and abs(errors["ttft", "p99"]) < 0.02
    assert abs(content["causes"]["ttft_s"]["dispatch"]) < 5e-5
    manifest = json.loads((out / "sim" / "manifest.json").read_text())
    del manifest["config"]["front_end"]["wakeup_s"]  # of a record made before it was known
    (out / "sim" / "manifest.json").write_text(json.dumps(manifest))
    assert simulated_config(read_record(out / "sim")).front_end.wakeup_s == 0.0


def test_the_engine_has_a_request_once_it_is_handed_over_and_before_it_is_begun() -> None:
    record, clocks = live(rate=45.0, requests=300)
    requests = {name: column.copy() for name, column in record.requests.items()}
    requests["dispatched_s"][7] = math.nan
    for name in clocks:
        clocks[name][8] = math.nan
    clocks["queued_s"][9] = requests["dispatched_s"][9] - 0.1  # a clock's jitter
    reached_s = at_engine(replace(record, requests=requests), clocks, TAKEN_S).requests["dispatched_s"]
    took_s = reached_s - requests["dispatched_s"]
    assert np.flatnonzero(np.isnan(took_s)).tolist() == [7]
    known = np.arange(300) != 7
    assert (took_s[known] >= 0).all() and (reached_s <= requests["scheduled_s"])[known].all()
    assert took_s[9] == 0 and took_s[8] == pytest.approx(TAKEN_S, rel=0.2)
    assert np.median(took_s[known]) == pytest.approx(TAKEN_S, rel=0.2)
    assert at_engine(record, clocks, 0.0).requests["dispatched_s"] == pytest.approx(record.requests["dispatched_s"])
