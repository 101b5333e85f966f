"""Where cells run: in this process, or over its cores. A cluster is one more class with the same method."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Generator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from multiprocessing.connection import wait as wait_for_sentinels
from multiprocessing.sharedctypes import Synchronized
from multiprocessing.util import Finalize
from typing import Protocol

from simmoe.commands.sweeping.cells import Cell, CellResult, run_cell
from simmoe.ending import end_despite_threads
from simmoe.errors import SimmoeError
from simmoe.interrupts import ctrl_c_later, sigint_blocked

Outcome = CellResult | SimmoeError
Outcomes = Generator[tuple[int, Outcome] | None, None, None]


class Executor(Protocol):
    """Runs cells. Cells are pure data, independent and idempotent, so any number may run anywhere, in any order."""

    def run(self, cells: Sequence[Cell]) -> Outcomes:
        """Yield (index, outcome) as cells end, in any order, each index once.

        A failure that is the cell's own is an outcome; the others go on. None, now and then, means still at work.
        Closing the iterator abandons what has not ended.
        """
        ...


def attempt(cell: Cell) -> Outcome:
    """Run a cell; a failure simmoe reports on purpose is its outcome."""
    try:
        return run_cell(cell)
    except SimmoeError as error:
        return error


class SerialExecutor:
    """Cells one after another in this process."""

    def run(self, cells: Sequence[Cell]) -> Outcomes:
        """Yield outcomes in order."""
        for index, cell in enumerate(cells):
            yield index, attempt(cell)


class LocalExecutor:
    """Cells over processes of this machine."""

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        # Forked workers start in milliseconds with everything imported; elsewhere than on Linux forking is not safe.
        self._context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
        self._told: Synchronized[int] = self._context.Value("b", 0)

    def run(self, cells: Sequence[Cell]) -> Outcomes:
        """Yield outcomes as they come, and None five times a second. Ctrl-C is heard as often, and between outcomes.

        Raises:
            SimmoeError: a worker was killed.
        """
        num_workers = min(self.jobs, len(cells))
        # Ctrl-C anywhere within the starting or the ending of a pool would leave half of one behind.
        with ctrl_c_later() as interrupts:
            pool = ProcessPoolExecutor(num_workers, self._context, initializer=_start_worker, initargs=(self._told,))
            is_done = False
            try:
                with warnings.catch_warnings(), sigint_blocked():  # in workers, too: Ctrl-C is the parent's
                    # Python 3.12 warns of forking beside threads; here are only BLAS's own, idle and fork-safe.
                    warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
                    index_of = {pool.submit(attempt, cell): index for index, cell in enumerate(cells)}
                pending: set[Future[Outcome]] = set(index_of)
                while pending:
                    done, pending = wait(pending, timeout=0.2, return_when=FIRST_COMPLETED)
                    ended = sorted(done, key=index_of.__getitem__)
                    for future in (*ended,) or (None,):
                        if interrupts:
                            raise KeyboardInterrupt
                        yield (index_of[future], future.result()) if future else None
                is_done = True
            except BrokenProcessPool:
                raise SimmoeError(
                    "a worker process was killed (out of memory?); repeat the command, perhaps with fewer --jobs"
                ) from None
            finally:
                # Nothing of a cell that is left is worth waiting for. The pool's own thread is: Python wakes it when it
                # ends, and has a traceback printed where it has just closed what it is woken by.
                for child in () if is_done else multiprocessing.active_children():
                    child.kill()
                pool.shutdown(cancel_futures=True)


def local_executor(jobs: int) -> Executor:
    """Return the executor for a number of processes."""
    return LocalExecutor(jobs) if jobs > 1 else SerialExecutor()


def _start_worker(told: Synchronized[int]) -> None:
    """Leave Ctrl-C to the parent, do not outlive it, and end when told, whatever threads a policy has started.

    Args:
        told: 1 once a worker has named threads that do not end. The next cells' will not either: workers from then on
            neither wait for theirs nor name them again.
    """
    gc.freeze()  # what the parent has imported and read stays: no use in searching it for garbage
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # it was born with it blocked
    threading.Thread(target=_exit_with_parent, daemon=True).start()

    def tell(line: str) -> None:
        with told.get_lock():
            is_known, told.value = bool(told.value), 1
        if not is_known:
            print(f"simmoe: a worker process {line}", file=sys.stderr)

    def end() -> None:
        end_despite_threads(0, tell, 0.0 if told.value else None)

    Finalize(None, end, exitpriority=0)  # before the process waits for its threads


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait_for_sentinels([parent.sentinel])
    os._exit(1)
