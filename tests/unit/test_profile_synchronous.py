"""A synchronous engine's steps against what the default table says of them, and what its host and device overlap."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from simmoe.profiles.catalog import load_profile
from simmoe.profiles.samples import Sample, read_samples
from simmoe.profiles.shape import StepParts, StepShape

ROOT = Path(__file__).parents[2]
RAW = ROOT / "profiles" / "data" / "raw"
SYNC = RAW / "olmoe-1b-7b-split4-revision2-sync-h200.jsonl.gz"
HELD = RAW / "olmoe-1b-7b-split4-revision2-h200.jsonl.gz"
PROFILE = load_profile("olmoe-1b-7b-split4-h200")

GROUPS = {
    "prompts of 16 to 512 tokens": ("prefill", 1, 512),
    "prompts of 1,024 to 8,192 tokens": ("prefill", 513, 8192),
    "all prompts": ("prefill", 1, 8192),
    "1 to 8 decoding sequences": ("decode", 1, 8),
    "16 to 64": ("decode", 9, 64),
    "128 to 512": ("decode", 65, 512),
    "1,024": ("decode", 513, 1024),
    "all decode-only": ("decode", 1, 1024),
}


class Point(NamedTuple):
    """A step as the engine ran it, seconds, and what it takes by the table on the host that ran it."""

    sample: Sample
    parts: StepParts


class Errors(NamedTuple):
    """Predicted / measured - 1 of a group of points, one value each: device and host added up, and as they overlap."""

    table_added: list[float]
    table: list[float]
    added: list[float]
    overlapped: list[float]


@cache
def all_points() -> tuple[Point, ...]:
    header, samples = read_samples(SYNC)
    assert not header.async_scheduling
    host_s = {s.shape: s.median_s for s in samples if s.clock == "host"}
    cost, tail_s = PROFILE.cost(async_scheduling=False), PROFILE.table.graph_tail_s
    assert tail_s is not None

    def graph_begins_s(shape: StepShape) -> float:
        return host_s[shape] - cost.parts_s(shape).update_s - tail_s

    # what this host prepares a step's inputs in, before it launches a graph of one sequence
    prepared_s = float(np.median([graph_begins_s(s) for s in host_s if s.num_decode_seqs == 1]))

    def point(sample: Sample) -> Point:
        shape = sample.shape
        by_table = cost.parts_s(shape)
        wait_s = prepared_s if sample.kind == "prefill" else graph_begins_s(shape)
        return Point(sample, StepParts(by_table.device_s, host_s[shape], by_table.update_s, wait_s))

    return tuple(point(sample) for sample in samples if sample.clock == "step")


def points(group: str) -> Iterator[Point]:
    kind, least, most = GROUPS[group]
    for point in all_points():
        if point.sample.kind == kind and least <= point.sample.shape.num_tokens <= most:
            yield point


def errors(group: str) -> Errors:
    cost = PROFILE.cost(async_scheduling=False)
    rows: list[list[float]] = []
    for sample, own in points(group):
        by_table = cost.parts_s(sample.shape)
        predicted = (
            by_table.device_s + by_table.host_s,
            cost.step_s(sample.shape),
            own.device_s + own.host_s,
            own.alone_s,
        )
        rows.append([seconds / sample.median_s - 1 for seconds in predicted])
    return Errors(*map(list, zip(*rows, strict=True)))


def row(group: str) -> str:
    """Return the row of docs/profiles.md."""
    found = errors(group)

    def cell(off: list[float]) -> str:
        size = np.abs(off)
        return f"{np.mean(off):+.1%}, {np.median(size):.1%}, {np.quantile(size, 0.95):.1%}"

    return f"| {group} | {len(found.table)} | " + " | ".join(cell(off) for off in found) + " |"


def kernels_alone() -> dict[StepShape, float]:
    """Return what prompts of the same model and weights take with the device held, seconds."""
    return {s.shape: s.median_s for s in read_samples(HELD)[1] if s.clock == "held" and s.kind == "prefill"}


def left_over_s(group: str) -> list[float]:
    """Return what steps take longer than is composed of the same prompts' kernels alone and of the host as it was."""
    held = kernels_alone()
    return [
        sample.median_s - own._replace(device_s=held[sample.shape]).alone_s
        for sample, own in points(group)
        if sample.shape in held
    ]


def test_the_docs_print_the_errors_of_synchronous_steps() -> None:
    page = (ROOT / "docs" / "profiles.md").read_text(encoding="utf-8")
    for group in GROUPS:
        assert row(group) in page, (
            "put the rows of 'python -m tests.unit.test_profile_synchronous' into docs/profiles.md"
        )
    left = [1e3 * seconds for seconds in left_over_s("prompts of 1,024 to 8,192 tokens")]
    assert f"leave {min(left):.1f} to {max(left):.1f} ms of the {len(left)}" in page


@pytest.mark.parametrize("group", GROUPS)
def test_host_and_device_overlap_so_a_step_is_shorter_than_both(group: str) -> None:
    """Composed as they overlap, with what the host took, no group is further off than with both added up."""
    found = errors(group)
    assert np.mean(found.added) > 0.02
    assert abs(np.mean(found.overlapped)) < abs(np.mean(found.added))
    size, added_size = np.abs(found.overlapped), np.abs(found.added)
    assert np.quantile(size, 0.95) < np.quantile(added_size, 0.95)
    assert np.median(size) < np.median(added_size) + 1e-3
    if GROUPS[group][0] == "decode":
        assert abs(np.mean(found.overlapped)) < 0.02


def test_a_step_of_few_prompt_tokens_is_as_long_as_its_host_takes() -> None:
    """No matter how long its kernels take."""
    for sample, own in points("prompts of 16 to 512 tokens"):
        assert own.host_s < sample.median_s < 1.05 * own.host_s
        assert own.alone_s == own.host_s


if __name__ == "__main__":
    print("\n".join(row(group) for group in GROUPS))
    for name in ("prompts of 16 to 512 tokens", "prompts of 1,024 to 8,192 tokens"):
        print(name, "left over, ms:", [round(1e3 * seconds, 2) for seconds in left_over_s(name)])
