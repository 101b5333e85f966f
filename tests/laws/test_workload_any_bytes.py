"""Whatever a file holds, reading it gives a sound trace or one clear error."""

from __future__ import annotations

import gzip
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simmoe.errors import TraceError
from simmoe.traces import reader
from simmoe.traces.reader import read_trace

HEADERS = [
    "TIMESTAMP,ContextTokens,GeneratedTokens",
    "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type",
    "request_id,arrival_s,prompt_tokens,output_tokens,k_qos,prefix_hashes",
    "arrival_s,prompt_tokens,output_tokens",
]
NUMBERS = ["", " 7", "7", "0", "-1", "1.5", "1e3", "1e999", "nan", "inf", "1_0", "٣", "²", "\uff11", "0x1f", "9" * 400]
TIMES = ["2023-11-16 18:15:46.6805900", "2024-05-10 00:00:01+00:00", "2023-13-01 00:00:00", "1700000000", "NaT", "now"]
CELLS = st.sampled_from([*NUMBERS, *TIMES, '"', "7 8"]) | st.text(max_size=4)
JSON_VALUES = st.sampled_from(
    [
        "1",
        "0",
        "-1",
        "1.5",
        "1e3",
        "1e999",
        "NaN",
        "-Infinity",
        "true",
        "null",
        '"7"',
        "[1, 2]",
        "[]",
        "[null]",
        "{}",
        "9" * 400,
    ]
)
CSV = st.builds(
    lambda header, rows: "\n".join([header, *map(",".join, rows)]),
    st.sampled_from(HEADERS),
    st.lists(st.lists(CELLS, min_size=3, max_size=6), max_size=4),
)
JSONL = st.lists(
    st.builds(
        lambda time, prompt, output, hashes: (
            f'{{"timestamp": {time}, "input_length": {prompt}, "output_length": {output}, "hash_ids": {hashes}}}'
        ),
        *[JSON_VALUES] * 4,
    )
    | st.sampled_from(["", "{", "[]", "7", "{}"]),
    max_size=4,
).map("\n".join)
FILES = st.one_of(
    st.binary(max_size=200),
    CSV.map(str.encode),
    JSONL.map(str.encode),
    st.builds(lambda text, cut: gzip.compress(text.encode())[:cut], CSV, st.integers(2, 200)),
    st.binary(max_size=100).map(b"PAR1".__add__),
)


@settings(max_examples=600, deadline=None)
@given(content=FILES)
def test_a_sound_trace_or_one_line(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path: Path = tmp_path_factory.getbasetemp() / "any"
    path.write_bytes(content)
    reader._read.cache_clear()  # two examples may be of one size and written within one tick of the file system's clock
    try:
        trace = read_trace(path)
    except TraceError as error:
        message = str(error)
        assert f"'{path}'" in message and "\n" not in message
        return
    assert len(trace) >= 1
    assert trace.arrival_s[0] == 0 and (np.diff(trace.arrival_s) >= 0).all() and np.isfinite(trace.arrival_s).all()
    assert trace.prompt_tokens.min() >= 1 and trace.output_tokens.min() >= 1
    assert trace.k_qos is None or trace.k_qos.min() >= 1
    assert trace.source["rows"] == len(trace)
