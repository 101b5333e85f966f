"""The folder of a sweep or a search: claimed by one, one small file a finished cell, so a killed one resumes."""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from simmoe.commands.evidence import CALL_NAME
from simmoe.commands.sweeping.cells import CellResult
from simmoe.errors import OutputError

INPUTS = "inputs.json"


class SweepStore:
    """The results of one sweep, or of what ``what`` names, on disk; open for the length of a ``with`` block.

    ``inputs.json`` says which sweep the folder belongs to and is locked while one runs; ``cells/`` has one file a
    finished cell, named by its content address and written in one rename.

    Raises:
        OutputError: the folder cannot be written, is not a sweep's, holds another sweep, or one is running there.
    """

    def __init__(self, folder: Path, inputs: Mapping[str, Any], what: str = "sweep") -> None:
        self.folder = folder
        self.what = what
        self._cells = folder / "cells"
        self._content = (json.dumps(inputs, indent=2, sort_keys=True) + "\n").encode()

    def __enter__(self) -> Self:
        if self.folder.is_file():
            raise OutputError(f"'{self.folder}' is a file, not a folder; choose another --out")
        if self.folder.is_dir() and not (self.folder / INPUTS).exists() and any(self.folder.iterdir()):
            raise OutputError(f"'{self.folder}' is not empty and holds no {self.what}; choose another --out")
        try:
            self._cells.mkdir(parents=True, exist_ok=True)
            # Unbuffered and kept open: the lock lasts as long as this very handle, and dies with the process.
            self._handle = open(self.folder / INPUTS, "a+b", buffering=0)
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            self._claim()
        except BaseException:
            self._handle.close()
            raise
        for leftover in (*self._cells.glob(".*.partial"), *self.folder.glob(".*.partial"), self.folder / CALL_NAME):
            leftover.unlink(missing_ok=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._handle.close()

    def load(self, key: str) -> CellResult | None:
        """Return a finished cell, or None."""
        try:
            kept = json.loads((self._cells / f"{key}.json").read_bytes())
            metrics, extrapolated = kept["metrics"], kept["extrapolated"]
        except (OSError, ValueError, KeyError):
            return None  # absent, or cut short by a power failure: either way to be run
        return CellResult({name: math.nan if v is None else v for name, v in metrics.items()}, extrapolated)

    def save(self, key: str, inputs: Mapping[str, Any], result: CellResult) -> None:
        """Keep a finished cell."""
        plain = {name: None if math.isnan(value) else value for name, value in result.metrics.items()}
        content = {"inputs": inputs, "metrics": plain, "extrapolated": result.extrapolated}
        self.write(f"cells/{key}.json", (json.dumps(content, allow_nan=False) + "\n").encode())

    def interrupted(self) -> str:
        """Say what Ctrl-C leaves behind."""
        return (
            f"simmoe: interrupted; {self.num_cells()} finished cells are kept in '{self.folder}': "
            f"repeat the command to resume"
        )

    def num_cells(self) -> int:
        """Return how many finished cells are kept."""
        return sum(1 for _ in self._cells.glob("*.json"))

    def write(self, name: str, content: bytes) -> Path:
        """Write a file of the folder in one rename and return its path."""
        path = self.folder / name
        partial = path.with_name(f".{path.name}.partial")
        try:
            partial.write_bytes(content)
            partial.replace(path)
        except OSError as error:
            raise self._unwritable(error) from error
        return path

    def _claim(self) -> None:
        try:
            fcntl.lockf(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise OutputError(
                f"another {self.what} is at work in '{self.folder}'; wait for it or choose another --out"
            ) from None
        self._handle.seek(0)
        found = self._handle.read()
        if not found:
            try:
                self._handle.write(self._content)
            except OSError as error:
                raise self._unwritable(error) from error
        elif found != self._content:
            raise OutputError(
                f"'{self.folder}' holds another {self.what}{_difference(found, self._content)}; choose another --out"
            )

    def _unwritable(self, error: OSError) -> OutputError:
        return OutputError(f"cannot write to '{self.folder}': {os.strerror(error.errno or 0)}; choose another --out")


def _difference(found: bytes, wanted: bytes) -> str:
    """Name the first input that differs: ``" (seeds is 3 there, 5 here)"``."""
    try:
        there, here = _flat(json.loads(found)), _flat(json.loads(wanted))
    except ValueError:
        return ""
    for name in sorted(there.keys() | here.keys()):
        if there.get(name) != here.get(name):
            return f" ({name} is {json.dumps(there.get(name))} there, {json.dumps(here.get(name))} here)"
    return ""


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in data.items():
        out |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return out
