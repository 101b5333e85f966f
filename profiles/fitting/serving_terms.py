"""What a profile's grids do not say: the cost of prefill and decode in one step, and how much of a size is padding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from simmoe.profiles.fitting.evidence import runs_at
from simmoe.profiles.fitting.regression import FloatArray, least_absolute_terms
from simmoe.profiles.residuals import Predictor
from simmoe.profiles.samples import Sample
from simmoe.profiles.shape import StepShape
from simmoe.profiles.table import ALL_PADDED, RealShare, StepTable

#: Mixed steps must have been measured at contexts this many times apart to tell KV tokens from sequences.
CONTEXTS_APART = 4.0

#: Which steps their decodes alone decide, and the terms of the others, are found in turn, so often.
ROUNDS = 8

#: Fewer steps between captured sizes tell nothing of the padding there.
LEAST_STEPS = 3

#: Of a step's time, at least, that its KV must take for the step to tell what a KV token takes.
KV_PART = 0.1

#: A served step counts as so many points: it is what the table is asked for, points are of the corners of a range.
SERVED_WEIGHT = 2.0

_ALL_REAL = RealShare(((1, 1.0),), ((1, 1.0),))


def with_prefill_terms(
    table: StepTable, prefills: Sequence[Sample], mixed: Sequence[Sample], served: Sequence[Sample] = ()
) -> StepTable:
    """Return the table with the terms of a mixed step and prefill's share of real tokens.

    Both are what explains steps best (least absolute relative error), in turn: the terms all mixed steps, the share the
    prompts alone and the served steps. Points of prompts beside decodes would mislead it: their sizes lie just above
    captured ones, where the share and what any mixed step costs look alike; they tell it only where nothing else does.

    A KV token is read once whether or not prompt tokens are beside it: where the contexts measured are too alike, or KV
    too small a part of any step, to tell KV tokens from sequences, it costs what it costs a decode-only step.

    Args:
        table: with grids and decode-only terms.
        prefills: steps of prompt tokens alone, bound by the device.
        mixed: points with both, bound by the device.
        served: steps of a served load with both, bound by the device.
    """
    decode_rate_s = table.decode_kv[-1][1]
    between = [s for s in prefills if runs_at(table.captured_sizes, s.shape.num_tokens) != s.shape.num_tokens]
    steps = [*between, *served, *mixed]
    if not steps:
        return replace(table, attention=table.attention._replace(mixed_kv_token_s=decode_rate_s))
    seqs = np.array([s.num_decode_seqs for s in steps], dtype=np.float64)
    kv_tokens = np.array([s.decode_kv_tokens for s in steps], dtype=np.float64)
    measured = np.array([s.median_s for s in steps])
    prompts_alone = [
        s.shape._replace(num_prefill_tokens=s.shape.num_tokens, num_decode_seqs=0, decode_kv_tokens=0) for s in steps
    ]
    padded, unpadded = _bounds_s(table, prompts_alone)
    both = seqs > 0
    decodes_alone = [
        s.shape._replace(num_prefill_tokens=0, num_prefill_seqs=0, prefill_kv_pairs=0) for s in (*served, *mixed)
    ]
    floor = np.concatenate([np.zeros(len(between)), device_seconds(table, decodes_alone)])
    contexts = kv_tokens[both] / seqs[both]
    told_apart = bool(both.any()) and contexts.max() >= CONTEXTS_APART * contexts.min()
    told_apart &= bool((decode_rate_s * kv_tokens > KV_PART * measured).any())

    kvless = device_seconds(table, [shape._replace(decode_kv_tokens=0) for shape in decodes_alone])
    experts = np.concatenate([np.zeros(len(between)), kvless - table.decode.cells[0][0].device_s])
    # the least of real tokens alone and all padded; then what beside them is once a mixed step, of what the sequences
    # take alone, a sequence, a KV token
    columns = np.stack([unpadded - padded, both, experts, seqs, kv_tokens], axis=1)
    rest = padded if told_apart else padded + decode_rate_s * kv_tokens
    limits: list[float | None] = [1.0, None, 1.0, None, None if told_apart else 0.0]

    def explains(free: list[int], values: FloatArray, of: npt.NDArray[np.bool_]) -> FloatArray:
        """Return the values with those at ``free`` found anew, the others as they are."""
        fixed = [i for i in range(len(values)) if i not in free]
        beside = rest + columns[:, fixed] @ values[fixed]
        tells = of & (floor < np.maximum(beside + columns[:, free] @ values[free], measured))
        found = values.copy()
        if tells.any():
            found[free] = least_absolute_terms(
                columns[tells][:, free], beside[tells], measured[tells], [limits[i] for i in free], weights[tells]
            )
        return found

    weights = np.repeat([1.0, SERVED_WEIGHT, 1.0], [len(between), len(served), len(mixed)])
    values = np.zeros(5)
    for _ in range(ROUNDS):
        values = explains([0, 1, 2, 3, 4], values, floor < measured)
    tells_share = np.arange(len(steps)) < len(between) + len(served)
    if tells_share.any():
        for _ in range(ROUNDS):
            values = explains([1, 2, 3, 4], explains([0], values, tells_share), both)
    share, step_s, decode_share, seq_s, rate_s = (values + 0.0).tolist()
    attention = table.attention._replace(
        mixed_step_s=step_s,
        mixed_seq_s=seq_s,
        mixed_kv_token_s=rate_s if told_apart else decode_rate_s,
        mixed_decode_share=decode_share,
    )
    real_share = table.real_share._replace(prefill=((1, share),))
    return replace(table, attention=attention, real_share=real_share)


def with_decode_share(table: StepTable, decodes: Sequence[Sample]) -> StepTable:
    """Return the table with decode's share of real sequences, for each captured size that steps ran padded to.

    Args:
        table: with grids and decode-only terms.
        decodes: decode-only steps, bound by the device.
    """
    by_size: dict[int, list[Sample]] = {}
    for s in decodes:
        size = runs_at(table.captured_sizes, s.num_decode_seqs)
        if size != s.num_decode_seqs:
            by_size.setdefault(size, []).append(s)
    knots: list[tuple[int, float]] = []
    for size, steps in sorted(by_size.items()):
        shapes = [s.shape for s in steps]
        measured = np.array([s.median_s for s in steps])
        padded, unpadded = _bounds_s(table, shapes)
        if len(steps) < LEAST_STEPS or not (unpadded < padded).any():
            continue
        shares = np.linspace(0.0, 1.0, 101)
        misfits = [np.abs(np.log((padded - share * (padded - unpadded)) / measured)).sum() for share in shares]
        knots.append((size, float(shares[int(np.argmin(misfits))])))
    if not knots:
        return table
    return replace(table, real_share=table.real_share._replace(decode=tuple(knots)))


def with_serving_contexts(table: StepTable, decodes: Sequence[Sample]) -> StepTable:
    """Return the table with the time a KV token takes as it is where contexts differ, all batches by one factor.

    Sequences of one context, as points have, fill whole waves of the attention kernel's blocks and leave the last one
    part empty; those of many contexts level out, and take no longer. Steps that KV has a small part in say more of the
    grid than of KV, and are left out.

    Args:
        table: with grids and decode-only terms.
        decodes: decode-only steps of a served load, bound by the device.
    """
    shapes = [s.shape for s in decodes]
    without = device_seconds(table, [shape._replace(decode_kv_tokens=0) for shape in shapes])
    kv = device_seconds(table, shapes) - without
    measured = np.array([s.median_s for s in decodes])
    telling = kv > KV_PART * (kv + without)
    if telling.sum() < LEAST_STEPS:
        return table
    (factor,) = least_absolute_terms(kv[telling, None], without[telling], measured[telling], [None]).tolist()
    return replace(table, decode_kv=tuple((size, factor * value) for size, value in table.decode_kv))


def _bounds_s(table: StepTable, shapes: Sequence[StepShape]) -> tuple[FloatArray, FloatArray]:
    """Return the device's seconds if all of a captured size were padding's cost, and if all were real tokens'."""
    padded, unpadded = (device_seconds(replace(table, real_share=share), shapes) for share in (ALL_PADDED, _ALL_REAL))
    return padded, unpadded


def device_seconds(table: StepTable, shapes: Sequence[StepShape]) -> FloatArray:
    """Return what a table says the device takes for each shape."""
    predictor = Predictor(table, async_scheduling=True)
    return np.array([predictor.device_s(shape) for shape in shapes])
