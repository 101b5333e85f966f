"""Read a trace file into columns, whatever its format; every value is checked, none is altered."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from simmoe.errors import TraceError
from simmoe.traces.cells import (
    MAX_TOKENS,
    BadCell,
    Datetimes,
    FloatColumn,
    IntColumn,
    hash_runs,
    seconds,
    texts,
    whole_numbers,
)
from simmoe.traces.columns import HashRuns, PackedStrings
from simmoe.traces.rows import Chunk, RowFile

#: Longer than any trace: arrivals further apart come from two clocks (an epoch beside an offset, say).
MAX_SPAN_S = 10 * 366 * 86400.0

TokenColumn = npt.NDArray[np.int32]
T = TypeVar("T", bound=np.generic)


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """What a file says, sorted by arrival (stable: equal times keep the file's order). Arrays are read-only."""

    path: Path
    arrival_s: FloatColumn
    """[num_rows] seconds since the first arrival, non-decreasing."""
    prompt_tokens: TokenColumn
    """[num_rows] >= 1; 32 bits, for a week of a service is tens of millions of rows."""
    output_tokens: TokenColumn
    """[num_rows] >= 1."""
    k_qos: IntColumn | None
    """[num_rows] >= 1, if the file has budgets."""
    request_id: PackedStrings | None
    """[num_rows] unique, if the file names its requests."""
    prefix_hashes: HashRuns | None
    """[num_rows] hash ids of consecutive prompt blocks, if the file has them."""
    prefix_block_tokens: int
    source: dict[str, object]
    """File name, sha256, format, rows, and what reading did (order, failed requests, unread columns). Plain JSON."""
    _file_row: IntColumn | None
    """[num_rows] each request's row in the file; None where that is its position, from 1."""

    def __len__(self) -> int:
        return len(self.arrival_s)

    def file_row(self, position: int) -> int:
        """Return the row of the file, from 1 without the header, that stands at ``position`` here."""
        return position + 1 if self._file_row is None else int(self._file_row[position])


def read_trace(path: Path) -> Trace:
    """Read a trace as published or in simmoe's own columns; CSV, JSONL (either gzipped) or Parquet.

    A file read before and unchanged since is returned from memory.

    Raises:
        TraceError: the file, a column or a row is unusable; the message names it.
    """
    try:
        stat = path.stat()
    except OSError as error:
        raise TraceError(f"cannot read '{path}': {error.strerror or error}") from None
    return _read(path, stat.st_mtime_ns, stat.st_size)


@functools.lru_cache(maxsize=4)
def _read(path: Path, mtime_ns: int, size: int) -> Trace:
    file = RowFile(path)
    parser = _ChunkParser(file)
    for chunk in file.chunks():
        parser.add(chunk)
    return parser.finish()


class _ChunkParser:
    """Turns chunks of cells into arrays, and the arrays into a Trace."""

    def __init__(self, file: RowFile) -> None:
        self._file = file
        self._datetimes = Datetimes()
        self._parts: dict[str, list[Any]] = {}
        self._num_failed = 0

    def add(self, chunk: Chunk) -> None:
        """Parse one chunk.

        Raises:
            TraceError: names the first bad cell's row and column.
        """
        layout = self._file.format
        least_output = 0 if layout.zero_output_is_failure else 1
        parts: dict[str, Any] = {}
        column = ""
        try:
            for column, cells in chunk.cells.items():
                if column == layout.arrival:
                    ticks = layout.ticks_per_second
                    parts["time"] = self._datetimes.parse(cells) if ticks is None else seconds(cells, ticks)
                elif column == layout.prompt:
                    parts["prompt"] = _token_counts(cells, 1)
                elif column == layout.output:
                    parts["output"] = _token_counts(cells, least_output)
                elif column == layout.k_qos:
                    parts["k_qos"] = whole_numbers(cells, 1, MAX_TOKENS, "a budget")
                elif column == layout.request_id:
                    parts["id"] = PackedStrings.of(texts(cells))
                else:
                    parts["hashes"] = _hashes(cells, parts["prompt"], layout.prefix_block_tokens)
        except BadCell as bad:
            raise TraceError(f"{self._file.at(chunk.first_row + bad.index)}: '{column}' {bad.reason}") from None
        n = len(parts["time"])
        if layout.zero_output_is_failure:
            kept = parts["output"] > 0
            parts["row"] = np.arange(chunk.first_row, chunk.first_row + n, dtype=np.int64)
            rows = np.flatnonzero(kept)
            parts = {
                name: part.take(rows) if isinstance(part, (PackedStrings, HashRuns)) else part[kept]
                for name, part in parts.items()
            }
            self._num_failed += n - len(parts["time"])
        for name, part in parts.items():
            self._parts.setdefault(name, []).append(part)

    def finish(self) -> Trace:
        """Join, sort and check what holds across rows."""
        file, layout = self._file, self._file.format
        time = self._join("time")
        if not len(time):
            raise TraceError(
                f"'{file.path}': every request failed (no output tokens); nothing can be replayed: give another file"
            )
        steps_back = int((np.diff(time) < 0).sum())
        order = np.argsort(time, kind="stable") if steps_back else None
        time = _sorted(time, order)
        row = self._join("row") if "row" in self._parts else None
        ids = PackedStrings.concatenate(self._parts["id"]) if "id" in self._parts else None
        if ids is not None:
            self._check_unique(ids, row)
            ids = ids if order is None else ids.take(order)
        if order is not None:
            row = order + 1 if row is None else row[order]
        first = time[0]
        arrival_s = (time - first) / 1e9 if layout.ticks_per_second is None else time - first
        if arrival_s[-1] > MAX_SPAN_S:
            jump = int(np.diff(arrival_s).argmax()) + 1
            here, before = (jump + 1, jump) if row is None else (int(row[jump]), int(row[jump - 1]))
            raise TraceError(
                f"{file.at(here)}: '{layout.arrival}' is {arrival_s[jump] - arrival_s[jump - 1]:.0f} s after the "
                f"arrival before it (row {before}): mixed clocks; put all rows on one"
            )
        hashes = HashRuns.concatenate(self._parts["hashes"]) if "hashes" in self._parts else None
        if hashes is not None and order is not None:
            hashes = hashes.take(order)
        source: dict[str, object] = {
            "file": file.path.name,
            "sha256": file.sha256,
            "format": layout.name,
            "rows": len(time),
            "first_arrival": str(np.datetime64(int(first), "ns")) if time.dtype == np.int64 else float(first),
            "order": "as in the file" if order is None else f"stable sort by arrival ({steps_back} steps back in time)",
            "failed_requests_left_out": self._num_failed,
            "columns_not_read": list(file.ignored),
        }
        return Trace(
            path=file.path,
            arrival_s=_frozen(arrival_s),
            prompt_tokens=_sorted(self._join("prompt"), order),
            output_tokens=_sorted(self._join("output"), order),
            k_qos=_sorted(self._join("k_qos"), order) if "k_qos" in self._parts else None,
            request_id=ids,
            prefix_hashes=hashes,
            prefix_block_tokens=layout.prefix_block_tokens,
            source=source,
            _file_row=row,
        )

    def _join(self, name: str) -> Any:
        return np.concatenate(self._parts.pop(name))

    def _check_unique(self, ids: PackedStrings, row: IntColumn | None) -> None:
        """Refuse an id that stands twice; ``row`` has the file's rows where they are not the positions from 1."""
        if len(set(ids)) == len(ids):
            return
        seen: dict[str, int] = {}
        for number, text in zip(range(1, len(ids) + 1) if row is None else row.tolist(), ids, strict=True):
            if text in seen:
                raise TraceError(
                    f"{self._file.at(number)}: request_id '{text}' is that of row {seen[text]} too; give each its own"
                )
            seen[text] = number


def _token_counts(cells: Sequence[Any], least: int) -> TokenColumn:
    return whole_numbers(cells, least, MAX_TOKENS, "a token count").astype(np.int32)


def _hashes(cells: Sequence[Any], prompt_tokens: TokenColumn, block_tokens: int) -> HashRuns:
    runs = HashRuns.of(hash_runs(cells))
    too_many = runs.lengths() > -(-prompt_tokens // block_tokens)
    if too_many.any():
        i = int(too_many.argmax())
        raise BadCell(
            i,
            f"has {len(runs[i])} hash ids for {int(prompt_tokens[i])} prompt tokens; one covers {block_tokens} tokens: "
            f"leave the others out",
        )
    return runs


def _sorted(column: npt.NDArray[T], order: npt.NDArray[np.intp] | None) -> npt.NDArray[T]:
    return _frozen(column if order is None else column[order])


def _frozen(column: npt.NDArray[T]) -> npt.NDArray[T]:
    column.setflags(write=False)
    return column
