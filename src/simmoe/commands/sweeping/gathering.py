"""Cells run where they are not kept already, and kept as they end: what makes sweeps and searches resumable."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing

from simmoe.commands.evidence import save_evidence
from simmoe.commands.sweeping.cells import Cell, CellResult
from simmoe.commands.sweeping.executor import Executor
from simmoe.commands.sweeping.progress import Progress
from simmoe.commands.sweeping.sources import cell_key
from simmoe.commands.sweeping.store import SweepStore
from simmoe.errors import PolicyError, SimmoeError


def gather(cells: Sequence[Cell], store: SweepStore, executor: Executor, progress: Progress) -> list[CellResult]:
    """Return every cell's result, in order: from the store if it is kept there, else run and kept.

    Raises:
        SimmoeError: of the class of the first failure, naming the cell; the other cells are run and kept.
    """
    keys = [cell_key(cell) for cell in cells]
    done: dict[int, CellResult] = {}
    for index, key in enumerate(keys):
        kept = store.load(key)
        if kept is not None:
            done[index] = kept
    progress.advance(len(done), resumed=True)
    missing = [index for index in range(len(cells)) if index not in done]
    failures: dict[int, SimmoeError] = {}
    with closing(executor.run([cells[index] for index in missing])) as events:
        for event in events if missing else ():
            if event is None:
                progress.tick()
                continue
            index, outcome = missing[event[0]], event[1]
            if isinstance(outcome, SimmoeError):
                failures[index] = outcome
            else:
                store.save(keys[index], cells[index].inputs(), outcome)
                done[index] = outcome
            progress.advance(1)
    if failures:
        first = min(failures)
        failure = failures[first]
        if isinstance(failure, PolicyError):
            failure = save_evidence(failure, store.folder)
        others = f"; {len(failures) - 1} more cells failed" if len(failures) > 1 else ""
        rest = f"finished cells ({store.num_cells()}) are kept in '{store.folder}'"
        raise type(failure)(f"{cells[first].label}: {failure}{others}; {rest}")
    return [done[index] for index in range(len(cells))]
