"""Step-cost tables on disk: one self-describing JSON file, one row a line, checked when it is read.

Every table of a file names its columns with their units; the reader refuses a missing column, another unit, a hole in a
grid, and a value that is not finite, negative, or falls where sizes or k grow.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

from simmoe.errors import ProfileError
from simmoe.profiles.provenance import provenance_faults
from simmoe.profiles.reading import parse_json, read_bytes
from simmoe.profiles.table import (
    COLUMNS,
    NO_SHARE,
    OPTIONAL,
    PATHS,
    STATUSES,
    Attention,
    Cell,
    GridTable,
    HostShare,
    MixedHost,
    RealShare,
    StepTable,
)
from simmoe.writing import write_whole

FORMAT = "simmoe-profile"
#: Version 2 had no mixed_decode_share, and neither it nor 3 what IN_VERSION_4 names; without that, 3 is written.
READ_VERSIONS = (2, 3, 4)
IN_VERSION_4 = ("mixed_host", "graph_tail")

#: No step takes a day: seconds beyond are in another unit.
MOST_SECONDS = 86_400.0

_SECONDS = {unit for columns in COLUMNS.values() for _, unit in columns if unit == "s" or unit.startswith("s/")}

Rows = list[list[Any]]


def write_table(path: str | os.PathLike[str], table: StepTable) -> None:
    """Write a table, whole or not at all, after checking that it reads back.

    Raises:
        ProfileError: the table breaks a rule of the format.
        OutputError: the file cannot be written.
    """
    text = dump_table(table)
    parse_table(text.encode(), os.fspath(path))
    write_whole(path, text.encode(), "the table")


def dump_table(table: StepTable) -> str:
    """Return the file's text: JSON with one row a line."""
    rows: dict[str, Rows] = {
        "prefill": _grid_rows(table.prefill),
        "decode": _grid_rows(table.decode),
        "decode_kv": [[size, _rounded(value)] for size, value in table.decode_kv],
        "attention": [[_rounded(value) for value in table.attention]],
        "real_share": [
            [kind, size, _rounded(share)] for kind, knots in table.real_share._asdict().items() for size, share in knots
        ],
        "host": [[name, *(_rounded(value) for value in table.host[name])] for name in PATHS if name in table.host],
        "mixed_host": [
            [mixed.above_tokens, *(_rounded(value) for value in mixed.share)] for mixed in [table.mixed_host] if mixed
        ],
        "update": [[_rounded(value) for value in table.update]] if any(table.update) else [],
        "graph_tail": [] if table.graph_tail_s is None else [[_rounded(table.graph_tail_s)]],
    }
    head = {
        "format": FORMAT,
        "version": 4 if any(rows[name] for name in IN_VERSION_4) else 3,
        "name": table.name,
        "status": table.status,
        "summary": table.summary,
        "k_max": table.k_max,
        "k_granularity": table.k_granularity,
        "block_size": table.block_size,
        "num_gpu_blocks": table.num_gpu_blocks,
        "ingress_s": table.ingress_s,
        "egress_s": table.egress_s,
        "captured_sizes": list(table.captured_sizes),
        "captured_ks": list(table.captured_ks),
    }
    parts = [f'"{key}": {json.dumps(value)}' for key, value in head.items()]
    for name, columns in COLUMNS.items():
        if name in OPTIONAL and not rows[name]:
            continue
        body = ",\n".join(f"  {json.dumps(row)}" for row in rows[name])
        parts.append(f'"{name}": {{"columns": {json.dumps(columns)}, "rows": [\n{body}\n]}}')
    parts.append(f'"provenance": {_dump_lines(dict(table.provenance), depth=3)}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def read_table(path: str | os.PathLike[str]) -> StepTable:
    """Read and check a table file.

    Raises:
        ProfileError: names the file, the table, the row and the value at fault.
    """
    return parse_table(read_bytes(path, "the profile"), os.fspath(path))


def parse_table(content: bytes, where: str) -> StepTable:
    """Read and check a table's bytes; ``where`` names them in errors."""
    data = parse_json(content, f"profile '{where}'")
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise ProfileError(f"'{where}' is no profile: it does not say format '{FORMAT}'")
    if data.get("version") not in READ_VERSIONS:
        reads = " and ".join(map(str, READ_VERSIONS))
        raise ProfileError(f"profile '{where}' has version {data.get('version')}; this simmoe reads {reads}")
    return _Reader(data, where).table(hashlib.sha256(content).hexdigest())


def _grid_rows(grid: GridTable) -> Rows:
    return [
        [size, k, _rounded(cell.device_s), _rounded(cell.spread_s), cell.repetitions]
        for size, row in zip(grid.sizes, grid.cells, strict=True)
        for k, cell in zip(grid.ks, row, strict=True)
    ]


def _dump_lines(value: Any, depth: int) -> str:
    """Return JSON with one line an item down to ``depth`` levels, keys sorted, the rest compact."""
    if not depth or not isinstance(value, dict | list) or not value:
        return json.dumps(value, sort_keys=True)
    if isinstance(value, list):
        items = [_dump_lines(item, depth - 1) for item in value]
        return "[\n" + ",\n".join(items) + "\n]"
    items = [f"{json.dumps(key)}: {_dump_lines(item, depth - 1)}" for key, item in sorted(value.items())]
    return "{\n" + ",\n".join(items) + "\n}"


def _rounded(seconds: float) -> float:
    """Return seconds to seven significant digits: far below the spread, and short in a diff."""
    return float(f"{seconds:.7g}")


class _Reader:
    """Takes the fields of one file, checking each."""

    def __init__(self, data: dict[str, Any], where: str) -> None:
        self._data = data
        self._where = where

    def table(self, sha256: str) -> StepTable:
        known = {*COLUMNS, "format", "version", "name", "status", "summary", "k_max", "k_granularity", "block_size"}
        known |= {"num_gpu_blocks", "ingress_s", "egress_s", "captured_sizes", "captured_ks", "provenance"}
        unknown = sorted(set(self._data) - known)
        self._require(not unknown, f"has unknown {', '.join(unknown)}")
        status = self._text("status")
        self._require(status in STATUSES, f"has status '{status}'; it must be one of {', '.join(STATUSES)}")
        provenance = self._field("provenance")
        self._require(isinstance(provenance, dict), "has a provenance that is no JSON object")
        fault = next(provenance_faults(provenance), None)
        self._require(fault is None, f"has a provenance whose {fault}")
        for told, origin in (("measured", "runs"), ("estimated", "estimate")):
            self._require(
                status != told or bool(provenance.get(origin)), f"has status '{told}' and no provenance.{origin}"
            )
        self._require(
            status != "measured" or not provenance.get("estimate"), "has status 'measured' and a provenance.estimate"
        )
        captured = self._ascending("captured_sizes")
        host = self._host(PATHS if captured else PATHS[-1:])
        table = StepTable(
            name=self._text("name"),
            status=status,
            summary=self._text("summary"),
            k_max=self._count("k_max"),
            k_granularity=self._count("k_granularity"),
            block_size=self._count("block_size"),
            num_gpu_blocks=self._count("num_gpu_blocks"),
            ingress_s=self._seconds("ingress_s"),
            egress_s=self._seconds("egress_s"),
            captured_sizes=captured,
            captured_ks=self._ascending("captured_ks"),
            prefill=self._grid("prefill", "num_tokens"),
            decode=self._grid("decode", "num_seqs"),
            decode_kv=self._decode_kv(),
            attention=self._attention(),
            real_share=self._real_share(),
            host=host,
            mixed_host=self._mixed_host(host),
            update=self._update(),
            graph_tail_s=self._graph_tail(host),
            provenance=provenance,
            sha256=sha256,
        )
        self._budgets_agree(table)
        return table

    def _budgets_agree(self, table: StepTable) -> None:
        """Refuse budgets the engine could not run."""
        granularity = table.k_granularity
        for name, ks in (
            ("k_max", (table.k_max,)),
            ("captured_ks", table.captured_ks),
            ("table 'prefill'", table.prefill.ks),
            ("table 'decode'", table.decode.ks),
        ):
            for k in ks:
                self._require(k <= table.k_max, f"has k_max {table.k_max}, and k {k} in {name}")
                self._require(
                    k % granularity == 0, f"has k_granularity {granularity}, which does not divide k {k} in {name}"
                )

    def _grid(self, name: str, size_name: str) -> GridTable:
        rows = self._rows(name)
        cells: dict[tuple[int, int], Cell] = {}
        for number, (size, k, device_s, spread_s, repetitions) in enumerate(rows, start=1):
            where = f"table '{name}' row {number} ({size_name} {size}, k {k})"
            self._require(size >= 1 and k >= 1, f"{where}: sizes and k start at 1")
            self._require((size, k) not in cells, f"{where} is there twice")
            self._require(device_s > 0, f"{where}: device_s is {device_s}; it must be above 0")
            cells[size, k] = Cell(device_s, spread_s, repetitions)
        sizes = sorted({size for size, _ in cells})
        ks = sorted({k for _, k in cells})
        for i, size in enumerate(sizes):
            for j, k in enumerate(ks):
                where = f"table '{name}' ({size_name} {size}, k {k})"
                self._require((size, k) in cells, f"{where} is missing; a grid needs every size at every k")
                for before in ((sizes[i - 1], k) if i else None, (size, ks[j - 1]) if j else None):
                    if before and cells[size, k].device_s < cells[before].device_s:
                        raise self._error(
                            f"{where}: device_s {cells[size, k].device_s} is below the {cells[before].device_s} of "
                            f"({size_name} {before[0]}, k {before[1]}); it may not fall as sizes or k grow"
                        )
        return GridTable(tuple(sizes), tuple(ks), tuple(tuple(cells[size, k] for k in ks) for size in sizes))

    def _decode_kv(self) -> tuple[tuple[int, float], ...]:
        rows = self._rows("decode_kv")
        for number, (row, before) in enumerate(zip(rows, [[0, 0.0], *rows], strict=False), start=1):
            self._require(
                row[0] > before[0] and row[1] >= before[1],
                f"table 'decode_kv' row {number}: (num_seqs {row[0]}, per_kv_token_s {row[1]}) after ({before[0]}, "
                f"{before[1]}); num_seqs must ascend and per_kv_token_s may not fall",
            )
        return tuple((size, value) for size, value in rows)

    def _attention(self) -> Attention:
        rows = self._rows("attention")
        self._require(len(rows) == 1, f"table 'attention' has {len(rows)} rows; it has one")
        attention = Attention(*rows[0])
        share = attention.mixed_decode_share
        self._require(share <= 1, f"table 'attention': mixed_decode_share is {share}; it must be at most 1")
        return attention

    def _real_share(self) -> RealShare:
        rows = self._rows("real_share")
        knots: dict[str, list[tuple[int, float]]] = {kind: [] for kind in RealShare._fields}
        for number, (kind, size, share) in enumerate(rows, start=1):
            where = f"table 'real_share' row {number}"
            self._require(kind in knots, f"{where}: kind is '{kind}'; it must be one of {', '.join(knots)}")
            self._require(share <= 1, f"{where}: share is {share}; it must be at most 1")
            least = knots[kind][-1][0] if knots[kind] else 0
            self._require(size > least, f"{where}: size {size} after {least}; sizes must ascend from at least 1")
            knots[kind].append((size, share))
        missing = [kind for kind, found in knots.items() if not found]
        self._require(not missing, f"table 'real_share' has no row of {', '.join(missing)}")
        return RealShare(*(tuple(found) for found in knots.values()))

    def _host(self, paths: Sequence[str]) -> dict[str, HostShare]:
        rows = self._rows("host")
        names = [row[0] for row in rows]
        self._require(names == list(paths), f"table 'host' has rows {names}; it must have {list(paths)}")
        for number, (row, before) in enumerate(zip(rows[1:], rows, strict=False), start=2):
            for (column, _), value, least in zip(COLUMNS["host"][1:], row[1:], before[1:], strict=True):
                self._require(
                    value >= least,
                    f"table 'host' row {number} ({row[0]}): {column} {value} is below the {least} of '{before[0]}'",
                )
        return {row[0]: HostShare(*row[1:]) for row in rows}

    def _mixed_host(self, host: Mapping[str, HostShare]) -> MixedHost | None:
        row = self._of_graphs("mixed_host", host)
        if row is None:
            return None
        mixed = MixedHost(row[0], HostShare(*row[1:]))
        for name, value, least in zip(HostShare._fields, mixed.share, host["piecewise"], strict=True):
            self._require(
                value >= least, f"table 'mixed_host': {name} {value} is below the {least} of host 'piecewise'"
            )
        return mixed

    def _graph_tail(self, host: Mapping[str, HostShare]) -> float | None:
        row = self._of_graphs("graph_tail", host)
        return None if row is None else float(row[0])

    def _of_graphs(self, name: str, host: Mapping[str, HostShare]) -> list[Any] | None:
        """Return the one row of a table of IN_VERSION_4; None where the file lacks the table."""
        if name not in self._data:
            return None
        self._require(self._data["version"] > 3, f"has a table '{name}', which version 4 brought")
        self._require(len(host) > 1, f"has a table '{name}' without captured sizes")
        rows = self._rows(name)
        self._require(len(rows) == 1, f"table '{name}' has {len(rows)} rows; it has one")
        return rows[0]

    def _update(self) -> HostShare:
        if "update" not in self._data:
            return NO_SHARE
        rows = self._rows("update")
        self._require(len(rows) == 1, f"table 'update' has {len(rows)} rows; it has one")
        return HostShare(*rows[0])

    def _rows(self, name: str) -> Rows:
        table = self._field(name)
        columns = COLUMNS[name]
        if name == "attention" and self._data["version"] == 2:
            columns = columns[:-1]
        found = table.get("columns") if isinstance(table, dict) else None
        rows = table.get("rows") if isinstance(table, dict) else None
        self._require(
            isinstance(found, list) and isinstance(rows, list) and bool(rows), f"table '{name}' needs columns and rows"
        )
        assert isinstance(found, list) and isinstance(rows, list)
        unknown = sorted(set(table) - {"columns", "rows"})
        self._require(not unknown, f"table '{name}' has unknown {', '.join(unknown)}")
        for column in found:
            self._require(
                isinstance(column, list) and len(column) == 2 and all(isinstance(part, str) for part in column),
                f"table '{name}' has a column {column!r}; it must be a name and a unit",
            )
        units = dict(found)
        for column, unit in columns:
            self._require(column in units, f"table '{name}' has no column '{column}'")
            self._require(
                units[column] == unit, f"table '{name}': column '{column}' is in '{units[column]}'; it must be '{unit}'"
            )
        order = [column for column, _ in found]
        self._require(order == [column for column, _ in columns], f"table '{name}' has columns {order}")
        for number, row in enumerate(rows, start=1):
            self._require(
                isinstance(row, list) and len(row) == len(columns),
                f"table '{name}' row {number} is {row}; it must have {len(columns)} values",
            )
            for (column, unit), value in zip(columns, row, strict=True):
                if unit == "name":
                    fits = isinstance(value, str)
                elif unit in ("tokens", "experts", "sequences", "count"):
                    fits = isinstance(value, int) and value >= 0
                else:
                    fits = isinstance(value, int | float) and math.isfinite(value) and value >= 0
                self._require(
                    fits and not isinstance(value, bool),
                    f"table '{name}' row {number}: {column} is {value!r}, no {unit} value",
                )
                self._require(
                    unit not in _SECONDS or value <= MOST_SECONDS,
                    f"table '{name}' row {number}: {column} is {value!r} {unit}; no step takes a day",
                )
        return rows

    def _field(self, name: str) -> Any:
        self._require(name in self._data, f"has no '{name}'")
        return self._data[name]

    def _text(self, name: str) -> str:
        value = self._field(name)
        fits = isinstance(value, str) and value.isprintable() and bool(value.strip())
        self._require(fits, f"has {name} {value!r}; it must be one line of text")
        return str(value)

    def _count(self, name: str) -> int:
        value = self._field(name)
        fits = isinstance(value, int) and not isinstance(value, bool) and value >= 1
        self._require(fits, f"has {name} {value!r}; it must be a whole number of at least 1")
        return int(value)

    def _seconds(self, name: str) -> float:
        value = self._field(name)
        fits = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= MOST_SECONDS
        self._require(fits, f"has {name} {value!r}; it must be seconds of at least 0, and less than a day")
        return float(value)

    def _ascending(self, name: str) -> tuple[int, ...]:
        values = self._field(name)
        fits = isinstance(values, list) and all(isinstance(v, int) for v in values)
        self._require(
            fits and all(a < b for a, b in zip([0, *values], values, strict=False)),
            f"has {name} {values!r}; it must be whole numbers that ascend from at least 1",
        )
        return tuple(values)

    def _require(self, holds: bool, problem: str) -> None:
        if not holds:
            raise self._error(problem)

    def _error(self, problem: str) -> ProfileError:
        return ProfileError(f"profile '{self._where}' {problem}")
