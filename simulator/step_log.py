"""The table of steps, kept only when a run records it."""

from __future__ import annotations

from typing import Any

import numpy as np

from simmoe.records import STEP_COLUMNS, Columns
from simmoe.simulator.step import Step

MODE = "uniform"
"""Every token of a step runs at the step's one budget."""


class StepLog:
    """Rows of one rank's steps, in order."""

    def __init__(self, dp_rank: int) -> None:
        self.dp_rank = dp_rank
        self._rows: list[tuple[Any, ...]] = []

    def add(self, step: Step) -> None:
        """Add a step that has ended."""
        self._rows.append(
            (
                self.dp_rank,
                step.start_s,
                step.duration_s,
                step.num_prefill_tokens,
                step.num_decode_seqs,
                step.kv_tokens,
                step.k_exec,
                step.num_tokens * step.k_exec,
                step.num_waiting,
                step.num_running,
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
