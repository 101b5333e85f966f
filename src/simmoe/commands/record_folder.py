"""The folder of a run record, made sure of before any work."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from simmoe.commands.evidence import CALL_NAME
from simmoe.errors import OutputError

_INERT = ("record_steps", "fast_forward")
_OWN = ("manifest.json", "requests.parquet", CALL_NAME)


@contextmanager
def record_folder(out: str, inputs: Mapping[str, Any] | None = None) -> Iterator[Path]:
    """Create the folder, and take away again what was created if the block fails and has left nothing in it.

    Args:
        out: the folder.
        inputs: entries of the manifest to come that decide the run: an earlier record with the same is replaced.
            None: no earlier record is (a live run never gives the same twice).
    Raises:
        OutputError: it cannot be created or written, is a file, or holds another run or something that is no run.
    """
    folder = Path(out)
    if folder.is_file():
        raise OutputError(f"'{folder}' is a file, not a folder; choose another --out")
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
        names = {path.name for path in folder.iterdir()}
    except OSError as error:
        _remove(created)
        raise OutputError(f"cannot write to '{folder}': {error.strerror}; choose another --out") from error
    if names and ("inputs.json" in names or not names.intersection(_OWN)):
        raise OutputError(f"'{folder}' is not empty and holds no run record; choose another --out")
    if "manifest.json" in names:
        _check_same_run(folder, inputs)
    (folder / CALL_NAME).unlink(missing_ok=True)
    try:
        yield folder
    except BaseException:
        _remove(created)
        raise


def _check_same_run(folder: Path, inputs: Mapping[str, Any] | None) -> None:
    if inputs is None:
        raise OutputError(f"'{folder}' holds a run already; choose another --out, or remove it")
    try:
        kept = json.loads((folder / "manifest.json").read_text())
    except ValueError:
        kept = {}
    for name, value in json.loads(json.dumps(inputs)).items():
        if _deciding(kept.get(name)) != _deciding(value):
            raise OutputError(f"'{folder}' holds another run (its {name} differs); choose another --out, or remove it")


def _deciding(value: Any) -> Any:
    """Leave out of a configuration what changes how a run is computed or kept, but not its results."""
    return {k: v for k, v in value.items() if k not in _INERT} if isinstance(value, dict) else value


def _remove(created: list[Path]) -> None:
    for path in created:
        try:
            path.rmdir()
        except OSError:  # never made, or no longer empty
            return
