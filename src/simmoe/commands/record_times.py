"""Reading the CSV files that a live run's record keeps beside its tables."""

from __future__ import annotations

import csv
import gzip
import math
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from simmoe.errors import RecordError
from simmoe.reading import what_is_no_file
from simmoe.record_checks import MAX_TIME_S
from simmoe.records import Columns


def read_times(path: Path, names: Sequence[str], of: str, num_rows: int | None = None) -> Columns:
    """Return columns of a file, [rows] float each; NaN where a value is left out.

    Args:
        path: of the file, unpacked when its name ends in ``.gz``.
        names: of the columns.
        of: what a row is of, such as 'steps', for errors.
        num_rows: the record has of them; None: not known.
    Raises:
        FileNotFoundError: there is none.
        RecordError: it cannot be read, has other columns or another number of rows, or a value that is no number.
    """
    try:
        if kind := what_is_no_file(path):
            raise RecordError(f"cannot read '{path}': it is {kind}, no file")
        with gzip.open(path, "rt", newline="") if path.suffix == ".gz" else path.open(newline="") as file:
            rows = list(csv.DictReader(file))
    except FileNotFoundError:
        raise
    except (OSError, EOFError, UnicodeDecodeError, csv.Error, zlib.error) as error:
        raise RecordError(f"cannot read '{path}': {error}") from None
    missing = [name for name in names if rows and name not in rows[0]]
    if missing:
        raise RecordError(f"'{path}' has no column {', '.join(missing)}")
    if num_rows not in (None, len(rows)):
        raise RecordError(f"'{path}' is not of the record's {num_rows} {of}")
    columns: dict[str, list[float]] = {name: [] for name in names}
    for line, row in enumerate(rows, start=2):
        for name in names:
            columns[name].append(_number(row[name], f"'{path}' line {line}: {name}"))
    return {name: np.array(values) for name, values in columns.items()}


def _number(text: str | None, where: str) -> float:
    if text == "":
        return math.nan
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not abs(value) <= MAX_TIME_S:
        raise RecordError(f"{where} is {text!r}; it must be a finite number within {MAX_TIME_S:g}")
    return value
