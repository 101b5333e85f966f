"""Ending a process whose policies have started threads that never end: Python would wait for them for ever."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

PATIENCE_S = 5.0
"""How long threads may take to end once everything else has."""

_MACHINERY = (threading.__file__, os.path.join("concurrent", "futures", "thread.py"))
"""Files whose code runs threads, whoever has started them."""

_MOST_TOLD = 3


def end_despite_threads(exit_code: int, tell: Callable[[str], object], patience_s: float | None = None) -> None:
    """Have this process, which is about to end, do so ``patience_s`` from now at the latest.

    Threads that end by then are waited for, as ever. If some do not, they are named and the process exits at once.

    Args:
        exit_code: what the process was to exit with.
        tell: called with one line that names the threads.
        patience_s: None: ``PATIENCE_S``.
    """
    if _threads_left():
        patience_s = PATIENCE_S if patience_s is None else patience_s
        threading.Thread(target=_end, args=(exit_code, tell, patience_s), daemon=True).start()


def _end(exit_code: int, tell: Callable[[str], object], patience_s: float) -> None:
    deadline_s = time.monotonic() + patience_s
    for thread in _threads_left():
        thread.join(max(0.0, deadline_s - time.monotonic()))
    if left := _threads_left():
        with suppress(Exception):  # nobody may read any more
            told = ", ".join(map(described, left[:_MOST_TOLD]))
            more = f" and {len(left) - _MOST_TOLD} more" if len(left) > _MOST_TOLD else ""
            tell(f"ended without {told}{more}, still running {patience_s:g} s after all else was done")
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
        os._exit(exit_code)


def described(thread: threading.Thread) -> str:
    """Return what to call a thread: its name, and the place in the code it was started to run that it is at."""
    own = [place for place in _stack(thread) if not place.filename.endswith(_MACHINERY)]
    return f"thread '{thread.name}'" + (f" ({own[0].filename}:{own[0].lineno})" if own else "")


def threads_in(file: str) -> list[threading.Thread]:
    """Return the threads that Python would wait for and that run code of a file."""
    return [thread for thread in _threads_left() if any(place.filename == file for place in _stack(thread))]


def _stack(thread: threading.Thread) -> traceback.StackSummary:
    frame = sys._current_frames().get(thread.ident or 0)
    return traceback.extract_stack(frame) if frame else traceback.StackSummary()


def _threads_left() -> list[threading.Thread]:
    """Return the threads that Python waits for before it ends, while it has not come to the end of its own."""
    return [thread for thread in threading.enumerate() if not thread.daemon and thread is not threading.main_thread()]
