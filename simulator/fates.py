"""What became of each request, by row of the workload."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from simmoe.records import Columns
from simmoe.simulator.request import SimRequest
from simmoe.traces.workload import Workload


class Fates:
    """The request table in the making; an engine's listener."""

    def __init__(self, workload: Workload, egress_s: float) -> None:
        size = len(workload)
        self.workload = workload
        self.egress_s = egress_s
        self.on_finished: Callable[[SimRequest, int], None] = lambda request, rank: None
        """Called when a request has finished, with its rank."""
        self.dp_rank = np.full(size, -1, dtype=np.int64)
        """Rank each request was routed to; -1: none."""
        self.rejections: Counter[str] = Counter()
        """Rejected requests by reason."""
        self.end_s = 0.0
        """The latest time a client received a token."""
        self._dispatched_s = np.full(size, np.nan)
        self._scheduled_s = np.full(size, np.nan)
        self._first_token_s = np.full(size, np.nan)
        self._finished_s = np.full(size, np.nan)
        self._num_preemptions = np.zeros(size, dtype=np.int64)
        self._status = np.full(size, "queued", dtype=object)

    def rejected(self, row: int, reason: str) -> None:
        """Record that a request can never be served."""
        self._status[row] = "rejected"
        self.rejections[reason] += 1

    def dispatched(self, row: int, now_s: float) -> None:
        """Record that a request has reached its rank."""
        self._dispatched_s[row] = now_s

    def scheduled(self, request: SimRequest, start_s: float) -> None:
        """Record the first start of a request; later ones follow a preemption."""
        if not request.num_preemptions:
            self._scheduled_s[request.row] = start_s

    def token(self, request: SimRequest, out_s: float) -> None:
        """Record the first output token; one that decoded before it was preempted has had its own."""
        if not request.num_preemptions or np.isnan(self._first_token_s[request.row]):
            self._first_token_s[request.row] = out_s + self.egress_s

    def finished(self, request: SimRequest, dp_rank: int, out_s: float) -> None:
        """Record the last output token; it comes after the first, however many tokens that one had to wait for."""
        row = request.row
        finished_s = self._finished_s[row] = max(out_s + self.egress_s, self._first_token_s[row])
        self._num_preemptions[row] = request.num_preemptions
        self._status[row] = "finished"
        self.end_s = max(self.end_s, finished_s)
        self.on_finished(request, dp_rank)

    def left_over(self, request: SimRequest, running: bool) -> None:
        """Record how a request stood when the simulation was stopped."""
        self._status[request.row] = "running" if running else "queued"
        self._num_preemptions[request.row] = request.num_preemptions

    def columns(self, num_arrived: int) -> Columns:
        """Return the table of records.REQUEST_COLUMNS over the first ``num_arrived`` requests."""
        workload = self.workload
        table = {
            "request_id": np.array(workload.request_id, dtype=object),
            "arrival_s": workload.arrival_s,
            "dispatched_s": self._dispatched_s,
            "scheduled_s": self._scheduled_s,
            "first_token_s": self._first_token_s,
            "finished_s": self._finished_s,
            "prompt_tokens": workload.prompt_tokens,
            "output_tokens": workload.output_tokens,
            "k_qos": workload.k_qos,
            "dp_rank": self.dp_rank,
            "num_preemptions": self._num_preemptions,
            "status": self._status,
        }
        return {name: column[:num_arrived] for name, column in table.items()}
