"""The shipped summary: what it may hold, how close it is, and that it is what the script makes."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from simmoe.traces import summary
from simmoe.traces.build import build_workload
from simmoe.traces.catalog import CONV_2023
from simmoe.traces.reader import read_trace
from simmoe.traces.spec import WorkloadSpec

IntColumn = npt.NDArray[np.int64]


def ks_distance(a: IntColumn, b: IntColumn) -> float:
    """The largest gap between two empirical distributions."""
    at = np.union1d(a, b)
    cdf_a = np.searchsorted(np.sort(a), at, side="right") / len(a)
    cdf_b = np.searchsorted(np.sort(b), at, side="right") / len(b)
    return float(np.abs(cdf_a - cdf_b).max())


@pytest.fixture(scope="module")
def original() -> Path:
    folder = os.environ.get("SIMMOE_DATA")
    path = Path(folder or "") / CONV_2023.file_name
    if not folder or not path.is_file():
        pytest.skip(f"needs {CONV_2023.file_name} in $SIMMOE_DATA")
    return path


@pytest.fixture(scope="module")
def filtered(original: Path) -> tuple[IntColumn, IntColumn]:
    trace = read_trace(original)
    prompt, output = trace.prompt_tokens.astype(np.int64), trace.output_tokens.astype(np.int64)
    kept = (prompt + output >= 1024) & (prompt + output <= 2048)
    return prompt[kept], output[kept]


def drawn(
    seed: int, requests: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> tuple[IntColumn, IntColumn]:
    """Lengths as a user without the original gets them."""
    monkeypatch.delenv("SIMMOE_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    workload = build_workload(WorkloadSpec(trace="azure", rate=1.0, seed=seed, requests=requests))
    assert workload.source["lengths"] == "shipped summary"
    return workload.prompt_tokens, workload.output_tokens


def test_size_and_attribution() -> None:
    shipped, _ = summary.shipped()
    assert len(shipped.prompt_edges) - 1 <= 64
    assert len(shipped.output_edges) - 1 <= 64
    assert len(shipped) == 8399
    assert shipped.about["license"] == "CC-BY 4.0"
    assert "Splitwise, ISCA 2024" in shipped.about["citation"]
    assert shipped.about["original"]["sha256"] == CONV_2023.sha256
    assert summary.SHIPPED.stat().st_size < 32_768


@pytest.mark.parametrize("seed", range(5))
def test_totals_stay_within_the_filter(seed: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    prompt, output = drawn(seed, 30_000, monkeypatch, tmp_path)
    total = prompt + output
    assert total.min() >= 1024 and total.max() <= 2048
    assert prompt.min() >= 1 and output.min() >= 1


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("requests", [None, 40_000])
def test_close_to_the_original(
    seed: int,
    requests: int | None,
    filtered: tuple[IntColumn, IntColumn],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    prompt, output = drawn(seed, requests, monkeypatch, tmp_path)
    assert ks_distance(prompt, filtered[0]) <= 0.02
    assert ks_distance(output, filtered[1]) <= 0.02
    correlation = np.corrcoef(prompt, output)[0, 1]
    assert abs(correlation - np.corrcoef(*filtered)[0, 1]) <= 0.05
    assert prompt.mean() == pytest.approx(filtered[0].mean(), rel=0.005)
    assert output.mean() == pytest.approx(filtered[1].mean(), rel=0.005)


def test_the_script_makes_the_shipped_file(original: Path, tmp_path: Path) -> None:
    summary.main([str(original), str(tmp_path / "again.json")])
    assert (tmp_path / "again.json").read_bytes() == summary.SHIPPED.read_bytes()


def test_each_request_counted_lies_in_its_cell() -> None:
    """Taking every counted request once gives back the histogram."""
    shipped, _ = summary.shipped()
    prompt, output = shipped.lengths(np.arange(len(shipped)), np.random.default_rng(0))
    i = np.searchsorted(shipped.prompt_edges, prompt, side="right") - 1
    j = np.searchsorted(shipped.output_edges, output, side="right") - 1
    cells, counts = np.unique(np.stack([i, j], axis=1), axis=0, return_counts=True)
    assert np.column_stack([cells, counts]).tolist() == shipped.cells.tolist()
