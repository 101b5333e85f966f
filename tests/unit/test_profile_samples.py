"""Raw sample files: what is written reads back, a cut run resumes, and a bad row is named."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from simmoe.errors import OutputError, ProfileError
from simmoe.profiles.samples import Sample, SampleHeader, SampleWriter, read_samples
from simmoe.profiles.synthetic import SyntheticEngine

HEADER = SyntheticEngine().header()
SAMPLES = SyntheticEngine().samples()[:4]


def write(path: Path, samples: list[Sample], header: SampleHeader = HEADER) -> Path:
    with SampleWriter(path, header) as writer:
        for sample in samples:
            writer.write(sample)
    return path


def test_samples_read_back_as_written(tmp_path: Path) -> None:
    assert read_samples(write(tmp_path / "a.jsonl", SAMPLES)) == (HEADER, SAMPLES)


def test_gzipped_samples_are_read(tmp_path: Path) -> None:
    plain = write(tmp_path / "a.jsonl", SAMPLES)
    packed = tmp_path / "a.jsonl.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_samples(packed) == (HEADER, SAMPLES)
    with pytest.raises(OutputError, match="compress it afterwards"):
        SampleWriter(packed, HEADER)


def test_a_killed_run_resumes_without_its_cut_row(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", SAMPLES[:2])
    with path.open("a") as file:
        file.write('{"kind": "pre')
    with pytest.raises(ProfileError, match=r"a\.jsonl' line 4 is not JSON"):
        read_samples(path)
    with SampleWriter(path, replace(HEADER, date="2026-01-02")) as writer:
        assert writer.done == Counter(sample.key for sample in SAMPLES[:2])
        for sample in SAMPLES:
            if sample.key not in writer.done:
                writer.write(sample)
    assert read_samples(path) == (HEADER, SAMPLES)


def test_a_file_of_another_engine_is_not_continued(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", SAMPLES)
    with pytest.raises(ProfileError, match="was measured with captured_sizes"):
        SampleWriter(path, replace(HEADER, captured_sizes=[1, 2]))
    assert read_samples(path) == (HEADER, SAMPLES)


PREFILL, DECODE = asdict(SAMPLES[0]), asdict(next(s for s in SyntheticEngine().samples() if s.kind == "decode"))

LARGER = {"num_prefill_tokens": HEADER.captured_sizes[-1] + 1, "prefill_kv_pairs": 10**9}


@pytest.mark.parametrize(
    ("base", "change", "message"),
    [
        (PREFILL, {"kind": "train"}, "kind is 'train'"),
        (PREFILL, {"clock": "sundial"}, "clock is 'sundial'"),
        (PREFILL, {"mode": "fast"}, "mode is 'fast'"),
        (PREFILL, {"k": 0}, "k is 0; it must be at least 1"),
        (PREFILL, {"k": 1.5}, "k is 1.5; it must be int"),
        (PREFILL, {"num_prefill_tokens": 0}, "num_prefill_tokens 0"),
        (PREFILL, {"prefill_kv_pairs": -1}, "prefill_kv_pairs is -1"),
        (PREFILL, {"num_decode_seqs": 3, "decode_kv_tokens": 3}, "call it mixed"),
        (DECODE, {"num_prefill_tokens": 3}, "call it mixed"),
        (DECODE, {"decode_kv_tokens": 0}, "its own new token"),
        (DECODE, {"median_s": float("nan")}, "median_s is nan"),
        (DECODE, {"p10_s": 0.0}, "p10_s is 0.0"),
        (DECODE, {"p90_s": 1e-9}, "out of order"),
        (DECODE, {"median_s": "fast"}, "median_s is 'fast'; it must be float"),
        (DECODE, {"colour": "red"}, "unknown colour"),
        (DECODE, {"k": HEADER.k_max + 1}, f"k is {HEADER.k_max + 1}; the header's k_max is {HEADER.k_max}"),
        (PREFILL, LARGER | {"mode": "graphs"}, f"the header's captured_sizes end at {HEADER.captured_sizes[-1]}"),
    ],
)
def test_a_bad_row_is_named_with_file_and_line(
    tmp_path: Path, base: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    path = write(tmp_path / "a.jsonl", SAMPLES[:1])
    with path.open("a") as file:
        file.write(json.dumps({**base, **change}) + "\n")
    with pytest.raises(ProfileError, match=r"a\.jsonl' line 3") as error:
        read_samples(path)
    assert message in str(error.value)


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [])
    with path.open("a") as file:
        file.write(json.dumps({name: value for name, value in PREFILL.items() if name != "clock"}) + "\n")
    with pytest.raises(ProfileError, match="line 2 lacks clock"):
        read_samples(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"captured_sizes": [4, 2]}, "captured_sizes"),
        ({"captured_ks": [0]}, "captured_ks"),
        ({"k_max": 0}, "k_max is 0"),
        ({"num_gpu_blocks": 1}, "num_gpu_blocks is 1"),
        ({"front_end": {"ingress_s": -1.0}}, "front_end.ingress_s"),
        ({"front_end": {"travel_s": 1.0}}, "travel_s"),
        ({"captured_ks": [1, HEADER.k_max + 1]}, "captured_ks ends at"),
        ({"model": " "}, "model is empty"),
        ({"card": ""}, "card is empty"),
    ],
)
def test_a_bad_header_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        replace(HEADER, **change)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"captured_sizes": ["a"]}, "captured_sizes[0] is 'a'; it must be int"),
        ({"captured_sizes": [1.5]}, "captured_sizes[0] is 1.5; it must be int"),
        ({"captured_ks": [None]}, "captured_ks[0] is None; it must be int"),
        ({"front_end": {"ingress_s": "soon"}}, "front_end.ingress_s is 'soon'; it must be float"),
        ({"clocks": {"sm_mhz": "fast"}}, "clocks.sm_mhz is 'fast'; it must be float"),
        ({"versions": {"vllm": 1}}, "versions.vllm is 1; it must be str"),
        ({"notes": [1]}, "notes[0] is 1; it must be str"),
        ({"model": "two\nlines"}, "model is 'two\\nlines'; it must be one line of text"),
    ],
)
def test_elements_of_a_header_are_checked_too(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = write(tmp_path / "a.jsonl", SAMPLES)
    head, *rows = path.read_text().splitlines()
    path.write_text("\n".join([json.dumps({**json.loads(head), **change}), *rows]))
    with pytest.raises(ProfileError) as error:
        read_samples(path)
    assert message in str(error.value) and "a.jsonl' line 1" in str(error.value)


def test_version_1_is_read_but_knows_no_held_clock(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", SAMPLES)
    path.write_text(path.read_text().replace('"version": 2', '"version": 1', 1))
    assert read_samples(path) == (HEADER, SAMPLES)
    with path.open("a") as file:
        file.write(json.dumps({**PREFILL, "clock": "held"}) + "\n")
    with pytest.raises(ProfileError, match="version 1, which knows no clock 'held'; it needs version 2"):
        read_samples(path)


def test_held_rows_are_written_and_a_resumed_file_of_version_1_becomes_one_of_version_2(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", SAMPLES)
    path.write_text(path.read_text().replace('"version": 2', '"version": 1', 1))
    held = replace(SAMPLES[0], clock="held")
    assert read_samples(write(path, [held])) == (HEADER, [*SAMPLES, held])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        ('{"format": "csv"}\n', "is no sample file"),
        ('{"format": "simmoe-samples", "version": 9}\n', "version 9"),
        ("[1]\n", "line 1 is not a JSON object"),
        ('{"format": "simmoe-samples", "version": 1}\n', "lacks model"),
    ],
)
def test_what_is_no_sample_file_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(content)
    with pytest.raises(ProfileError, match=message):
        read_samples(path)
    with pytest.raises(ProfileError, match=r"cannot read the sample file '.*absent\.jsonl': No such"):
        read_samples(tmp_path / "absent.jsonl")
