"""The shipped summary of the Azure conversation lengths: a joint histogram, made from the original and sampled here.

``python -m simmoe.traces.summary AzureLLMInferenceTrace_conv.csv [OUT]`` writes it. It holds counts of (prompt, output)
cells after the paper's filter, at most 64 x 64, and no row of the original.

Attribution: Azure LLM inference trace 2023, Microsoft, CC-BY 4.0; cite Splitwise (ISCA 2024).
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from simmoe.errors import TraceError
from simmoe.traces.catalog import CONV_2023, PAPER_TOTAL_TOKENS
from simmoe.traces.reader import read_trace

IntColumn = npt.NDArray[np.int64]

SHIPPED = Path(__file__).parent / "data" / "azure_conv_2023_1024_2048.json"
MAX_BINS = 64
_QUANTILES = 36
_EVEN_BINS = 12
_SPIKE_SHARE = 0.01
_SCHEMA = 1


@dataclass(frozen=True, slots=True, eq=False)
class Summary:
    """A joint histogram of prompt and output lengths, all within bounds on their sum."""

    prompt_edges: IntColumn
    """[num_prompt_bins + 1]; bin i holds prompts in ``edges[i] .. edges[i + 1] - 1``."""
    output_edges: IntColumn
    """[num_output_bins + 1]; as for prompts."""
    cells: IntColumn
    """[num_cells, 3] prompt bin, output bin, number of requests; every cell that is not empty."""
    total_tokens: tuple[int, int]
    """Least and greatest prompt + output."""
    about: dict[str, Any]
    """Original, licence, citation; plain JSON data."""

    def __len__(self) -> int:
        """The number of requests counted."""
        return int(self.cells[:, 2].sum())

    def lengths(self, rows: IntColumn, rng: np.random.Generator) -> tuple[IntColumn, IntColumn]:
        """Return prompt and output lengths of the counted requests ``rows``.

        Request r lies in the cell that the counts, laid end to end, put at r: taking every row once gives each cell as
        often as the original has it. Within its cell a request is uniform over the points whose sum is within bounds.

        Args:
            rows: [n] int64 in ``0 .. len(self) - 1``.
            rng: draws the points.
        Returns:
            prompt_tokens, output_tokens: [n] int64 each.
        """
        cell = np.searchsorted(np.cumsum(self.cells[:, 2]), rows, side="right")
        i, j = self.cells[cell, 0], self.cells[cell, 1]
        prompt, output = np.empty_like(rows), np.empty_like(rows)
        low, high = self.total_tokens
        left = np.arange(len(rows))
        while len(left):
            prompt[left] = rng.integers(self.prompt_edges[i[left]], self.prompt_edges[i[left] + 1])
            output[left] = rng.integers(self.output_edges[j[left]], self.output_edges[j[left] + 1])
            total = prompt[left] + output[left]
            left = left[(total < low) | (total > high)]
        return prompt, output


@functools.lru_cache(maxsize=1)
def shipped() -> tuple[Summary, str]:
    """Return the summary in the package and its sha256."""
    content = SHIPPED.read_bytes()
    data = json.loads(content)
    assert data["schema_version"] == _SCHEMA, data["schema_version"]
    low, high = data["total_tokens"]
    summary = Summary(
        prompt_edges=np.array(data["prompt_edges"], dtype=np.int64),
        output_edges=np.array(data["output_edges"], dtype=np.int64),
        cells=np.array(data["cells"], dtype=np.int64).reshape(-1, 3),
        total_tokens=(low, high),
        about=data["about"],
    )
    return summary, hashlib.sha256(content).hexdigest()


def summarize(prompt: IntColumn, output: IntColumn, about: dict[str, Any]) -> dict[str, Any]:
    """Return the summary of lengths within PAPER_TOTAL_TOKENS as plain JSON data."""
    low, high = PAPER_TOTAL_TOKENS
    keep = (prompt + output >= low) & (prompt + output <= high)
    prompt, output = prompt[keep], output[keep]
    prompt_edges, output_edges = _edges(prompt), _edges(output)
    i = np.searchsorted(prompt_edges, prompt, side="right") - 1
    j = np.searchsorted(output_edges, output, side="right") - 1
    cells, counts = np.unique(np.stack([i, j], axis=1), axis=0, return_counts=True)
    return {
        "schema_version": _SCHEMA,
        "about": about,
        "total_tokens": [low, high],
        "prompt_edges": prompt_edges.tolist(),
        "output_edges": output_edges.tolist(),
        "cells": [[*map(int, cell), int(count)] for cell, count in zip(cells, counts, strict=True)],
    }


def _edges(values: IntColumn) -> IntColumn:
    """Return integer bin edges.

    Quantiles hold the marginal, even steps the tails (and with them the correlation), and a value that more than a
    hundredth of all requests share has a bin of its own.
    """
    quantiles = np.quantile(values, np.linspace(0, 1, _QUANTILES + 1), method="lower").astype(np.int64)
    even = np.linspace(values.min(), values.max() + 1, _EVEN_BINS + 1).astype(np.int64)
    distinct, counts = np.unique(values, return_counts=True)
    spikes = distinct[counts > _SPIKE_SHARE * len(values)]
    edges = np.unique(np.concatenate([quantiles, even, spikes, spikes + 1]))
    assert len(edges) - 1 <= MAX_BINS, len(edges)
    return edges


def main(argv: list[str]) -> None:
    """Write the summary of the original named first to the path named second, by default into the package."""
    if not 1 <= len(argv) <= 2:
        sys.exit("usage: python -m simmoe.traces.summary AzureLLMInferenceTrace_conv.csv [OUT]")
    trace = read_trace(Path(argv[0]))
    if trace.source["sha256"] != CONV_2023.sha256:
        raise TraceError(f"'{argv[0]}' is not {CONV_2023.file_name} as published: its sha256 differs")
    about = {
        "original": {name: trace.source[name] for name in ("file", "sha256", "rows")},
        "url": CONV_2023.url,
        "license": CONV_2023.license,
        "citation": CONV_2023.citation,
    }
    data = summarize(trace.prompt_tokens.astype(np.int64), trace.output_tokens.astype(np.int64), about)
    lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in data.items()]
    Path(argv[1] if len(argv) == 2 else SHIPPED).write_text("{\n" + ",\n".join(lines) + "\n}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
