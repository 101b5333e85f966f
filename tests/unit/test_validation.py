"""The validation experiments' own parts: their plan, and what an engine of theirs can do."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest

from simmoe.analysis.metrics import Slo
from simmoe.commands.sweeping.cells import Cell, run_cell
from simmoe.commands.sweeping.saturation import offline_cell, saturation_rate
from simmoe.profiles.catalog import load_profile
from simmoe.simulator.config import EngineConfig, SimConfig
from simmoe.traces.spec import WorkloadSpec

FOLDER = Path(__file__).parents[2] / "benchmarks" / "validation"

pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="benchmarks/ is in the repository alone")


def run(program: str) -> str:
    """Return what a program prints that imports from the experiment's folder."""
    found = subprocess.run([sys.executable, "-c", program], cwd=FOLDER, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    return found.stdout


def test_every_policy_serves_the_same_requests_at_each_load_up_to_its_saturation() -> None:
    program = (
        "from collections import defaultdict\n"
        "from plan import EXPERIMENTS, FRONT_END, POLICIES\n"
        "from simmoe.policies.registry import parse_policy\n"
        "from simmoe.traces.build import build_workload\n"
        "calibrating, seeds = set(), set()\n"
        "for experiment in EXPERIMENTS.values():\n"
        "    cells = experiment.cells(experiment.saturation or dict(zip(POLICIES, (30.0, 31.0, 33.0))))\n"
        "    assert len({cell.name for cell in cells}) == len(cells)\n"
        "    assert build_workload(cells[1].spec).k_qos.max() <= experiment.k_max\n"
        "    served, runs = defaultdict(set), defaultdict(int)\n"
        "    for cell in cells:\n"
        "        assert not parse_policy(POLICIES[cell.system]).clairvoyant\n"
        "        assert cell.spec.rate == cell.rate and (cell.load == float('inf') or cell.load < 1), cell\n"
        "        assert cell.num_ranks <= experiment.num_ranks\n"
        "        if cell.name.startswith(FRONT_END): calibrating.add(cell.spec.seed); continue\n"
        "        seeds.add(cell.spec.seed)\n"
        "        served[cell.rate, cell.num_ranks].add((cell.spec.seed, cell.spec.requests))\n"
        "        runs[cell.name.removesuffix('-again')] += 1\n"
        "    assert all(len(same) == 1 for same in served.values()), served\n"
        "    assert all(number <= 2 for number in runs.values()) and 2 in runs.values()\n"
        "assert not calibrating & seeds\n"
    )
    run(program)


def test_a_deployments_saturation_is_that_of_a_sweep() -> None:
    program = (
        "from dataclasses import replace\n"
        "from json import dumps\n"
        "from plan import EXPERIMENTS, POLICIES\n"
        "from saturation import saturation\n"
        "from simmoe.profiles.catalog import load_profile\n"
        "experiment = replace(EXPERIMENTS['keyed'], captured_ks=None)\n"
        "spec = experiment.cells(dict.fromkeys(POLICIES, 1.0))[0].spec\n"
        "rate = saturation(experiment, load_profile('synthetic-olmoe-split4'))['vllm+k']\n"
        "print(dumps([rate, spec.requests, spec.seed]))\n"
    )
    rate, requests, seed = json.loads(run(program))
    profile = load_profile("synthetic-olmoe-split4")
    config = SimConfig(k_max=profile.k_max, engine=EngineConfig(num_gpu_blocks=profile.num_gpu_blocks))
    # The same requests: how many a sweep offers offline follows from their lengths, which differ by seed.
    spec = WorkloadSpec(trace="azure", rate=math.inf, requests=requests, mu=16, sigma=5, seed=seed)
    cell = Cell(spec, "fifo", profile.name, config, Slo())
    assert rate == pytest.approx(saturation_rate(run_cell(offline_cell(cell)).metrics, "fifo"), abs=0.05)
