"""Laws of a profile's step cost, on generated tables and shapes, inside the measured grid and outside."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from simmoe.profiles.shape import StepShape
from simmoe.profiles.step_cost import ProfileStepCost, Surfaces
from simmoe.profiles.table import (
    ALL_PADDED,
    PATHS,
    Attention,
    Cell,
    GridTable,
    HostShare,
    MixedHost,
    RealShare,
    StepTable,
)
from simmoe.profiles.table_file import dump_table, parse_table

#: Interpolating between equal or nearly equal values may round either way.
ROUNDING = 1 - 1e-12

seconds = st.floats(0, 0.05, allow_nan=False)


def ascending(largest: int, most: int) -> st.SearchStrategy[list[int]]:
    return st.lists(st.integers(1, largest), min_size=1, max_size=most, unique=True).map(sorted)


@st.composite
def grids(draw: st.DrawFn, largest: int) -> GridTable:
    sizes, ks = draw(ascending(largest, 5)), draw(ascending(32, 5))
    steps = draw(st.lists(seconds, min_size=len(sizes) * len(ks), max_size=len(sizes) * len(ks)))
    values = np.array(steps).reshape(len(sizes), len(ks)).cumsum(axis=0).cumsum(axis=1) + 1e-5
    return GridTable(tuple(sizes), tuple(ks), tuple(tuple(Cell(float(v), 0.0, 1) for v in row) for row in values))


@st.composite
def share_rows(draw: st.DrawFn) -> tuple[tuple[int, float], ...]:
    return tuple((size, draw(st.floats(0, 1))) for size in draw(ascending(600, 4)))


@st.composite
def tables(draw: st.DrawFn) -> StepTable:
    captured = tuple(draw(st.one_of(st.just([]), ascending(600, 6))))
    kv_sizes = draw(ascending(300, 3))
    slopes = np.cumsum(draw(st.lists(st.floats(0, 1e-6), min_size=len(kv_sizes), max_size=len(kv_sizes))))
    paths = PATHS if captured else PATHS[-1:]
    shares = np.cumsum([[draw(st.floats(0, 0.01)), draw(st.floats(0, 1e-4))] for _ in paths], axis=0)
    mixed_host, graph_tail_s = None, None
    if captured:
        graph_tail_s = draw(st.sampled_from([None, 0.0, 4e-4, 1.1e-3]))
    if captured and draw(st.sampled_from([False, True])):
        more = [draw(st.floats(0, 0.02)), draw(st.floats(0, 1e-4))]
        mixed_host = MixedHost(draw(st.integers(0, 900)), HostShare(*(shares[1] + more).tolist()))
    return StepTable(
        name="drawn",
        status="synthetic",
        summary="drawn by hypothesis",
        k_max=32,
        k_granularity=1,
        block_size=16,
        num_gpu_blocks=100,
        ingress_s=0.0,
        egress_s=0.0,
        captured_sizes=captured,
        captured_ks=(1,),
        prefill=draw(grids(800)),
        decode=draw(grids(300)),
        decode_kv=tuple((size, float(slope)) for size, slope in zip(kv_sizes, slopes, strict=True)),
        attention=Attention(
            draw(st.floats(0, 1e-8)),
            draw(st.floats(0, 1e-3)),
            draw(st.floats(0, 1e-4)),
            draw(st.floats(0, 1e-6)),
            draw(st.floats(0, 1e-2)),
            draw(st.floats(0, 1)),
        ),
        real_share=RealShare(draw(share_rows()), draw(share_rows())),
        host={path: HostShare(*(float(v) for v in share)) for path, share in zip(paths, shares, strict=True)},
        mixed_host=mixed_host,
        graph_tail_s=graph_tail_s,
        provenance={},
    )


@st.composite
def shapes(draw: st.DrawFn) -> StepShape:
    prefill = draw(st.one_of(st.just(0), st.integers(1, 1500)))
    decode = draw(st.integers(0 if prefill else 1, 600))
    prompts = draw(st.integers(1, prefill)) if prefill else 0
    pairs = draw(st.integers(prefill, prefill * 5000)) if prefill else 0
    return StepShape(
        prefill, pairs, prompts, decode, draw(st.integers(decode, decode * 9000 + 1)), draw(st.integers(1, 64))
    )


def cost_of(table: StepTable, async_scheduling: bool) -> ProfileStepCost:
    return ProfileStepCost(Surfaces.of(table), async_scheduling)


@given(tables(), st.booleans(), shapes())
def test_steps_take_positive_finite_time_and_always_the_same(
    table: StepTable, async_scheduling: bool, shape: StepShape
) -> None:
    cost = cost_of(table, async_scheduling)
    first = cost.step_s(shape)
    assert 0 < first < math.inf
    assert cost.step_s(shape) == first == cost_of(table, async_scheduling).step_s(shape)


@given(tables(), st.booleans(), shapes(), shapes())
def test_more_of_anything_never_costs_less(
    table: StepTable, async_scheduling: bool, shape: StepShape, more: StepShape
) -> None:
    cost = cost_of(table, async_scheduling)
    larger = StepShape(*(max(a, b) for a, b in zip(shape, more, strict=True)))
    assert cost.step_s(larger) >= cost.step_s(shape) * ROUNDING


@given(tables(), st.booleans(), st.integers(1, 3000), st.integers(1, 63))
def test_prefill_time_is_monotone_in_tokens_and_budget(
    table: StepTable, async_scheduling: bool, num_tokens: int, k: int
) -> None:
    cost = cost_of(table, async_scheduling)
    assert cost.prefill_s(num_tokens + 1, k) >= cost.prefill_s(num_tokens, k) * ROUNDING
    assert cost.prefill_s(num_tokens, k + 1) >= cost.prefill_s(num_tokens, k) * ROUNDING


@given(
    tables(),
    st.booleans(),
    st.integers(1, 600),
    st.integers(1, 64),
    st.lists(st.integers(1, 10**7), min_size=1, max_size=20),
)
def test_decode_line_equals_the_step_bit_for_bit(
    table: StepTable, async_scheduling: bool, num_seqs: int, k: int, kv_tokens: list[int]
) -> None:
    cost = cost_of(table, async_scheduling)
    steps = [cost.step_s(StepShape(0, 0, 0, num_seqs, kv, k)) for kv in kv_tokens]
    base_s, per_kv_token_s, floor_s, update_s, wait_s = cost_of(table, async_scheduling).decode_line(num_seqs, k)
    device_s = base_s + per_kv_token_s * np.array(kv_tokens, dtype=np.float64)
    assert device_s.tolist() == [base_s + per_kv_token_s * kv for kv in kv_tokens]
    line_s = device_s if async_scheduling else wait_s + device_s + update_s
    assert np.maximum(floor_s, line_s).tolist() == steps


@given(tables(), shapes())
def test_overlapping_the_host_never_costs_more_than_adding_it(table: StepTable, shape: StepShape) -> None:
    assert cost_of(table, True).step_s(shape) <= cost_of(table, False).step_s(shape)


@given(tables(), shapes())
def test_a_mixed_step_costs_no_less_than_its_decodes_alone(table: StepTable, shape: StepShape) -> None:
    alone = shape._replace(num_prefill_tokens=0, prefill_kv_pairs=0, num_prefill_seqs=0)
    if shape.num_decode_seqs:
        assert cost_of(table, True).step_s(shape) >= cost_of(table, True).step_s(alone)


@given(tables(), st.data())
def test_a_step_costs_its_captured_size_or_less_by_what_real_tokens_alone_cost(
    table: StepTable, data: st.DataObject
) -> None:
    if not table.captured_sizes:
        return
    cost, all_padded = cost_of(table, True), cost_of(replace(table, real_share=ALL_PADDED), True)
    size = data.draw(st.sampled_from(table.captured_sizes))
    below = max((c for c in table.captured_sizes if c < size), default=0)
    num_tokens, k = data.draw(st.integers(below + 1, size)), data.draw(st.integers(1, 64))
    step, full = StepShape(num_tokens, 10, 1, 0, 0, k), StepShape(size, 10, 1, 0, 0, k)
    assert cost.step_s(step) <= all_padded.step_s(step) == all_padded.step_s(full) == cost.step_s(full)


@given(tables(), st.integers(1, 3000), st.integers(1, 600), st.integers(1, 64))
def test_extrapolation_is_counted_once_a_point_and_only_outside(
    table: StepTable, num_tokens: int, num_seqs: int, k: int
) -> None:
    def runs_at(size: int) -> int:
        return next((c for c in table.captured_sizes if c >= size), size)

    cost = cost_of(table, True)
    for _ in range(2):
        cost.step_s(StepShape(num_tokens, num_tokens, 1, 0, 0, k))
        cost.step_s(StepShape(0, 0, 0, num_seqs, num_seqs, k))
    points = {kind: 0 for kind in ("prefill_tokens", "decode_seqs")}
    ks: set[tuple[int, int]] = set()
    for kind, size, grid in (("prefill_tokens", num_tokens, table.prefill), ("decode_seqs", num_seqs, table.decode)):
        points[kind] += not grid.sizes[0] <= runs_at(size) <= grid.sizes[-1]
        if not grid.ks[0] <= k <= grid.ks[-1]:
            ks.add((runs_at(size), k))
    assert cost.extrapolated == {kind: n for kind, n in {**points, "k": len(ks)}.items() if n}


@given(tables())
def test_a_table_reads_back_as_written(table: StepTable) -> None:
    text = dump_table(table)
    again = parse_table(text.encode(), "drawn")
    assert dump_table(again) == text
    assert again.captured_sizes == table.captured_sizes
