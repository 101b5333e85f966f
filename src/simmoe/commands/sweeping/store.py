"""The folder of a sweep or a search: claimed by one, one small file a finished cell, so a killed one resumes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from simmoe.analysis.metrics import METRICS
from simmoe.commands.evidence import CALL_NAME
from simmoe.commands.out_folder import claim_folder, results_in
from simmoe.commands.sweeping.cells import CellResult
from simmoe.errors import OutputError
from simmoe.writing import write_whole

INPUTS = "inputs.json"


class SweepStore:
    """The results of one sweep, or of what ``what`` names, on disk; open for the length of a ``with`` block.

    ``inputs.json``, written first, says which sweep the folder belongs to; ``cells/`` has one file a finished cell,
    named by its content address. Every file is written in one rename.

    Raises:
        OutputError: the folder cannot be written, is not a sweep's, holds another sweep, or one is running there.
    """

    def __init__(self, folder: Path, inputs: Mapping[str, Any], what: str = "sweep") -> None:
        self.folder = folder
        self.what = what
        self._cells = folder / "cells"
        self._content = (json.dumps(inputs, indent=2, sort_keys=True) + "\n").encode()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            stack.enter_context(claim_folder(self.folder, self.what))
            self._adopt()
            self._claim = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._claim.__exit__(kind, error, trace)

    def load(self, key: str) -> CellResult | None:
        """Return a finished cell; None if it is absent, or its file is cut short or no cell's: it is to be run."""
        try:
            kept = json.loads((self._cells / f"{key}.json").read_bytes())
        except (OSError, ValueError):
            return None
        return _result(kept)

    def save(self, key: str, inputs: Mapping[str, Any], result: CellResult) -> None:
        """Keep a finished cell."""
        plain = {name: None if math.isnan(value) else value for name, value in result.metrics.items()}
        content = {"inputs": inputs, "metrics": plain, "extrapolated": result.extrapolated}
        self.write(f"cells/{key}.json", (json.dumps(content, allow_nan=False) + "\n").encode())

    def interrupted(self) -> str:
        """Say what Ctrl-C leaves behind."""
        return (
            f"interrupted; {self.num_cells()} finished cells are kept in '{self.folder}': repeat the command to resume"
        )

    def num_cells(self) -> int:
        """Return how many finished cells are kept."""
        return sum(1 for _ in self._cells.glob("*.json"))

    def write(self, name: str, content: bytes) -> Path:
        """Write a file of the folder in one rename and return its path."""
        path = self.folder / name
        write_whole(path, content, f"the {self.what}", "choose another --out")
        return path

    def _adopt(self) -> None:
        """Make sure that the folder is this sweep's or nobody's, and tidy what a killed process left."""
        found = self._read_inputs()
        if found is None and (results_in(self.folder) - {"cells"} or self.num_cells()):
            raise OutputError(f"'{self.folder}' is not empty and holds no {self.what}; choose another --out")
        # What is cut short begins as ours does; cells it may have are named by their own inputs, so none is misread.
        if found is None or (found != self._content and self._content.startswith(found)):
            self.write(INPUTS, self._content)
        elif found != self._content:
            raise OutputError(
                f"'{self.folder}' holds another {self.what}{_difference(found, self._content)}; choose another --out"
            )
        try:
            self._cells.mkdir(exist_ok=True)
            for leftover in (*self._cells.glob(".*.partial"), *self.folder.glob(".*.partial"), self.folder / CALL_NAME):
                leftover.unlink(missing_ok=True)
        except OSError as error:
            raise OutputError(f"cannot write to '{self.folder}': {error.strerror}; choose another --out") from error

    def _read_inputs(self) -> bytes | None:
        try:
            return (self.folder / INPUTS).read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise OutputError(
                f"cannot read '{self.folder / INPUTS}': {error.strerror}; choose another --out"
            ) from error


def _result(kept: object) -> CellResult | None:
    """Return what a cell's file says, or None if that is no cell's result."""
    if not isinstance(kept, dict):
        return None
    metrics, extrapolated = kept.get("metrics"), kept.get("extrapolated")
    if not isinstance(metrics, dict) or metrics.keys() != METRICS.keys() or not isinstance(extrapolated, dict):
        return None
    values = {name: math.nan if value is None else value for name, value in metrics.items()}
    if not all(type(value) in (int, float) for value in (*values.values(), *extrapolated.values())):
        return None
    return CellResult(values, extrapolated)


def _difference(found: bytes, wanted: bytes) -> str:
    """Name the first input that differs: ``" (seeds is 3 there, 5 here)"``."""
    try:
        there, here = _flat(json.loads(found)), _flat(json.loads(wanted))
    except (ValueError, AttributeError):  # no JSON, or no object
        return f", or its {INPUTS} is spoilt"
    for name in sorted(there.keys() | here.keys()):
        if there.get(name) != here.get(name):
            return f" ({name} is {json.dumps(there.get(name))} there, {json.dumps(here.get(name))} here)"
    return ""


def _flat(data: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in data.items():
        out |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return out
