"""Ctrl-C, obeyed once: what tidies up after the first is not cut short by a second, nor work that must not be cut."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


def raise_once(number: int, frame: FrameType | None) -> None:
    """Raise KeyboardInterrupt unless one is on its way through ``except`` and ``finally``: a handler of signals."""
    error = sys.exception()
    while error is not None:
        if isinstance(error, KeyboardInterrupt):
            return
        error = error.__context__
    raise KeyboardInterrupt


RAISING = (signal.default_int_handler, raise_once)
"""The handlers under which a KeyboardInterrupt is the user's Ctrl-C."""


@contextmanager
def ctrl_c_once() -> Iterator[None]:
    """Have Ctrl-C raise KeyboardInterrupt in the block as ever, but not while an earlier one is being obeyed."""
    if signal.getsignal(signal.SIGINT) is not signal.default_int_handler or not _set_handler(raise_once):
        yield  # in the background it is ignored, and stays so; other threads do not hear it
        return
    try:
        yield
    finally:
        _set_handler(signal.default_int_handler)


@contextmanager
def ctrl_c_later() -> Iterator[list[int]]:
    """Have Ctrl-C heard at the end of the block, not within it.

    Yields:
        what has come so far, empty at first: who looks there may raise KeyboardInterrupt where it does no harm.
    """
    came: list[int] = []
    before = signal.getsignal(signal.SIGINT)
    if before not in RAISING or not _set_handler(lambda number, frame: came.append(number)):
        yield came
        return
    try:
        yield came
    finally:
        _set_handler(before)
        if came and not isinstance(sys.exception(), KeyboardInterrupt):
            raise_once(signal.SIGINT, None)


@contextmanager
def sigint_blocked() -> Iterator[None]:
    """Block Ctrl-C until the end of the block; in processes that are started meanwhile, until they unblock it."""
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _set_handler(handler: object) -> bool:
    """Return whether this is the thread that hears signals."""
    try:
        signal.signal(signal.SIGINT, handler)  # type: ignore[arg-type]
    except ValueError:
        return False
    return True
