"""The table of steps, kept only when a run records it."""

from __future__ import annotations

from typing import Any

import numpy as np

from simmoe.records import STEP_COLUMNS, Columns
from simmoe.simulator.step import Step
from simmoe.simulator.stretch import Stretch

MODE = "uniform"
"""Every token of a step runs at the step's one budget."""


class StepLog:
    """Rows of one rank's steps, in order."""

    def __init__(self, dp_rank: int) -> None:
        self.dp_rank = dp_rank
        self._rows: list[tuple[Any, ...]] = []

    def add(self, step: Step) -> None:
        """Add a step that has ended."""
        shape = step.shape
        self._rows.append(
            (
                self.dp_rank,
                step.start_s,
                step.duration_s,
                shape.num_prefill_tokens,
                shape.num_decode_seqs,
                shape.decode_kv_tokens,
                shape.k_exec,
                shape.num_tokens * shape.k_exec,
                step.num_waiting,
                step.num_running,
                MODE,
            )
        )

    def add_stretch(self, stretch: Stretch, num_steps: int, num_waiting: int, num_running: int) -> None:
        """Add steps 1 .. num_steps - 1 of a stretch; the first is the engine's own."""
        shape = stretch.shape
        for position in range(1, num_steps):
            self._rows.append(
                (
                    self.dp_rank,
                    float(stretch.ends[position - 1]),
                    float(stretch.durations[position]),
                    0,
                    shape.num_decode_seqs,
                    stretch.kv_tokens(position),
                    shape.k_exec,
                    shape.num_decode_seqs * shape.k_exec,
                    num_waiting,
                    num_running,
                    MODE,
                )
            )

    @staticmethod
    def columns(logs: list[StepLog]) -> Columns:
        """Return the logs as one table, rank by rank."""
        rows = [row for log in logs for row in log._rows]
        table: Columns = {}
        for position, (name, kind) in enumerate(STEP_COLUMNS.items()):
            values = [row[position] for row in rows]
            table[name] = np.array(values, dtype=object if kind == "string" else kind)
        return table
