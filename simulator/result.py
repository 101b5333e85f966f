"""What a simulation returns: columns of the run record and the totals nobody needs the steps for."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from simmoe.records import Columns, RunRecord


@dataclass(slots=True)
class RankTotals:
    """Sums over one rank's steps."""

    num_steps: int = 0
    busy_s: float = 0.0
    num_prefill_tokens: int = 0
    num_decode_tokens: int = 0
    routed_slots: int = 0
    """Token-expert pairs run: tokens times executed budget."""
    qos_slots: int = 0
    """Token-expert pairs asked for: the sum of the scheduled tokens' own budgets."""
    num_preemptions: int = 0
    num_recomputed_tokens: int = 0
    """Tokens computed again after a preemption."""
    num_cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    num_plans: int = 0
    """Times the batch policy was asked."""
    kv_peak_blocks: int = 0
    """Most blocks in use at the start of a step."""


@dataclass(slots=True)
class SimResult:
    """Outcome of one simulation."""

    requests: Columns
    """As records.REQUEST_COLUMNS, in order of arrival."""
    ranks: list[RankTotals]
    end_s: float
    """When the last event happened."""
    steps: Columns | None = None
    """As records.STEP_COLUMNS, when recorded."""
    policy_state: dict[str, Any] = field(default_factory=dict)
    """Snapshots of inspectable policies: 'route', 'batch_0', 'batch_1', ..."""
    notes: dict[str, Any] = field(default_factory=dict)
    """Why requests were rejected, by reason, and other countable facts."""

    def record(self, manifest: dict[str, Any]) -> RunRecord:
        """Return the run record; ``manifest`` holds what the caller knows (config, seeds, versions, profile)."""
        full = {
            **manifest,
            "host": "simulator",
            "end_s": self.end_s,
            "ranks": [asdict(totals) for totals in self.ranks],
            "policy_state": self.policy_state,
            "notes": self.notes,
        }
        record = RunRecord(requests=self.requests, manifest=full, steps=self.steps)
        full["counts"] = record.counts()
        return record
