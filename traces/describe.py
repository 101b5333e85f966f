"""A workload or a trace in words and numbers, for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from simmoe.traces.workload import Workload

PERCENTILES = (50, 75, 90, 99)


def source_line(source: Mapping[str, Any]) -> str:
    """Return one line on where a workload's lengths came from and what was left out or altered.

    Args:
        source: ``Workload.source``.
    """
    filtered = source["filter"]
    parts: list[str] = []
    if source["lengths"] == "shipped summary":
        parts.append(
            f"{source['trace']}: shipped summary of {source['summary_of']['original']['file']}, not the original"
        )
        parts.append(f"{filtered['rows_kept']:,} requests counted")
    else:
        published = {True: ", as published", False: ", NOT the published bytes", None: ""}[source.get("as_published")]
        name = "" if source["trace"] == source["file"] else f"{source['trace']}: original "
        parts.append(f"{name}{source['file']} (sha256 {source['sha256'][:12]}{published})")
        parts.append(f"{filtered['rows_kept']:,} of {source['rows']:,} rows kept")
        if source["failed_requests_left_out"]:
            parts.append(f"{source['failed_requests_left_out']:,} failed requests left out")
    low, high = filtered["min_total_tokens"], filtered["max_total_tokens"]
    if low is not None or high is not None:
        parts.append(f"total tokens {'' if low is None else low}..{'' if high is None else high}")
    if clip := source["clip"]:
        parts.append(f"{clip['prompts_shortened']:,} prompts shortened to fit {clip['total_tokens']:,} tokens")
    return ", ".join(parts)


def statistics(workload: Workload) -> dict[str, dict[str, float]]:
    """Return mean, extremes and PERCENTILES of prompt, output and total tokens.

    Returns:
        ``{"prompt_tokens": {"mean": ..., "min": ..., "p50": ..., "max": ...}, ...}``
    """
    columns = {
        "prompt_tokens": workload.prompt_tokens,
        "output_tokens": workload.output_tokens,
        "total_tokens": workload.prompt_tokens + workload.output_tokens,
    }
    out: dict[str, dict[str, float]] = {}
    for name, column in columns.items():
        percentiles = np.percentile(column, PERCENTILES)
        out[name] = {
            "mean": float(column.mean()),
            "min": float(column.min()),
            **{f"p{p}": float(value) for p, value in zip(PERCENTILES, percentiles, strict=True)},
            "max": float(column.max()),
        }
    return out


def correlation(workload: Workload) -> float | None:
    """Return Pearson's correlation of prompt and output lengths; None where one of them is constant."""
    if np.ptp(workload.prompt_tokens) == 0 or np.ptp(workload.output_tokens) == 0:
        return None
    return float(np.corrcoef(workload.prompt_tokens, workload.output_tokens)[0, 1])


def gap_variation(workload: Workload) -> float | None:
    """Return the coefficient of variation of the gaps between arrivals (Poisson: 1); None if all are at one time."""
    gaps = np.diff(workload.arrival_s)
    return float(gaps.std() / gaps.mean()) if len(gaps) and gaps.mean() > 0 else None


def repeated_blocks(hashes: Sequence[tuple[int, ...]]) -> float:
    """Return the share of prompt blocks whose hash id an earlier block has: the reuse an endless prefix cache sees."""
    ids = [block for run in hashes for block in run]
    return 1 - len(set(ids)) / len(ids) if ids else 0.0
