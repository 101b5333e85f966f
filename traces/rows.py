"""Rows of a trace file in chunks: CSV, JSONL (either gzipped) or Parquet, with every failure naming file and row."""

from __future__ import annotations

import codecs
import csv
import gzip
import hashlib
import io
import itertools
import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simmoe.errors import TraceError
from simmoe.traces.formats import Format, detect

CHUNK_ROWS = 8192

_GZIP_MAGIC = b"\x1f\x8b"
_PARQUET_MAGIC = b"PAR1"


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive rows, by column."""

    first_row: int
    """Number of the first row, counted from 1 without the header."""
    cells: dict[str, Sequence[Any]]
    """Column name -> its cells; text from CSV, plain values from JSONL and Parquet."""


class RowFile:
    """One trace file, open for one pass over its rows.

    Attributes:
        format: detected from the header.
        columns: the names this pass reads: all required, and the optional ones the file has.
        ignored: further names in the header.
        sha256: hash of the file's bytes; complete after the last chunk.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.format: Format
        self.columns: tuple[str, ...] = ()
        self.ignored: tuple[str, ...] = ()
        self.header_lines = 0
        self._hash = hashlib.sha256()

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def at(self, row: int) -> str:
        """Return how a message names ``row``."""
        line = f" (line {row + self.header_lines})" if self.header_lines else ""
        return f"'{self.path}' row {row}{line}"

    def chunks(self) -> Iterator[Chunk]:
        """Yield every row in file order.

        Raises:
            TraceError: the file cannot be opened or decompressed, is not UTF-8, has no rows, a missing column, or a row
                of another length than the header.
        """
        try:
            with self.path.open("rb") as raw:
                magic = raw.read(4)
                raw.seek(0)
                if magic == _PARQUET_MAGIC:
                    self._hash = hashlib.file_digest(raw, "sha256")
                    yield from self._parquet()
                    return
                stream: Any = io.BufferedReader(_Hashing(raw, self._hash), 1 << 18)
                if magic[:2] == _GZIP_MAGIC:
                    stream = gzip.GzipFile(fileobj=stream)
                yield from self._text(io.TextIOWrapper(stream, encoding="utf-8-sig", newline=""))
        except UnicodeDecodeError as error:
            raise TraceError(f"{self._where_not_utf8(error)}; save the file as UTF-8") from None
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise TraceError(
                f"'{self.path}': the gzip data is truncated or damaged ({error}); fetch it again"
            ) from None
        except OSError as error:
            raise TraceError(f"cannot read '{self.path}': {error.strerror or _one_line(error)}") from None

    def _text(self, stream: io.TextIOWrapper) -> Iterator[Chunk]:
        first = stream.readline()
        if not first.strip():
            raise TraceError(f"'{self.path}' is empty; expected a header line, or one JSON object a line")
        lines = itertools.chain([first], stream)
        chunks = self._jsonl(lines) if first.lstrip().startswith("{") else self._csv(lines)
        empty = True
        for chunk in chunks:
            empty = False
            yield chunk
        if empty:
            raise TraceError(f"'{self.path}' has a header and no rows: an empty trace cannot be replayed; add rows")

    def _choose(self, names: Sequence[str]) -> None:
        self.format = detect(names, f"'{self.path}'")
        self.columns = self.format.required + tuple(name for name in self.format.optional if name in names)
        self.ignored = tuple(name for name in names if name not in self.columns)

    def _csv(self, lines: Iterator[str]) -> Iterator[Chunk]:
        self.header_lines = 1
        row = 1
        reader = csv.reader(lines, strict=True)
        try:
            header = [name.strip() for name in next(reader)]
            self._choose(header)
            wanted = {name: header.index(name) for name in self.columns}
            blank_at = 0
            while rows := list(itertools.islice(reader, CHUNK_ROWS)):
                if set(map(len, rows)) != {len(header)} or blank_at:
                    blank_at = self._check_lengths(rows, row, len(header), blank_at)
                    rows = [cells for cells in rows if cells]
                if rows:
                    columns = list(zip(*rows, strict=True))
                    yield Chunk(row, {name: columns[index] for name, index in wanted.items()})
                row += len(rows)
        except csv.Error as error:
            raise TraceError(f"'{self.path}' line {reader.line_num}: {error}; quote cells as CSV does") from None

    def _check_lengths(self, rows: list[list[str]], first_row: int, width: int, blank_at: int) -> int:
        """Accept blank lines at the file's end alone; return the row of the first blank one, 0 if there is none."""
        for i, cells in enumerate(rows):
            if not cells:
                blank_at = blank_at or first_row + i
            elif blank_at:
                raise TraceError(f"{self.at(blank_at)} is blank, and rows follow; remove the line")
            elif len(cells) != width:
                raise TraceError(
                    f"{self.at(first_row + i)} has {len(cells)} cells where the header has {width}; make them as many"
                )
        return blank_at

    def _jsonl(self, lines: Iterator[str]) -> Iterator[Chunk]:
        row = 1
        blank_at = 0
        while block := list(itertools.islice(lines, CHUNK_ROWS)):
            objects: list[dict[str, Any]] = []
            for i, line in enumerate(block):
                if not line.strip():
                    blank_at = blank_at or row + i
                    continue
                if blank_at:
                    raise TraceError(f"{self.at(blank_at)} is blank, and rows follow; remove the line")
                objects.append(self._object(line, row + i))
            if not objects:
                continue
            if not self.columns:
                self._choose(list(objects[0]))
            absent = set(self.format.optional).difference(self.columns)
            for i, fields in enumerate(objects):
                if not absent.isdisjoint(fields):
                    name = min(absent.intersection(fields))
                    raise TraceError(
                        f"{self.at(row + i)} has '{name}', which earlier rows lack; give it in all or none"
                    )
            yield Chunk(row, {name: self._column(objects, name, row) for name in self.columns})
            row += len(objects)

    def _object(self, line: str, row: int) -> dict[str, Any]:
        try:
            fields = json.loads(line, object_pairs_hook=_without_twins)
        except _Twins as error:
            raise TraceError(f"{self.at(row)} has the key '{error}' twice; remove one") from None
        except (ValueError, RecursionError) as error:
            raise TraceError(f"{self.at(row)} is not JSON: {error}; write one object a line") from None
        if not isinstance(fields, dict):
            raise TraceError(f"{self.at(row)} is not a JSON object; write one object a line")
        return fields

    def _column(self, objects: list[dict[str, Any]], name: str, first_row: int) -> list[Any]:
        try:
            return [fields[name] for fields in objects]
        except KeyError:
            row = first_row + next(i for i, fields in enumerate(objects) if name not in fields)
            raise TraceError(f"{self.at(row)}: missing '{name}'; every row needs it") from None

    def _parquet(self) -> Iterator[Chunk]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        try:
            file = pq.ParquetFile(self.path)
            self._choose(list(file.schema_arrow.names))
            row = 1
            for batch in file.iter_batches(CHUNK_ROWS, columns=list(self.columns)):
                yield Chunk(row, {name: batch.column(name).to_pylist() for name in self.columns})
                row += batch.num_rows
        except pa.ArrowException as error:
            raise TraceError(
                f"'{self.path}' is not Parquet that can be read: {_one_line(error)}; write it again"
            ) from None
        if row == 1:
            raise TraceError(f"'{self.path}' has no rows: an empty trace cannot be replayed; add rows")

    def _where_not_utf8(self, error: UnicodeDecodeError) -> str:
        """Find the first line that is not UTF-8; the decoder itself only knows its buffer."""
        with self.path.open("rb") as raw:
            packed = raw.read(2) == _GZIP_MAGIC
        with gzip.open(self.path) if packed else self.path.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                if number == 1:
                    self.header_lines = 0 if line.removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"{") else 1
                try:
                    line.decode("utf-8")
                except UnicodeDecodeError as found:
                    return f"{self.at(number - self.header_lines)}: byte 0x{line[found.start]:02x} is not UTF-8"
        return f"'{self.path}': {error.reason}: not UTF-8"


class _Twins(Exception):
    """A JSON object has a key, the argument, twice."""


def _without_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        raise _Twins(next(name for name in names if names.count(name) > 1))
    return fields


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


class _Hashing(io.RawIOBase):
    """A raw file that hashes what is read through it."""

    def __init__(self, raw: io.BufferedReader, digest: Any) -> None:
        self._raw = raw
        self._digest = digest

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count = self._raw.readinto(buffer)
        self._digest.update(memoryview(buffer)[:count])
        return count
