"""The run record: what is written is what is read, and a folder is whole or it is no record."""

from __future__ import annotations

import errno
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simmoe.errors import OutputError, RecordError
from simmoe.records import (
    METRIC_DEFINITIONS,
    REQUEST_COLUMNS,
    STATUSES,
    STEP_COLUMNS,
    Columns,
    RunRecord,
    read_record,
    write_record,
)

VALUES: dict[str, st.SearchStrategy[Any]] = {
    "string": st.text(st.characters(exclude_categories=["Cs"]), max_size=8),
    "float64": st.floats(allow_infinity=False),
    "int64": st.integers(-(2**63), 2**63 - 1),
}


@st.composite
def tables(draw: st.DrawFn, schema: dict[str, str]) -> Columns:
    size = draw(st.integers(0, 20))
    return {
        name: np.array(
            draw(st.lists(VALUES[kind], min_size=size, max_size=size)), dtype=object if kind == "string" else kind
        )
        for name, kind in schema.items()
    }


def table(schema: dict[str, str], size: int = 3) -> Columns:
    return {
        name: np.array(["a"] * size, dtype=object) if kind == "string" else np.ones(size, dtype=kind)
        for name, kind in schema.items()
    }


@given(tables(REQUEST_COLUMNS), st.none() | tables(STEP_COLUMNS))
def test_a_record_reads_back_as_it_was_written(
    tmp_path_factory: pytest.TempPathFactory, requests: Columns, steps: Columns | None
) -> None:
    folder = tmp_path_factory.mktemp("record")
    write_record(folder, RunRecord(requests=requests, steps=steps, manifest={"seed": 1}))
    read = read_record(folder)
    assert read.manifest["seed"] == 1 and read.manifest["metrics"] == METRIC_DEFINITIONS
    assert (read.steps is None) == (steps is None)
    for written, found in ((requests, read.requests), (steps or {}, read.steps or {})):
        assert list(written) == list(found)
        for name in written:
            np.testing.assert_array_equal(found[name], written[name])


def test_equal_records_have_equal_bytes(tmp_path: Path) -> None:
    record = RunRecord(requests=table(REQUEST_COLUMNS), steps=table(STEP_COLUMNS), manifest={"b": 1, "a": 2})
    for name in ("one", "two"):
        write_record(tmp_path / name, record)
    for file in sorted((tmp_path / "one").iterdir()):
        assert file.read_bytes() == (tmp_path / "two" / file.name).read_bytes()


def test_rewriting_without_steps_leaves_none_behind(tmp_path: Path) -> None:
    write_record(tmp_path, RunRecord(requests=table(REQUEST_COLUMNS), steps=table(STEP_COLUMNS), manifest={}))
    write_record(tmp_path, RunRecord(requests=table(REQUEST_COLUMNS), manifest={}))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["manifest.json", "requests.parquet"]


def test_a_record_that_cannot_be_whole_is_not_begun(tmp_path: Path) -> None:
    bad = table(REQUEST_COLUMNS)
    del bad["k_qos"]
    with pytest.raises(RecordError, match="k_qos"):
        write_record(tmp_path, RunRecord(requests=bad, manifest={}))
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="choose another --out"):
        write_record(tmp_path / "file", RunRecord(requests=table(REQUEST_COLUMNS), manifest={}))


def fail_at(monkeypatch: pytest.MonkeyPatch, point: int, error: BaseException) -> list[int]:
    """Let the operation of that number fail, half done if it writes; the list counts them."""
    done: list[int] = []

    def failing(operation: Callable[..., Any], half: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            done.append(1)
            if len(done) - 1 != point:
                return operation(*args, **kwargs)
            half(*args)
            raise error

        return call

    write_bytes = Path.write_bytes
    monkeypatch.setattr(os, "replace", failing(os.replace, lambda *paths: None))
    halve = failing(write_bytes, lambda path, content: write_bytes(path, content[: len(content) // 2]))
    monkeypatch.setattr(Path, "write_bytes", halve)
    whole = pq.ParquetWriter.write_table
    monkeypatch.setattr(pq.ParquetWriter, "write_table", failing(whole, lambda *args: None))
    return done


NO_SPACE = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("error", [NO_SPACE, KeyboardInterrupt()])
@pytest.mark.parametrize("had_steps", [True, False])
@pytest.mark.parametrize("has_steps", [True, False])
def test_a_write_that_fails_anywhere_leaves_the_old_record(
    error: BaseException, had_steps: bool, has_steps: bool, tmp_path: Path
) -> None:
    def record(value: int, steps: bool) -> RunRecord:
        requests = table(REQUEST_COLUMNS, size=value)
        return RunRecord(
            requests, {"seed": value}, table(STEP_COLUMNS, size=value) if steps else None, {"view.json": b"%d" % value}
        )

    write_record(tmp_path / "old", record(2, had_steps))
    before = {path.name: path.read_bytes() for path in (tmp_path / "old").iterdir()}
    for point in itertools.count():
        with pytest.MonkeyPatch.context() as monkeypatch:
            done = fail_at(monkeypatch, point, error)
            try:
                write_record(tmp_path / "old", record(3, has_steps))
                break
            except (OutputError, KeyboardInterrupt) as failure:
                assert isinstance(error, KeyboardInterrupt) or "No space left" in str(failure)
        assert len(done) > point
        assert {path.name: path.read_bytes() for path in (tmp_path / "old").iterdir()} == before, point

        with pytest.MonkeyPatch.context() as monkeypatch:
            fail_at(monkeypatch, point, error)
            try:
                write_record(tmp_path / f"new{point}", record(3, has_steps))
            except (OutputError, KeyboardInterrupt):
                assert list((tmp_path / f"new{point}").iterdir()) == [], point
    assert point >= 3 * 3 - 1, "each file is written and renamed, and an old one moved aside"
    read = read_record(tmp_path / "old")
    assert read.manifest["seed"] == 3 == len(read.requests["status"]) and (read.steps is not None) == has_steps


@pytest.mark.parametrize("value", [{1, 2}, object(), {(1, 2): 3}, {1: 0, "a": 0}, 1j])
def test_a_manifest_that_is_not_plain_data_is_refused_before_anything_is_written(tmp_path: Path, value: object) -> None:
    write_record(tmp_path, RunRecord(requests=table(REQUEST_COLUMNS), manifest={"seed": 1}))
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(RecordError, match="not plain JSON data"):
        write_record(tmp_path, RunRecord(requests=table(REQUEST_COLUMNS, 5), manifest={"policy_state": value}))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def spoil_pages(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[4:200] = bytes(196)  # between the magic number and the footer
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (lambda folder: (folder / "manifest.json").unlink(), "no manifest.json"),
        (lambda folder: (folder / "manifest.json").write_text("{"), "not JSON"),
        (lambda folder: (folder / "manifest.json").write_bytes(b"\xff\xfe{"), "not JSON"),
        (lambda folder: (folder / "manifest.json").write_text("[]"), "no JSON object"),
        (lambda folder: (folder / "manifest.json").write_text("null"), "no JSON object"),
        (lambda folder: (folder / "manifest.json").write_text(json.dumps({"schema_version": 99})), "schema version 99"),
        (lambda folder: (folder / "requests.parquet").unlink(), "no requests.parquet"),
        (lambda folder: (folder / "requests.parquet").write_bytes(b"junk"), "not Parquet"),
        (lambda folder: (folder / "requests.parquet").write_bytes(b""), "not Parquet"),
        (lambda folder: spoil_pages(folder / "requests.parquet"), "not Parquet, or spoilt"),
    ],
)
def test_a_spoilt_record_is_named(tmp_path: Path, spoil: Any, complaint: str) -> None:
    write_record(tmp_path, RunRecord(requests=table(REQUEST_COLUMNS), manifest={}))
    spoil(tmp_path)
    with pytest.raises(RecordError, match=complaint):
        read_record(tmp_path)


def test_counts_list_every_status_and_add_up() -> None:
    requests = table(REQUEST_COLUMNS)
    requests["status"] = np.array(["finished", "rejected", "finished"], dtype=object)
    counts = RunRecord(requests=requests, manifest={}).counts()
    assert set(counts) == {"injected", *STATUSES}
    assert counts["injected"] == 3 == sum(counts[name] for name in STATUSES)


def test_writing_a_record_imports_no_pandas(tmp_path: Path) -> None:
    program = (
        "import sys, numpy as np; from simmoe.records import *; "
        "r = {n: np.array(['a'], dtype=object) if k == 'string' else np.ones(1, dtype=k)"
        " for n, k in REQUEST_COLUMNS.items()}; "
        f"write_record({str(tmp_path)!r}, RunRecord(requests=r, manifest={{}})); "
        "sys.exit('pandas' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
