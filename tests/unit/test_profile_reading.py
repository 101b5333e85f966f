"""What is no readable file is refused in one line by every reader of profiles, and none waits for a pipe."""

from __future__ import annotations

import gzip
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from simmoe.errors import DataError, ProfileError
from simmoe.profiles.catalog import load_profile, profile_path
from simmoe.profiles.layer_times import read_layer_times
from simmoe.profiles.models import read_model
from simmoe.profiles.reading import MOST_DIGITS, parse_json, read_text
from simmoe.profiles.recording_file import read_header
from simmoe.profiles.samples import read_samples

READERS: list[Callable[[str], Any]] = [load_profile, read_samples, read_layer_times, read_model, read_header]


def refused(reader: Callable[[str], Any], path: Path) -> str:
    with pytest.raises(DataError) as error:
        reader(str(path))
    message = str(error.value)
    assert str(path) in message and "\n" not in message
    return message


@pytest.mark.parametrize("reader", READERS)
def test_every_reader_names_what_it_cannot_read(tmp_path: Path, reader: Callable[[str], Any]) -> None:
    path = tmp_path / "a.json"
    os.mkfifo(path)
    assert "it is a pipe; name a file" in refused(reader, path)
    path.unlink()
    for content in (b"", b"\xff\xfe\x00", b"{", b"[" * 100_000, b'{"a": ' + b"9" * 5000 + b"}", b"[]", b"{}", b"null"):
        path.write_bytes(content)
        refused(reader, path)


@pytest.mark.parametrize("reader", [load_profile, read_samples, read_layer_times, read_header])
def test_a_folder_is_no_file(tmp_path: Path, reader: Callable[[str], Any]) -> None:
    (tmp_path / "a.json").mkdir()
    assert "it is a folder; name a file" in refused(reader, tmp_path / "a.json")


def test_gzip_cut_short_damaged_or_none_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    packed = gzip.compress(profile_path("synthetic-olmoe-split4").read_bytes())
    damaged = packed[:500] + bytes(400) + packed[900:]
    for content in (packed[:5], packed[:700], damaged, b"plain"):
        path.write_bytes(content)
        assert "cannot unpack the sample file" in refused(read_samples, path)
    path.write_bytes(packed)
    assert read_text(path, "it") == profile_path("synthetic-olmoe-split4").read_text()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "x is not JSON: "),
        ("[" * 100_000, "x is nested too deeply"),
        ('{"a": [{"k": 1, "b": 0, "k": 2}]}', "x has 'k' twice"),
        (f"[-{'9' * (MOST_DIGITS + 1)}]", "x has the number -99999999… of 19 digits; none here has more than 18"),
        ("9" * 5000, "x has the number 999999999… of 5000 digits"),
    ],
)
def test_what_json_readers_crash_on_or_alter_is_named(text: str, message: str) -> None:
    with pytest.raises(ProfileError) as error:
        parse_json(text, "x")
    assert str(error.value).startswith(message)


def test_the_largest_whole_number_is_read() -> None:
    assert parse_json(f"[{'9' * MOST_DIGITS}, -1, 1.5]", "x") == [int("9" * MOST_DIGITS), -1, 1.5]
