"""Hearing at once of the death of processes that are no children of this one: an engine's, behind its server.

The server says that its engine is dead when it gets round to it, which on a busy machine may be a second later.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

_TITLE = b"VLLM::"
"""How vLLM calls its engine's processes and their workers."""


def engine_processes(server: int) -> list[int]:
    """Return vLLM's processes under a server's, with the workers under those; empty where /proc does not tell."""
    found = []
    for pid in _children(server):
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(_TITLE):
                found += [pid, *engine_processes(pid)]
    return found


def _children(pid: int) -> list[int]:
    children: list[int] = []
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            children += map(int, (task / "children").read_text().split())
    return children


@contextlib.contextmanager
def first_death(pids: Sequence[int]) -> Iterator[asyncio.Future[int]]:
    """Yield a future that is done, with the process, as soon as one of these ends; never where that cannot be heard of.

    Linux alone has descriptors of processes that are not one's children.
    """
    loop = asyncio.get_running_loop()
    death: asyncio.Future[int] = loop.create_future()
    descriptors: list[int] = []

    def note(pid: int) -> None:
        if not death.done():
            death.set_result(pid)

    try:
        for pid in pids:
            try:
                descriptors.append(os.pidfd_open(pid))
            except ProcessLookupError:
                note(pid)
            except (AttributeError, OSError):
                continue
            else:
                loop.add_reader(descriptors[-1], note, pid)
        yield death
    finally:
        for descriptor in descriptors:
            loop.remove_reader(descriptor)
            os.close(descriptor)
