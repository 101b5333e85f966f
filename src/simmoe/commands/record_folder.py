"""The folder of a run record, made sure of before any work."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from simmoe.commands.evidence import CALL_NAME
from simmoe.commands.out_folder import claim_folder, results_in
from simmoe.errors import OutputError
from simmoe.records import SCHEMA_VERSION, was_being_replaced

_INERT = ("record_steps", "fast_forward")
_KINDS = ("run", "live")


@contextmanager
def record_folder(out: str, inputs: Mapping[str, Any] | None = None) -> Iterator[Path]:
    """Create the folder and hold it; take it away again if the block fails and has left nothing in it.

    Args:
        out: the folder.
        inputs: entries of the manifest to come that decide the run: an earlier record with the same is replaced.
            None: no earlier record is (a live run never gives the same twice).
    Raises:
        OutputError: it cannot be created or written, is a file, is in use by another run, or holds another run or
            something that is no run.
    """
    with claim_folder(out, "run") as folder:
        names = results_in(folder)
        if "manifest.json" in names and "inputs.json" not in names:
            _check_same_run(folder, inputs)
        elif names - {CALL_NAME} and not was_being_replaced(folder):
            raise OutputError(f"'{folder}' is not empty and holds no run record; choose another --out")
        (folder / CALL_NAME).unlink(missing_ok=True)
        yield folder


def _check_same_run(folder: Path, inputs: Mapping[str, Any] | None) -> None:
    try:
        kept = json.loads((folder / "manifest.json").read_bytes())
        is_ours = kept["schema_version"] == SCHEMA_VERSION and kept["kind"] in _KINDS
    except (OSError, ValueError, LookupError, TypeError):
        is_ours = False
    if not is_ours:
        raise OutputError(f"'{folder}' holds a manifest.json that is no run record's; choose another --out")
    if inputs is None:
        raise OutputError(f"'{folder}' holds a run already; choose another --out, or remove it")
    for name, value in json.loads(json.dumps(inputs)).items():
        if _deciding(kept.get(name)) != _deciding(value):
            raise OutputError(f"'{folder}' holds another run (its {name} differs); choose another --out, or remove it")


def _deciding(value: Any) -> Any:
    """Leave out of a configuration what changes how a run is computed or kept, but not its results."""
    return {k: v for k, v in value.items() if k not in _INERT} if isinstance(value, dict) else value
