"""Trace files as published: which columns hold what. A file's format is told by its header, never by its name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from simmoe.errors import TraceError


@dataclass(frozen=True, slots=True)
class Format:
    """One layout of columns."""

    name: str
    arrival: str
    """Column of arrival times."""
    prompt: str
    """Column of prompt lengths, tokens."""
    output: str
    """Column of output lengths, tokens."""
    ticks_per_second: int | None
    """Unit of the arrival column when it counts; None when it holds dates and times of day."""
    request_id: str = "request_id"
    """Optional column of names; simmoe's own columns are read in every format that lacks one of the publisher's."""
    k_qos: str = "k_qos"
    """Optional column of routing budgets."""
    prefix_hashes: str = "prefix_hashes"
    """Optional column of hash ids, one for each consecutive block of ``prefix_block_tokens`` prompt tokens."""
    prefix_block_tokens: int = 512
    zero_output_is_failure: bool = False
    """Whether the publisher records a failed request as one with no output; such rows are left out and counted."""

    @property
    def required(self) -> tuple[str, str, str]:
        """The columns a file must have."""
        return (self.arrival, self.prompt, self.output)

    @property
    def optional(self) -> tuple[str, ...]:
        """The columns a file may have."""
        return (self.request_id, self.k_qos, self.prefix_hashes)


AZURE = Format("azure", "TIMESTAMP", "ContextTokens", "GeneratedTokens", ticks_per_second=None)
MOONCAKE = Format(
    "mooncake", "timestamp", "input_length", "output_length", ticks_per_second=1000, prefix_hashes="hash_ids"
)
BURSTGPT = Format(
    "burstgpt", "Timestamp", "Request tokens", "Response tokens", ticks_per_second=1, zero_output_is_failure=True
)
PLAIN = Format("plain", "arrival_s", "prompt_tokens", "output_tokens", ticks_per_second=1)

FORMATS = (PLAIN, AZURE, MOONCAKE, BURSTGPT)


def detect(columns: Sequence[str], where: str) -> Format:
    """Return the format whose required columns are all among ``columns``.

    Args:
        columns: the header's names.
        where: the file, for messages.
    Raises:
        TraceError: a name stands twice, or no format's columns are all there; the message names the nearest format's
            missing columns.
    """
    for name in columns:
        if columns.count(name) > 1:
            raise TraceError(f"{where}: column '{name}' stands twice in the header; rename or remove one")
    found = set(columns)
    for candidate in FORMATS:
        if found.issuperset(candidate.required):
            return candidate
    nearest = max(FORMATS, key=lambda candidate: len(found.intersection(candidate.required)))
    missing = ", ".join(f"'{name}'" for name in nearest.required if name not in found)
    seen = ", ".join(columns)
    if found.isdisjoint(nearest.required):
        layouts = "; ".join(f"{candidate.name}: {', '.join(candidate.required)}" for candidate in FORMATS)
        raise TraceError(f"{where}: no known header; found '{_short(seen)}'; name the columns as one of {layouts}")
    raise TraceError(
        f"{where}: missing column {missing} of the {nearest.name} format; found '{_short(seen)}'; add or rename it"
    )


def _short(text: str) -> str:
    return text if len(text) <= 120 else text[:117] + "..."
