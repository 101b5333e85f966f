"""The routed experts of one MoE layer alone, timed, against the card's measured ceilings.

One JSON file a model, layout and card; ``simmoe.live.measure`` writes it, beside a table's samples or by itself. A
row's arithmetic and traffic follow from the shape: each token-expert pair multiplies with an expert's three matrices,
and each expert touched is read once, beside the tokens read and written. Of several cards it is what one of them does:
its share of every expert touched, or the pairs of the experts it holds whole.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from simmoe.errors import ProfileError
from simmoe.profiles.models import model_shape
from simmoe.profiles.reading import build, parse_json, read_text
from simmoe.writing import write_whole

FORMAT = "simmoe-moe-layer"
VERSION = 3

#: Version 1 has no ``num_cards`` and ``expert_parallel``: it is of one card; neither it nor 2 has ``num_layers`` and
#: ``in_engine``: they are of a table's engine.
READ = (1, 2, VERSION)

WHAT = "the layer's times"
"""What a file holds, in messages."""

COLUMNS = ("num_tokens", "k", "seconds", "distinct_experts")


class LayerTime(NamedTuple):
    """The experts of one layer at one point."""

    num_tokens: int
    k: int
    seconds: float
    distinct_experts: float
    """Experts touched, of those the card holds; the mean over layers."""


@dataclass(frozen=True, slots=True)
class LayerTimes:
    """One file.

    Raises:
        ProfileError: a ceiling, a time or a count that is not finite and above 0 (no expert touched is possible where
            each card has whole ones), or more experts than there are.
        DataError: a configuration that is not supported.
    """

    model: str
    model_config: dict[str, Any]
    """The deciding values of the configuration, split as measured."""
    dtype: str
    card: str
    date: str
    versions: dict[str, str]
    kernel: str
    matmul_flop_s: float
    """Measured ceiling: a large bf16 matrix product."""
    copy_byte_s: float
    """Measured ceiling: a large copy, bytes read and bytes written counted."""
    rows: tuple[LayerTime, ...]
    num_cards: int = 1
    """Cards that share the layer; times are of one of them, without what the others send."""
    expert_parallel: bool = False
    """Whole experts on each card, instead of a share of every expert."""
    num_layers: int = 0
    """Layers timed in turn, each with weights of its own; 0: not noted."""
    in_engine: bool = True
    """Timed in the engine that was measured; else by itself, on random weights of the shapes that engine's first card
    would hold."""

    def __post_init__(self) -> None:
        values = {"matmul_flop_s": self.matmul_flop_s, "copy_byte_s": self.copy_byte_s}
        experts = model_shape(self.model_config).num_experts
        for row in self.rows:
            at = f"{row.num_tokens} tokens, k {row.k}"
            # of few tokens all may have gone to experts that other cards hold
            none_here = self.expert_parallel and row.distinct_experts == 0
            values |= {f"{name} at {at}": getattr(row, name) for name in COLUMNS[: -1 if none_here else None]}
            if row.distinct_experts > experts:
                raise ProfileError(f"distinct_experts at {at} is {row.distinct_experts}; a layer has {experts}")
        for name, value in values.items():
            if not (math.isfinite(value) and value > 0):
                raise ProfileError(f"{name} is {value}; it must be finite and above 0")

    def flop(self, row: LayerTime) -> float:
        """Return the floating-point operations of a point on one card."""
        return 2.0 * row.num_tokens * row.k * model_shape(self.model_config).expert_weights / self.num_cards

    def bytes_moved(self, row: LayerTime) -> float:
        """Return the bytes a card must move at least: weights of the experts touched, tokens in and out, in bf16."""
        shape = model_shape(self.model_config)
        held = shape.expert_weights / (1 if self.expert_parallel else self.num_cards)
        return 2.0 * (row.distinct_experts * held + 2 * row.num_tokens * shape.hidden_size)

    def bound_s(self, row: LayerTime) -> float:
        """Return the seconds the card's ceilings allow: the roofline."""
        return max(self.flop(row) / self.matmul_flop_s, self.bytes_moved(row) / self.copy_byte_s)


def write_layer_times(path: str | os.PathLike[str], times: LayerTimes) -> None:
    """Write a file, one row a line.

    Raises:
        OutputError: it cannot be written.
    """
    head = {"format": FORMAT, "version": VERSION, **asdict(times), "columns": COLUMNS}
    rows = head.pop("rows")
    text = json.dumps(head, indent=1)[:-2] + ',\n "rows": [\n  '
    text += ",\n  ".join(json.dumps(list(row)) for row in rows) + "\n ]\n}\n"
    write_whole(path, text.encode(), WHAT)


def read_layer_times(path: str | os.PathLike[str]) -> LayerTimes:
    """Read a file.

    Raises:
        ProfileError: names the file and what is wrong with it.
    """
    name = os.fspath(path)
    data = parse_json(read_text(path, "the layer's times"), f"'{name}'")
    if not isinstance(data, dict) or data.pop("format", None) != FORMAT or data.pop("version", None) not in READ:
        raise ProfileError(f"'{name}' holds no layer times of version {VERSION} or before")
    if data.pop("columns", None) != list(COLUMNS):
        raise ProfileError(f"'{name}' does not have the columns {', '.join(COLUMNS)}")
    try:
        rows = tuple(_rows(data.get("rows")))
    except ProfileError as error:
        raise ProfileError(f"'{name}' {error}") from None
    return build(LayerTimes, {**data, "rows": rows}, f"'{name}'")


def _rows(rows: Any) -> Iterator[LayerTime]:
    if not isinstance(rows, list) or not rows:
        raise ProfileError("has no rows")
    seen: set[tuple[int, int]] = set()
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, list) or len(row) != len(COLUMNS):
            raise ProfileError(f"row {number} is {row!r}; it must have {len(COLUMNS)} values")
        time = build(LayerTime, dict(zip(COLUMNS, row, strict=True)), f"row {number}")
        if (time.num_tokens, time.k) in seen:
            raise ProfileError(f"row {number}: {time.num_tokens} tokens, k {time.k} are there twice")
        seen.add((time.num_tokens, time.k))
        yield time
