"""A synchronous engine's steps against what the default table says of them, and what its host and device overlap."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from simmoe.profiles.catalog import load_profile
from simmoe.profiles.samples import Sample, read_samples

ROOT = Path(__file__).parents[2]
RAW = ROOT / "profiles" / "data" / "raw" / "olmoe-1b-7b-split4-revision2-sync-h200.jsonl.gz"
TABLE = "olmoe-1b-7b-split4-h200"

GROUPS = {
    "prompts of 16 to 512 tokens": ("prefill", 1, 512),
    "prompts of 1,024 to 8,192 tokens": ("prefill", 513, 8192),
    "1 to 8 decoding sequences": ("decode", 1, 8),
    "16 to 64": ("decode", 9, 64),
    "128 to 512": ("decode", 65, 512),
    "1,024": ("decode", 513, 1024),
}


class Point(NamedTuple):
    """A step as the engine ran it, seconds, and the host's own time for it."""

    sample: Sample
    host_s: float


class Errors(NamedTuple):
    """Predicted / measured - 1 of a group of points, one value each."""

    table: list[float]
    own_host: list[float]
    overlapped: list[float]


def points(group: str) -> Iterator[Point]:
    kind, least, most = GROUPS[group]
    header, samples = read_samples(RAW)
    assert not header.async_scheduling
    host_s = {s.shape: s.median_s for s in samples if s.clock == "host"}
    for s in samples:
        if s.clock == "step" and s.kind == kind and least <= s.shape.num_tokens <= most:
            yield Point(s, host_s[s.shape])


def errors(group: str) -> Errors:
    profile = load_profile(TABLE)
    synchronous, parts_of = profile.cost(False), profile.cost(True).parts_s
    rows: list[list[float]] = []
    for point in points(group):
        parts, shape = parts_of(point.sample.shape), point.sample.shape
        launch_s = point.host_s - parts.update_s
        begin_s = max(0.0, launch_s - (profile.table.graph_tail_s or 0.0)) if point.sample.kind == "decode" else 0.0
        overlapped_s = max(launch_s, begin_s + parts.device_s) + parts.update_s
        predicted = synchronous.step_s(shape), parts.device_s + point.host_s, overlapped_s
        rows.append([s / point.sample.median_s - 1 for s in predicted])
    return Errors(*map(list, zip(*rows, strict=True)))


def row(group: str) -> str:
    """Return the row of docs/profiles.md."""
    found = errors(group)

    def cell(off: list[float]) -> str:
        size = np.abs(off)
        return f"{np.mean(off):+.1%}, {np.median(size):.1%}, {np.quantile(size, 0.95):.1%}"

    return f"| {group} | {len(found.table)} | " + " | ".join(cell(off) for off in found) + " |"


def test_the_docs_print_the_errors_of_synchronous_steps() -> None:
    page = (ROOT / "docs" / "profiles.md").read_text(encoding="utf-8")
    for group in GROUPS:
        assert row(group) in page, (
            "put the rows of 'python -m tests.unit.test_profile_synchronous' into docs/profiles.md"
        )


def test_host_and_device_overlap_so_a_step_is_shorter_than_both() -> None:
    """No matter how long its kernels take, a step of few prompt tokens is as long as its launch."""
    for group in GROUPS:
        assert np.mean(errors(group).own_host) > 0
        if GROUPS[group][0] == "decode":
            assert np.median(np.abs(errors(group).overlapped)) < np.median(np.abs(errors(group).own_host)) + 1e-3
    for point in points("prompts of 16 to 512 tokens"):
        assert point.host_s < point.sample.median_s < 1.05 * point.host_s


if __name__ == "__main__":
    print("\n".join(row(group) for group in GROUPS))
