"""The folder of a run record, made sure of before any work."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from simmoe.commands.evidence import CALL_NAME
from simmoe.errors import OutputError

_OWN = ("manifest.json", "requests.parquet", CALL_NAME)


@contextmanager
def record_folder(out: str) -> Iterator[Path]:
    """Create the folder, and take away again what was created if the block fails and has left nothing in it.

    An earlier record there will be replaced; any other content is left alone.

    Raises:
        OutputError: it cannot be created or written, is a file, or holds something that is no run record.
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
    (folder / CALL_NAME).unlink(missing_ok=True)
    try:
        yield folder
    except BaseException:
        _remove(created)
        raise


def _remove(created: list[Path]) -> None:
    for path in created:
        try:
            path.rmdir()
        except OSError:  # never made, or no longer empty
            return
