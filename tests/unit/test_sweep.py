"""``simmoe sweep`` as a user types it: equal bytes, resuming, and what it refuses."""

from __future__ import annotations

import csv
import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from simmoe.analysis.metrics import METRICS, Slo
from simmoe.cli import run as simmoe
from simmoe.commands.sweeping.cells import Cell, run_cell
from simmoe.commands.sweeping.saturation import LOADS
from simmoe.commands.sweeping.store import SweepStore
from simmoe.profiles.catalog import DEFAULT_PROFILE, load_profile, profile_names
from simmoe.simulator.config import EngineConfig, FrontEndConfig, SimConfig
from simmoe.traces.spec import WorkloadSpec

PROFILE = DEFAULT_PROFILE if DEFAULT_PROFILE in profile_names() else profile_names()[0]

#: A policy that counts its instances and, when armed, signals the sweep once, from the first cell of the grid.
SIGNALS = """
import os
from pathlib import Path
from simmoe.policies.protocols import ADMIT_ALL

class Signals:
    def __init__(self):
        with open("built.log", "a") as log:
            log.write("x")
        armed = Path("armed")
        if armed.exists() and len(list(Path("out/cells").glob("*.json"))) >= 2:
            number, sweep_pid = armed.read_text().split()
            armed.unlink()
            os.kill(int(sweep_pid), int(number))

    def plan(self, view):
        return ADMIT_ALL
"""

#: The command line in a process of its own, which arms the policy with its process id.
ARMED = """
import os, sys
if sys.argv[1] != "0":
    open("armed", "w").write(f"{sys.argv[1]} {os.getpid()}")
from simmoe.cli import main
main(sys.argv[2:])
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    lines = [f"{0.2 * i},{rng.integers(20, 2000)},{rng.integers(1, 60)}" for i in range(30)]
    path = tmp_path / "requests.csv"
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *lines]) + "\n")
    return path


@pytest.fixture
def command(trace: Path) -> list[str]:
    options = ["--requests", "30", "--seeds", "2", "--rates", "20,60", "--policy", "fifo", "--policy", "lanes"]
    options = ["--max-num-seqs", "4", *options]
    return ["sweep", "--trace", str(trace), "--profile", PROFILE, *options]


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_same_bytes_whatever_the_run_the_jobs_and_the_hash_seed(command: list[str], tmp_path: Path) -> None:
    printed = set()
    for name, jobs, hash_seed in (("a", "1", "1"), ("b", "2", "2")):
        argv = [sys.executable, "-m", "simmoe", *command, "--jobs", jobs, "--out", name]
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        done = subprocess.run(argv, check=True, capture_output=True, env=environment, cwd=tmp_path, text=True)
        printed.add(done.stdout.replace(f"Files in {name}:", "Files in OUT:"))
    assert len(printed) == 1, "and the same tables"
    a, b = files_of(tmp_path / "a"), files_of(tmp_path / "b")
    assert a == b
    assert len([name for name in a if name.startswith("cells/")]) == 2 * 2 * 2 + 2
    assert set(a) >= {"sweep.csv", "cells.parquet", "sweep.png", "manifest.json", "inputs.json"}


@pytest.mark.parametrize(("signal", "code", "jobs"), [(9, -9, "2"), (2, 130, "1"), (2, 130, "2")])
def test_a_stopped_sweep_resumes_without_redoing_cells(
    signal: int, code: int, jobs: str, command: list[str], tmp_path: Path
) -> None:
    (tmp_path / "signals.py").write_text(SIGNALS)
    argv = [*command[:-2], "--policy", "signals.py:Signals", "--ranks", "1", "--jobs", jobs, "--out", "out"]
    start = [sys.executable, "-c", ARMED]
    stopped = subprocess.run([*start, str(signal), *argv], cwd=tmp_path, capture_output=True, text=True)
    assert stopped.returncode == code, stopped.stderr
    kept = {name: data for name, data in files_of(tmp_path / "out").items() if name.startswith("cells/")}
    assert 2 <= len(kept) < 10 and not (tmp_path / "out" / "manifest.json").exists()
    if signal == 2:
        last = stopped.stderr.splitlines()[-1]
        assert last == (
            f"simmoe: interrupted; {len(kept)} finished cells are kept in 'out': repeat the command to resume"
        )

    (tmp_path / "built.log").unlink()
    resumed = subprocess.run([*start, "0", *argv], cwd=tmp_path, capture_output=True, text=True)
    assert resumed.returncode == 0, resumed.stderr
    assert f"10/10 cells, {len(kept)} of them from an earlier run" in resumed.stderr
    of_policy = sum(json.loads(data)["inputs"]["policy"] == "signals.py:Signals" for data in kept.values())
    built = len((tmp_path / "built.log").read_text())
    assert built == 1 + 5 - of_policy, "once before any work, then for each cell that was missing"
    everything = files_of(tmp_path / "out")
    assert all(everything[name] == data for name, data in kept.items())
    if signal == 9:
        subprocess.run([*start, "0", *argv[:-1], "whole"], cwd=tmp_path, capture_output=True, check=True)
        assert files_of(tmp_path / "whole") == everything, "resumed or not, the same bytes"


def test_cells_are_what_run_cell_says_and_files_agree(command: list[str], trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert simmoe([*command, "--jobs", "1", "--ranks", "1", "--slo-ttft", "0.05", "--out", str(out)]) == 0
    table = pq.read_table(out / "cells.parquet").to_pylist()
    assert [(row["rate_per_s"], row["seed"], row["policy"]) for row in table] == [
        (rate, seed, policy) for rate in (20.0, 60.0) for seed in (0, 1) for policy in ("fifo", "lanes")
    ]
    profile = load_profile(PROFILE)
    cell = Cell(
        WorkloadSpec(trace=str(trace), rate=60.0, requests=30, k_max=profile.k_max, seed=1),
        "lanes",
        PROFILE,
        SimConfig(
            k_max=profile.k_max,
            k_granularity=profile.k_granularity,
            engine=EngineConfig(max_num_seqs=4, block_size=profile.block_size, num_gpu_blocks=profile.num_gpu_blocks),
            front_end=FrontEndConfig(ingress_s=profile.front_end.ingress_s, egress_s=profile.front_end.egress_s),
        ),
        Slo(ttft_s=0.05),
    )
    metrics = run_cell(cell).metrics
    assert {name: table[-1][name] for name in METRICS} == {
        name: None if math.isnan(value) else value for name, value in metrics.items()
    }

    with open(out / "sweep.csv", newline="") as file:
        rows = {(float(r["rate_per_s"]), r["policy"], r["metric"]): r for r in csv.DictReader(file)}
    assert len(rows) == 2 * 2 * len(METRICS)
    assert {row["profile_status"] for row in rows.values()} == {profile.status}
    values = [row["ttft_p99_s"] for row in table if row["rate_per_s"] == 60.0 and row["policy"] == "lanes"]
    row = rows[60.0, "lanes", "ttft_p99_s"]
    assert float(row["mean"]) == pytest.approx(np.mean(values), rel=1e-12)
    assert float(row["ci95_half_width"]) == pytest.approx(12.7062 * np.std(values, ddof=1) / math.sqrt(2), rel=1e-4)
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["counts"]["injected"] == manifest["counts"]["finished"] == 8 * 30
    assert float(row["load"]) == pytest.approx(60 / manifest["saturation_per_s"]["fifo"])
    assert manifest["rates_found"] is False and manifest["inputs"]["baseline"] == "fifo"


def test_seeds_are_common_random_numbers(trace: Path) -> None:
    from simmoe.traces.build import build_workload

    slow, quick = (build_workload(WorkloadSpec(trace=str(trace), requests=30, seed=4, rate=r)) for r in (2.0, 8.0))
    np.testing.assert_array_equal(slow.prompt_tokens, quick.prompt_tokens)
    np.testing.assert_array_equal(slow.k_qos, quick.k_qos)
    np.testing.assert_allclose(slow.arrival_s, 4 * quick.arrival_s)


def test_rates_are_found_around_saturation(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    without_rates = [word for word in command if word not in ("--rates", "20,60")]
    out = tmp_path / "out"
    assert simmoe([*without_rates, "--seeds", "1", "--jobs", "1", "--out", str(out)]) == 0
    manifest = json.loads((out / "manifest.json").read_text())
    loads = [rate / manifest["saturation_per_s"]["fifo"] for rate in manifest["rates_per_s"]]
    assert loads == pytest.approx(LOADS, rel=0.006), "three significant digits"
    assert len(loads) >= 5 and loads[0] < 0.5 and 1 < loads[-1] < 1.5
    assert "Saturation, requests/s: fifo " in capsys.readouterr().out


def test_tables_name_the_best_policy_a_rate_and_count_requests(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simmoe([*command, "--jobs", "1", "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr()
    assert "Which policy, at which load: least mean TTFT, and its change from fifo" in printed.out
    assert "240 injected = 240 finished + 0 rejected + 0 aborted + 0 failed + 0 running + 0 queued." in printed.out
    assert f"Files in {tmp_path}/out: sweep.csv, cells.parquet, sweep.png, manifest.json\n" in printed.out
    assert "trace: requests.csv (sha256 " in printed.err and "10/10 cells" in printed.err


def test_a_policy_that_raises_is_named_and_the_other_cells_kept(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = tmp_path / "mine.py"
    policy.write_text("class Mine:\n    def route(self, request, ranks, now_s):\n        return 99\n")
    for jobs in ("1", "2"):
        out = tmp_path / jobs
        argv = [*command, "--policy", f"{policy}:Mine", "--jobs", jobs, "--out", str(out)]
        assert simmoe(argv) == 4
        message = capsys.readouterr().err.splitlines()[-1]
        assert f"policy '{policy}:Mine', offline, seed 0: " in message and "99" in message
        assert f"finished cells (2) are kept in '{out}'" in message
        assert sorted(path.name for path in out.iterdir()) == ["cells", "inputs.json", "policy_call.json"]
        assert len(list((out / "cells").iterdir())) == 2


def test_a_worker_that_dies_is_reported(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    policy = tmp_path / "mine.py"
    policy.write_text("import os\n\nclass Mine:\n    def plan(self, view):\n        os._exit(1)\n")
    out = tmp_path / "out"
    assert simmoe([*command, "--policy", f"{policy}:Mine", "--jobs", "2", "--out", str(out)]) == 1
    assert "a worker process was killed (out of memory?)" in capsys.readouterr().err.splitlines()[-1]
    assert sorted(path.name for path in out.iterdir()) == ["cells", "inputs.json"]


def test_a_changed_policy_file_is_another_sweep(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = tmp_path / "mine.py"
    policy.write_text("class Mine:\n    def route(self, request, ranks, now_s):\n        return 0\n")
    argv = [*command, "--policy", f"{policy}:Mine", "--jobs", "1", "--out", str(tmp_path / "out")]
    assert simmoe(argv) == 0
    before = files_of(tmp_path / "out")
    policy.write_text(policy.read_text().replace("return 0", "return 1"))
    assert simmoe(argv) == 5
    assert "holds another sweep (policy_sources." in capsys.readouterr().err
    assert files_of(tmp_path / "out") == before


def test_a_changed_helper_of_a_policy_is_another_sweep(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from chosen import RANK\n\nclass Mine:\n    def route(self, request, ranks, now_s):\n        return RANK\n"
    )
    small = ["--rates", "20", "--seeds", "1", "--jobs", "1"]
    argv = [sys.executable, "-m", "simmoe", *command, *small, "--policy", "mine.py:Mine", "--out", "out"]
    said = []
    for rank, code in ((0, 0), (0, 0), (1, 5)):
        (tmp_path / "chosen.py").write_text(f"RANK = {rank}\n")
        done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == code, done.stderr
        said.append(done.stderr)
    assert "6/6 cells, 6 of them from an earlier run" in said[1]
    assert "holds another sweep (policy_sources.mine.py:Mine.module chosen is " in said[2]


def test_one_sweep_a_folder_at_a_time(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simmoe([*command, "--jobs", "1", "--out", str(tmp_path / "out")]) == 0
    script = (
        "import fcntl, sys; file = open(sys.argv[1], 'a'); fcntl.lockf(file, fcntl.LOCK_EX); "
        "print('locked', flush=True); input()"
    )
    locked = [sys.executable, "-c", script, str(tmp_path / "out" / ".simmoe.lock")]
    with subprocess.Popen(locked, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "locked\n"
        assert simmoe([*command, "--jobs", "1", "--out", str(tmp_path / "out")]) == 5
        other.communicate("\n")
    assert "another sweep is at work" in capsys.readouterr().err
    assert simmoe([*command, "--jobs", "1", "--out", str(tmp_path / "out")]) == 0


def test_a_sweep_stopped_at_its_very_start_goes_on(command: list[str], tmp_path: Path) -> None:
    study = {"seeds": 3, "policies": ["fifo", "lanes"]}
    with SweepStore(tmp_path / "whole", study):
        pass
    inputs = (tmp_path / "whole" / "inputs.json").read_bytes()
    starts: list[dict[str, bytes]] = [
        {},
        {".inputs.json.partial": inputs[:9]},
        {".simmoe.lock": b"", "cells/.0.json.partial": b"{"},
        *({"inputs.json": inputs[:size]} for size in range(len(inputs))),
        {"inputs.json": inputs[:9], "cells/0.json": b"{}"},
    ]
    for number, files in enumerate(starts):
        out = tmp_path / str(number)
        (out / "cells").mkdir(parents=True)
        for name, content in files.items():
            (out / name).write_bytes(content)
        with SweepStore(out, study):
            assert (out / "inputs.json").read_bytes() == inputs
        assert set(files_of(out)) == {"inputs.json"} | {name for name in files if name == "cells/0.json"}, files
    assert simmoe([*command, "--jobs", "1", "--out", str(tmp_path / "0")]) == 5, "it is another's by now"
    (tmp_path / "empty" / "cells").mkdir(parents=True)
    assert simmoe([*command, "--rates", "20", "--seeds", "1", "--jobs", "1", "--out", str(tmp_path / "empty")]) == 0


@pytest.mark.parametrize(
    "files",
    [{"cells/mine.json": "{}"}, {"cells/x.json": "{}", "cells/y.txt": ""}, {"inputs.json": "[]"}, {"inputs.json": "x"}],
)
def test_folders_that_only_look_like_a_sweeps_are_left_alone(
    files: dict[str, str], command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    (out / "cells").mkdir(parents=True)
    for name, content in files.items():
        (out / name).write_text(content)
    before = files_of(out)
    assert simmoe([*command, "--jobs", "1", "--out", str(out)]) == 5
    assert "choose another --out" in capsys.readouterr().err.splitlines()[-1]
    assert files_of(out) == before


def test_spoilt_cells_are_run_again(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    argv = [*command, "--jobs", "1", "--out", str(out)]
    assert simmoe(argv) == 0
    before = files_of(out)
    cells = sorted((out / "cells").iterdir())
    kept = json.loads(cells[0].read_text())
    one = next(iter(kept["metrics"]))
    spoilt: list[object] = [
        {"metrics": {}},
        {"metrics": {}, "extrapolated": {}},
        [],
        None,
        3,
        "cell",
        {},
        {**kept, "metrics": None},
        {**kept, "metrics": [kept["metrics"]]},
        {**kept, "extrapolated": None},
        {**kept, "extrapolated": {"prefill": "often"}},
        {**kept, "metrics": {**kept["metrics"], one: "1"}},
        {**kept, "metrics": {**kept["metrics"], one: [1]}},
        {**kept, "metrics": {**kept["metrics"], one: True}},
        {**kept, "metrics": {name: value for name, value in kept["metrics"].items() if name != one}},
        {**kept, "metrics": {**kept["metrics"], "other": 1.0}},
    ]
    texts = [json.dumps(content).encode() for content in spoilt] + [b"", b"{", b"\xff\xfe", cells[0].read_bytes()[:-9]]
    assert len(texts) == 2 * len(cells)
    for half in (texts[::2], texts[1::2]):
        for cell, text in zip(cells, half, strict=True):
            cell.write_bytes(text)
        capsys.readouterr()
        assert simmoe(argv) == 0
        assert "from an earlier run" not in capsys.readouterr().err
        assert files_of(out) == before


@pytest.mark.parametrize("module", ["write_report", "plot_sweep"])
def test_ctrl_c_while_the_report_is_written_keeps_the_cells(
    module: str,
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    out = tmp_path / "out"
    argv = [*command, "--jobs", "1", "--out", str(out)]
    with monkeypatch.context() as patch:
        patch.setattr(f"simmoe.commands.sweeping.report.{module}", interrupted)
        assert simmoe(argv) == 130
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == f"simmoe: interrupted; 10 finished cells are kept in '{out}': repeat the command to resume"
    assert simmoe(argv) == 0
    assert "10/10 cells, 10 of them from an earlier run" in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["sweep", "search"])
def test_a_policy_that_does_not_suit_the_deployment_is_refused_before_any_work(
    kind: str, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(
        "class Mine:\n    def __init__(self):\n        1 / 0\n    def plan(self, v): ...\n"
    )
    options = ["--trace", command[2], "--profile", PROFILE, "--slo-ttft", "1", "--out", str(tmp_path / "out")]
    for policy, code, message in (
        ("lanes,lanes=5", 2, "lanes: lanes is 5; it must be at most 2, the deployment's ranks"),
        (f"{tmp_path}/mine.py:Mine", 4, f"policy '{tmp_path}/mine.py:Mine' cannot be built: "),
    ):
        assert simmoe([kind, *options, "--policy", policy]) == code
        assert message in capsys.readouterr().err.splitlines()[-1]
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ("--rates 5,x", 2, "--rates has 'x', which is no number; write them as in 5,10,20"),
        ("--rates 5,inf", 2, "--rates has inf; a rate must be a finite number of requests/s above 0"),
        ("--rates 5,0", 2, "--rates has 0; a rate must be a finite number"),
        ("--rates 5,5.0", 2, "--rates has 5 twice; give each rate once"),
        ("--seeds 0", 2, "--seeds is 0; it must be in 1..10000"),
        ("--jobs 0", 2, "--jobs is 0; it must be at least 1"),
        ("--policy fifo+queue-aware", 2, "is the same policy as 'fifo'"),
        ("--policy lane", 2, "no policy 'lane' (did you mean 'lanes'?)"),
        ("--rate 5", 2, "No such option '--rate'"),
        ("--slo-tpot nan", 2, "--slo-tpot is nan"),
        ("--trace nothing.csv", 2, "no trace or file 'nothing.csv'"),
        ("--min-total-tokens 99999", 3, "none of 30 rows has 99999.."),
    ],
)
def test_bad_options_get_one_line_and_leave_nothing(
    options: str, code: int, message: str, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simmoe([*command, *options.split(), "--out", str(tmp_path / "out")]) == code
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("simmoe: ") and message in lines[-1]
    assert not (tmp_path / "out").exists()


def test_places_that_cannot_be_written_are_refused_before_any_work(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("mine")
    assert simmoe([*command, "--jobs", "1", "--out", str(tmp_path / "other")]) == 0
    capsys.readouterr()
    before = files_of(tmp_path)
    for out, extra, message in (
        ("file", [], "is a file, not a folder"),
        ("file/deeper", [], "Not a directory"),
        ("full", [], "is not empty and holds no sweep"),
        ("other", ["--seeds", "3"], "holds another sweep (seeds is 2 there, 3 here)"),
    ):
        assert simmoe([*command, *extra, "--out", str(tmp_path / out)]) == 5
        printed = capsys.readouterr()
        assert message in printed.err.splitlines()[-1] and printed.out == ""
    assert files_of(tmp_path) == before


def test_a_deployment_that_serves_nobody_says_so(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simmoe([*command, "--num-gpu-blocks", "2", "--jobs", "1", "--out", str(tmp_path / "out")]) == 1
    assert "finished none of 32 requests offline (32 rejected)" in capsys.readouterr().err


def test_the_default_folder_is_named_by_the_inputs(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for seeds in ("1", "1", "2"):
        assert simmoe([*command, "--seeds", seeds, "--jobs", "1"]) == 0
    names = sorted(path.name for path in (tmp_path / "sweeps").iterdir())
    assert len(names) == 2 and all(name.startswith("requests-mu16-sigma5-2ranks-") for name in names)


def test_a_cell_is_labelled_by_its_load(trace: Path) -> None:
    cell = Cell(WorkloadSpec(trace=str(trace), rate=math.inf), "fifo", PROFILE, SimConfig(), Slo())
    assert cell.label == "policy 'fifo', offline, seed 0"
    assert replace(cell, workload=replace(cell.workload, rate=2.5, seed=7)).label == "policy 'fifo', rate 2.5, seed 7"
