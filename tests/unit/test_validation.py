"""The validation experiment's own parts: its plan, and the front end's times recovered from runs that have them."""

from __future__ import annotations

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
        "calibrating, seeds = set(), set()\n"
        "for experiment in EXPERIMENTS.values():\n"
        "    cells = experiment.cells(experiment.saturation or dict(zip(POLICIES, (30.0, 31.0, 33.0))))\n"
        "    assert len({cell.name for cell in cells}) == len(cells)\n"
        "    served, runs = defaultdict(set), defaultdict(int)\n"
        "    for cell in cells:\n"
        "        assert not parse_policy(POLICIES[cell.system]).clairvoyant\n"
        "        assert cell.spec.rate == cell.rate and (cell.load == float('inf') or cell.load <= 0.905), cell\n"
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
        "from plan import EXPERIMENTS\n"
        "from saturation import saturation\n"
        "from simmoe.profiles.catalog import load_profile\n"
        "profile = load_profile('synthetic-olmoe-split4')\n"
        "print(saturation(replace(EXPERIMENTS['keyed'], captured_ks=None), profile)['vllm+k'])\n"
    )
    spec = WorkloadSpec(trace="azure", rate=1.0, requests=1, mu=16, sigma=5)
    profile = load_profile("synthetic-olmoe-split4")
    config = SimConfig(k_max=profile.k_max, engine=EngineConfig(num_gpu_blocks=profile.num_gpu_blocks))
    metrics = run_cell(offline_cell(Cell(spec, "fifo", profile.name, config, Slo()))).metrics
    assert float(run(program)) == pytest.approx(saturation_rate(metrics, "fifo"), abs=0.05)


def test_the_front_ends_times_are_found_in_runs_that_have_them() -> None:
    program = (
        "from dataclasses import replace\n"
        "from front_end import front_end_times\n"
        "from plan import EXPERIMENTS, POLICIES\n"
        "from simmoe.policies.registry import parse_policy\n"
        "from simmoe.profiles.catalog import load_profile\n"
        "from simmoe.simulator.config import EngineConfig, FrontEndConfig, SimConfig\n"
        "from simmoe.simulator.simulation import simulate\n"
        "from simmoe.traces.build import build_workload\n"
        "profile = load_profile('synthetic-olmoe-split4')\n"
        "given = FrontEndConfig(\n"
        "    ingress_s=0.0008, egress_s=0.0011, ingress_service_s=0.0004, egress_per_token_s=0.00002\n"
        ")\n"
        "records = []\n"
        "experiment = EXPERIMENTS['keyed']\n"
        "for cell in experiment.cells(experiment.saturation)[:2]:\n"
        "    config = SimConfig(num_ranks=cell.num_ranks, front_end=given, record_steps=True)\n"
        "    choice = parse_policy(POLICIES[cell.system])\n"
        "    result = simulate(build_workload(cell.spec), config, profile.cost(), choice.batch, choice.route)\n"
        "    records.append(result.record({}))\n"
        "found = front_end_times(*records)\n"
        "for name in ('ingress_s', 'egress_s', 'ingress_service_s', 'egress_per_token_s'):\n"
        "    print(getattr(found, name) / getattr(given, name))\n"
    )
    ratios = [float(line) for line in run(program).split()]
    assert len(ratios) == 4
    assert all(math.isclose(ratio, 1.0, abs_tol=0.15) for ratio in ratios), ratios
