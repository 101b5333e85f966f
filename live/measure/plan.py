"""Which points are measured."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

#: Prompt tokens of the sequences that decode. Steps lengthen them; three times as many belong to the next.
CONTEXTS = (128, 512, 2048, 8192)

#: Of the sequences that decode beside prompt tokens: far enough apart to tell KV tokens from sequences.
MIXED_CONTEXTS = (256, 2048)


@dataclass(frozen=True)
class PrefillPoint:
    """Steps that compute prompts only."""

    num_tokens: int
    """Prompt tokens a step."""
    num_prompts: int = 1
    """Prompts they belong to, of equal length but for the remainder."""
    num_chunks: int = 1
    """Steps one prompt takes; above 1 the later ones attend to the context of the earlier."""
    ks: tuple[int, ...] = ()
    """Budgets; empty means all."""


@dataclass(frozen=True)
class DecodePoint:
    """Steps that decode only."""

    num_seqs: int
    context: int
    """Prompt tokens of each sequence; it grows by a token a step from there."""
    ks: tuple[int, ...] = ()
    """Budgets; empty means all."""


@dataclass(frozen=True)
class MixedPoint:
    """Steps that compute one prompt and decode besides."""

    num_tokens: int
    num_seqs: int
    context: int
    ks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Plan:
    """What one run measures."""

    ks: tuple[int, ...]
    prefill: tuple[PrefillPoint, ...] = ()
    decode: tuple[DecodePoint, ...] = ()
    mixed: tuple[MixedPoint, ...] = ()
    eager: tuple[PrefillPoint | DecodePoint, ...] = ()
    """Measured with captured graphs left aside, kernels launched one by one."""
    passes: int = 3
    """Times everything is gone through, so that a spell of slow host meets a point but once; a row a pass."""
    repetitions: int = 2
    """Steps a prefill or mixed point and budget in each pass; decode points one more."""
    seed: int = 0
    """Of the order of budgets."""
    front_end_requests: int = 30
    """Requests sent one at a time, to measure the front end."""
    front_end_lengths: tuple[int, int] = (1024, 16)
    """Their prompt and output tokens."""
    notes: tuple[str, ...] = ()
    """Copied into the header."""


def default_plan(captured_sizes: tuple[int, ...], ks: tuple[int, ...], max_num_seqs: int, max_context: int) -> Plan:
    """Return the plan for an engine with these graphs: captured sizes, sizes between them, and what attention adds.

    Args:
        captured_sizes: ascending; the last is the largest step measured.
        ks: budgets, ascending.
        max_num_seqs: most sequences a step may hold.
        max_context: longest context to decode at.
    """
    largest = captured_sizes[-1]
    few = tuple(sorted({ks[0], ks[len(ks) // 3], ks[len(ks) // 2], ks[-1]}))
    sizes = [n for n in captured_sizes if n >= min(16, largest)]
    between = [(a + b) // 2 for a, b in zip(sizes[3::3], sizes[4::3], strict=False) if b - a > 2]
    just_above = [a + 1 for a in sizes[:-1] if a >= 256]  # below, the host binds a step whatever its size
    prefill = [PrefillPoint(n) for n in sizes]
    prefill += [PrefillPoint(n, ks=few) for n in sorted({*between, *just_above})]
    for n in (n for n in (512, 2048, 4096, 8192) if n <= largest):
        prefill += [PrefillPoint(n, num_prompts=p, ks=few) for p in (2, 8, 32) if n // p >= 16]
    for n in (n for n in (512, 2048, 4096) if n <= largest):
        chunks = min(4, max_context // n)
        if chunks > 1:
            prefill.append(PrefillPoint(n, num_chunks=chunks, ks=few))

    all_seqs = [n for n in captured_sizes if n <= max_num_seqs]
    coarse = [n for n in all_seqs if n & (n - 1) == 0]
    contexts = [c for c in CONTEXTS if c <= max_context] or [max_context]
    every = contexts[len(contexts) // 3]
    decode = [DecodePoint(n, every) for n in all_seqs]
    # padding costs less than real sequences, by size: one sequence above each captured size, and some way between
    decode += [DecodePoint(a + 1, every, few) for a, b in pairwise(all_seqs) if b - a > 1]
    decode += [DecodePoint(n, every, few) for n in (6, 12, 20, 44, 100, 200, 288, 576) if n <= max_num_seqs]
    decode += [DecodePoint(n, context, few) for context in contexts if context != every for n in coarse]

    mixed = [
        MixedPoint(n, seqs, context, few)
        for seqs in (8, 32, 64, 128, 256)
        for context in MIXED_CONTEXTS
        if seqs <= max_num_seqs and context <= max_context
        for n in (64, 256, 512, 1024, 2048, 4096, 7680)
        if n + seqs <= largest
    ]
    eager: list[PrefillPoint | DecodePoint] = [
        PrefillPoint(n, ks=few) for n in sizes if n & (n - 1) == 0 or n % 1536 == 0
    ]
    eager += [DecodePoint(n, every, few) for n in coarse]
    return Plan(ks, tuple(prefill), tuple(decode), tuple(mixed), tuple(eager))
