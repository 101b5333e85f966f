"""The offline cell that finds a saturation rate: big enough to be steady, small enough to run, for any arrivals."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from simmoe.analysis.metrics import Slo
from simmoe.commands.sweeping.cells import Cell, run_cell
from simmoe.commands.sweeping.saturation import MOST_REQUESTS, ROUNDS, offline_cell, rates_around, saturation_rate
from simmoe.errors import SimmoeError
from simmoe.simulator.config import EngineConfig, SimConfig
from simmoe.traces.spec import WorkloadSpec

PROFILE = "synthetic-olmoe-split4"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "five.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{i},{90 + i},{8 + i}\n" for i in range(5)))
    return path


def cell(trace: Path, ranks: int = 1, max_num_seqs: int = 4, arrivals: str = "poisson", blocks: int = 1000) -> Cell:
    engine = EngineConfig(max_num_seqs=max_num_seqs, num_gpu_blocks=blocks)
    spec = WorkloadSpec(trace=str(trace), arrivals=arrivals, rate=5.0, requests=5, seed=3)
    return Cell(spec, "fifo", PROFILE, SimConfig(num_ranks=ranks, engine=engine), Slo())


@pytest.mark.parametrize("arrivals", ["poisson", "replay", "gamma", "constant", "onoff"])
def test_every_request_is_present_at_the_start(trace: Path, arrivals: str) -> None:
    offline = offline_cell(cell(trace, arrivals=arrivals))
    assert (offline.workload.requests, offline.workload.rate, offline.workload.seed) == (ROUNDS * 4, math.inf, 0)
    assert run_cell(offline).metrics["finished"] == ROUNDS * 4


def test_what_runs_at_once_is_bounded_by_sequences_or_by_blocks(trace: Path) -> None:
    # 102 tokens a request on average, 16 a block: 99 blocks hold 15.5 of them
    assert offline_cell(cell(trace, max_num_seqs=64, blocks=100)).workload.requests == ROUNDS * 16
    assert offline_cell(cell(trace, ranks=3)).workload.requests == ROUNDS * 3 * 4


def test_many_ranks_get_fewer_rounds(trace: Path) -> None:
    large = offline_cell(cell(trace, ranks=64, max_num_seqs=128, blocks=10_000)).workload.requests
    assert large == MOST_REQUESTS
    larger = offline_cell(cell(trace, ranks=512, max_num_seqs=128, blocks=10_000)).workload.requests
    assert larger == 4 * 512 * 128


def test_the_rate_does_not_depend_on_how_many_rounds_are_run(trace: Path) -> None:
    offline = offline_cell(cell(trace))
    rate = saturation_rate(run_cell(offline).metrics, "fifo")
    longer = Cell(
        WorkloadSpec(trace=str(trace), rate=math.inf, requests=8 * ROUNDS * 4, seed=0), "fifo", PROFILE, offline.config,
        offline.slo,
    )  # fmt: skip
    assert rate == pytest.approx(saturation_rate(run_cell(longer).metrics, "fifo"), rel=0.05)


def test_a_deployment_that_finishes_nothing_has_no_rate(trace: Path) -> None:
    with pytest.raises(SimmoeError, match=r"'fifo' finished none of \d+ requests offline .*rejected"):
        saturation_rate(run_cell(offline_cell(cell(trace, blocks=2))).metrics, "fifo")


def test_rates_are_rounded_and_ascend() -> None:
    assert rates_around(64.57) == (16.1, 32.3, 45.2, 54.9, 64.6, 74.3)
