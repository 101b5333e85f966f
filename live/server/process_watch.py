"""Hearing at once of the death of processes that are no children of this one: an engine's, behind its server.

The server says that its engine is dead when it gets round to it, which on a busy machine may be a second later. So may
be the end of a process that was killed: the kernel takes it apart when it gets a core. That it was is seen at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path

_TITLE = b"VLLM::"
"""How vLLM calls its engine's processes and their workers."""

LOOK_INTERVAL_S = 0.1
"""How often processes are looked at."""

_PF_EXITING = 0x4
_STATE, _FLAGS, _PENDING = 0, 6, 28
"""Fields of /proc/PID/stat after the name, which may hold anything (proc_pid_stat(5): 3, 9 and 31)."""


def is_dying(stat: bytes) -> bool:
    """Return whether a process has ended, is ending, or was killed and has not been told yet.

    Args:
        stat: what /proc/PID/stat holds.
    """
    fields = stat.rpartition(b")")[2].split()
    was_killed = int(fields[_PENDING]) >> (signal.SIGKILL - 1) & 1
    return bool(fields[_STATE] in (b"Z", b"X") or int(fields[_FLAGS]) & _PF_EXITING or was_killed)


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
    """Yield a future that is done, with the process, as soon as one of these is to end; never where that is not told.

    Linux alone has descriptors of processes that are not one's children, and tells how they are in /proc.
    """
    loop = asyncio.get_running_loop()
    death: asyncio.Future[int] = loop.create_future()
    descriptors: list[int] = []

    def note(pid: int) -> None:
        if not death.done():
            death.set_result(pid)

    async def look() -> None:
        while not death.done():
            for pid in pids:
                with contextlib.suppress(OSError):
                    if is_dying(Path(f"/proc/{pid}/stat").read_bytes()):
                        note(pid)
            await asyncio.sleep(LOOK_INTERVAL_S)

    looking = loop.create_task(look())
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
        looking.cancel()
        for descriptor in descriptors:
            loop.remove_reader(descriptor)
            os.close(descriptor)
