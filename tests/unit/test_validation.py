"""The validation experiments' own parts: their plan, and what an engine of theirs can do."""

from __future__ import annotations

import csv
import gzip
import importlib
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from simmoe.analysis.compare import differences
from simmoe.analysis.metrics import Slo
from simmoe.cli import run as cli
from simmoe.commands.sweeping.cells import Cell, run_cell
from simmoe.commands.sweeping.saturation import offline_cell, saturation_rate
from simmoe.commands.validate import simulate_like
from simmoe.live.driving.recording import HOST_FILE
from simmoe.profiles.catalog import load_profile
from simmoe.profiles.shape import StepShape
from simmoe.records import RunRecord, read_record, write_record
from simmoe.simulator.config import EngineConfig, SimConfig
from simmoe.traces.spec import WorkloadSpec
from tests.support.live_record import as_live

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "validation"
PROFILE = "synthetic-olmoe-split4"

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


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Import a module of the experiment's folder, for the length of a test."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(FOLDER) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


@pytest.fixture
def live(tmp_path: Path) -> RunRecord:
    """A record as a live run leaves it, of two engines that take the profile's times."""
    options = ["--rate", "30", "--requests", "60", "--ranks", "2", "--record-steps", "--profile", PROFILE]
    assert cli(["run", *options, "--policy", "fifo+round-robin", "--out", str(tmp_path / "was")]) == 0
    return as_live(read_record(tmp_path / "was"), experiment={"graphs": "keyed"})


def test_a_host_that_does_not_wander_changes_nothing(module: Callable[[str], ModuleType], live: RunRecord) -> None:
    sensitivity, profile = module("sensitivity"), load_profile(PROFILE)
    plain, _ = simulate_like(live, profile)

    def of(ratio: float) -> RunRecord:
        steady = sensitivity._with_cost(
            profile, live, lambda cost: sensitivity.Wandering(cost, np.array([ratio]), 0, 2)
        )
        record: RunRecord = simulate_like(live, steady, fast_forward=False)[0]
        return record

    for name, column in plain.requests.items():
        assert (of(1.0).requests[name] == column).all()
    assert of(3.0).requests["finished_s"].max() > plain.requests["finished_s"].max()


def test_each_engine_goes_through_the_hosts_moments_at_its_own_pace(module: Callable[[str], ModuleType]) -> None:
    cost = load_profile(PROFILE).cost()
    shape = StepShape(0, 0, 0, 10, 1000, 32)
    wandering = module("sensitivity").Wandering(cost, np.array([1.0, 2.0, 4.0]), 1, 2)
    parts = cost.parts_s(shape)
    for ratio in (2, 2, 4, 4, 1, 1, 2):
        assert wandering.parts_s(shape) == (parts.device_s, *(ratio * part for part in parts[1:]))


def test_a_hosts_moments_are_its_times_over_their_mean_and_stalls_are_none(
    module: Callable[[str], ModuleType], live: RunRecord, tmp_path: Path
) -> None:
    sensitivity, profile = module("sensitivity"), load_profile(PROFILE)
    cost, steps = profile.cost(), live.steps
    assert steps is not None
    counts = list(zip(steps["num_prefill_tokens"].tolist(), steps["num_decode_tokens"].tolist(), strict=True))
    ratios = np.random.default_rng(0).uniform(0.7, 1.4, len(counts))
    ratios[5] = 30.0
    lines = ["num_prefill_seqs,launch_s,update_s"]
    for (tokens, decodes), ratio in zip(counts, ratios, strict=True):
        host_s = cost.parts_s(StepShape(tokens, tokens, min(1, tokens), decodes, decodes, 8)).host_s
        lines.append(f"{min(1, tokens)},{0.75 * ratio * host_s:.12f},{0.25 * ratio * host_s:.12f}")
    files = {HOST_FILE: gzip.compress("\n".join(lines).encode() + b"\n")}
    folder = write_record(tmp_path / "live", replace(live, files=files))
    assert sensitivity.host_ratios(folder, profile) == pytest.approx(np.delete(ratios, 5), rel=1e-6)


def test_steps_that_take_what_the_table_says_are_no_longer_and_no_shorter(
    module: Callable[[str], ModuleType], live: RunRecord, tmp_path: Path
) -> None:
    steps, profile, columns = module("steps"), load_profile(PROFILE), live.steps
    assert columns is not None
    cost = profile.cost()
    names = ("num_prefill_tokens", "num_decode_tokens", "kv_tokens", "k_exec")
    lines = ["num_prefill_seqs,launch_s,update_s"]
    for n, decodes, kv, k in zip(*(columns[name].tolist() for name in names), strict=True):
        parts = cost.parts_s(StepShape(n, n * (n + 1) // 2, min(n, 1), decodes, kv, k))
        lines.append(f"{min(n, 1)},{parts.launch_s:.12f},{parts.update_s:.12f}")
    folders = []
    for factor in (1.0, 2.0):  # of the host's times, which the synthetic profile's device hides
        slower = [lines[0]]
        for line in lines[1:]:
            prompts, launch_s, update_s = map(float, line.split(","))
            slower.append(f"{prompts:.0f},{factor * launch_s:.12f},{factor * update_s:.12f}")
        files = {HOST_FILE: gzip.compress("\n".join(slower).encode() + b"\n")}
        folders.append(write_record(tmp_path / f"{factor}", replace(live, files=files)))
    as_said, slower_host = (steps.live_steps([folder], profile) for folder in folders)
    decode_only = as_said.num_prefill_tokens == 0
    assert decode_only.sum() > 100
    assert as_said.on_own_s == pytest.approx(as_said.on_table_s, rel=1e-9)
    assert as_said.on_table_s[decode_only] == pytest.approx(as_said.live_s[decode_only], rel=1e-6)
    assert (
        slower_host.on_own_s >= as_said.on_own_s * (1 - 1e-9)
    ).all() and slower_host.on_own_s.sum() > as_said.on_own_s.sum()
    rows = steps.steps_table([as_said, slower_host]).splitlines()
    assert rows[0].count("|") == 8 and any(row.startswith("| decode-only |") for row in rows)


def test_when_requests_join_steps_is_told_of_every_experiment() -> None:
    told = run("import sys\nsys.argv[1:] = ['../../docs/results/validation']\nfrom joining import main\nmain()")
    page = (ROOT / "docs" / "validation.md").read_text()
    assert f"<!-- table: joining -->\n\n{told.strip()}\n" in page


def test_the_parts_of_ttft_add_up_of_every_run_that_reports_it() -> None:
    program = (
        "from pathlib import Path\n"
        "from plan import EXPERIMENTS\n"
        "from split import split_table\n"
        "print(split_table(Path('../../docs/results/validation/keyed'), EXPERIMENTS['keyed']))"
    )
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in run(program).splitlines()[2:]]
    assert {"vllm-25", "k-aware-90-own"} <= {row[0] for row in rows}
    assert not {"vllm+k-25", "vllm-offline", "front-end-load"} & {row[0] for row in rows}
    for _, *cells in rows:
        *parts, total = (float(cell.split(" ± ")[0]) for cell in cells)
        assert sum(parts) == pytest.approx(total, abs=0.005 * (len(parts) + 1))  # each is rounded to 0.01


def test_how_far_a_live_run_lies_outside_of_the_draws(module: Callable[[str], ModuleType], live: RunRecord) -> None:
    profile = load_profile(PROFILE)
    simulated, _ = simulate_like(live, profile)
    statistic = ("ttft", "mean")
    live_s = float((live.requests["first_token_s"] - live.requests["arrival_s"]).mean())
    compared = module("compared")

    def beyond(low: float, high: float) -> float:
        cell = module("plan").EXPERIMENTS["keyed"].cells({"vllm": 1.0, "vllm+k": 1.0, "k-aware": 1.0})[2]
        spread = {statistic: (low * live_s, high * live_s)}
        run = compared.Compared(cell, live, *[simulated] * 3, (simulated,) * 2, None, 1.0, {}, spread, {})
        return float(run.beyond(*statistic))

    assert beyond(0.9, 1.1) == 0
    assert beyond(0.8, 0.9) == pytest.approx(0.1) and beyond(1.2, 1.3) == pytest.approx(-0.2)


def test_a_page_gets_its_tables_and_keeps_all_else(module: Callable[[str], ModuleType], tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("Before.\n\n<!-- table: keyed host -->\n\n| old |\n| --- |\n| row |\n\nAfter.\n\nEnd.\n")
    module("tables").put_into(page, {"keyed host": "| new |", "keyed results": "| nowhere |"})
    assert page.read_text() == "Before.\n\n<!-- table: keyed host -->\n\n| new |\n\nAfter.\n\nEnd.\n"


def test_the_page_shows_every_run_that_was_recorded() -> None:
    page = (ROOT / "docs" / "validation.md").read_text()
    for folder in (ROOT / "docs" / "results" / "validation").iterdir():
        recorded = {run.name for run in folder.iterdir() if run.is_dir() and not run.name.startswith("front-end")}
        for name in ("results", "host", "causes"):
            _, comment, after = page.partition(f"<!-- table: {folder.name} {name} -->\n\n")
            rows = after.partition("\n\n")[0].splitlines()[2:]
            assert comment and {row.split(" | ")[0].removeprefix("| ") for row in rows} == recorded


def test_the_page_is_of_the_shipped_profile_and_a_run_simulated_again_gives_its_row(
    module: Callable[[str], ModuleType],
) -> None:
    """One run of each experiment, the plain simulation: what the tables rest on besides takes minutes."""
    page = (ROOT / "docs" / "validation.md").read_text()
    analyse, compared, plan = module("analyse"), module("compared"), module("plan")
    runs = {"keyed": "vllm-25", "default-graphs": "k-aware-50", "deepseek": "vllm-25", "repeated": "k-aware-70-again"}
    assert runs.keys() == plan.EXPERIMENTS.keys()
    for name, run in runs.items():
        experiment, folder = plan.EXPERIMENTS[name], ROOT / "docs" / "results" / "validation" / name
        profile = load_profile(experiment.profile)
        assert f"the profile with SHA-256 {profile.sha256[:8]};" in page, "make the page's tables anew, by analyse.py"
        front_end, _ = analyse.told_front_end(folder)
        live, believed = read_record(folder / run), load_profile(str(folder / analyse.POLICY_PROFILE))
        simulated, _ = simulate_like(live, profile, front_end, believed)
        with (folder.parents[1] / f"validation-{name}.csv").open(newline="") as file:
            (row,) = (row for row in csv.DictReader(file) if row["run"] == run)
        found = {f"{d.metric}_{d.statistic}": d for d in differences(simulated, live)}
        kept = [column.removesuffix("_error") for column in row if column.removesuffix("_error") in found]
        assert len(kept) > 15
        for statistic in kept:
            ours, theirs, error = (float(row[f"{statistic}_{what}"]) for what in ("simulated", "live", "error"))
            difference = found[statistic]
            assert (ours, theirs) == pytest.approx((difference.first, difference.second), rel=1e-5), statistic
            assert error == pytest.approx(difference.error, abs=1e-5), statistic
        cell = analyse._recorded(live, experiment)
        alone = compared.Compared(cell, live, *[simulated] * 3, (simulated,) * 2, None, 1.0, {}, {}, {})
        (printed,) = module("tables").table([alone]).splitlines()[2:]
        _, _, table = page.partition(f"<!-- table: {name} results -->")
        (shown,) = (line for line in table.partition("<!--")[0].splitlines() if line.startswith(f"| {run} |"))
        assert shown == printed


def test_without_a_queue_a_bias_in_the_steps_is_one_in_tpot(
    module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    magnification = module("magnification")
    monkeypatch.setattr(magnification, "ONLINE_S", 1000.0)
    experiment = module("plan").EXPERIMENTS["keyed"]
    (ttft, _), _, (tpot, error) = magnification.grows_by(experiment, load_profile(PROFILE), "vllm", 1e-4, seeds=(0, 1))
    assert tpot == pytest.approx(1, abs=1e-6) and error < 1e-6
    assert 0.5 < ttft < 1  # the front end's part of it does not grow


def test_a_ttft_that_is_not_to_be_reported_is_in_no_picture(
    module: Callable[[str], ModuleType], live: RunRecord, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from matplotlib.figure import Figure

    pictures, drawn = module("pictures"), []

    @contextmanager
    def keep(_path: Path, size: tuple[float, float]) -> Iterator[Figure]:
        drawn.append(Figure(size))
        yield drawn[-1]

    monkeypatch.setattr(pictures, "picture", keep)
    late = replace(live, manifest=live.manifest | {"send_lag": {"ttft_reported": False}})
    system = next(iter(pictures.POLICIES))
    runs = [
        SimpleNamespace(cell=SimpleNamespace(system=system, rate=rate), simulated=live, live=record)
        for rate, record in ((30.0, live), (40.0, late))
    ]
    pictures.draw_loads(tmp_path / "loads.png", runs)
    pictures.draw_distributions(tmp_path / "distributions.png", runs)
    loads, distributions = drawn
    dots = [next(line for line in axes.lines if line.get_label() == f"{system}, live") for axes in loads.axes]
    assert [list(np.isnan(line.get_ydata())) for line in dots] == [[False, True], [False, True], [False, False]]
    # TTFT of the simulated run alone; TPOT of both
    assert [len(axes.lines) for axes in distributions.axes[:2]] == [1, 2]
