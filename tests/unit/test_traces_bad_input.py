"""Every kind of bad trace: one line that names file, row, column and value; nothing read by half."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import pytest

from simmoe.errors import TraceError
from simmoe.traces import reader, rows
from simmoe.traces.build import build_workload
from simmoe.traces.reader import read_trace
from simmoe.traces.spec import WorkloadSpec

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46.6805900,374,44\n"
PLAIN = "arrival_s,prompt_tokens,output_tokens\n0,5,5\n"
FULL = "request_id,arrival_s,prompt_tokens,output_tokens,k_qos,prefix_hashes\na,0,600,5,4,1 2\n"
MOONCAKE = '{"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]}\n'
BURSTGPT = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"

ROW_2_CSV = "row 2 (line 3)"

#: A message ends in what would do, or in what to do.
REMEDY = re.compile(r"; \w|: \w+ .*|must be|expected")

#: what it is -> (content, parts of the message)
BAD = {
    "nothing": ("", ["is empty"]),
    "blank": ("\n\n", ["is empty"]),
    "header alone": (PLAIN.splitlines()[0] + "\n", ["no rows", "empty trace"]),
    "no header": ("1,2,3\n4,5,6\n", ["no known header", "1, 2, 3", "TIMESTAMP"]),
    "missing column": (
        "TIMESTAMP,ContextTokens\n2023-11-16 18:15:46,4\n",
        ["missing column 'GeneratedTokens'", "azure"],
    ),
    "semicolons": (PLAIN.replace(",", ";"), ["no known header"]),
    "column twice": ("arrival_s,prompt_tokens,output_tokens,arrival_s\n0,5,5,0\n", ["'arrival_s' stands twice"]),
    "nan arrival": (PLAIN + "nan,5,5\n", [ROW_2_CSV, "'arrival_s'", "nan", "finite"]),
    "infinite arrival": (PLAIN + "inf,5,5\n", [ROW_2_CSV, "'arrival_s'", "inf", "finite"]),
    "negative arrival": (PLAIN + "-1,5,5\n", [ROW_2_CSV, "'arrival_s'", "'-1'", "at least 0"]),
    "empty arrival": (PLAIN + ",5,5\n", [ROW_2_CSV, "'arrival_s'", "empty"]),
    "arrival of words": (PLAIN + "soon,5,5\n", [ROW_2_CSV, "'soon'", "number"]),
    "arrival with underscore": (PLAIN + "1_0,5,5\n", [ROW_2_CSV, "'1_0'", "number"]),
    "zero prompt": (PLAIN + "1,0,5\n", [ROW_2_CSV, "'prompt_tokens'", "'0'", "at least 1"]),
    "zero output": (PLAIN + "1,5,0\n", [ROW_2_CSV, "'output_tokens'", "'0'", "at least 1"]),
    "negative prompt": (PLAIN + "1,-5,5\n", [ROW_2_CSV, "'prompt_tokens'", "'-5'", "at least 1"]),
    "fractional prompt": (PLAIN + "1,5.5,5\n", [ROW_2_CSV, "'prompt_tokens'", "'5.5'", "whole"]),
    "nan prompt": (PLAIN + "1,nan,5\n", [ROW_2_CSV, "'prompt_tokens'", "'nan'", "finite"]),
    "infinite output": (PLAIN + "1,5,1e999\n", [ROW_2_CSV, "'output_tokens'", "'1e999'", "finite"]),
    "prompt with underscore": (PLAIN + "1,1_000,5\n", [ROW_2_CSV, "'1_000'", "number"]),
    "other digits": (PLAIN + "1,٣,5\n", [ROW_2_CSV, "'٣'", "number"]),
    "absurd prompt": (PLAIN + f"1,{10**30},5\n", [ROW_2_CSV, "'prompt_tokens'", "below 2**62"]),
    "huge prompt": (PLAIN + f"1,{2**31},5\n", [ROW_2_CSV, "'prompt_tokens'", "at most 2147483647"]),
    "azure zero": (AZURE + "2023-11-16 18:15:47,0,5\n", [ROW_2_CSV, "'ContextTokens'", "'0'", "at least 1"]),
    "burstgpt zero prompt": (BURSTGPT + "0,m,5,5,10,l\n1,m,0,5,5,l\n", [ROW_2_CSV, "'Request tokens'", "at least 1"]),
    "burstgpt all failed": (BURSTGPT + "0,m,5,0,5,l\n", ["every request failed"]),
    "azure no such date": (AZURE + "2023-02-30 00:00:00,5,5\n", [ROW_2_CSV, "'TIMESTAMP'", "no such date"]),
    "azure no such time": (AZURE + "2023-11-16 25:00:00,5,5\n", [ROW_2_CSV, "'TIMESTAMP'", "no such date"]),
    "azure words": (AZURE + "yesterday,5,5\n", [ROW_2_CSV, "'yesterday'", "date and time"]),
    "azure not a time": (AZURE + "NaT,5,5\n", [ROW_2_CSV, "'NaT'", "date and time"]),
    "azure counts after dates": (AZURE + "12.5,5,5\n", [ROW_2_CSV, "'12.5'", "mixed clocks"]),
    "dates after counts": (PLAIN + "2023-11-16 18:15:46,5,5\n", [ROW_2_CSV, "date", "mixed clocks"]),
    "azure zone after none": (AZURE + "2023-11-16 18:15:46+02:00,5,5\n", [ROW_2_CSV, "mixed clocks"]),
    "azure none after zone": (
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:15:46+02:00,5,5\n2023-11-16 18:15:46,5,5\n",
        [ROW_2_CSV, "mixed clocks"],
    ),
    "azure zone of days": (AZURE.replace(".6805900", "+99:00"), ["row 1 (line 2)", "a day or more"]),
    "epoch after counts": (PLAIN + "1700000000,5,5\n", [ROW_2_CSV, "mixed clocks", "row 1"]),
    "epoch before counts": (PLAIN.replace("\n0,", "\n1700000000,") + "3,5,5\n", ["row 1", "mixed clocks", "row 2"]),
    "azure 1970 row": (AZURE + "1970-01-01 00:00:00,5,5\n", ["row 1", "mixed clocks", "row 2"]),
    "short row": (PLAIN + "1,5\n", [ROW_2_CSV, "2 cells", "header has 3"]),
    "long row": (PLAIN + "1,5,5,5\n", [ROW_2_CSV, "4 cells", "header has 3"]),
    "blank line inside": (PLAIN + "\n1,5,5\n", [ROW_2_CSV, "blank"]),
    "open quote": (PLAIN + '1,"5,5\n', ["line 3"]),
    "budget zero": (FULL + "b,1,5,5,0,1\n", [ROW_2_CSV, "'k_qos'", "'0'", "at least 1"]),
    "budget fraction": (FULL + "b,1,5,5,1.5,1\n", [ROW_2_CSV, "'k_qos'", "'1.5'", "whole"]),
    "id twice": (FULL + "a,1,5,5,1,1\n", [ROW_2_CSV, "'a'", "row 1"]),
    "id of two lines": (FULL + '"b\nb",1,5,5,1,1\n', [ROW_2_CSV, "'request_id'", "one line"]),
    "no id": (FULL + ",1,5,5,1,1\n", [ROW_2_CSV, "'request_id'"]),
    "hash of words": (FULL + "b,1,5,5,1,x\n", [ROW_2_CSV, "'prefix_hashes'", "'x'"]),
    "more hashes than blocks": (FULL + "b,1,512,5,1,1 2\n", [ROW_2_CSV, "2 hash ids", "512"]),
    "json broken": (MOONCAKE + '{"timestamp": 1, \n', ["row 2", "not JSON"]),
    "json list": (MOONCAKE + "[1, 2]\n", ["row 2", "not a JSON object"]),
    "json key missing": (
        MOONCAKE + '{"timestamp": 1, "input_length": 5, "hash_ids": []}\n',
        ["row 2", "'output_length'"],
    ),
    "json hashes missing": (
        MOONCAKE + '{"timestamp": 1, "input_length": 5, "output_length": 5}\n',
        ["row 2", "'hash_ids'"],
    ),
    "json hashes later": (
        '{"timestamp": 1, "input_length": 5, "output_length": 5}\n' + MOONCAKE,
        ["row 2", "'hash_ids'", "earlier rows lack"],
    ),
    "json nan": (MOONCAKE.replace('"timestamp": 0', '"timestamp": NaN'), ["row 1", "'timestamp'", "finite"]),
    "json fraction": (MOONCAKE.replace("600", "600.5"), ["row 1", "'input_length'", "600.5", "whole"]),
    "json true": (MOONCAKE.replace("600", "true"), ["row 1", "'input_length'", "True", "number"]),
    "json null": (MOONCAKE.replace("600", "null"), ["row 1", "'input_length'", "missing"]),
    "json hash fraction": (MOONCAKE.replace("[1, 2]", "[1, 2.5]"), ["row 1", "'hash_ids'", "2.5"]),
    "json hashes not a list": (MOONCAKE.replace("[1, 2]", "7"), ["row 1", "'hash_ids'", "list"]),
    "json key twice": (
        MOONCAKE.replace('"input_length"', '"timestamp": 5, "input_length"'),
        ["row 1", "'timestamp' twice"],
    ),
    "json unread key twice": (
        MOONCAKE + '{"x": 1, "timestamp": 1, "input_length": 5, "output_length": 5, "hash_ids": [], "x": 2}\n',
        ["row 2", "'x' twice"],
    ),
    "azure budget zero": (
        "TIMESTAMP,ContextTokens,GeneratedTokens,k_qos\n2023-11-16 18:15:46,374,44,0\n",
        ["row 1 (line 2)", "'k_qos'", "at least 1"],
    ),
    "burstgpt id twice": (
        "Timestamp,Request tokens,Response tokens,request_id\n0,5,0,a\n1,5,5,b\n2,5,5,b\n",
        ["row 3 (line 4)", "'b'", "row 2", "give each its own"],
    ),
    "json negative": (MOONCAKE.replace('"timestamp": 0', '"timestamp": -3'), ["row 1", "'timestamp'", "-3"]),
}


def refused(path: Path) -> str:
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    message = str(caught.value)
    assert "\n" not in message
    assert f"'{path}'" in message
    return message


@pytest.mark.parametrize("case", BAD)
@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_bad_content_is_named(tmp_path: Path, case: str, packed: bool) -> None:
    content, parts = BAD[case]
    path = tmp_path / "bad.csv"
    path.write_bytes(gzip.compress(content.encode()) if packed else content.encode())
    message = refused(path)
    for part in parts:
        assert part in message, message
    assert REMEDY.search(message.removeprefix(f"'{path}'")), f"no remedy in: {message}"


def test_rows_are_named_beyond_the_first_chunk(tmp_path: Path) -> None:
    path = tmp_path / "long.csv"
    path.write_text("arrival_s,prompt_tokens,output_tokens\n" + "1,5,5\n" * 20_000 + "1,5,5.5\n" + "1,5,5\n" * 9)
    assert "row 20001 (line 20002)" in refused(path)


@pytest.mark.parametrize("case", BAD)
def test_chunks_hide_nothing(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a chunk a row, what two rows say together is still seen."""
    path = tmp_path / "bad.csv"
    path.write_bytes(BAD[case][0].encode())
    whole = refused(path)
    monkeypatch.setattr(rows, "CHUNK_ROWS", 1)
    reader._read.cache_clear()
    assert refused(path).split(":")[0] == whole.split(":")[0]


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "gzip"])
def test_bytes_that_are_not_utf8(tmp_path: Path, packed: bool) -> None:
    content = (PLAIN + "1,5,5\n" * 3).encode() + b"1,\xff,5\n"
    path = tmp_path / "latin.csv"
    path.write_bytes(gzip.compress(content) if packed else content)
    message = refused(path)
    assert "row 5 (line 6)" in message
    assert "0xff" in message and "UTF-8" in message


def test_utf_16(tmp_path: Path) -> None:
    path = tmp_path / "wide.csv"
    path.write_bytes(PLAIN.encode("utf-16"))
    assert "not UTF-8" in refused(path)


@pytest.mark.parametrize("keep", [15, 200, -4])
def test_truncated_gzip(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "cut.csv.gz"
    rows = "".join(f"{i},{i * 7919 % 997 + 1},{i * 104729 % 499 + 1}\n" for i in range(2000))
    path.write_bytes(gzip.compress((PLAIN + rows).encode())[:keep])
    assert "gzip data is truncated or damaged" in refused(path)


def test_damaged_gzip(tmp_path: Path) -> None:
    path = tmp_path / "damaged.csv.gz"
    data = bytearray(gzip.compress((PLAIN + "1,5,5\n" * 5000).encode()))
    data[-6] ^= 0xFF  # the checksum
    path.write_bytes(data)
    assert "gzip data is truncated or damaged" in refused(path)


def test_parquet_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "x.parquet"
    path.write_bytes(b"PAR1 and no more")
    assert "Parquet" in refused(path)


def test_folder_and_missing_file(tmp_path: Path) -> None:
    assert "cannot read" in refused(tmp_path)
    assert "No such file" in refused(tmp_path / "absent.csv")


def build(tmp_path: Path, content: str, **options: object) -> str:
    path = tmp_path / "trace.csv"
    path.write_text(content)
    with pytest.raises(TraceError) as caught:
        build_workload(WorkloadSpec(trace=str(path), **options))  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_filter_that_keeps_nothing(tmp_path: Path) -> None:
    message = build(tmp_path, PLAIN, min_total_tokens=100, max_total_tokens=200)
    assert (
        "none of 1 rows" in message
        and "change min_total_tokens" in message
        and "100..200" in message
        and "10..10" in message
    )


def test_budget_above_k_max_names_the_row(tmp_path: Path) -> None:
    content = FULL + "b,2,5,5,33,1\nc,1,5,5,32,1\n"
    message = build(tmp_path, content, budgets="trace", k_max=32)
    assert "row 2" in message and "33" in message and "1..k_max (32)" in message


def test_budgets_of_a_trace_without_them(tmp_path: Path) -> None:
    assert "no column 'k_qos'" in build(tmp_path, PLAIN, budgets="trace")


def test_output_that_leaves_no_room_when_clipping(tmp_path: Path) -> None:
    message = build(tmp_path, PLAIN + "1,5,64\n1,5,65\n", clip_total_tokens=64)
    assert "row 2" in message and "64" in message and "2 rows" in message


def test_one_instant_cannot_be_scaled(tmp_path: Path) -> None:
    assert "one instant" in build(tmp_path, PLAIN + "0,5,5\n", arrivals="replay", rate=2.0)
