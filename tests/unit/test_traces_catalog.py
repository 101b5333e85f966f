"""Which file a name means, and in which order it is looked for."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from simmoe.errors import UsageError
from simmoe.traces.build import build_workload
from simmoe.traces.catalog import TRACES, cache_dir, resolve
from simmoe.traces.describe import source_line
from simmoe.traces.spec import WorkloadSpec

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,1000,100\n2023-11-16 18:15:47,10,5\n"


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty data folder and an empty cache."""
    (tmp_path / "data").mkdir()
    monkeypatch.setenv("SIMMOE_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cache_dir().mkdir(parents=True)


def test_the_data_folder_comes_before_the_cache(tmp_path: Path) -> None:
    cached = cache_dir() / "AzureLLMInferenceTrace_conv.csv"
    cached.write_text(AZURE)
    assert resolve("azure-conv")[1] == cached
    given = tmp_path / "data" / "AzureLLMInferenceTrace_conv.csv.gz"
    given.write_bytes(gzip.compress(AZURE.encode()))
    assert resolve("azure-conv")[1] == given


def test_without_the_variable_only_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SIMMOE_DATA")
    (cache_dir() / "conversation_trace.jsonl").write_text("{}")
    assert resolve("mooncake")[1] == cache_dir() / "conversation_trace.jsonl"


def test_the_cache_is_in_the_home_folder_by_default(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "simmoe"


def test_only_azure_falls_back_to_the_summary() -> None:
    assert resolve("azure")[1] is None
    for name in set(TRACES) - {"azure"}:
        with pytest.raises(UsageError, match=f"simmoe traces fetch {name}"):
            resolve(name)


def test_unknown_name_and_missing_file() -> None:
    with pytest.raises(UsageError, match=r"no trace or file 'azure-cnv' \(did you mean 'azure-conv'\?\)"):
        resolve("azure-cnv")
    with pytest.raises(UsageError, match=r"no trace or file './x\.csv'"):
        resolve("./x.csv")
    with pytest.raises(UsageError, match="is not a file"):
        resolve(".")


def test_variable_that_names_no_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SIMMOE_DATA", "/nowhere/at/all")
    with pytest.raises(UsageError, match=r"\$SIMMOE_DATA is '/nowhere/at/all'"):
        resolve("azure")


def test_a_file_that_is_not_the_published_one_is_said_so(tmp_path: Path) -> None:
    (tmp_path / "data" / "AzureLLMInferenceTrace_conv.csv").write_text(AZURE)
    source = build_workload(WorkloadSpec(trace="azure")).source
    assert source["as_published"] is False
    assert "NOT the published bytes" in source_line(source)


def test_original_and_summary_say_which_they_are(tmp_path: Path) -> None:
    summary = build_workload(WorkloadSpec(trace="azure", rate=1.0)).source
    assert summary["lengths"] == "shipped summary"
    assert "shipped summary" in source_line(summary)
    (tmp_path / "data" / "AzureLLMInferenceTrace_conv.csv").write_text(AZURE)
    original = build_workload(WorkloadSpec(trace="azure", rate=1.0)).source
    assert original["lengths"] == "original"
    assert original["filter"] == {"min_total_tokens": 1024, "max_total_tokens": 2048, "rows_kept": 1}
    assert "original AzureLLMInferenceTrace_conv.csv" in source_line(original)
    assert "1 of 2 rows kept" in source_line(original)


def test_no_source_tells_where_the_file_lay(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(AZURE)
    spec = WorkloadSpec(trace=str(path))
    assert str(tmp_path) not in repr(build_workload(spec).source)
    assert spec.as_dict()["trace"] == "mine.csv"
    assert WorkloadSpec().as_dict()["trace"] == "azure"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "no recorded arrivals; give a rate"),
        ({"rate": 1.0, "arrivals": "replay"}, "no recorded arrivals; give a rate"),
        ({"rate": 1.0, "max_total_tokens": 4096}, r"covers 1024\.\.2048 total tokens alone"),
        ({"rate": 1.0, "budgets": "trace"}, "has no budgets"),
        (
            {"rate": 1.0, "min_total_tokens": 3000},
            "min_total_tokens is 3000, but trace 'azure' keeps rows of at most 2048 .*; give max_total_tokens too",
        ),
        (
            {"rate": 1.0, "max_total_tokens": 512},
            "max_total_tokens is 512, but trace 'azure' keeps rows of at least 1024 .*; give min_total_tokens too",
        ),
    ],
)
def test_what_the_summary_cannot_do(options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build_workload(WorkloadSpec(trace="azure", **options))  # type: ignore[arg-type]
