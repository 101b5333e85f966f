"""The cost of a step, composed from a profile's table.

A step of n tokens at budget k occupies the device for

* decode only: ``decode(n, k) + per_kv_token(n) * KV tokens``;
* with prompt tokens: ``prefill(n, k)`` plus what query-key pairs, prompts, decode sequences, their KV tokens and having
  both add, a share of what the decode sequences take alone among it, and no less than all that they take alone;

and the host for ``base + per sequence``, by launch path; more with prompts beside decodes where those are launched
apart.
With asynchronous scheduling the host composes the next step while the device runs this one, and in a train of like
steps each lasts as long as the slower of the two. Of the host's share ``update`` follows the step's output, and all but
``graph_tail`` of a graph's launch is over before the device can begin it.

With synchronous scheduling a step is composed when the one before has been taken in. The host prepares its inputs, and
then launches one graph, or the pieces of one, or kernels one by one: whichever, the device begins when it would begin
the graph of as many decoding sequences. Once both it and the launch are done the step is taken in.

Every term is non-negative and none falls as any part of the shape grows, so neither does a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from simmoe.profiles.beyond import Rooflines
from simmoe.profiles.grid import Grid
from simmoe.profiles.interpolation import interpolated
from simmoe.profiles.shape import DecodeLine, StepParts, StepShape
from simmoe.profiles.table import NO_SHARE, GridTable, HostShare, StepTable

#: T(n, k) is asked without saying how many prompts the n tokens are; prompts of this length are assumed.
PROMPT_TOKENS = 1024


def prompt_shape(num_tokens: int, k_exec: int) -> StepShape:
    """Return the shape T(n, k) is asked at: n prompt tokens, taken as prompts of PROMPT_TOKENS and a remainder."""
    whole, rest = divmod(num_tokens, PROMPT_TOKENS)
    pairs = whole * (PROMPT_TOKENS * (PROMPT_TOKENS + 1) // 2) + rest * (rest + 1) // 2
    return StepShape(num_tokens, pairs, whole + (rest > 0), 0, 0, k_exec)


class Surfaces(NamedTuple):
    """A table made ready to be asked; shared by every cost object of a profile."""

    prefill: Grid
    decode: Grid
    table: StepTable

    @classmethod
    def of(cls, table: StepTable) -> Surfaces:
        """Prepare a table."""

        def grid(points: GridTable, real_share: Sequence[tuple[int, float]], *, decode: bool) -> Grid:
            rooflines = partial(_rooflines, table, decode=decode)
            return Grid(points.sizes, points.ks, points.seconds, table.captured_sizes, real_share, rooflines)

        return cls(
            grid(table.prefill, table.real_share.prefill, decode=False),
            grid(table.decode, table.real_share.decode, decode=True),
            table,
        )


def _rooflines(table: StepTable, *, decode: bool) -> Rooflines | None:
    """Return the rooflines of a table's steps; counting a step's work takes scipy, so only where one is asked for."""
    from simmoe.profiles.estimating.scaling import rooflines_of

    return rooflines_of(table, decode=decode)


class ProfileStepCost:
    """Seconds a step takes on the engine a table was measured on.

    Make one a run: it counts which questions lay outside the measured grid.

    Args:
        surfaces: the prepared table.
        async_scheduling: whether the host composes a step while the device runs the one before.
    """

    def __init__(self, surfaces: Surfaces, async_scheduling: bool) -> None:
        self._prefill, self._decode, table = surfaces
        self._kv_sizes, self._kv_slopes = zip(*table.decode_kv, strict=True)
        terms = table.attention
        self._pair_s, self._prefill_seq_s = terms.prefill_pair_s, terms.prefill_seq_s
        self._mixed_seq_s, self._mixed_kv_s, self._mixed_s = (
            terms.mixed_seq_s,
            terms.mixed_kv_token_s,
            terms.mixed_step_s,
        )
        self._mixed_share = terms.mixed_decode_share
        self._least_decode_s = table.decode.cells[0][0].device_s
        self._is_async = async_scheduling
        eager = table.host["eager"]
        self._full = table.host.get("full", eager)
        self._piecewise = table.host.get("piecewise", eager)
        self._eager = eager
        self._mixed = mixed = table.mixed_host
        self._mixed_eager = HostShare(*map(max, eager, mixed.share)) if mixed else eager
        shares = (self._full, self._piecewise, eager, self._mixed_eager, *([mixed.share] if mixed else []))
        self._launches_apart = table.launches_apart
        within = {share: _within(table.update, share) for share in shares}
        self._updates = dict.fromkeys(shares, table.update) if self._launches_apart else within
        self._graph_tail_s = table.graph_tail_s
        # What a host has to do before it launches a graph. Unless it is known when the device begins one, it does so
        # when all is launched; without graphs, as far as is known, at once.
        before = self._full if table.captured_sizes else NO_SHARE
        taken_in = NO_SHARE if self._launches_apart else _within(table.update, before)
        self._prepares = HostShare(
            before.base_s - taken_in.base_s - (self._graph_tail_s or 0.0), before.per_seq_s - taken_in.per_seq_s
        )
        self._largest_captured = self._prefill.largest_captured
        self._k_first, self._k_last = self._prefill.ks[0], self._prefill.ks[-1]
        self._lines: dict[tuple[int, int], DecodeLine] = {}
        # Those of them that a decode-only step was asked for on.
        self._asked: dict[tuple[int, int], DecodeLine] = {}
        # (decode sequences, k) -> device seconds of their step alone, and seconds a KV token adds.
        self._alone: dict[tuple[int, int], tuple[float, float]] = {}
        self._outside: dict[str, set[tuple[int, int]]] = {}

    def step_s(self, shape: StepShape, /) -> float:
        """Return the time from the start of a step to the start of the next; > 0.

        Args:
            shape: at least one token; ``k_exec`` at least 1.
        """
        parts = self.parts_s(shape)
        if not self._is_async:
            return parts.alone_s
        device_s, host_s, update_s, _ = parts
        if self._launches_apart:  # outputs are taken in meanwhile
            host_s -= update_s
        return device_s if device_s > host_s else host_s

    def parts_s(self, shape: StepShape, /) -> StepParts:
        """Return the device's and the host's part of a step.

        Args:
            shape: at least one token; ``k_exec`` at least 1.
        """
        tokens, pairs, prompts, decodes, kv_tokens, k = shape
        if not tokens:
            line = self._asked.get((decodes, k))
            if line is None:
                line = self._asked[decodes, k] = self.decode_line(decodes, k)
                self._count(self._decode, "decode_seqs", decodes, k)
            base_s, per_kv_token_s, floor_s, update_s, wait_s = line
            return StepParts(base_s + per_kv_token_s * kv_tokens, floor_s, update_s, wait_s)
        num_tokens = tokens + decodes
        device_s = self._prefill.seconds(num_tokens, k)
        device_s += self._pair_s * pairs + self._prefill_seq_s * prompts
        if decodes:
            device_s += self._mixed_s + self._mixed_seq_s * decodes + self._mixed_kv_s * kv_tokens
            alone = self._alone.get((decodes, k))
            if alone is None:
                alone = self._alone[decodes, k] = self._decode.seconds(decodes, k), self._kv_slope_s(decodes)
            device_s += self._mixed_share * (alone[0] - self._least_decode_s)
            alone_s = alone[0] + alone[1] * kv_tokens
            if alone_s > device_s:
                device_s = alone_s
        grid = self._prefill
        if not (grid.first_size <= num_tokens <= grid.last_size and self._k_first <= k <= self._k_last):
            self._count(grid, "prefill_tokens", num_tokens, k)
        captured, mixed = num_tokens <= self._largest_captured, self._mixed
        if mixed is not None and mixed.is_apart(tokens, decodes):
            share = mixed.share if captured else self._mixed_eager
        else:
            share = self._piecewise if captured else self._eager
        host_s = share.base_s + share.per_seq_s * (prompts + decodes)
        update = self._updates[share]
        update_s = update.base_s + update.per_seq_s * (prompts + decodes)
        if self._launches_apart:
            host_s += update_s
        if self._is_async:
            return StepParts(device_s, host_s, update_s)
        return StepParts(device_s, host_s, update_s, self._prepared_s(prompts + decodes, host_s - update_s))

    def decode_line(self, num_decode_seqs: int, k_exec: int, /) -> DecodeLine:
        """Return the line a decode-only step of this many sequences follows as its KV grows."""
        line = self._lines.get((num_decode_seqs, k_exec))
        if line is not None:
            return line
        device_s = self._decode.seconds(num_decode_seqs, k_exec)
        share = self._full if num_decode_seqs <= self._largest_captured else self._eager
        host_s = share.base_s + share.per_seq_s * num_decode_seqs
        slope_s = self._kv_slope_s(num_decode_seqs)
        update = self._updates[share]
        update_s = update.base_s + update.per_seq_s * num_decode_seqs
        if self._launches_apart:
            host_s += update_s
        wait_s = 0.0
        if not self._is_async:
            wait_s = self._prepared_s(num_decode_seqs, host_s - update_s)
        elif self._graph_tail_s is not None and num_decode_seqs <= self._largest_captured:
            wait_s = max(0.0, host_s - update_s - self._graph_tail_s)
        line = DecodeLine(device_s, slope_s, host_s, update_s, wait_s)
        self._lines[num_decode_seqs, k_exec] = line
        return line

    def prefill_s(self, num_tokens: int, k_exec: int, /) -> float:
        """Return T(n, k): a step of n prompt tokens, taken as prompts of PROMPT_TOKENS and a remainder."""
        return self.step_s(prompt_shape(num_tokens, k_exec))

    @property
    def extrapolated(self) -> Mapping[str, int]:
        """How many distinct (size, k) were asked for outside the measured grid, by what lay outside.

        'prefill_tokens' and 'decode_seqs': the tokens or sequences; 'k': the budget. Empty when everything lay inside.
        Distinct points are counted, not steps, and a line alone is not: the steps on it may never run.
        """
        return {kind: len(points) for kind, points in sorted(self._outside.items())}

    def _kv_slope_s(self, num_decode_seqs: int) -> float:
        """Return the seconds a KV token adds to a step of so many decoding sequences."""
        return interpolated(self._kv_sizes, self._kv_slopes, num_decode_seqs)

    def _prepared_s(self, num_seqs: int, launch_s: float) -> float:
        """Return how long a synchronous host is at a step of so many sequences, of the launch, before it can begin."""
        base_s, per_seq_s = self._prepares
        return min(max(0.0, base_s + per_seq_s * num_seqs), launch_s)

    def _count(self, grid: Grid, kind: str, size: int, k: int) -> None:
        if grid.outside_sizes(size):
            self._outside.setdefault(kind, set()).add((grid.runs_at(size), k))
        if grid.outside_ks(k):
            self._outside.setdefault("k", set()).add((grid.runs_at(size), k))


def _within(update: HostShare, share: HostShare) -> HostShare:
    """Return what of a path's share follows the output: no more than there is, whatever the number of sequences."""
    return HostShare(min(update.base_s, share.base_s), min(update.per_seq_s, share.per_seq_s))
