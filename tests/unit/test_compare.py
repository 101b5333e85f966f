"""Comparing records: what is injected is what is found."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from simmoe.analysis.compare import COMPARED, STATISTICS, Pairing, differences
from simmoe.analysis.compare_causes import CAUSES, StepRatios, direct_causes, step_periods
from simmoe.cli import run as cli
from simmoe.commands.counterfactual import find_causes
from simmoe.errors import RecordError
from simmoe.live.driving.lag import judge_lag
from simmoe.policies.registry import parse_policy
from simmoe.profiles.catalog import load_profile
from simmoe.profiles.shape import DecodeLine, StepParts, StepShape
from simmoe.records import RunRecord, write_record
from simmoe.simulator.config import EngineConfig, FrontEndConfig, SimConfig
from simmoe.simulator.simulation import simulate
from simmoe.traces.workload import Workload

PROFILE = load_profile()
CHOICE = parse_policy("fifo")


class Slower:
    """A step cost times a factor."""

    def __init__(self, factor: float) -> None:
        self._cost = PROFILE.cost(True)
        self._factor = factor
        self.prefill_s = self._cost.prefill_s

    def step_s(self, shape: StepShape, /) -> float:
        return self._factor * self._cost.step_s(shape)

    def parts_s(self, shape: StepShape, /) -> StepParts:
        return StepParts(*(self._factor * part for part in self._cost.parts_s(shape)))

    def decode_line(self, num_decode_seqs: int, k_exec: int, /) -> DecodeLine:
        return DecodeLine(*(self._factor * part for part in self._cost.decode_line(num_decode_seqs, k_exec)))


def workload(rate: float = 35.0, size: int = 400) -> Workload:
    rng = np.random.default_rng(7)
    arrivals = np.cumsum(rng.exponential(1 / rate, size))
    return Workload(
        request_id=[f"r{i}" for i in range(size)],
        arrival_s=arrivals - arrivals[0],
        prompt_tokens=rng.integers(600, 1500, size),
        output_tokens=rng.integers(20, 200, size),
        k_qos=rng.integers(4, 28, size),
    )


def record(
    load: Workload, factor: float = 1.0, ingress_s: float = 0.0, max_num_seqs: int = 1024, steps: bool = True
) -> RunRecord:
    config = SimConfig(
        engine=EngineConfig(num_gpu_blocks=PROFILE.num_gpu_blocks, max_num_seqs=max_num_seqs),
        front_end=FrontEndConfig(ingress_s=ingress_s),
        record_steps=steps,
    )
    result = simulate(load, config, Slower(factor), CHOICE.batch, CHOICE.route)
    manifest = {
        "kind": "run",
        "config": config.as_dict(),
        "profile": {"name": PROFILE.name, "sha256": PROFILE.sha256},
        "policy": {"given": CHOICE.text},
    }
    return result.record(manifest)


@pytest.fixture(scope="module")
def base() -> RunRecord:
    return record(workload())


def test_a_record_differs_from_itself_by_nothing(base: RunRecord) -> None:
    rows = differences(base, base)
    assert {(row.metric, row.statistic) for row in rows} >= {(m, s) for m in COMPARED for s in STATISTICS}
    assert all(row.error == 0 for row in rows)
    causes, ratios = find_causes(base, base, Pairing.of(base, base))
    assert all(abs(part) < 1e-12 for part in (*causes.ttft_s.values(), *causes.e2e_s.values()))
    assert ratios.overall == pytest.approx(1) and ratios.compared_share == pytest.approx(1)


def bunched(load: Workload) -> Workload:
    return replace(load, arrival_s=np.floor(load.arrival_s / 2) * 2)


@pytest.mark.parametrize(
    ("cause", "change"),
    [
        ("step time", lambda load: record(load, factor=1.1)),
        ("step time", lambda load: record(load, factor=0.95)),
        ("dispatch", lambda load: record(load, ingress_s=0.02)),
        ("arrivals", lambda load: record(bunched(load))),
        ("queueing", lambda load: record(load, max_num_seqs=24)),
    ],
    ids=["slower steps", "faster steps", "later dispatch", "bunched arrivals", "fewer seats"],
)
def test_what_is_injected_is_what_is_found(
    base: RunRecord, cause: str, change: Callable[[Workload], RunRecord]
) -> None:
    """At a load where the queue magnifies: nine tenths of the difference go to its cause, and the parts add up."""
    other = change(workload())
    pairing = Pairing.of(base, other)
    causes, ratios = find_causes(base, other, pairing)
    direct = direct_causes(base, other, pairing)
    means = {row.metric: row.second - row.first for row in differences(base, other) if row.statistic == "mean"}
    for metric, parts in (("ttft", causes.ttft_s), ("e2e", causes.e2e_s)):
        assert sum(parts.values()) == pytest.approx(means[metric], rel=1e-9, abs=1e-12)
        assert parts[cause] / means[metric] == pytest.approx(1, abs=0.1)
    assert sum(direct.ttft_s.values()) == pytest.approx(means["ttft"])
    if cause == "step time":
        factor = 1.1 if means["ttft"] > 0 else 0.95
        assert ratios.overall == pytest.approx(factor, abs=0.005)
        # the queue passes on more than a request's own steps lose or gain
        assert abs(causes.ttft_s[cause]) > 1.5 * abs(direct.ttft_s[cause])


def test_steps_are_compared_with_their_like() -> None:
    steps = {
        "num_prefill_tokens": np.array([0, 0, 900]),
        "num_decode_tokens": np.array([8, 9, 0]),
        "kv_tokens": np.array([100, 120, 0]),
        "k_exec": np.array([4, 4, 8]),
        "duration_s": np.array([0.01, 0.01, 0.05]),
        "start_s": np.array([0.0, 0.01, 0.02]),
        "dp_rank": np.zeros(3, dtype=np.int64),
    }
    other = {name: column[:2] for name, column in steps.items()}
    other["start_s"], other["duration_s"] = np.array([0.0, 0.02]), np.array([0.01, 0.03])
    ratios = StepRatios(steps, other)
    assert ratios.overall == pytest.approx(2.5)
    assert ratios.compared_share == pytest.approx(2 / 7)
    assert ratios.ratio(0, 12, 127, 4) == pytest.approx(2.5)
    assert ratios.ratio(0, 12, 127, 5) == ratios.overall


def test_the_hosts_time_between_steps_counts_and_a_pause_does_not() -> None:
    steps = {
        "start_s": np.array([0.0, 2.0, 7.0, 1.0]),
        "duration_s": np.array([1.0, 1.5, 1.0, 1.0]),
        "num_decode_tokens": np.array([1, 1, 0, 1]),
        "dp_rank": np.array([0, 0, 0, 1]),
    }
    assert step_periods(steps).tolist() == [2.0, 1.5, 1.0, 1.0]


def test_records_of_other_workloads_are_refused(base: RunRecord) -> None:
    load = workload()
    with pytest.raises(RecordError, match=r"request 'r0' has k_qos \d+ in the first record and 3 in the second"):
        Pairing.of(base, record(replace(load, k_qos=np.full(len(load), 3))))
    with pytest.raises(RecordError, match="share no finished request"):
        Pairing.of(base, record(replace(load, request_id=[f"x{i}" for i in range(len(load))])))


def test_unfinished_requests_are_counted_and_left_out(base: RunRecord) -> None:
    requests = {name: column.copy() for name, column in base.requests.items()}
    requests["status"][:3] = "aborted"
    requests["finished_s"][:3] = math.nan
    pairing = Pairing.of(base, RunRecord(requests, base.manifest, base.steps))
    assert len(pairing.first) == len(requests["status"]) - 3
    assert pairing.num_other == 3


@pytest.mark.parametrize("steps", [True, False], ids=["steps", "no steps"])
def test_the_command(tmp_path: Path, base: RunRecord, capsys: pytest.CaptureFixture[str], steps: bool) -> None:
    write_record(tmp_path / "sim", base)
    write_record(tmp_path / "live", record(workload(), factor=1.1, steps=steps))
    assert cli(["compare", str(tmp_path / "sim"), str(tmp_path / "live"), "--out", str(tmp_path / "out")]) == 0
    told = capsys.readouterr()
    assert ("by running the first again" if steps else "by the requests' own intervals") in told.out
    assert ("both records need their steps" in told.err) != steps
    content = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert set(content["causes"]["ttft_s"]) == set(CAUSES)
    assert content["num_paired"] == len(base.requests["status"])
    assert (tmp_path / "out" / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_a_ttft_spoilt_by_late_sending_is_not_told(
    tmp_path: Path, base: RunRecord, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rest is: a refused TTFT shows neither as a number, nor as an error, nor as a cause, nor in the picture."""
    lag = judge_lag(np.array([0.1]), np.array([0.2])).as_dict()
    write_record(tmp_path / "sim", base)
    late = record(workload(), factor=1.1)
    write_record(tmp_path / "live", RunRecord(late.requests, {**late.manifest, "send_lag": lag}, late.steps))
    assert cli(["compare", str(tmp_path / "sim"), str(tmp_path / "live"), "--out", str(tmp_path / "out")]) == 8
    told = capsys.readouterr()
    assert re.search(r"TTFT of '.*live' is not compared: the mean send lag, 100.000 ms, is above 2%", told.err)
    assert "mean TTFT" not in told.out and "magnified" not in told.out
    ours, theirs, error = (line.split() for line in told.out.partition("TTFT")[2].splitlines()[:3])
    assert "-" not in ours and theirs[1:] == error[1:] == ["-"] * len(STATISTICS)
    content = json.loads((tmp_path / "out" / "compare.json").read_text())
    assert content["ttft_refused"] == ["", lag["refusal"]] and content["causes"]["ttft_s"] is None
    for row in content["differences"]:
        assert (row["second"] is None) == (row["metric"] == "ttft"), row
    assert set(content["causes"]["e2e_s"]) == set(CAUSES)
    assert (tmp_path / "out" / "compare.png").read_bytes().startswith(b"\x89PNG")


def test_a_folder_that_is_no_record_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli(["compare", str(tmp_path), str(tmp_path)]) == 3
    assert "is no run record" in capsys.readouterr().err
