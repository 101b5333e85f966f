"""The budget schedulers with a script: which k a decode step runs at, and how many tokens a step may compute."""

from __future__ import annotations

from collections import deque
from typing import Any

from simmoe.live.engine.scheduler import AsyncBudgetScheduler, BudgetScheduler
from simmoe.live.engine.steps import BatchSummary, StepRecorder


class ScriptMixin:
    """Runs a population of sequences through a list of budgets, one step each."""

    recorder: StepRecorder | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._full_budget: int = self.max_num_scheduled_tokens
        self._decode_seqs = 0
        self._decode_ks: deque[int] = deque()
        self._hold_after = False

    def hold(self) -> None:
        """Compute nothing until the next script, so that requests gather."""
        self.max_num_scheduled_tokens = 0

    def script(
        self, decode_seqs: int, decode_ks: list[int], max_num_scheduled_tokens: int, hold_after: bool = False
    ) -> None:
        """Set the script; it replaces the one before and ends a hold.

        Args:
            decode_seqs: steps that decode exactly this many sequences, and compute no prompt, take the next of
                ``decode_ks`` as their budget, until none is left.
            decode_ks: budgets, in order; each must be one the engine can execute.
            max_num_scheduled_tokens: tokens a step may compute; 0 for the engine's own limit.
            hold_after: hold once ``decode_ks`` has run out.
        """
        self._decode_seqs = decode_seqs
        self._decode_ks = deque(decode_ks)
        self._hold_after = hold_after
        self.max_num_scheduled_tokens = max_num_scheduled_tokens or self._full_budget

    def script_left(self) -> int:
        """Return the budgets of the script still to come, and the steps under way."""
        return len(self._decode_ks) + (self.recorder.num_open if self.recorder is not None else 0)

    def step_k(self, batch: BatchSummary) -> int:
        """Return the script's budget where it applies, else the batch's own."""
        shape = batch.shape
        if self._decode_ks and not shape.num_prefill_tokens and shape.num_decode_seqs == self._decode_seqs:
            k = self._decode_ks.popleft()
            if self._hold_after and not self._decode_ks:
                self.hold()
            return k
        return super().step_k(batch)  # type: ignore[misc, no-any-return]


class ScriptedScheduler(ScriptMixin, BudgetScheduler):
    """The synchronous one."""


class AsyncScriptedScheduler(ScriptMixin, AsyncBudgetScheduler):
    """The asynchronous one."""
