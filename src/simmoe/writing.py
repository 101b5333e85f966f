"""Writing a file whole or not at all, and over nothing but a file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from simmoe.errors import OutputError

ELSEWHERE = "choose another place"


def write_whole(path: str | os.PathLike[str], content: bytes, what: str, remedy: str = ELSEWHERE) -> None:
    """Write a file of known content; see :func:`whole_file`."""
    with whole_file(path, what, remedy) as partial:
        partial.write_bytes(content)


@contextmanager
def whole_file(path: str | os.PathLike[str], what: str, remedy: str = ELSEWHERE) -> Iterator[Path]:
    """Give a path beside a file's to write it at; it is moved there when the block ends well, else taken away.

    Folders on the way are created, links followed. One process writes a file at a time.

    Args:
        path: of the file.
        what: it is, such as 'the table', for errors.
        remedy: what to do where it cannot be written, for errors.
    Raises:
        OutputError: it cannot be written, or what stands there is no file: a folder, a pipe or a device.
    """
    with _beside(path, what, remedy) as (target, partial):
        yield partial
        partial.replace(target)


def check_place(path: str | os.PathLike[str], what: str, remedy: str = ELSEWHERE) -> None:
    """Make sure that a file can be written, before the long work it is to hold; see :func:`whole_file`."""
    with _beside(path, what, remedy) as (_, partial):
        partial.touch()


@contextmanager
def _beside(path: str | os.PathLike[str], what: str, remedy: str) -> Iterator[tuple[Path, Path]]:
    """Yield where a file is to be and a path beside it; whatever is left there is taken away."""
    target = Path(os.path.realpath(path))
    cannot = f"cannot write {what} to '{os.fspath(path)}'"
    try:
        if target.exists() and not target.is_file():
            raise OutputError(f"{cannot}: what stands there is no file; choose another name")
        target.parent.mkdir(parents=True, exist_ok=True)
        partial = target.with_name(f".{target.name}.partial")
        try:
            yield target, partial
        finally:
            with suppress(OSError):
                partial.unlink()  # not there after a move
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else error  # pyarrow's own words are longer
        raise OutputError(f"{cannot}: {why}; {remedy}") from error
