"""Cells of a file to numbers, a chunk at a time: a fast pass for sound chunks, and one that names the first bad cell.

Every parser takes one column of a chunk (strings from CSV, plain values from JSON or Parquet) and raises BadCell with
the cell's index in the chunk; the reader knows which file and row that is.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

FloatColumn = npt.NDArray[np.float64]
IntColumn = npt.NDArray[np.int64]

#: More than any model's context; a larger count is a broken cell.
MAX_TOKENS = 2**31 - 1
#: Hash ids and budgets.
MAX_INT = 2**62

_DATETIME = re.compile(
    r"((?:19|20)\d\d-\d\d-\d\d[ T]\d\d:\d\d(?::\d\d(?:\.\d{1,9})?)?)\s*(Z|[+-]\d\d(?::?\d\d)?)?", re.ASCII
)
_DECIMALS = re.compile(r"[0-9.]*", re.ASCII)
_ID = re.compile(r"[^\x00-\x1f\x7f-\x9f]+")
_ZERO_OFFSETS = frozenset({"Z", "+00:00", "+0000", "+00", "-00:00"})


class BadCell(ValueError):
    """One cell cannot be used.

    Attributes:
        index: position in the chunk.
        reason: what is wrong and what is expected, without file, row or column.
    """

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(reason)
        self.index = index
        self.reason = reason


def whole_numbers(cells: Sequence[Any], least: int, most: int, what: str) -> IntColumn:
    """Parse whole numbers in ``least..most``; ``374.0`` is one, ``374.5``, ``1e400``, ``nan`` and ``1_000`` are not."""
    try:
        if isinstance(cells[0], str):
            digits = "".join(cells)
            sound = digits.isascii() and digits.isdecimal()
        else:
            sound = set(map(type, cells)) == {int}
        if sound:
            column = np.array(list(map(int, cells)), dtype=np.int64)
            if int(column.min()) >= least and int(column.max()) <= most:
                return column
    except (ValueError, TypeError, OverflowError):
        pass
    return np.array([_whole(i, cell, least, most, what) for i, cell in enumerate(cells)], dtype=np.int64)


def _whole(index: int, cell: Any, least: int, most: int, what: str) -> int:
    value = _number(index, cell, what)
    if not float(value).is_integer():
        raise BadCell(index, f"is {_shown(cell)}; {what} must be a whole number")
    if not least <= value <= most:
        bound = f"at least {least}" if value < least else f"at most {most}"
        raise BadCell(index, f"is {_shown(cell)}; {what} must be {bound}")
    return int(value)


def seconds(cells: Sequence[Any], per_second: int) -> FloatColumn:
    """Parse times as numbers, finite and at least 0, counted ``per_second`` to the second; return seconds."""
    try:
        if isinstance(cells[0], str):
            sound = _DECIMALS.fullmatch("".join(cells)) is not None
        else:
            sound = set(map(type, cells)) <= {int, float}
        if sound:
            column = np.array(list(map(float, cells)), dtype=np.float64)
            if np.isfinite(column).all() and float(column.min()) >= 0:
                return column / per_second
    except (ValueError, TypeError, OverflowError):
        pass
    return np.array([_time(i, cell) for i, cell in enumerate(cells)], dtype=np.float64) / per_second


def _time(index: int, cell: Any) -> float:
    if isinstance(cell, str) and _DATETIME.fullmatch(cell.strip()):
        raise BadCell(
            index,
            f"is the date {_shown(cell)} where time is counted from the trace's start (mixed clocks?); "
            f"put all rows on one clock",
        )
    value = float(_number(index, cell, "a time"))
    if value < 0:
        raise BadCell(index, f"is {_shown(cell)}; a time must be at least 0")
    return value


def _number(index: int, cell: Any, what: str) -> int | float:
    """Return a finite number, or raise; text may carry surrounding blanks and nothing else."""
    value: int | float
    if isinstance(cell, str):
        text = cell.strip()
        if not text:
            raise BadCell(index, f"is empty; {what} must be a number")
        try:
            value = int(text) if text.isascii() and text.lstrip("+-").isdecimal() else float(text)
            if not text.isascii() or "_" in text:
                raise ValueError
        except ValueError:
            raise BadCell(index, f"is {_shown(cell)}; {what} must be a number") from None
    elif isinstance(cell, (int, float)) and not isinstance(cell, bool):
        value = cell
    else:
        raise BadCell(index, f"is {_shown(cell)}; {what} must be a number")
    if isinstance(value, int) and abs(value) > MAX_INT:
        raise BadCell(index, f"is {_shown(cell)}; {what} must be below 2**62")
    if not math.isfinite(value):
        raise BadCell(index, f"is {_shown(cell)}; {what} must be finite")
    return value


class Datetimes:
    """Parse dates and times of day to nanoseconds since 1970 UTC, over all chunks of one file.

    Accepts a blank or ``T`` between date and time, zero to nine digits of a second's fraction, and an offset from UTC.
    Times without an offset are UTC, and may stand beside ``+00:00`` (the Azure files of 2024 mix forms); beside any
    other offset they would be another clock.
    """

    def __init__(self) -> None:
        self._bare = False
        self._shifted = False

    def parse(self, cells: Sequence[Any]) -> IntColumn:
        """Return [len(cells)] int64 nanoseconds."""
        bodies: list[str] = []
        offsets: list[str | None] = []
        for i, cell in enumerate(cells):
            match = _DATETIME.fullmatch(cell.strip() if isinstance(cell, str) else "")
            if match is None:
                raise BadCell(i, self._not_a_date(i, cell))
            body, offset = match.groups()
            bodies.append(body)
            offsets.append(offset)
        shifts = self._shifts(offsets)
        try:
            times = np.array(bodies, dtype="datetime64[ns]").astype(np.int64)
        except ValueError:
            times = np.array([self._single(i, body) for i, body in enumerate(bodies)], dtype=np.int64)
        return times if shifts is None else times - shifts

    def _shifts(self, offsets: list[str | None]) -> IntColumn | None:
        kinds = set(offsets)
        if kinds <= _ZERO_OFFSETS | {None}:
            self._bare |= None in kinds
            if self._shifted and None in kinds:
                raise BadCell(
                    offsets.index(None), "has no UTC offset where earlier rows do: mixed clocks; write one in all rows"
                )
            return None
        for i, offset in enumerate(offsets):
            self._bare |= offset is None
            self._shifted |= offset is not None and offset not in _ZERO_OFFSETS
            if self._bare and self._shifted:
                raise BadCell(i, "mixes times with and without an offset from UTC: mixed clocks; write one in all rows")
        return np.array([_offset_ns(i, offset) for i, offset in enumerate(offsets)], dtype=np.int64)

    @staticmethod
    def _single(index: int, body: str) -> int:
        try:
            return int(np.datetime64(body, "ns").astype(np.int64))
        except ValueError:
            raise BadCell(index, f"is '{body}'; there is no such date or time of day; correct it") from None

    @staticmethod
    def _not_a_date(index: int, cell: Any) -> str:
        try:
            _number(index, cell, "")
        except BadCell:
            return f"is {_shown(cell)}; expected a date and time such as 2023-11-16 18:15:46.6805900"
        return (
            f"is the number {_shown(cell)} where a date and time is expected (mixed clocks?); put all rows on one clock"
        )


def _offset_ns(index: int, offset: str | None) -> int:
    if offset is None or offset in _ZERO_OFFSETS:
        return 0
    digits = offset[1:].replace(":", "").ljust(4, "0")
    minutes = int(digits[:2]) * 60 + int(digits[2:])
    if minutes >= 24 * 60:
        raise BadCell(index, f"has the offset '{offset}', a day or more from UTC; write +HH:MM below +24:00")
    return (-1 if offset[0] == "-" else 1) * minutes * 60 * 10**9


def hash_runs(cells: Sequence[Any]) -> list[list[int]]:
    """Parse runs of hash ids: lists of whole numbers (JSON, Parquet) or blank-separated text (CSV)."""
    return [_hash_run(i, cell) for i, cell in enumerate(cells)]


def _hash_run(index: int, cell: Any) -> list[int]:
    values: Any = cell.split() if isinstance(cell, str) else cell
    if not isinstance(values, list):
        raise BadCell(index, f"is {_shown(cell)}; expected a list of hash ids")
    if not isinstance(cell, str) and set(map(type, values)) <= {int} and all(0 <= v <= MAX_INT for v in values):
        return values
    return [_whole(index, value, 0, MAX_INT, "a hash id") for value in values]


def texts(cells: Sequence[Any]) -> list[str]:
    """Parse request ids: text without control characters (line breaks among them), or whole numbers."""
    out = []
    for i, cell in enumerate(cells):
        if isinstance(cell, bool) or not isinstance(cell, (str, int)) or not _ID.fullmatch(str(cell)):
            raise BadCell(i, f"is {_shown(cell)}; a request id must be text of one line, or a whole number")
        out.append(str(cell))
    return out


def _shown(cell: Any) -> str:
    text = "missing" if cell is None else repr(cell)
    return text if len(text) <= 60 else text[:57] + "..."


#: What one parser looks like once its bounds are bound.
Parser = Callable[[Sequence[Any]], Any]
