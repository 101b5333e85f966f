"""What no run can have left, under 'compare' and 'validate': one line, its exit code, and nothing written."""

from __future__ import annotations

import gzip
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from simmoe.cli import run as cli
from simmoe.live.driving.recording import CLOCKS_FILE, HOST_COLUMNS, HOST_FILE
from simmoe.profiles.fitting.host_times import LEAST_STEPS
from simmoe.records import REQUEST_COLUMNS, STEP_COLUMNS, RunRecord, read_record, write_record
from tests.support.live_record import as_live

TABLES = {"requests.parquet": REQUEST_COLUMNS, "steps.parquet": STEP_COLUMNS}


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the records ``sim`` and ``live``, the second with all that a live run on a GPU keeps."""
    folder = tmp_path_factory.mktemp("sound")
    options = ["--rate", "20", "--requests", "40", "--ranks", "2", "--record-steps", "--policy", "tiers+lanes"]
    assert cli(["run", *options, "--out", str(folder / "sim")]) == 0
    sim = read_record(folder / "sim")
    live = as_live(sim, target={"model": "olmoe"})
    columns = (sim.requests[name] for name in ("request_id", "dispatched_s", "first_token_s"))
    clocks = ["request_id,queued_s,first_output_s", *(",".join(map(str, row)) for row in zip(*columns, strict=True))]
    assert sim.steps is not None
    host = [",".join(HOST_COLUMNS), *(f"{int(n > 0)},0.003,0.0005" for n in sim.steps["num_prefill_tokens"])]
    files = {
        CLOCKS_FILE: ("\n".join(clocks) + "\n").encode(),
        HOST_FILE: gzip.compress(("\n".join(host) + "\n").encode()),
    }
    write_record(folder / "live", RunRecord(live.requests, live.manifest, live.steps, files))
    return folder


class Records:
    """A copy of the sound records to spoil, and the commands that read it."""

    def __init__(self, sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        shutil.copytree(sound, tmp_path / "records")
        self.sim, self.live = tmp_path / "records" / "sim", tmp_path / "records" / "live"
        self.out = tmp_path / "out"
        self._capsys = capsys

    def refusal(self, *arguments: str, code: int = 3) -> str:
        """Return the line with which a command refuses, having left nothing."""
        self._capsys.readouterr()
        assert cli([*arguments, "--out", str(self.out)]) == code
        told = self._capsys.readouterr()
        lines = [line for line in told.err.splitlines() if line.startswith("simmoe: ")]
        assert len(lines) == 1 and told.err.endswith(lines[0] + "\n"), told.err
        assert not told.out and not self.out.exists()
        return lines[0]

    def refusals(self, code: int = 3) -> set[str]:
        """Return what each command that reads the live record says of it."""
        return {
            self.refusal("compare", str(self.sim), str(self.live), code=code),
            self.refusal("compare", str(self.live), str(self.sim), code=code),
            self.refusal("validate", "--live", str(self.live), code=code),
            self.refusal("validate", "--live", str(self.sim), "--host-from", str(self.live), code=code),
        }


@pytest.fixture
def records(sound: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Records:
    return Records(sound, tmp_path, capsys)


def change_column(path: Path, name: str, change: Callable[[list[Any]], list[Any]]) -> None:
    """Write a table anew with a column of other values, of its type where they have it."""
    table = pq.read_table(path)
    index = table.column_names.index(name)
    values = change(table.column(name).to_pylist())
    kept = table.schema.field(name).type
    try:
        column = pa.array(values, pa.float64() if 1.5 in values else kept)
    except (pa.ArrowInvalid, pa.ArrowTypeError):
        column = pa.array(values)
    pq.write_table(table.set_column(index, name, column), path)


def at_row_3(value: Any) -> Callable[[list[Any]], list[Any]]:
    return lambda values: [*values[:3], value, *values[4:]]


def test_sound_records_are_read(records: Records) -> None:
    assert cli(["compare", str(records.sim), str(records.live)]) == 0
    options = ["--live", str(records.live), "--host-from", str(records.live)]
    assert cli(["validate", *options, "--out", str(records.out)]) in (0, 3)  # few steps tell of no host


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), 1e300], ids=str)
@pytest.mark.parametrize(
    ("table", "name"), [(t, n) for t, columns in TABLES.items() for n, kind in columns.items() if kind == "float64"]
)
def test_a_time_that_is_none(records: Records, table: str, name: str, value: float) -> None:
    change_column(records.live / table, name, at_row_3(value))
    line = records.refusal("compare", str(records.sim), str(records.live))
    assert f"{table}' row 3: {name} is {value}; it must be within 1e+09 s" in line


@pytest.mark.parametrize("value", [-2, 2**63 - 1, None, "x", 1.5], ids=str)
@pytest.mark.parametrize(
    ("table", "name"), [(t, n) for t, columns in TABLES.items() for n, kind in columns.items() if kind == "int64"]
)
def test_a_count_that_is_none(records: Records, table: str, name: str, value: Any) -> None:
    change = at_row_3(value) if value != "x" else lambda values: ["x"] * len(values)
    change_column(records.live / table, name, change)
    line = records.refusal("compare", str(records.sim), str(records.live))
    assert f"{table}'" in line and name in line


@pytest.mark.parametrize("kind", ["null", "of another type", "absent"])
@pytest.mark.parametrize(("table", "name"), [(t, n) for t, columns in TABLES.items() for n in columns])
def test_a_column_that_is_none(records: Records, table: str, name: str, kind: str) -> None:
    path = records.live / table
    if kind == "absent":
        pq.write_table(pq.read_table(path).drop_columns([name]), path)
    else:
        change_column(path, name, lambda values: [None] * len(values) if kind == "null" else [[1]] * len(values))
    if kind == "null" and name in ("dispatched_s", "scheduled_s"):  # nobody tells, of an endpoint
        assert cli(["compare", str(records.sim), str(records.live)]) == 0
        return
    line = records.refusal("compare", str(records.sim), str(records.live))
    assert f"{table}'" in line and name in line


@pytest.mark.parametrize(
    ("table", "name", "change", "message"),
    [
        ("requests.parquet", "request_id", lambda v: [v[0]] * len(v), "row 1: request_id '0' is there twice"),
        ("requests.parquet", "status", at_row_3("done"), "row 3: status is done; it must be one of finished, rejected"),
        ("requests.parquet", "arrival_s", lambda v: v[::-1], "it must be no earlier than the one before"),
        ("requests.parquet", "arrival_s", lambda v: [x + 5 for x in v], "row 0: arrival_s is 5.0; it must be 0 s"),
        ("requests.parquet", "arrival_s", at_row_3(None), "row 3: arrival_s is nan; it must be known"),
        ("requests.parquet", "finished_s", at_row_3(None), "row 3: finished_s is nan; it must be known of a finished"),
        ("steps.parquet", "start_s", lambda v: v[::-1], "no earlier than the step before on its rank"),
        ("steps.parquet", "dp_rank", lambda v: v[::-1], "no lower than the one before"),
    ],
)
def test_rows_that_no_run_has(
    records: Records, table: str, name: str, change: Callable[[list[Any]], list[Any]], message: str
) -> None:
    change_column(records.live / table, name, change)
    (line,) = records.refusals()
    assert f"{table}' row" in line and message in line


def test_no_requests_and_none_that_finished(records: Records) -> None:
    path = records.live / "requests.parquet"
    change_column(path, "status", lambda values: ["failed"] * len(values))
    for command in (["compare", str(records.sim), str(records.live)], ["validate", "--live", str(records.live)]):
        assert "the two records share no finished request" in records.refusal(*command)
    pq.write_table(pq.read_table(path).slice(0, 0), path)
    for command in (["compare", str(records.sim), str(records.live)], ["validate", "--live", str(records.live)]):
        records.refusal(*command)


def test_steps_of_nothing(records: Records) -> None:
    path = records.live / "steps.parquet"
    pq.write_table(pq.read_table(path).slice(0, 0), path)
    assert cli(["compare", str(records.sim), str(records.live)]) == 0
    assert cli(["validate", "--live", str(records.live), "--out", str(records.out)]) == 0


@pytest.mark.parametrize("content", ["empty", "half", "junk", "of another kind", "deep", "pipe", "folder", "nowhere"])
@pytest.mark.parametrize("name", ["manifest.json", "requests.parquet", "steps.parquet", CLOCKS_FILE, HOST_FILE])
def test_a_file_that_is_none(records: Records, name: str, content: str) -> None:
    path = records.live / name
    whole = path.read_bytes()
    path.unlink()
    if content == "pipe":
        os.mkfifo(path)
    elif content == "folder":
        path.mkdir()
    elif content == "nowhere":
        path.symlink_to("nowhere")
    else:
        half = whole[: len(whole) // 2]
        texts = {
            "empty": b"",
            "half": half,
            "junk": b"\xff\xfe\x00" * 30,
            "of another kind": b"[1]",
            "deep": b"[" * 10**5,
        }
        path.write_bytes(texts[content])
    if name == HOST_FILE:
        told_by = {records.refusal("validate", "--live", str(records.sim), "--host-from", str(records.live))}
        lines = told_by if content == "nowhere" else records.refusals()  # else as if it kept none, but to tell a host
    elif name == CLOCKS_FILE:
        if content == "nowhere":
            return  # as if it kept none
        lines = {records.refusal("validate", "--live", str(records.live))}
    else:
        lines = records.refusals()
    assert all(name in line or str(records.live) in line for line in lines)


def set_entry(folder: Path, path: tuple[str, ...], value: Any) -> None:
    manifest = json.loads((folder / "manifest.json").read_bytes())
    place = manifest
    for name in path[:-1]:
        place = place.setdefault(name, {})
    if value is ...:
        place.pop(path[-1], None)
    else:
        place[path[-1]] = value
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("value", [..., None, "x", -1, 1.5, [None], 10**30], ids=repr)
@pytest.mark.parametrize(
    "path",
    [
        ("config",),
        ("config", "engine"),
        *(("config", "engine", name) for name in ("block_size", "captured_ks", "max_num_seqs", "num_gpu_blocks")),
        ("config", "engine", "max_num_batched_tokens"),
        ("config", "engine", "captured_sizes"),
        ("config", "num_ranks"),
        ("config", "k_max"),
        ("kind",),
        ("policy",),
        ("policy", "given"),
        ("profile",),
        ("profile", "name"),
        ("profile", "sha256"),
        ("engines",),
        ("engines", "0"),
        ("engines", "0", "vocab_size"),
        ("target",),
        ("send_lag",),
        ("schema_version",),
    ],
    ids=".".join,
)
def test_an_entry_of_a_manifest(
    records: Records,
    path: tuple[str, ...],
    value: Any,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever stands there, a command does its work or says in a line what is wrong."""
    monkeypatch.setattr("simmoe.analysis.compare_plot.plot_comparison", lambda *drawn: None)
    set_entry(records.live, path, value)
    set_entry(records.sim, path, value)
    for arguments in (
        ["validate", "--live", str(records.live), "--out", str(records.out)],
        ["compare", str(records.sim), str(records.live)],
    ):
        capsys.readouterr()
        code = cli(arguments)
        lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("simmoe: ")]
        assert code in (0, 2, 3) and len(lines) == (code != 0)
        assert code == 0 or not records.out.exists()


@pytest.mark.parametrize(
    ("host", "message"),
    [
        ("1,nan,0.1", "launch_s is 'nan'; it must be a finite number"),
        ("1,1e300,0.1", "launch_s is '1e300'; it must be a finite number within"),
        ("0.5,0.1,0.1", "or has values below 0 or a part of one"),
        ("1,,", f"they tell of a host from {LEAST_STEPS} and"),
    ],
)
def test_a_host_that_tells_nothing(records: Records, host: str, message: str) -> None:
    steps = pq.read_table(records.live / "steps.parquet").num_rows
    content = ",".join(HOST_COLUMNS) + "\n" + f"{host}\n" * steps
    (records.live / HOST_FILE).write_bytes(gzip.compress(content.encode()))
    assert message in records.refusal("validate", "--live", str(records.sim), "--host-from", str(records.live))


@pytest.mark.parametrize("clocks", [",", "-5,-9", "9e8,9e8", "nan,1", "1e300,1"])
def test_clocks_that_tell_nothing(records: Records, clocks: str) -> None:
    rows = pq.read_table(records.live / "requests.parquet").num_rows
    (records.live / CLOCKS_FILE).write_text("request_id,queued_s,first_output_s\n" + f"a,{clocks}\n" * rows)
    assert CLOCKS_FILE in records.refusal("validate", "--live", str(records.live))


def test_a_run_or_its_record_is_asked_for(records: Records) -> None:
    assert "give --live RECORD of a live run, or --model DIR" in records.refusal("validate", code=2)
    assert "is no live run's" in records.refusal("validate", "--live", str(records.sim))


def test_another_machines_or_models_host(records: Records) -> None:
    validate = ["validate", "--live", str(records.live), "--host-from"]
    assert "is no live run's record" in records.refusal(*validate, str(records.sim))
    assert "is no run record" in records.refusal(*validate, str(records.sim / "absent"))
    assert "--host-from is empty" in records.refusal(*validate, "", code=2)
    set_entry(records.live, ("config", "k_max"), 8)
    assert "have 8" in records.refusal("validate", "--live", "any", "--host-from", str(records.live), code=2)


@pytest.mark.parametrize("option", ["--live", "--host-from", "--policy-profile", "--profile"])
def test_an_empty_option_is_none_left_out(records: Records, option: str) -> None:
    given = {"--live": str(records.live), option: " "}
    assert "is empty" in records.refusal("validate", *(word for pair in given.items() for word in pair), code=2)


@pytest.mark.parametrize("blocked", ["", "sim", "compare", "compare/compare.json"])
def test_a_place_that_cannot_be_written_is_told_before_the_work(
    records: Records, blocked: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = records.out / blocked
    if blocked == "compare/compare.json":
        place.mkdir(parents=True)
    else:
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text("a file\n")
    before = sorted(records.out.rglob("*"))
    assert cli(["validate", "--live", str(records.live), "--out", str(records.out)]) == 5
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("simmoe: ")]
    assert str(place) in line
    if blocked != "compare/compare.json":  # that is found when it is written, beside the simulated record
        assert sorted(records.out.rglob("*")) == before


def test_causes_that_are_not_known_are_no_zeros(records: Records, capsys: pytest.CaptureFixture[str]) -> None:
    """An endpoint does not tell when it began a request."""
    change_column(records.live / "requests.parquet", "scheduled_s", lambda values: [None] * len(values))
    (records.live / "steps.parquet").unlink()
    assert cli(["compare", str(records.sim), str(records.live), "--out", str(records.out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    (ttft,) = [line.split() for line in lines if line.startswith("mean TTFT, ms")]
    assert ttft[3:] == ["0.00", "0.00", "-", "-", "-"]
    causes = json.loads((records.out / "compare.json").read_text())["causes"]
    assert causes["ttft_s"]["queueing"] is None and causes["ttft_s"]["dispatch"] == 0
    assert np.isfinite(causes["ttft_s"]["arrivals"])
