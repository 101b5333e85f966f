"""A physical core of its own for the thread that schedules and launches, so that the host's pace is the engine's own.

Steps of few sequences take as long as the host needs to launch them. That time rises by half when a hyperthread sibling
is at work, with the engine's client as with anybody else, and again when the scheduler moves the thread about. So the
main thread of the engine core, and of each worker where these are processes of their own, gets a core whose siblings
stay idle; every other thread of engine and client shares the rest.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from simmoe.errors import LiveError

#: What vLLM calls its processes (``VLLM_PROCESS_NAME_PREFIX``, by setproctitle).
ENGINE_CORE, WORKER = "VLLM::EngineCore", "VLLM::Worker"

#: Physical cores for all other threads, at least: the client's, and those that copy, encode and decode.
OTHERS = 2

PROC = Path("/proc")
CPUS = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class Places:
    """Which logical CPUs threads run on."""

    own: tuple[int, ...]
    """One for each main thread, on a physical core of its own."""
    others: tuple[int, ...]
    """For everything else: no sibling of ``own`` is among them."""


def parse_cpus(text: str) -> set[int]:
    """Return the CPUs a kernel's list names, e.g. ``0-3,8``."""
    found: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def physical_cores(allowed: Collection[int], cpus: Path = CPUS) -> list[tuple[int, ...]]:
    """Return the allowed CPUs grouped by the physical core they are threads of, as far as the kernel tells."""
    cores: set[tuple[int, ...]] = set()
    for cpu in allowed:
        path = cpus / f"cpu{cpu}" / "topology" / "thread_siblings_list"
        siblings = parse_cpus(path.read_text()) if path.exists() else {cpu}
        cores.add(tuple(sorted(siblings & set(allowed))))
    return sorted(cores)


def places(cores: Sequence[tuple[int, ...]], num_main: int) -> Places:
    """Return where ``num_main`` main threads and all others run.

    Raises:
        LiveError: too few physical cores.
    """
    if len(cores) < num_main + OTHERS:
        raise LiveError(
            f"{num_main} main threads on cores of their own need {num_main + OTHERS} physical cores, this process may "
            f"use {len(cores)}: let it use more, or measure without --pin"
        )
    # the last ones: interrupts tend to go to the first
    others, own = cores[:-num_main], cores[-num_main:]
    return Places(tuple(core[0] for core in own), tuple(sorted(cpu for core in others for cpu in core)))


def num_main_threads(tensor_parallel_size: int) -> int:
    """Return how many threads schedule or launch: one process does both on one card, each worker is one on several."""
    return 1 if tensor_parallel_size == 1 else 1 + tensor_parallel_size


def check_cores(tensor_parallel_size: int) -> None:
    """Raise what :func:`pin_engine` would for want of cores, before there is an engine."""
    places(physical_cores(os.sched_getaffinity(0)), num_main_threads(tensor_parallel_size))


def pin_engine(tensor_parallel_size: int) -> str:
    """Pin the threads of the engine this process started, and of this process.

    Returns:
        Where they run, in words.
    Raises:
        LiveError: too few physical cores, or vLLM's processes do not bear the names they should.
    """
    named = {pid: name for pid in descendants(os.getpid()) if (name := title(pid))}
    main = [pid for pid, name in named.items() if name.startswith(ENGINE_CORE)]
    if tensor_parallel_size > 1:
        main += [pid for pid, name in named.items() if name.startswith(WORKER)]
    if len(main) != num_main_threads(tensor_parallel_size):
        raise LiveError(
            f"--pin looks for processes named {ENGINE_CORE} and {WORKER}..., and found {sorted(named.values())}: "
            "install setproctitle, by which vLLM names them, or measure without --pin"
        )
    where = places(physical_cores(os.sched_getaffinity(0)), len(main))
    pin(dict(zip(main, where.own, strict=True)), [os.getpid()], where.others)
    on = ", ".join(
        f"{named[pid].removeprefix('VLLM::')} on CPU {cpu}" for pid, cpu in zip(main, where.own, strict=True)
    )
    return f"main threads pinned to physical cores of their own ({on}), all others on {len(where.others)} other CPUs"


def pin(main: dict[int, int], also: Iterable[int], others: Collection[int]) -> None:
    """Give each process's main thread a CPU, and all other threads of these processes and of ``also`` the others.

    Args:
        main: the CPU of each process's main thread, by process id.
        also: processes without a main thread of interest.
        others: CPUs.
    """
    for pid in {*main, *also}:
        for thread in (int(task.name) for task in (PROC / str(pid) / "task").iterdir()):
            os.sched_setaffinity(thread, {main[pid]} if thread == pid and pid in main else others)


def descendants(pid: int) -> list[int]:
    """Return the processes this one started, those they started, and so on."""
    children: dict[int, list[int]] = {}
    for path in PROC.glob("[0-9]*/stat"):
        try:
            # the name before the parenthesis may hold spaces; then come the state and the parent
            parent = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:  # ended meanwhile
            continue
        children.setdefault(parent, []).append(int(path.parent.name))
    found, todo = [], [pid]
    while todo:
        below = sorted(children.get(todo.pop(), ()))
        found += below
        todo += below
    return sorted(found)


def title(pid: int) -> str:
    """Return the name a vLLM process gave itself; empty for other processes, and when it is gone."""
    try:
        name = (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""
    return name if name.startswith("VLLM::") else ""
