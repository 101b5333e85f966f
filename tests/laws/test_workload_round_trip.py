"""What is written as a plain trace and read back is the same, in every layout, from any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simmoe.traces.columns import HashRuns, PackedStrings
from simmoe.traces.export import SUFFIXES, write_trace
from simmoe.traces.reader import read_trace
from simmoe.traces.workload import Workload

TOKENS = st.integers(1, 2**31 - 1)
#: Any text of one line: commas, quotes, blanks and all; no lone surrogates, which UTF-8 cannot write.
IDS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=8)


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    n = draw(st.integers(1, 12))
    gaps = draw(st.lists(st.floats(0, 1e6), min_size=n - 1, max_size=n - 1))

    def column(values: st.SearchStrategy[int]) -> Any:
        return np.array(draw(st.lists(values, min_size=n, max_size=n)), dtype=np.int64)

    prompt = column(TOKENS)
    blocks = [min(int(-(-p // 512)), 5) for p in prompt]
    runs = [draw(st.lists(st.integers(0, 2**62), max_size=most)) for most in blocks]
    return Workload(
        request_id=PackedStrings.of(draw(st.lists(IDS, min_size=n, max_size=n, unique=True))),
        arrival_s=np.concatenate([[0.0], np.cumsum(gaps)]),
        prompt_tokens=prompt,
        output_tokens=column(TOKENS),
        k_qos=column(TOKENS),
        prefix_hashes=HashRuns.of(runs) if draw(st.booleans()) else None,
    )


@pytest.mark.parametrize("suffix", SUFFIXES)
@settings(max_examples=60, deadline=None)
@given(workload=workloads(), with_k_qos=st.booleans())
def test_written_and_read_back(
    tmp_path_factory: pytest.TempPathFactory, suffix: str, workload: Workload, with_k_qos: bool
) -> None:
    path: Path = tmp_path_factory.mktemp("round") / f"trace{suffix}"
    write_trace(path, workload, with_k_qos)
    trace = read_trace(path)
    assert trace.arrival_s.tolist() == workload.arrival_s.tolist()
    assert trace.prompt_tokens.tolist() == workload.prompt_tokens.tolist()
    assert trace.output_tokens.tolist() == workload.output_tokens.tolist()
    assert trace.request_id is not None
    assert list(trace.request_id) == list(workload.request_id)
    assert (trace.k_qos is not None) is with_k_qos
    if trace.k_qos is not None:
        assert trace.k_qos.tolist() == workload.k_qos.tolist()
    hashes = None if trace.prefix_hashes is None else list(trace.prefix_hashes)
    assert hashes == (None if workload.prefix_hashes is None else list(workload.prefix_hashes))
    assert not list(path.parent.glob(".*")), "no partial file is left"


RUNS = st.lists(st.lists(st.integers(0, 99), max_size=4), max_size=8)


@given(runs=RUNS, data=st.data())
def test_hash_runs_are_a_list_of_tuples(runs: list[list[int]], data: st.DataObject) -> None:
    packed = HashRuns.of(runs)
    plain = [tuple(run) for run in runs]
    assert list(packed) == plain
    assert packed[1:5:2] == plain[1:5:2]
    rows = data.draw(st.lists(st.integers(0, len(runs) - 1), max_size=9) if runs else st.just([]))
    most = data.draw(st.lists(st.integers(0, 4), min_size=len(rows), max_size=len(rows)))
    shift = data.draw(st.lists(st.integers(0, 9), min_size=len(rows), max_size=len(rows)))
    index = np.array(rows, dtype=np.int64)
    taken = packed.take(index, at_most=np.array(most, dtype=np.int64), shift=np.array(shift, dtype=np.int64))
    assert list(taken) == [
        tuple(block + by for block in plain[row][:keep]) for row, keep, by in zip(rows, most, shift, strict=True)
    ]
    assert list(HashRuns.concatenate([packed, taken])) == plain + list(taken)


@given(texts=st.lists(IDS, max_size=8))
def test_packed_strings_are_a_list(texts: list[str]) -> None:
    packed = PackedStrings.of(texts)
    assert list(packed) == texts
    assert packed[::-1] == texts[::-1]
    assert list(packed.take(np.arange(len(texts))[::-1])) == texts[::-1]
    assert list(PackedStrings.concatenate([packed, packed])) == texts + texts
