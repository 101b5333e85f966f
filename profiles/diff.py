"""How two tables differ: facts, grid cells where both have them, terms, provenance. Orders are fixed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from simmoe.profiles.table import PATHS, GridTable, StepTable

#: Fields of a table compared as they are, in order.
_FACTS = (
    "name", "status", "summary", "k_max", "k_granularity", "block_size", "num_gpu_blocks", "ingress_s", "egress_s",
    "captured_sizes", "captured_ks",
)  # fmt: skip


#: Levels of the provenance that are taken apart.
_DEPTH = 3


class Change(NamedTuple):
    """One value that differs; None where a table lacks it."""

    name: str
    a: Any
    b: Any


class GridDiff(NamedTuple):
    """How one grid differs from another, over the points both have."""

    sizes: tuple[int, ...]
    ks: tuple[int, ...]
    change: npt.NDArray[np.float64]
    """[num_sizes, num_ks] b / a - 1 of the device seconds."""
    measured_otherwise: int
    """Points of equal or other seconds whose spread or repetitions differ."""
    only: tuple[Change, ...]
    """Sizes and budgets that one of the two lacks: 'sizes' and 'k' with those of a alone and of b alone."""

    @property
    def differs(self) -> bool:
        """Whether any point, or the grid itself, differs."""
        return bool(self.change.any() or self.measured_otherwise or self.only)


class TableDiff(NamedTuple):
    """How table b differs from table a."""

    facts: tuple[Change, ...]
    grids: dict[str, GridDiff]
    """'prefill' and 'decode'."""
    terms: tuple[Change, ...]
    """Attention's, KV's by batch, and the host's by launch path."""
    provenance: tuple[Change, ...]
    """Values by their path in alphabetical order; lists of plain values, and what lies deep, are compared whole."""

    @property
    def differs(self) -> bool:
        """Whether the tables differ in anything."""
        return bool(self.facts or self.terms or self.provenance or any(grid.differs for grid in self.grids.values()))


def diff_tables(a: StepTable, b: StepTable) -> TableDiff:
    """Compare two tables, of one model or of two."""
    terms_a, terms_b = dict(_terms(a)), dict(_terms(b))
    return TableDiff(
        facts=_changes({name: getattr(a, name) for name in _FACTS}, {name: getattr(b, name) for name in _FACTS}),
        grids={"prefill": _diff_grids(a.prefill, b.prefill), "decode": _diff_grids(a.decode, b.decode)},
        terms=_changes(terms_a, terms_b),
        provenance=tuple(_nested(a.provenance, b.provenance, "", _DEPTH)),
    )


def _diff_grids(a: GridTable, b: GridTable) -> GridDiff:
    sizes = tuple(size for size in a.sizes if size in b.sizes)
    ks = tuple(k for k in a.ks if k in b.ks)
    pairs = [
        [(a.cells[a.sizes.index(n)][a.ks.index(k)], b.cells[b.sizes.index(n)][b.ks.index(k)]) for k in ks]
        for n in sizes
    ]
    change = np.array([[y.device_s / x.device_s - 1 for x, y in row] for row in pairs]).reshape(len(sizes), len(ks))
    only = [
        Change(name, tuple(v for v in of_a if v not in of_b), tuple(v for v in of_b if v not in of_a))
        for name, of_a, of_b in (("sizes", a.sizes, b.sizes), ("k", a.ks, b.ks))
        if of_a != of_b
    ]
    return GridDiff(sizes, ks, change, sum(x[1:] != y[1:] for row in pairs for x, y in row), tuple(only))


def _terms(table: StepTable) -> Iterator[tuple[str, float]]:
    for name, value in table.attention._asdict().items():
        yield f"attention {name}", value
    for kind, knots in table.real_share._asdict().items():
        for size, value in knots:
            yield f"real_share of {kind} at {size:,}", value
    for num_seqs, value in table.decode_kv:
        yield f"decode_kv per_kv_token_s at {num_seqs:,} sequences", value
    for path in PATHS:
        if path in table.host:
            for name, value in table.host[path]._asdict().items():
                yield f"host {path} {name}", value
    if table.mixed_host:
        yield "mixed_host above_tokens", table.mixed_host.above_tokens
        for name, value in table.mixed_host.share._asdict().items():
            yield f"mixed_host {name}", value
    if any(table.update):
        for name, value in table.update._asdict().items():
            yield f"update {name}", value
    if table.graph_tail_s is not None:
        yield "graph_tail tail_s", table.graph_tail_s


def _nested(a: Mapping[str, Any], b: Mapping[str, Any], path: str, depth: int) -> Iterator[Change]:
    """Yield what differs in two nested objects, by path in alphabetical order; whole values below ``depth`` levels."""
    for key in sorted({*a, *b}):
        yield from _values(a.get(key), b.get(key), f"{path}{key}", depth - 1)


def _values(a: Any, b: Any, path: str, depth: int) -> Iterator[Change]:
    if isinstance(a, Mapping) and isinstance(b, Mapping) and depth:
        yield from _nested(a, b, f"{path}.", depth)
    elif _objects(a) and _objects(b) and len(a) == len(b):
        for place, (one, other) in enumerate(zip(a, b, strict=True)):
            yield from _values(one, other, f"{path}[{place}]", depth)
    elif a != b:
        yield Change(path, a, b)


def _objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _changes(a: Mapping[str, Any], b: Mapping[str, Any]) -> tuple[Change, ...]:
    """Return what differs, in a's order, then what b alone has."""
    names = [*a, *(name for name in b if name not in a)]
    return tuple(Change(name, a.get(name), b.get(name)) for name in names if a.get(name) != b.get(name))
