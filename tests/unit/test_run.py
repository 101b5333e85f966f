"""``simmoe run`` as a user types it: what it prints, what it writes, what it refuses."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from simmoe.cli import run as simmoe
from simmoe.commands.deployment_options import DeploymentOptions, resolve_deployment
from simmoe.policies.validate import call_from_json
from simmoe.profiles.catalog import DEFAULT_PROFILE, profile_names
from simmoe.records import read_record

PROFILE = DEFAULT_PROFILE if DEFAULT_PROFILE in profile_names() else profile_names()[0]

FAILS = """
from simmoe.policies.protocols import ADMIT_ALL

class Fails:
    def __init__(self):
        self.asked = 0

    def plan(self, view):
        self.asked += 1
        if self.asked > 3:
            raise ValueError("enough")
        return ADMIT_ALL
"""


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    lines = [f"{0.2 * i},{rng.integers(20, 2000)},{rng.integers(1, 200)}" for i in range(40)]
    path = tmp_path / "requests.csv"
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *lines]) + "\n")
    return path


@pytest.fixture
def command(trace: Path) -> list[str]:
    return ["run", "--trace", str(trace), "--profile", PROFILE]


def test_defaults_replay_every_row_at_its_time(
    command: list[str], trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simmoe([*command, "--out", str(tmp_path / "out")]) == 0
    printed = capsys.readouterr()
    assert "40 injected = 40 finished + 0 rejected + 0 aborted + 0 failed + 0 running + 0 queued" in printed.out
    assert "trace: requests.csv (sha256 " in printed.err and "40 of 40 rows kept" in printed.err
    assert "profile: " in printed.err
    record = read_record(tmp_path / "out")
    assert record.requests["arrival_s"].tolist() == [0.2 * i for i in range(40)]
    assert record.manifest["workload"]["spec"]["mu"] == 16.0 and record.manifest["workload"]["spec"]["sigma"] == 5.0
    assert record.manifest["config"]["num_ranks"] == 1
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["manifest.json", "requests.parquet"]
    ttft = record.requests["first_token_s"] - record.requests["arrival_s"]
    assert record.manifest["summary"]["ttft_mean_s"] == pytest.approx(float(ttft.mean()), rel=1e-12)
    assert record.manifest["profile"]["sha256"] and record.manifest["versions"]["numpy"] == np.__version__


def test_steps_are_recorded_when_asked_and_their_sums_are_the_totals(command: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert simmoe([*command, "--ranks", "2", "--record-steps", "--out", str(out)]) == 0
    record = read_record(out)
    assert record.steps is not None
    summary = record.manifest["summary"]
    tokens = record.steps["num_prefill_tokens"] + record.steps["num_decode_tokens"]
    assert summary["executed_k"] == pytest.approx(record.steps["routed_slots"].sum() / tokens.sum(), rel=1e-12)
    assert set(record.steps["dp_rank"].tolist()) == {0, 1}
    assert simmoe([*command, "--ranks", "2", "--out", str(out)]) == 0, "an earlier record is replaced"
    assert not (out / "steps.parquet").exists()


def test_same_inputs_same_bytes_step_by_step_or_not(command: list[str], tmp_path: Path) -> None:
    for name, extra in (("a", []), ("b", []), ("c", ["--step-by-step"])):
        assert simmoe([*command, "--rate", "30", "--record-steps", "--out", str(tmp_path / name), *extra]) == 0
    for file in ("requests.parquet", "steps.parquet"):
        assert len({(tmp_path / name / file).read_bytes() for name in "abc"}) == 1, file
    assert (tmp_path / "a" / "manifest.json").read_bytes() == (tmp_path / "b" / "manifest.json").read_bytes()


def test_options_reach_the_engine(command: list[str], tmp_path: Path) -> None:
    options = (
        "--ranks 3 --max-num-seqs 7 --max-num-batched-tokens 4096 --num-gpu-blocks 900 --block-size 32 "
        "--no-chunked-prefill --prefix-caching --no-async-scheduling --publish-interval-s 0 --num-front-ends 2 "
        "--ingress-s 0.5 --egress-s 0.25 --k-granularity 4 --seed 3 --policy tiers --max-time-s 9"
    )
    assert simmoe([*command, *options.split(), "--out", str(tmp_path / "out")]) == 0
    manifest = read_record(tmp_path / "out").manifest
    config, engine, front_end = (
        manifest["config"],
        manifest["config"]["engine"],
        manifest["config"]["front_end"],
    )
    assert (config["num_ranks"], config["k_granularity"], config["max_time_s"]) == (3, 4, 9.0)
    assert (engine["max_num_seqs"], engine["max_num_batched_tokens"], engine["num_gpu_blocks"]) == (7, 4096, 900)
    assert (engine["block_size"], engine["enable_chunked_prefill"], engine["enable_prefix_caching"]) == (
        32,
        False,
        True,
    )
    assert engine["async_scheduling"] is False
    given = {"publish_interval_s": 0.0, "num_front_ends": 2, "ingress_s": 0.5, "egress_s": 0.25}
    assert front_end.items() >= given.items()
    assert manifest["seed"] == 3 and manifest["policy"]["given"].startswith("tiers+")


@pytest.mark.parametrize(("profile", "backend"), [("olmoe-1b-7b-h200", "uni"), ("olmoe-1b-7b-tp2-h200", "mp")])
def test_workers_launch_where_the_profiles_engine_had_several(profile: str, backend: str) -> None:
    engine = resolve_deployment(DeploymentOptions(profile=profile)).config.engine
    assert engine.distributed_executor_backend == backend


def test_another_block_size_divides_the_same_memory(command: list[str], tmp_path: Path) -> None:
    blocks = {}
    for size in ("16", "64"):
        assert simmoe([*command, "--block-size", size, "--out", str(tmp_path / size)]) == 0
        blocks[size] = read_record(tmp_path / size).manifest["config"]["engine"]["num_gpu_blocks"]
    assert blocks["64"] == blocks["16"] * 16 // 64


def test_goodput_is_printed_when_objectives_are_given(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert simmoe(command) == 0
    assert "goodput" not in capsys.readouterr().out
    assert simmoe([*command, "--slo-ttft", "30"]) == 0
    assert "100.0 % of requests (TTFT <= 30 s)" in capsys.readouterr().out


def test_requests_that_never_fit_are_rejected_and_counted(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert simmoe([*command, "--num-gpu-blocks", "60"]) == 0
    printed = capsys.readouterr()
    rejected = int(printed.out.split(" rejected")[0].split()[-1])
    assert 0 < rejected < 40 and f"{40 - rejected} finished" in printed.out
    assert f"note: {rejected} rejected: " in printed.err


def test_neither_pandas_nor_matplotlib_nor_rich_is_imported(command: list[str], tmp_path: Path) -> None:
    script = (
        "import sys; from simmoe.cli import run; assert run(sys.argv[1:]) == 0; "
        "print({'pandas', 'matplotlib', 'scipy.stats', 'rich', 'torch', 'vllm'} & set(sys.modules))"
    )
    argv = [sys.executable, "-c", script, *command, "--out", str(tmp_path / "out")]
    done = subprocess.run(argv, check=True, capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "set()"


def test_a_policy_that_raises_is_named_and_its_view_saved(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = tmp_path / "mine.py"
    policy.write_text(FAILS)
    out = tmp_path / "deep" / "out"
    assert simmoe([*command, "--policy", f"{policy}:Fails", "--out", str(out)]) == 4
    message = capsys.readouterr().err.splitlines()[-1]
    assert f"policy Fails: {policy}:" in message and "ValueError: enough" in message
    assert f"saved in '{out / 'policy_call.json'}'" in message
    assert [path.name for path in out.iterdir()] == ["policy_call.json"], "no record half written"
    call_from_json(json.loads((out / "policy_call.json").read_text()), "policy_call.json")
    assert simmoe([*command, "--out", str(out)]) == 0, "the folder can be used again"
    assert not (out / "policy_call.json").exists()


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ("--polcy fifo", 2, "No such option '--polcy'"),
        ("--policy fifoo", 2, "no policy 'fifoo' (did you mean 'fifo'?)"),
        ("--ranks two", 2, "Invalid value for '--ranks'"),
        ("--ranks 0", 2, "num_ranks is 0; it must be at least 1"),
        ("--max-num-seqs 9000", 2, "max_num_seqs is 9000; it must be at most max_num_batched_tokens (8192)"),
        ("--num-gpu-blocks 1", 2, "num_gpu_blocks is 1; it must be at least 2"),
        ("--block-size 0", 2, "block_size is 0; it must be at least 1"),
        ("--k-granularity 5", 2, "k_granularity is 5; it must be a divisor of k_max 32"),
        ("--ingress-s -1", 2, "ingress_s is -1.0; it must be at least 0"),
        ("--slo-ttft 0", 2, "--slo-ttft is 0.0; it must be a number of seconds above 0"),
        ("--max-time-s nan", 2, "--max-time-s is nan; it must be a number of seconds above 0"),
        ("--rate -1", 2, "rate is -1.0"),
        ("--profile nothing", 2, "no profile 'nothing'"),
        ("--trace nothing", 2, "no trace or file 'nothing'"),
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
    for out, message in (
        ("file", "is a file, not a folder"),
        ("file/deeper", "Not a directory"),
        ("full", "is not empty and holds no run record"),
    ):
        assert simmoe([*command, "--out", str(tmp_path / out)]) == 5
        printed = capsys.readouterr()
        assert message in printed.err.splitlines()[-1] and printed.out == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "full", "requests.csv"]
    assert [path.name for path in (tmp_path / "full").iterdir()] == ["notes.txt"]


def test_a_record_that_fails_leaves_no_new_folders(command: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "class Mine:\n    def __init__(self): raise KeyError('x')\n    def plan(self, v): ...\n"
    )
    assert simmoe([*command, "--policy", f"{tmp_path}/mine.py:Mine", "--out", str(tmp_path / "a" / "b")]) == 4
    assert not (tmp_path / "a").exists()


def test_a_record_is_replaced_by_the_same_run_only(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert simmoe([*command, "--out", str(out)]) == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    assert simmoe([*command, "--policy", "tiers", "--out", str(out)]) == 5
    assert "holds another run (its policy differs)" in capsys.readouterr().err
    assert simmoe([*command, "--out", str(out)]) == 0
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


#: Says through a pipe that its run has begun, and goes on when told to through another.
WAITS = """
from simmoe.policies.protocols import ADMIT_ALL

class Waits:
    def __init__(self):
        open("begun", "w").close()
        open("go").close()

    def plan(self, view):
        return ADMIT_ALL
"""


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_one_run_a_folder_at_a_time(command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "waits.py").write_text(WAITS)
    for name in ("begun", "go"):
        os.mkfifo(tmp_path / name)
    out = tmp_path / "out"
    argv = [sys.executable, "-m", "simmoe", *command, "--policy", "waits.py:Waits", "--out", "out"]
    with subprocess.Popen(argv, cwd=tmp_path) as first:
        (tmp_path / "begun").read_bytes()
        assert simmoe([*command, "--out", str(out)]) == 5
        assert f"another run is at work in '{out}'" in capsys.readouterr().err.splitlines()[-1]
        (tmp_path / "go").write_bytes(b"")
    assert first.returncode == 0
    assert read_record(out).manifest["policy"]["given"].startswith("waits.py:Waits")
    assert sorted(files_of(out)) == ["manifest.json", "requests.parquet"]


def test_runs_that_race_for_a_folder_leave_one_record_whole(command: list[str], tmp_path: Path) -> None:
    alone = {}
    for policy in ("fifo", "tiers", "fixed-k"):
        assert simmoe([*command, "--policy", policy, "--out", str(tmp_path / policy)]) == 0
        alone[policy] = files_of(tmp_path / policy)
    argv = [sys.executable, "-m", "simmoe", *command, "--out", str(tmp_path / "out"), "--policy"]
    racing = {policy: subprocess.Popen([*argv, policy], stderr=subprocess.PIPE, text=True) for policy in alone}
    ended = {policy: (process.communicate()[1], process.returncode) for policy, process in racing.items()}
    winners = [policy for policy, (_, code) in ended.items() if code == 0]
    assert len(winners) == 1 and files_of(tmp_path / "out") == alone[winners[0]]
    for policy, (said, code) in ended.items():
        assert code == 0 or (code == 5 and said.splitlines()[-1].startswith("simmoe: ")), (policy, said)


def test_what_a_killed_run_leaves_is_no_obstacle(command: list[str], tmp_path: Path) -> None:
    assert simmoe([*command, "--out", str(tmp_path / "whole")]) == 0
    whole = files_of(tmp_path / "whole")
    for number, left in enumerate(
        (
            (".simmoe.lock",),
            (".simmoe.lock", ".requests.parquet.partial"),
            ("requests.parquet", ".manifest.json.partial"),
            ("requests.parquet", "steps.parquet", ".manifest.json.partial", ".manifest.json.old.partial"),
            ("policy_call.json",),
        )
    ):
        out = tmp_path / str(number)
        out.mkdir()
        for name in left:
            (out / name).write_text("left")
        assert simmoe([*command, "--out", str(out)]) == 0, left
        assert files_of(out) == whole, left


@pytest.mark.parametrize(
    "files",
    [
        {"manifest.json": "{}"},
        {"manifest.json": "[]"},
        {"manifest.json": "null"},
        {"manifest.json": "{"},
        {"manifest.json": '{"name": "my app", "icons": []}'},
        {"manifest.json": '{"schema_version": 1, "kind": "search"}'},
        {"manifest.json": '{"schema_version": 99, "kind": "run"}'},
        {"manifest.json": "{}", "inputs.json": "{}"},
        {"requests.parquet": "mine"},
        {"requests.parquet": "mine", "policy_call.json": "{}"},
        {".hidden": "mine"},
    ],
)
def test_files_that_are_no_record_of_ours_are_left_alone(
    files: dict[str, str], command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for name, content in files.items():
        (out / name).write_text(content)
    before = files_of(out)
    assert simmoe([*command, "--out", str(out)]) == 5
    lines = capsys.readouterr().err.splitlines()
    assert "choose another --out" in lines[-1] and f"'{out}'" in lines[-1]
    assert files_of(out) == before


@pytest.mark.parametrize("words", ["run", "sweep", "search", "live run", "validate", "compare a b"])
@pytest.mark.parametrize("value", ["", " "])
def test_an_empty_out_is_refused(
    words: str, value: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert simmoe([*words.split(), "--out", value]) == 2
    assert capsys.readouterr().err == "simmoe: --out is empty; name a folder, or leave the option out\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["run", "sweep"])
@pytest.mark.parametrize("below", ["", "deeper"])
def test_a_link_to_nowhere_is_named(
    kind: str, below: str, command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link = tmp_path / "link"
    link.symlink_to("gone")
    assert simmoe([kind, *command[1:], "--out", str(link / below)]) == 5
    message = capsys.readouterr().err.splitlines()[-1]
    assert f"'{link}' is a symbolic link to 'gone', which does not exist" in message
    assert link.is_symlink() and not (tmp_path / "gone").exists()


def test_ctrl_c_writes_nothing_and_says_so(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    policy = tmp_path / "mine.py"
    policy.write_text("class Mine:\n    def plan(self, view):\n        raise KeyboardInterrupt\n")
    argv = [*command, "--policy", f"{policy}:Mine", "--out", str(tmp_path / "a" / "b")]
    assert simmoe(argv) == 130
    assert capsys.readouterr().err.splitlines()[-1] == "simmoe: interrupted; nothing was written"
    assert not (tmp_path / "a").exists()


def test_a_disk_that_fills_leaves_the_earlier_record(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert simmoe([*command, "--out", str(tmp_path / "out")]) == 0
    before = files_of(tmp_path / "out")

    def full(path: Path, content: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    for out in ("out", "new"):
        assert simmoe([*command, "--out", str(tmp_path / out)]) == 5
        assert "No space left on device" in capsys.readouterr().err.splitlines()[-1]
    assert files_of(tmp_path / "out") == before and not (tmp_path / "new").exists()


@pytest.mark.parametrize("words", ["--help", "policies list", "run"])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_output_that_cannot_be_written_gets_one_line(words: str, unbuffered: str, command: list[str]) -> None:
    argv = [sys.executable, "-m", "simmoe", *(command if words == "run" else words.split())]
    environment = {**os.environ, "PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        done = subprocess.run(argv, stdout=full, stderr=subprocess.PIPE, env=environment, text=True)
    assert done.returncode == 5, done.stderr
    assert done.stderr.splitlines()[-1] == "simmoe: cannot write the output: No space left on device"
    assert "Traceback" not in done.stderr

    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w") as closed:
        done = subprocess.run(argv, stdout=closed, stderr=subprocess.PIPE, env=environment, text=True)
    assert done.returncode != 0
    assert not [line for line in done.stderr.splitlines() if not line.startswith(("trace:", "profile:"))]


@pytest.mark.parametrize("argv", [[], ["no-command"], ["run", "--no-option"]])
def test_a_wrong_call_ends_as_such_though_nobody_can_be_told(argv: list[str]) -> None:
    with open("/dev/full", "w") as full:
        assert subprocess.run([sys.executable, "-m", "simmoe", *argv], stderr=full).returncode == 2


def test_prefix_caching_of_a_trace_without_hash_ids_is_noted(
    command: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    note = "note: '{}' has no hash ids of its prompts' blocks, so the prefix cache will find nothing"
    assert simmoe([*command, "--prefix-caching"]) == 0
    assert note.format("requests.csv") in capsys.readouterr().err
    assert simmoe(command) == 0
    assert "hash ids" not in capsys.readouterr().err
    hashed = tmp_path / "hashed.jsonl"
    row = '{"timestamp": 60000, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n'
    hashed.write_text(row.replace("60000", "0") + row)
    assert simmoe(["run", "--trace", str(hashed), "--profile", PROFILE, "--prefix-caching", "--k", "8"]) == 0
    printed = capsys.readouterr()
    assert "hash ids" not in printed.err and "512 from the prefix cache" in printed.out
