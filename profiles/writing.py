"""Writing a file whole or not at all, and over nothing but a file."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from simmoe.errors import OutputError


def write_whole(path: str | os.PathLike[str], content: bytes, what: str) -> None:
    """Write a file beside the place it is for and move it there; folders on the way are created, links followed.

    Args:
        path: of the file.
        content: all of it.
        what: it is, such as 'the table', for errors.
    Raises:
        OutputError: it cannot be written, or what stands there is no file: a folder, a pipe or a device.
    """
    target = Path(os.path.realpath(path))
    partial = target.with_name(f".{target.name}.partial")
    cannot = f"cannot write {what} to '{os.fspath(path)}'"
    try:
        if target.exists() and not target.is_file():
            raise OutputError(f"{cannot}: what stands there is no file; choose another name")
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.write_bytes(content)
        partial.replace(target)
    except OSError as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise OutputError(f"{cannot}: {error.strerror or error}; choose another place") from error
