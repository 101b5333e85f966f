"""A workload or a trace in words and numbers, for the terminal."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from simmoe.traces.reader import Trace

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
        parts.append(f"{source['trace']}: original {source['file']} (sha256 {source['sha256'][:12]}{published})")
        parts.append(f"{filtered['rows_kept']:,} of {source['rows']:,} rows kept")
        if source["failed_requests_left_out"]:
            parts.append(f"{source['failed_requests_left_out']:,} failed requests left out")
    low, high = filtered["min_total_tokens"], filtered["max_total_tokens"]
    if low is not None or high is not None:
        parts.append(f"total tokens {'' if low is None else low}..{'' if high is None else high}")
    if clip := source["clip"]:
        parts.append(f"{clip['prompts_shortened']:,} prompts shortened to fit {clip['total_tokens']:,} tokens")
    return ", ".join(parts)


def statistics(trace: Trace) -> dict[str, dict[str, float]]:
    """Return mean, extremes and PERCENTILES of prompt, output and total tokens.

    Returns:
        ``{"prompt_tokens": {"mean": ..., "min": ..., "p50": ..., "max": ...}, ...}``
    """
    columns = {
        "prompt_tokens": trace.prompt_tokens,
        "output_tokens": trace.output_tokens,
        "total_tokens": trace.prompt_tokens + trace.output_tokens,
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
