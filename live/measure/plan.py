"""Which points are measured."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

#: Prompt tokens of the sequences that decode. Steps lengthen them; three times as many belong to the next.
CONTEXTS = (128, 512, 2048, 8192)

#: KV tokens of a decoding batch, at most: attention reads them at the memory's rate long before, so that what a token
#: costs is known, and filling a cache so far takes many times as long as the steps that are measured.
MAX_KV_TOKENS = 1 << 20

#: Likewise where the device is held: what KV costs is measured without.
MAX_HELD_KV_TOKENS = 1 << 18

#: Batches that decode beside prompt tokens, and their contexts: far enough apart to tell KV tokens from sequences. Each
#: batch at one of them, then each at the other, so that a plan cut short has seen both of everything.
MIXED_SEQS, MIXED_CONTEXTS = (8, 128, 64, 256, 32), (2048, 256)

#: Prompt tokens beside them, in the order they are measured: those of served steps first.
MIXED_TOKENS = (1024, 2048, 4096, 256, 512, 64, 7680)


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
    held: tuple[PrefillPoint | DecodePoint | MixedPoint, ...] = ()
    """Measured with the device held until a step is launched: those whose time the host decides otherwise, and a few
    larger ones, which must take what they take without."""
    held_eager: tuple[PrefillPoint | DecodePoint, ...] = ()
    """Likewise, with captured graphs left aside."""
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
    decode = [point for point in decode if point.num_seqs * point.context <= MAX_KV_TOKENS]

    mixed = [
        MixedPoint(n, seqs, context, few)
        for turn in range(len(MIXED_CONTEXTS))
        for i, seqs in enumerate(MIXED_SEQS)
        for context in (MIXED_CONTEXTS[(turn + i) % len(MIXED_CONTEXTS)],)
        if seqs <= max_num_seqs and context <= max_context
        for n in MIXED_TOKENS
        if n + seqs <= largest
    ]
    eager: list[PrefillPoint | DecodePoint] = [
        PrefillPoint(n, ks=few) for n in sizes if n & (n - 1) == 0 or n % 1536 == 0
    ]
    eager += [DecodePoint(n, every, few) for n in coarse]
    held, held_eager = _held(captured_sizes, ks, max_num_seqs, contexts)
    return Plan(ks, tuple(prefill), tuple(decode), tuple(mixed), tuple(eager), held, held_eager)


def _held(
    captured_sizes: tuple[int, ...], ks: tuple[int, ...], max_num_seqs: int, contexts: list[int]
) -> tuple[tuple[PrefillPoint | DecodePoint | MixedPoint, ...], tuple[PrefillPoint | DecodePoint, ...]]:
    """Return ``Plan.held`` and ``Plan.held_eager``: few budgets, seconds in all."""
    few = tuple(sorted({ks[0], ks[len(ks) // 3], ks[len(ks) // 2], ks[-1]}))
    ends = tuple(sorted({ks[0], ks[-1]}))
    largest = captured_sizes[-1]
    every, longer = contexts[len(contexts) // 3], contexts[len(contexts) * 2 // 3]

    def among(sizes: tuple[int, ...], most: int) -> list[int]:
        return [n for n in sizes if n in captured_sizes and n <= most]

    held: list[PrefillPoint | DecodePoint | MixedPoint] = [
        PrefillPoint(n, ks=few)
        for n in among((16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512, 640, 768, 896, 1024, 2048), largest)
    ]
    # padding, just above captured sizes and half way to the next
    held += [PrefillPoint(n, ks=ends) for n in (72, 144, 193, 257, 385, 449, 513, 576, 769, 960, 1025) if n <= largest]
    held += [PrefillPoint(512, num_prompts=8, ks=ends)] if largest >= 512 else []
    seqs = among((1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 320, 384, 512), max_num_seqs)
    held += [DecodePoint(n, every, few) for n in seqs]
    held += [DecodePoint(n, every, ends) for n in (9, 17, 33, 65, 129) if n <= max_num_seqs]
    if longer != every:
        held += [DecodePoint(n, longer, ends) for n in seqs if n & (n - 1) == 0]
    held += [
        MixedPoint(n, num_seqs, context, (few[len(few) // 2], ks[-1]))
        for num_seqs in (8, 64, 192)
        for context in MIXED_CONTEXTS
        if num_seqs <= max_num_seqs and context <= contexts[-1]
        for n in (64, 256, 768, *([1024, 2048] if num_seqs == 64 else []))
        if n + num_seqs <= largest
    ]
    held = [p for p in held if isinstance(p, PrefillPoint) or p.num_seqs * p.context <= MAX_HELD_KV_TOKENS]
    held_eager: list[PrefillPoint | DecodePoint] = [
        PrefillPoint(n, ks=ends) for n in (16, 256, 1024, 4096) if n <= largest
    ]
    held_eager += [DecodePoint(n, every, ends) for n in (1, 16, 128) if n <= max_num_seqs]
    return tuple(held), tuple(held_eager)
