"""Whether a path is a file's, before anything is read from it: to read a pipe is to wait for whoever writes it."""

from __future__ import annotations

import os
import stat


def what_is_no_file(path: str | os.PathLike[str]) -> str | None:
    """Return what stands at a path where that is no regular file, such as 'a folder'; links are followed.

    Raises:
        OSError: nothing stands there, or that cannot be told.
    """
    mode = os.stat(path).st_mode
    if stat.S_ISREG(mode):
        return None
    return "a folder" if stat.S_ISDIR(mode) else "a pipe" if stat.S_ISFIFO(mode) else "a device"
