"""What grids do not say is recovered from steps of a table that has it; steps that tell nothing change nothing."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import minimize

from simmoe.profiles.catalog import load_profile
from simmoe.profiles.fitting.evidence import device_bound
from simmoe.profiles.fitting.regression import least_absolute_terms
from simmoe.profiles.fitting.serving_terms import with_decode_share, with_prefill_terms, with_serving_contexts
from simmoe.profiles.residuals import Predictor
from simmoe.profiles.samples import Clock, Sample
from simmoe.profiles.shape import StepShape
from simmoe.profiles.step_cost import prompt_shape
from simmoe.profiles.synthetic import make_sample
from simmoe.profiles.table import HostShare, RealShare, StepTable

PLAIN = load_profile("synthetic-olmoe-split4").table
PLAIN = replace(PLAIN, attention=PLAIN.attention._replace(mixed_seq_s=0.0, mixed_kv_token_s=0.0))


def steps_of(table: StepTable, shapes: Iterable[StepShape]) -> list[Sample]:
    device = Predictor(table, async_scheduling=True)
    return [make_sample(shape, "step", "graphs", [device.device_s(shape)]) for shape in shapes]


def decoding(num_seqs: int, k: int, context: int = 500) -> StepShape:
    return StepShape(0, 0, 0, num_seqs, num_seqs * context, k)


def test_decodes_share_of_real_sequences_is_found_by_captured_size() -> None:
    true = replace(PLAIN, real_share=RealShare(decode=((8, 0.7), (64, 0.2), (512, 0.55))))
    steps = steps_of(true, (decoding(n, k) for n in (5, 6, 7, 40, 60, 300, 500) for k in (4, 16, 32)))
    assert dict(with_decode_share(PLAIN, steps).real_share.decode) == pytest.approx(
        {8: 0.7, 64: 0.2, 512: 0.55}, abs=0.01
    )
    # what a table says already changes nothing
    assert with_decode_share(true, steps).real_share == with_decode_share(PLAIN, steps).real_share


def test_steps_that_fill_their_size_say_nothing_of_padding() -> None:
    assert with_decode_share(PLAIN, steps_of(PLAIN, (decoding(n, 8) for n in (8, 16, 64)))) == PLAIN


def test_the_terms_of_a_mixed_step_and_prefills_share_are_found_together() -> None:
    attention = PLAIN.attention._replace(
        mixed_step_s=1.5e-3, mixed_seq_s=1e-5, mixed_kv_token_s=3e-8, mixed_decode_share=0.6
    )
    true = replace(PLAIN, attention=attention, real_share=RealShare(prefill=((1, 0.4),)))
    mixed = [
        StepShape(n, n * (n + 1) // 2, 1, seqs, seqs * context, k)
        for n, seqs, context, k in itertools.product((700, 1500, 3000), (8, 100, 250), (200, 2000), (8, 32))
    ]
    prefills = [prompt_shape(n, k) for n in (600, 1500, 3000) for k in (8, 32)]
    found = with_prefill_terms(PLAIN, steps_of(true, prefills), steps_of(true, mixed))
    assert tuple(found.attention) == pytest.approx(tuple(attention), rel=1e-6)
    assert found.real_share.prefill[0][1] == pytest.approx(0.4)
    one_context = [shape for shape in mixed if shape.decode_kv_tokens == 200 * shape.num_decode_seqs]
    found = with_prefill_terms(PLAIN, [], steps_of(true, one_context))
    assert found.attention.mixed_kv_token_s == PLAIN.decode_kv[-1][1]


def test_points_just_above_captured_sizes_do_not_mislead_the_share_where_prompts_alone_tell() -> None:
    """Every point of prompts beside decodes lies just above a captured size, and took 6% longer than the terms say."""
    attention = PLAIN.attention._replace(mixed_step_s=1.5e-3, mixed_seq_s=1e-5, mixed_kv_token_s=3e-8)
    true = replace(PLAIN, attention=attention, real_share=RealShare(prefill=((1, 0.7),)))
    above = [
        StepShape(n, n * (n + 1) // 2, 1, seqs, seqs * context, k)
        for n, seqs, context, k in itertools.product((1024, 2048), (8, 32), (200, 2000), (8, 16, 32))
    ]
    points = [replace(s, median_s=1.06 * s.median_s, p90_s=1.06 * s.p90_s) for s in steps_of(true, above)]
    prefills = steps_of(true, [prompt_shape(n, k) for n in (600, 1500, 3000) for k in (8, 32)])
    assert with_prefill_terms(PLAIN, [], points).real_share.prefill[0][1] < 0.65
    assert with_prefill_terms(PLAIN, prefills, points).real_share.prefill[0][1] == pytest.approx(0.7, abs=1e-6)


def test_what_decodes_take_alone_adds_ever_less_to_a_mixed_step_as_they_grow_in_number() -> None:
    device = Predictor(
        replace(PLAIN, attention=PLAIN.attention._replace(mixed_decode_share=0.6)), async_scheduling=True
    )

    def mixed_s(seqs: int) -> float:
        return device.device_s(StepShape(1024, 1024 * 1025 // 2, 1, seqs, seqs, 8))

    first, second, last = mixed_s(2) - mixed_s(1), mixed_s(32) - mixed_s(16), mixed_s(512) - mixed_s(256)
    assert first > second / 16 > last / 256 > 0


def test_without_mixed_steps_a_kv_token_costs_what_it_does_in_a_decode_only_one() -> None:
    found = with_prefill_terms(PLAIN, [], [])
    assert found == replace(PLAIN, attention=PLAIN.attention._replace(mixed_kv_token_s=PLAIN.decode_kv[-1][1]))


def test_a_kv_tokens_time_is_scaled_to_served_contexts() -> None:
    true = replace(PLAIN, decode_kv=tuple((size, 0.97 * value) for size, value in PLAIN.decode_kv))
    served = steps_of(true, (decoding(n, 16, context) for n in (40, 100) for context in (300, 1500, 2500)))
    found = with_serving_contexts(PLAIN, served).decode_kv
    assert [value for _, value in found] == pytest.approx([value for _, value in true.decode_kv])
    assert with_serving_contexts(PLAIN, served[:2]) == PLAIN


def test_what_bound_a_step_is_told_by_the_host_of_its_own_pass() -> None:
    """Two passes of one point: in the second a slow host held it up."""

    def row(clock: Clock, seconds: float) -> Sample:
        return make_sample(decoding(4, 8), clock, "graphs", [seconds])

    rows = [row("step", 3e-3), row("host", 2e-3), row("step", 4e-3), row("host", 3.9e-3)]
    clock = {"full": HostShare(2.9e-3, 0.0)}
    assert device_bound(rows, clock, (4,)) == [(rows[0], True), (rows[2], False)]
    assert device_bound(rows[::2], clock, (4,)) == [(rows[0], False), (rows[2], True)]


def test_least_absolute_error_is_the_least_there_is() -> None:
    rng = np.random.default_rng(5)
    for _ in range(20):
        terms, rest = rng.random((15, 2)), rng.random(15)
        seconds = rest + terms @ [0.5, 1.5] + rng.normal(0, 0.2, 15).clip(-0.1, 1.0)

        def misfit(values: np.ndarray, terms: np.ndarray = terms, rest: np.ndarray = rest) -> float:
            return float(np.abs((rest + terms @ np.abs(values)) / seconds - 1).sum())  # noqa: B023

        found = least_absolute_terms(terms, rest, seconds, [None, 1.2])
        assert (found >= 0).all() and found[1] <= 1.2 + 1e-9
        free = least_absolute_terms(terms, rest, seconds, [None, None])
        searched = min(
            (minimize(misfit, start, method="Nelder-Mead") for start in ([0, 1], [1, 1], [2, 0])),
            key=lambda r: float(r.fun),
        )
        assert misfit(free) <= searched.fun + 1e-9
        assert misfit(free) <= misfit(found) + 1e-9
