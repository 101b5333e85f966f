"""The folder of a command's results: created, held by one process at a time, and taken away again if nothing came."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

import click

from simmoe.errors import OutputError, UsageError

#: Held while a command works in the folder; gone when it ends, left by a killed one and then of no effect.
LOCK_NAME = ".simmoe.lock"

#: Another process may take the folder away between our creating and locking it; one gone this often is no folder.
_ATTEMPTS = 100


def refuse_empty(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Refuse ``--out ""``, what an unset shell variable becomes: a callback for click's options."""
    if value is not None and not value.strip():
        raise UsageError(f"{parameter.opts[0]} is empty; name a folder, or leave the option out")
    return value


@contextmanager
def claim_folder(out: str | os.PathLike[str], what: str) -> Iterator[Path]:
    """Create a folder and hold it for the length of the block; nobody else can claim it meanwhile.

    What was created is taken away again if the block fails and has left nothing in it.

    Args:
        out: the folder.
        what: who works there, for the message to another.
    Raises:
        OutputError: it cannot be created or written, is a file or a link to nowhere, or another process holds it.
    """
    folder = Path(out)
    if folder.is_file():
        raise OutputError(f"'{folder}' is a file, not a folder; choose another --out")
    for path in (folder, *folder.parents):
        if path.is_symlink() and not path.exists():
            raise OutputError(
                f"'{path}' is a symbolic link to '{os.readlink(path)}', which does not exist; create that, or choose "
                f"another --out"
            )
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        handle = _lock(folder)
    except OSError as error:
        _remove(created)
        raise OutputError(f"cannot write to '{folder}': {error.strerror}; choose another --out") from error
    if handle is None:
        raise OutputError(f"another {what} is at work in '{folder}'; wait for it or choose another --out")
    # The lock's file goes before the lock: who opened it and waits for neither finds that it holds no folder.
    try:
        yield folder
    except BaseException:
        (folder / LOCK_NAME).unlink(missing_ok=True)
        _remove(created)
        raise
    else:
        (folder / LOCK_NAME).unlink(missing_ok=True)
    finally:
        handle.close()


def results_in(folder: Path) -> set[str]:
    """Return the names of what a folder holds, without the lock and what a killed command left half written."""
    names = {path.name for path in folder.iterdir()}
    return {name for name in names if name != LOCK_NAME and not (name.startswith(".") and name.endswith(".partial"))}


def _lock(folder: Path) -> FileIO | None:
    """Return the locked file, to be kept open; None if another process holds it."""
    for _ in range(_ATTEMPTS):
        folder.mkdir(parents=True, exist_ok=True)
        try:
            handle = FileIO(folder / LOCK_NAME, "a+")
        except FileNotFoundError:
            continue  # its last holder took the folder away
        try:
            fcntl.lockf(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(handle.fileno()), os.stat(folder / LOCK_NAME)):
                return handle
        except FileNotFoundError:
            pass  # its last holder took the file away
        except OSError as error:
            handle.close()
            if error.errno in (errno.EACCES, errno.EAGAIN):
                return None
            raise
        handle.close()
    raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))


def _remove(created: list[Path]) -> None:
    for path in created:
        try:
            path.rmdir()
        except OSError:  # never made, or no longer empty
            return
