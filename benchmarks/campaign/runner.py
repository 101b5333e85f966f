"""Runs jobs on the GPUs at hand within a time: what is done is skipped, what is stopped goes on in the next call."""

from __future__ import annotations

import os
import queue
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from job import DONE, FAILED, LOG, STOPPED, UNFINISHED, Folder, Job
from pace import Pace

ROOT = Path(__file__).resolve().parents[2]
"""Of the repository: where commands run."""

GRACE_S = 15.0
"""From SIGTERM to SIGKILL."""

KILL_S = 10.0
"""From SIGKILL until a process that is still there is left to the system."""

STOPPING_S = 20.0
"""Kept of the time for stopping what runs, and for packing."""

ENDING_S = 10.0
"""Kept of what is left for a command that ends by itself in the time it is told."""

AT_ONCE_S = 20.0
"""A job that fails within so long is tried once more: measuring refuses a card that is busy, and one seems so for a
moment after the job before."""

FIRST_SAMPLES = 10
"""Of the host's pace, that tell whether it is fast."""


@dataclass
class Running:
    """A job that runs."""

    folder: Folder
    gpus: list[str]
    process: subprocess.Popen[bytes]
    waiter: threading.Thread
    """Ends with the process."""
    began_s: float


class Campaign:
    """Jobs, in the order they are to be started."""

    def __init__(
        self,
        jobs: Sequence[Job],
        gpus: Sequence[str],
        out: Path,
        say: Callable[[str], None],
        *,
        limit_s: float = float("inf"),
        min_pace: float = 0.0,
        pace: Pace | None = None,
        cpus: Mapping[str, set[int]] | None = None,
        packed: Callable[[dict[str, list[Path]]], None] = lambda folders: None,
    ) -> None:
        """Prepare to run.

        Args:
            jobs: in order.
            gpus: names for CUDA_VISIBLE_DEVICES.
            out: the jobs' folders are in it.
            say: told a line at each event.
            limit_s: seconds from now, stopping included.
            min_pace: jobs that want a fast host are left out on one of fewer million turns a second.
            pace: of the host; the campaign starts and stops it.
            cpus: those a job on that GPU alone has to itself; one on several has all of theirs.
            packed: called with the folders of jobs by GPU whenever one has ended.
        """
        self.out, self._gpus, self._say, self._cpus = out.resolve(), list(gpus), say, cpus or {}
        self._until_s = time.monotonic() + limit_s - STOPPING_S
        self._min_pace, self._pace, self._packed = min_pace, pace, packed
        folders = [Folder(job, self.out) for job in jobs]
        # one that failed may fail again, and take the time of others
        self.folders = sorted(folders, key=lambda folder: folder.state["state"] == FAILED)
        self.told: dict[str, str] = {}
        """State of each job, for the table."""
        self._running: list[Running] = []
        self._again: list[Folder] = []
        """Tried once more, or to be."""
        self._ends: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.is_interrupted = False

    def interrupt(self, number: int = 0, frame: FrameType | None = None) -> None:
        """Have what runs stopped, and nothing started any more: a handler of signals, by which no work is cut short."""
        self.is_interrupted = True
        self._ends.put(None)

    def run(self) -> None:
        """Run all there is time for, or until interrupted."""
        waiting = self._waiting()
        try:
            if self._pace is not None:
                self._pace.start()
            waiting = self._fast_enough(waiting)
            self._pack()
            while not self.is_interrupted and ((waiting := self._start(waiting)) or self._running):
                with suppress(queue.Empty):
                    self._ends.get(timeout=min(max(self._until_s - time.monotonic(), 0.0), 3600.0))
                waiting = self._take_in() + waiting
                if time.monotonic() >= self._until_s:
                    self._stop()
        finally:
            self._stop()
            if self._pace is not None:
                self._pace.stop()

    def words(self, job: Job) -> list[str]:
        """Return the command line of a job if it began now."""
        left_s = min(self._until_s - time.monotonic(), 1e6) - ENDING_S
        return job.words(sys.executable, self.out / job.name, max(left_s, 0.0))

    def _waiting(self) -> list[Folder]:
        waiting = []
        for folder in self.folders:
            if folder.is_done():
                self.told[folder.job.name] = "done before"
            elif folder.job.num_gpus > len(self._gpus):
                self.told[folder.job.name] = f"needs {folder.job.num_gpus} GPUs"
            else:
                waiting.append(folder)
        return waiting

    def _fast_enough(self, waiting: list[Folder]) -> list[Folder]:
        if self._pace is None or not self._min_pace:
            return waiting
        found = self._pace.first(FIRST_SAMPLES)
        self._say(f"the host makes {found:.1f} million turns a second")
        if found >= self._min_pace:
            return waiting
        for folder in waiting:
            if folder.job.fast_host:
                self.told[folder.job.name] = "host too slow"
        return [folder for folder in waiting if not folder.job.fast_host]

    def _start(self, waiting: list[Folder]) -> list[Folder]:
        """Start what there are GPUs for, in order, and return the rest.

        Where one waits for GPUs, only those behind it go first that should end before what runs now does.
        """
        rest: list[Folder] = []
        until_s = self._until_s
        for folder in waiting:
            job = folder.job
            busy = {gpu for running in self._running for gpu in running.gpus}
            free = [gpu for gpu in self._gpus if gpu not in busy]
            if time.monotonic() + job.needs_s > self._until_s:
                self.told[job.name] = "no time left"  # nor later
            elif job.num_gpus > len(free):
                if not rest:
                    until_s = max(running.began_s + running.folder.job.expected_s for running in self._running)
                rest.append(folder)
            elif rest and time.monotonic() + job.expected_s > until_s:
                rest.append(folder)
            else:
                self._begin(folder, free[: job.num_gpus])
        return rest

    def _begin(self, folder: Folder, gpus: list[str]) -> None:
        words = self.words(folder.job)
        folder.begin(words, gpus, time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()))
        self._say(f"{folder.job.name} on GPU {','.join(gpus)}: {shlex.join(words)}")
        environment = {**os.environ, **folder.job.variables(), "CUDA_VISIBLE_DEVICES": ",".join(gpus)}
        own = set().union(*(self._cpus.get(gpu, set()) for gpu in gpus))
        with (folder.path / LOG).open("ab") as log, running_on(own):
            # a group of its own, to be stopped with all it starts, but no session: what ends the campaign's ends it
            process = subprocess.Popen(
                words, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log, process_group=0
            )
        waiter = threading.Thread(target=self._wait_for, args=(process,), daemon=True)
        waiter.start()
        self._running.append(Running(folder, gpus, process, waiter, time.monotonic()))

    def _wait_for(self, process: subprocess.Popen[bytes]) -> None:
        process.wait()
        self._ends.put(None)

    def _take_in(self) -> list[Folder]:
        """Note what has ended, and return what is to be tried once more."""
        again = []
        for running in [r for r in self._running if not r.waiter.is_alive()]:
            kill_group(running.process.pid)  # what it left would keep the card
            missing = running.folder.missing()
            state = FAILED if running.process.returncode else UNFINISHED if missing else DONE
            if state == FAILED and self._lasted_s(running) < AT_ONCE_S and running.folder not in self._again:
                again.append(running.folder)
            self._ended(running, state, f"has not made {', '.join(missing)}" if state == UNFINISHED else "")
        self._again += again
        return again

    def _stop(self) -> None:
        """Stop all that runs: SIGTERM, then SIGKILL; what has ended meanwhile has ended."""
        self._take_in()
        for running in self._running:
            with suppress(ProcessLookupError):
                os.killpg(running.process.pid, signal.SIGTERM)
        until_s = time.monotonic() + GRACE_S
        for running in self._running:
            running.waiter.join(max(0.0, until_s - time.monotonic()))
        for running in self._running:
            kill_group(running.process.pid)
        for running in list(self._running):
            running.waiter.join(KILL_S)
            self._ended(running, STOPPED)

    def _lasted_s(self, running: Running) -> float:
        return time.monotonic() - running.began_s

    def _ended(self, running: Running, state: str, why: str = "") -> None:
        self._running.remove(running)
        folder, seconds = running.folder, self._lasted_s(running)
        code = running.process.returncode
        pace = self._pace.since(running.began_s) if self._pace is not None else None
        folder.end(state, seconds, code, pace)
        self.told[folder.job.name] = state
        why = f" with exit code {code}, see {folder.path / LOG}" if state == FAILED else f" {why}" if why else ""
        at = f", host at {pace} million turns a second" if pace is not None else ""
        self._say(f"{folder.job.name} {state}{why} after {seconds:.0f} s{at}")
        self._pack()

    def _pack(self) -> None:
        """Have what is there of any job packed, by the first of the GPUs it was last on."""
        folders: dict[str, list[Path]] = defaultdict(list)
        for folder in self.folders:
            if slices := folder.state["slices"]:
                folders[slices[-1]["gpus"][0]].append(folder.path)
        self._packed(folders)

    def table(self) -> Iterator[tuple[str, str, str, str]]:
        """Yield job, state, seconds of all slices, and what it made."""
        for folder in self.folders:
            job = folder.job
            made = [f"{name} {_size(folder.path / name)}" for name in job.makes if (folder.path / name).exists()]
            made = made if len(made) <= 4 else [f"{len(made)} of {len(job.makes)} files"]
            yield job.name, self.told.get(job.name, "waits"), f"{folder.seconds():.0f}", ", ".join(made)


@contextmanager
def running_on(cpus: set[int]) -> Iterator[None]:
    """Have what this thread starts meanwhile run on these CPUs; none named: on any."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus or before)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def kill_group(leader: int) -> None:
    """Kill what is left of a process group."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(leader, signal.SIGKILL)


def _size(path: Path) -> str:
    size = path.stat().st_size
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"
