"""Files as published, and how they may differ without meaning anything else."""

from __future__ import annotations

import csv
import gzip
import json
import os
from pathlib import Path

import numpy as np
import pytest

from simmoe.traces import rows
from simmoe.traces.build import build_workload
from simmoe.traces.reader import Trace, read_trace
from simmoe.traces.spec import WorkloadSpec

AZURE_2023 = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
2023-11-16 18:15:50.9951690,91,16
"""

#: As in the 2024 files: microseconds that happen to be zero are not written.
AZURE_2024 = """TIMESTAMP,ContextTokens,GeneratedTokens
2024-05-10 00:00:00.009930+00:00,2162,5
2024-05-10 00:00:01+00:00,2399,6
2024-05-10 00:00:01.022314+00:00,76,15
2024-05-10 00:00:02,2376,1
"""

MOONCAKE = """{"timestamp": 27482, "input_length": 6955, "output_length": 52, "hash_ids": [46, 47, 2353]}
{"timestamp": 30535, "input_length": 472, "output_length": 26, "hash_ids": [46]}
"""

BURSTGPT = """Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type
5,ChatGPT,472,18,490,Conversation log
45,ChatGPT,1087,0,1087,Conversation log
118.5,GPT-4,417,276,693,API log
"""

PLAIN_CSV = """request_id,arrival_s,prompt_tokens,output_tokens,k_qos,prefix_hashes,note
a,0.5,600,7,4,7 8,x
b,0.25,10,1,32,9,y
"""

PLAIN_JSONL = """{"arrival_s": 0.5, "prompt_tokens": 600, "output_tokens": 7, "k_qos": 4, "request_id": "a",\
 "prefix_hashes": [7, 8]}
{"request_id": "b", "arrival_s": 0.25, "prompt_tokens": 10, "output_tokens": 1.0, "k_qos": 32, "prefix_hashes": [9]}
"""


def write(tmp_path: Path, text: str, name: str = "trace") -> Path:
    path = tmp_path / name
    path.write_bytes(text.encode())
    return path


def lists(trace: Trace) -> dict[str, object]:
    """Everything a trace holds but where it came from."""
    return {
        "arrival_s": trace.arrival_s.tolist(),
        "prompt_tokens": trace.prompt_tokens.tolist(),
        "output_tokens": trace.output_tokens.tolist(),
        "k_qos": None if trace.k_qos is None else trace.k_qos.tolist(),
        "request_id": None if trace.request_id is None else list(trace.request_id),
        "prefix_hashes": None if trace.prefix_hashes is None else list(trace.prefix_hashes),
        "file_rows": [trace.file_row(i) for i in range(len(trace))],
    }


def test_azure_2023_keeps_all_seven_digits(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, AZURE_2023))
    assert trace.arrival_s.tolist() == [0.0, 4.314579, 4.314579]
    assert trace.prompt_tokens.tolist() == [374, 396, 91]
    assert trace.output_tokens.tolist() == [44, 109, 16]
    assert trace.source["first_arrival"] == "2023-11-16T18:15:46.680590000"
    hundred_ns = AZURE_2023.replace("50.9951690,396", "46.6805901,396").replace("50.9951690,91", "46.6805902,91")
    assert read_trace(write(tmp_path, hundred_ns, "ns")).arrival_s.tolist() == [0.0, 1e-7, 2e-7]


def test_azure_2024_mixed_forms_are_one_clock(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, AZURE_2024))
    assert trace.arrival_s.tolist() == [0.0, 0.99007, 1.012384, 1.99007]


def test_offsets_from_utc_are_honoured(tmp_path: Path) -> None:
    text = AZURE_2024.replace("00:00:02,", "01:30:02+01:30,").replace("01.022314+00:00", "01.022314Z")
    assert read_trace(write(tmp_path, text)).arrival_s.tolist() == [0.0, 0.99007, 1.012384, 1.99007]


def test_mooncake(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, MOONCAKE))
    assert trace.arrival_s.tolist() == [0.0, 30.535 - 27.482]
    assert trace.source["first_arrival"] == 27.482
    assert trace.prefix_hashes is not None
    assert list(trace.prefix_hashes) == [(46, 47, 2353), (46,)]
    assert trace.prefix_block_tokens == 512


def test_burstgpt_leaves_failed_requests_out_and_counts_them(tmp_path: Path) -> None:
    trace = read_trace(write(tmp_path, BURSTGPT))
    assert trace.arrival_s.tolist() == [0.0, 113.5]
    assert trace.output_tokens.tolist() == [18, 276]
    assert [trace.file_row(0), trace.file_row(1)] == [1, 3]
    assert trace.source["failed_requests_left_out"] == 1
    assert trace.source["columns_not_read"] == ["Model", "Total tokens", "Log Type"]


@pytest.mark.parametrize("text", [PLAIN_CSV, PLAIN_JSONL])
def test_plain(tmp_path: Path, text: str) -> None:
    trace = read_trace(write(tmp_path, text))
    assert lists(trace) == {
        "arrival_s": [0.0, 0.25],
        "prompt_tokens": [10, 600],
        "output_tokens": [1, 7],
        "k_qos": [32, 4],
        "request_id": ["b", "a"],
        "prefix_hashes": [(9,), (7, 8)],
        "file_rows": [2, 1],
    }
    assert trace.source["order"] == "stable sort by arrival (1 steps back in time)"


@pytest.mark.parametrize("text", [AZURE_2023, AZURE_2024, MOONCAKE, BURSTGPT, PLAIN_CSV, PLAIN_JSONL])
@pytest.mark.parametrize("variant", ["gzip", "crlf", "bom", "no newline at the end", "blank lines at the end", "all"])
def test_packing_means_nothing(tmp_path: Path, text: str, variant: str) -> None:
    expected = lists(read_trace(write(tmp_path, text, "expected.csv")))
    content = text
    if variant in ("crlf", "all"):
        content = content.replace("\n", "\r\n")
    if variant in ("bom", "all"):
        content = "\ufeff" + content
    if variant == "no newline at the end":
        content = content.rstrip("\n")
    if variant in ("blank lines at the end", "all"):
        content += "\n\n"
    data = content.encode()
    if variant in ("gzip", "all"):
        data = gzip.compress(data)
    path = tmp_path / "name-says-nothing.parquet"
    path.write_bytes(data)
    assert lists(read_trace(path)) == expected


@pytest.mark.parametrize("chunk_rows", [1, 2, 3])
@pytest.mark.parametrize("text", [AZURE_2024, MOONCAKE, BURSTGPT, PLAIN_CSV + "\n", PLAIN_JSONL + "\n\n"])
def test_chunks_mean_nothing(tmp_path: Path, text: str, chunk_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = lists(read_trace(write(tmp_path, text, "whole")))
    monkeypatch.setattr(rows, "CHUNK_ROWS", chunk_rows)
    assert lists(read_trace(write(tmp_path, text, "chunked"))) == expected


PUBLISHED = {
    "azure": ("TIMESTAMP,ContextTokens,GeneratedTokens", ["2023-11-16 18:15:46,600,5", "2023-11-16 18:15:47,700,6"]),
    "burstgpt": ("Timestamp,Request tokens,Response tokens", ["0,600,5", "1,700,6"]),
    "plain": ("arrival_s,prompt_tokens,output_tokens", ["0,600,5", "1,700,6"]),
}


@pytest.mark.parametrize("layout", PUBLISHED)
def test_own_columns_are_read_beside_those_of_every_publisher(tmp_path: Path, layout: str) -> None:
    header, (first, second) = PUBLISHED[layout]
    path = tmp_path / "trace.csv"
    path.write_text(f"{header},request_id,k_qos,prefix_hashes\n{first},a,7,1 2\n{second},b,9,1 3\n")
    trace = read_trace(path)
    assert trace.source["format"] == layout and trace.source["columns_not_read"] == []
    assert trace.k_qos is not None and trace.k_qos.tolist() == [7, 9]
    assert trace.request_id is not None and list(trace.request_id) == ["a", "b"]
    assert trace.prefix_hashes is not None and list(trace.prefix_hashes) == [(1, 2), (1, 3)]
    workload = build_workload(WorkloadSpec(trace=str(path)))
    assert workload.k_qos.tolist() == [7, 9] and workload.source["budgets"] == {"generator": "trace", "column": "k_qos"}


def test_own_columns_are_read_from_mooncakes_objects(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"timestamp": 0, "input_length": 6, "output_length": 5, "hash_ids": [1], "k_qos": 3}\n')
    trace = read_trace(path)
    assert trace.k_qos is not None and trace.k_qos.tolist() == [3]


def test_failed_requests_leave_with_their_own_columns(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(
        "Timestamp,Request tokens,Response tokens,request_id,k_qos,prefix_hashes\n"
        "0,600,0,a,1,1 2\n1,600,5,b,2,3 4\n2,600,0,c,3,5 6\n3,600,5,d,4,7 8\n"
    )
    trace = read_trace(path)
    assert trace.request_id is not None and list(trace.request_id) == ["b", "d"]
    assert trace.prefix_hashes is not None and list(trace.prefix_hashes) == [(3, 4), (7, 8)]
    assert trace.k_qos is not None and trace.k_qos.tolist() == [2, 4]
    assert [trace.file_row(i) for i in range(2)] == [2, 4]


def test_columns_may_stand_in_any_order(tmp_path: Path) -> None:
    shuffled = "GeneratedTokens, TIMESTAMP ,Extra,ContextTokens\n44,2023-11-16 18:15:46.6805900,?,374\n"
    trace = read_trace(write(tmp_path, shuffled))
    assert (trace.prompt_tokens.tolist(), trace.output_tokens.tolist()) == ([374], [44])


def test_equal_times_keep_the_order_of_the_file(tmp_path: Path) -> None:
    times = [i * 7919 % 5 for i in range(1, 1001)]
    text = "arrival_s,prompt_tokens,output_tokens\n" + "".join(f"{t},{i},1\n" for i, t in enumerate(times, start=1))
    expected = sorted(range(1, 1001), key=lambda i: times[i - 1])
    assert read_trace(write(tmp_path, text)).prompt_tokens.tolist() == expected


def test_a_file_is_read_once_until_it_changes(tmp_path: Path) -> None:
    path = write(tmp_path, AZURE_2023)
    first = read_trace(path)
    assert read_trace(path) is first
    with pytest.raises(ValueError, match="read-only"):
        first.prompt_tokens[0] = 1
    path.write_text(AZURE_2023 + "2023-11-16 18:15:51,5,5\n")
    os.utime(path, ns=(1, 1))
    assert len(read_trace(path)) == 4


def original(name: str) -> Path:
    folder = os.environ.get("SIMMOE_DATA")
    if not folder or not (Path(folder) / name).is_file():
        pytest.skip(f"needs {name} in $SIMMOE_DATA")
    return Path(folder) / name


@pytest.mark.parametrize(
    ("name", "rows_kept", "prompt_mean", "output_mean"),
    [
        ("AzureLLMInferenceTrace_conv.csv", 8399, 1144.48, 352.45),
        ("AzureLLMInferenceTrace_code.csv", 2189, 1455.28, 27.69),
    ],
)
def test_azure_originals_against_the_csv_module(
    name: str, rows_kept: int, prompt_mean: float, output_mean: float
) -> None:
    """The whole file by another route, and the means others have published for the paper's filter."""
    path = original(name)
    trace = read_trace(path)
    with path.open(newline="") as stream:
        records = list(csv.DictReader(stream))
    times = np.array([np.datetime64(record["TIMESTAMP"], "ns") for record in records])
    assert (np.diff(times.astype(np.int64)) >= 0).all(), "the oracle below relies on a sorted file"
    expected_s = (times - times[0]).astype(np.int64) / 1e9
    assert trace.arrival_s.tolist() == expected_s.tolist()
    assert trace.prompt_tokens.tolist() == [int(record["ContextTokens"]) for record in records]
    assert trace.output_tokens.tolist() == [int(record["GeneratedTokens"]) for record in records]
    total = trace.prompt_tokens + trace.output_tokens
    kept = (total >= 1024) & (total <= 2048)
    assert int(kept.sum()) == rows_kept
    assert float(trace.prompt_tokens[kept].mean()) == pytest.approx(prompt_mean, abs=0.005)
    assert float(trace.output_tokens[kept].mean()) == pytest.approx(output_mean, abs=0.005)


def test_mooncake_original_against_the_json_module() -> None:
    path = original("mooncake_conversation_trace.jsonl")
    trace = read_trace(path)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    records.sort(key=lambda record: record["timestamp"])
    assert trace.arrival_s.tolist() == [record["timestamp"] / 1000 for record in records]
    assert trace.prefix_hashes is not None
    assert list(trace.prefix_hashes) == [tuple(record["hash_ids"]) for record in records]
