"""The workload: what both hosts replay, one row a request, in columns."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from simmoe.errors import TraceError

FloatColumn = npt.NDArray[np.float64]
IntColumn = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Workload:
    """Requests sorted by arrival, the first at 0 s.

    Raises:
        TraceError: columns of unequal length; times that are not finite, negative or unsorted; counts below 1.
    """

    request_id: Sequence[str]
    """[num_requests] unique."""
    arrival_s: FloatColumn
    """[num_requests] seconds, non-decreasing, first 0."""
    prompt_tokens: IntColumn
    """[num_requests] >= 1."""
    output_tokens: IntColumn
    """[num_requests] >= 1; known to the host that replays, never to a policy."""
    k_qos: IntColumn
    """[num_requests] routing budget each request brings, >= 1, in sub-expert units."""
    prefix_hashes: Sequence[tuple[int, ...]] | None = None
    """[num_requests] hash ids of the prompt's consecutive blocks (Mooncake), or None where the trace has none."""
    prefix_block_tokens: int = 512
    """Tokens a hash id covers (Mooncake: 512); the last id of a prompt may cover fewer."""
    source: dict[str, object] = field(default_factory=dict)
    """Where the rows came from and what was done to them, for the manifest; plain JSON data."""

    def __post_init__(self) -> None:
        n = len(self.request_id)
        for name in ("arrival_s", "prompt_tokens", "output_tokens", "k_qos"):
            column = getattr(self, name)
            if len(column) != n:
                raise TraceError(f"workload column '{name}' has {len(column)} rows where request_id has {n}")
            if name != "arrival_s" and n and int(column.min()) < 1:
                row = int(column.argmin())
                raise TraceError(f"workload row {row}: {name} is {int(column[row])}; it must be at least 1")
        if self.prefix_hashes is not None and len(self.prefix_hashes) != n:
            raise TraceError(f"workload column 'prefix_hashes' has {len(self.prefix_hashes)} rows, not {n}")
        if n:
            if not np.isfinite(self.arrival_s).all():
                row = int((~np.isfinite(self.arrival_s)).argmax())
                raise TraceError(f"workload row {row}: arrival_s is {self.arrival_s[row]}; it must be finite")
            if self.arrival_s[0] != 0 or (np.diff(self.arrival_s) < 0).any():
                raise TraceError("workload arrivals must be sorted and start at 0 s")

    def __len__(self) -> int:
        return len(self.request_id)
