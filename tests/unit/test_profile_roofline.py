"""Roofline estimates: counted work against brute force, efficiencies recovered, held-out errors, and the command."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simmoe.cli import run
from simmoe.errors import ProfileError, UsageError
from simmoe.profiles.catalog import DEFAULT_PROFILE, layer_times_of, load_profile, profile_names
from simmoe.profiles.estimating.binding import Roofline, parallelism, roofline_of
from simmoe.profiles.estimating.cards import CARDS, card_named
from simmoe.profiles.estimating.estimate import estimate
from simmoe.profiles.estimating.held_out import ALL_TABLES, held_out_errors, over_all_tables
from simmoe.profiles.estimating.learned import MeasuredModel, launches, learn_from, left_out, measured_models
from simmoe.profiles.estimating.roofline import OVERLAP, Efficiencies, GridPoints, LayerPoints, device_s, learn
from simmoe.profiles.estimating.step_work import (
    ALIKE,
    ALIKE_WITH_SHARED,
    ONE_CARD,
    FloatArray,
    Parallelism,
    dense_layer_weights,
    distinct_experts,
    matrix_padding,
    padded_rows,
    step_work,
    tile_of,
)
from simmoe.profiles.models import model_shape, published_models, read_model, split_config
from simmoe.profiles.shape import StepShape
from simmoe.profiles.table import GridTable, HostShare, StepTable
from simmoe.profiles.table_file import dump_table, parse_table

H200 = CARDS["h200"]
OLMOE = read_model("olmoe-1b-7b")
SHAPE = model_shape(split_config(OLMOE.config, 4))


def shipped(names: Iterable[str]) -> list[MeasuredModel]:
    tables = [(name, load_profile(name).table) for name in names]
    return measured_models((table, layer_times_of(name, table)) for name, table in tables)


@pytest.fixture(scope="module")
def measured() -> list[MeasuredModel]:
    return shipped([DEFAULT_PROFILE])


def as_cells(table: StepTable, factor: float = 1.0) -> StepTable:
    """Return a table whose cells are passed off as measured."""

    def cells(grid: GridTable) -> GridTable:
        rows = tuple(tuple(c._replace(repetitions=3, device_s=factor * c.device_s) for c in row) for row in grid.cells)
        return replace(grid, cells=rows)

    return replace(table, prefill=cells(table.prefill), decode=cells(table.decode))


def as_measured(one: MeasuredModel, name: str, splits: int, factor: float = 1.0) -> MeasuredModel:
    """Return an estimate passed off as a measured table of another model."""
    model = read_model(name)
    table = as_cells(estimate(learn_from([one]), one.table, H200, model, splits, []), factor)
    table = replace(table, status="measured")
    shape = model_shape(split_config(model.config, splits))
    flags = one.table.provenance["runs"]
    return MeasuredModel(replace(table, provenance={"runs": flags}), model.published_as, shape, H200)


@pytest.mark.parametrize(("num_experts", "n", "k"), [(8, 5, 2), (16, 40, 3), (256, 300, 8), (64, 1, 8)])
def test_experts_touched_and_tiles_filled_are_those_of_random_routing(num_experts: int, n: int, k: int) -> None:
    rng = np.random.default_rng(5)
    touched, rows = [], []
    for _ in range(300):
        routed = rng.random((n, num_experts)).argsort(axis=1)[:, :k]
        counts = np.bincount(routed.ravel(), minlength=num_experts)
        touched.append((counts > 0).sum())
        rows.append((-(-counts // tile_of(n).rows) * tile_of(n).rows).sum())
    args = np.array([float(n)]), np.array([float(k)])
    assert distinct_experts(num_experts, *args)[0] == pytest.approx(np.mean(touched), rel=0.02)
    assert padded_rows(num_experts, *args)[0] == pytest.approx(np.mean(rows), rel=0.02)


@pytest.mark.parametrize(
    ("num_experts", "n", "k", "alike"), [(128, 40, 8, 0.93), (256, 300, 4, 0.72), (64, 600, 8, 0.9)]
)
def test_tokens_of_a_prompt_that_are_routed_alike_touch_fewer_experts(
    num_experts: int, n: int, k: int, alike: float
) -> None:
    rng = np.random.default_rng(11)
    touched, rows = [], []
    for _ in range(300):
        logits = alike * rng.standard_normal(num_experts) + np.sqrt(1 - alike**2) * rng.standard_normal(
            (n, num_experts)
        )
        counts = np.bincount(logits.argsort(axis=1)[:, -k:].ravel(), minlength=num_experts)
        touched.append((counts > 0).sum())
        rows.append((-(-counts // tile_of(n).rows) * tile_of(n).rows).sum())
    args = np.array([float(n)]), np.array([float(k)])
    # the least logit that is chosen is taken to be the same for all tokens; of few experts it varies
    assert distinct_experts(num_experts, *args, alike)[0] == pytest.approx(np.mean(touched), rel=0.1)
    assert padded_rows(num_experts, *args, alike)[0] == pytest.approx(np.mean(rows), rel=0.1)
    assert distinct_experts(num_experts, *args, alike)[0] < 0.8 * distinct_experts(num_experts, *args)[0]


def correlated_router_inputs(layers: int, shared_width: int, hidden: int = 96, heads: int = 6) -> float:
    """Return the square root of the correlation between router inputs of one random prompt, over a random model.

    Matrices are of fan_in ** -0.5, embeddings too, norms of 1, as models that are measured have.
    """
    rng, n, num_experts, k = np.random.default_rng(3), 48, 8, 2

    def weights(rows: int, columns: int) -> FloatArray:
        return np.asarray(rng.standard_normal((rows, columns)) / np.sqrt(rows))

    def norm(x: FloatArray) -> FloatArray:
        return np.asarray(x / np.sqrt((x**2).mean(axis=-1, keepdims=True)))

    def softmax(x: FloatArray) -> FloatArray:
        powers = np.exp(x - x.max(axis=-1, keepdims=True))
        return np.asarray(powers / powers.sum(axis=-1, keepdims=True))

    def mlp(x: FloatArray, width: int) -> FloatArray:
        gate = x @ weights(hidden, width)
        return np.asarray((gate / (1 + np.exp(-gate)) * (x @ weights(hidden, width))) @ weights(width, hidden))

    x, found = rng.standard_normal((n, hidden)) / np.sqrt(hidden), []
    for _ in range(layers):
        q, keys, v = ((norm(x) @ weights(hidden, hidden)).reshape(n, heads, -1).transpose(1, 0, 2) for _ in range(3))
        scores = np.where(np.tri(n, dtype=bool), q @ keys.transpose(0, 2, 1) / np.sqrt(hidden / heads), -np.inf)
        x = x + (softmax(scores) @ v).transpose(1, 0, 2).reshape(n, hidden) @ weights(hidden, hidden)
        inputs = norm(x)
        correlations = np.atleast_2d(np.corrcoef(inputs[n // 4 :]))
        found.append(correlations[np.triu_indices(len(correlations), 1)].mean())
        shares = softmax(inputs @ weights(hidden, num_experts))
        shares[shares < np.sort(shares, axis=1)[:, -k, None]] = 0.0
        x = x + sum(shares[:, e, None] * mlp(inputs, hidden // 4) for e in range(num_experts))
        if shared_width:
            x = x + mlp(inputs, shared_width)
    return float(np.sqrt(np.maximum(found, 0.0)).mean())


@pytest.mark.parametrize(
    ("layers", "shared_width", "alike"), [(16, 0, ALIKE), (48, 0, ALIKE), (27, 96, ALIKE_WITH_SHARED)]
)
def test_random_models_route_tokens_of_one_prompt_as_alike_as_is_taken(
    layers: int, shared_width: int, alike: float
) -> None:
    """Attention draws tokens of a prompt together with every layer, shared experts keep them apart."""
    assert correlated_router_inputs(layers, shared_width) == pytest.approx(alike, abs=0.06)


def test_work_is_counted_from_the_weights() -> None:
    work = step_work(SHAPE, [3], [32], decode=True)
    per_layer = 4 * 2048 * 2048 + 256 * 2048  # projections of 16 heads of 128, and the router
    assert work.dense_flop[0] == 2 * 3 * 16 * per_layer
    assert work.dense_bytes[0] == 2 * 16 * per_layer
    assert work.head_flop[0] == 2 * 3 * 50304 * 2048
    assert work.expert_bytes[0] == pytest.approx(2 * 16 * 256 * (1 - (1 - 32 / 256) ** 3) * 3 * 2048 * 256)
    all_experts = step_work(SHAPE, [1], [256], decode=True)
    assert all_experts.expert_bytes[0] == pytest.approx(2 * 16 * 256 * 3 * 2048 * 256)


def test_matrices_are_padded_to_tiles_too() -> None:
    # gate and up of 352 are 704 columns, 5.5 tiles of 128; down has a depth of 352, 5.5 tiles of 64
    n = np.array([8.0, 100.0])
    assert matrix_padding(352, n) == pytest.approx([(704 + 384) / 1056, (768 + 384) / 1056])
    assert matrix_padding(256, n) == pytest.approx([1.0, 1.0])
    work, narrow = (step_work(replace(SHAPE, expert_width=width), [100], [32], decode=False) for width in (352, 256))
    assert work.expert_flop[0] / narrow.expert_flop[0] == pytest.approx(352 / 256 * 1152 / 1056)


def test_what_a_token_moves_is_counted_operator_by_operator() -> None:
    """One layer of each kind, in elements: two norms (4 each), projections and router read and write hidden states."""
    hidden = 2048
    olmoe, deepseek = (model_shape(read_model(name).config) for name in ("olmoe-1b-7b", "deepseek-v2-lite"))
    # queries and outputs of 2048: written, rotated (read and written), read or written by attention; keys and values
    # of 2048 also cached
    attention = 11 * hidden + 3 * (2048 + 2048) + 4 * (2048 + 2048)
    assert step_work(olmoe, [1], [8], decode=False).token_bytes[0] == 2 * 16 * (attention + 2 * 64)
    # keys of 16 heads of 192 and values of 128, expanded from the latent; queries like keys, outputs like values
    attention = 11 * hidden + 7 * 16 * (192 + 128)
    shared, dense = 2 * hidden + 6 * 2 * 1408, 2 * hidden + 6 * 10944
    expected = 27 * attention + 26 * (2 * 64 + shared) + dense
    assert step_work(deepseek, [1], [6], decode=False).token_bytes[0] == 2 * expected


TWO_CARDS = [Parallelism(2), Parallelism(2, expert_parallel=True)]


def test_one_of_two_cards_multiplies_with_these_weights() -> None:
    """Counted matrix by matrix from the published shapes, as vLLM's classes place them."""
    olmoe, deepseek, qwen = (
        model_shape(read_model(name).config) for name in ("olmoe-1b-7b", "deepseek-v2-lite", "qwen3-30b-a3b")
    )
    assert dense_layer_weights(olmoe, TWO_CARDS[0]) == 16 * (4 * 2048 * 1024 + 64 * 2048)
    # 32 query heads and 4 KV heads of 128; the router of 128 experts is whole
    assert dense_layer_weights(qwen, TWO_CARDS[0]) == 48 * (2 * 2048 * 16 * 128 + 2 * 2048 * 2 * 128 + 128 * 2048)
    # 16 heads of 192 in queries; latent 512 and rotary key 64 whole; two shared experts; the first layer is dense
    attention = 2048 * 8 * 192 + 2048 * (512 + 64) + 512 * 8 * (128 + 128) + 8 * 128 * 2048
    experts = 26 * (3 * 2048 * 1408 + 64 * 2048)
    assert dense_layer_weights(deepseek, TWO_CARDS[0]) == 27 * attention + experts + 3 * 2048 * 10944 // 2
    assert [TWO_CARDS[0].kv_share(model) for model in (olmoe, deepseek, qwen)] == [0.5, 1.0, 0.5]
    # eight cards share four KV heads
    assert Parallelism(8).kv_share(qwen) == 0.25
    for model in (olmoe, deepseek, qwen):
        assert dense_layer_weights(model) == dense_layer_weights(model, ONE_CARD) == model.dense_layer_weights


def test_experts_on_two_cards_are_split_in_width_or_dealt_out() -> None:
    model = model_shape(OLMOE.config)
    one, (split, dealt) = (
        step_work(model, [300], [8], decode=False),
        (step_work(model, [300], [8], decode=False, parallel=parallel) for parallel in TWO_CARDS),
    )
    for each in (split, dealt):
        assert each.expert_flop[0] == one.expert_flop[0] / 2
        assert each.expert_bytes[0] == one.expert_bytes[0] / 2
        assert each.head_bytes[0] == one.head_bytes[0] / 2 and each.logit_bytes[0] == one.logit_bytes[0]
        # two sums a layer, and one of the embedding; half of the logits; half of queries and keys, for their norms
        assert each.link_bytes[0] == 2 * (300 * 2048 * (2 * 16 + 1) + (50304 + 16 * 300 * (2048 + 2048)) / 2)
    # a card sees every pair and half of each expert's width, or half of the pairs at whole width
    assert split.pair_bytes[0] == 2 * 300 * 8 * (2 * 2048 + 4 * 512) * 16
    assert dealt.pair_bytes[0] == 2 * 150 * 8 * (2 * 2048 + 4 * 1024) * 16
    assert one.link_bytes[0] == one.exchanges[0] == 0


@pytest.mark.parametrize(("n", "k", "cards"), [(1, 8, 2), (3, 8, 2), (8, 4, 4)])
def test_the_card_with_most_of_the_experts_touched_decides(n: int, k: int, cards: int) -> None:
    """Whole experts on each card: steps of few tokens touch them unevenly, and the others wait."""
    rng = np.random.default_rng(7)
    routed = rng.random((4000, n, 64)).argsort(axis=2)[:, :, :k]
    touched = np.zeros((4000, 64))
    np.put_along_axis(touched, routed.reshape(4000, -1), 1.0, axis=1)
    most = touched.reshape(4000, cards, -1).sum(axis=2).max(axis=1).mean()
    model = model_shape(OLMOE.config)
    work = step_work(model, [n], [k], decode=True, parallel=Parallelism(cards, expert_parallel=True))
    assert work.expert_bytes[0] == pytest.approx(2 * 16 * most * model.expert_weights, rel=0.03)


@given(
    st.integers(1, 20_000), st.integers(1, 20_000), st.integers(1, 32), st.integers(1, 32), st.sampled_from([2, 4, 8])
)
def test_no_card_reads_more_experts_than_it_holds_nor_fewer_for_more_tokens(
    n: int, more_n: int, k: int, more_k: int, cards: int
) -> None:
    model, parallel = model_shape(OLMOE.config), Parallelism(cards, expert_parallel=True)
    held = 2 * model.num_moe_layers * model.num_experts * model.expert_weights / cards
    ns, ks = [n, max(n, more_n)], [k, max(k, more_k)]
    less, more = step_work(model, ns, ks, decode=True, parallel=parallel).expert_bytes
    assert less <= more * (1 + 1e-12) and more <= held * (1 + 1e-12)


def test_what_passes_between_cards_is_learned_from_tables_of_several(measured: list[MeasuredModel]) -> None:
    truth = replace(learn_from(measured).device, link=0.4, exchange_s=2.5e-5)
    grids = []
    for model in (model_shape(OLMOE.config), model_shape(read_model("qwen3-30b-a3b").config)):
        for decode, parallel in product((False, True), TWO_CARDS):
            n, k = np.array(list(product([1, 64, 512, 8192], [4, 8])), dtype=np.float64).T
            seconds = device_s(model, H200, truth, n, k, decode=decode, parallel=parallel)
            grids.append(GridPoints(model, H200, decode, n, k, seconds, parallel))
    (one,) = measured
    cells = [(size, k) for size in (16, 1024) for k in (4, 32)]
    of_one = GridPoints(SHAPE, H200, True, *np.array([(n, k, 1e-3 * n) for n, k in cells], dtype=np.float64).T)
    found = learn([of_one, *grids])
    # one card's grid alone decides what is one card's
    assert replace(found, link=0.6, exchange_s=1e-5) == learn([of_one])
    # with the rest known, what is left tells the exchanges
    again = learn_from([one, *several(one)])
    assert again.device.dense_compute == learn_from([one]).device.dense_compute
    assert again.device.exchange_s == pytest.approx(2.5e-5, rel=0.1)
    assert again.device.link == pytest.approx(0.4, rel=0.1)
    assert again.host == learn_from([one]).host


def test_workers_of_several_cards_launch_while_outputs_are_taken_in(measured: list[MeasuredModel]) -> None:
    """What a share of one card holds of taking in stands beside the launch; tables of several cards teach no share."""
    (one,) = measured
    learned = learn_from([one, *several(one)])
    assert learned.update.base_s > 0 and learned.update.per_seq_s > 0
    for path, (fixed, _) in learned.host.items():
        assert fixed.per_seq_s == one.table.host[path].per_seq_s
    alone, pair = (estimate(learned, one.table, H200, OLMOE, 1, [], p) for p in (ONE_CARD, TWO_CARDS[0]))
    assert pair.update == alone.update == learned.update
    for path, share in pair.host.items():
        together = share.base_s + pair.update.base_s, share.per_seq_s + pair.update.per_seq_s
        assert together == pytest.approx(alone.host[path])


def several(one: MeasuredModel) -> list[MeasuredModel]:
    """Return tables of two cards whose exchanges take 25 us and reach 40% of the link."""
    learned = learn_from([one])
    learned = replace(learned, device=replace(learned.device, link=0.4, exchange_s=2.5e-5))
    found = []
    for name, parallel in product(("olmoe-1b-7b", "qwen3-30b-a3b"), TWO_CARDS):
        model = read_model(name)
        table = as_cells(estimate(learned, one.table, H200, model, 1, [], parallel))
        table = replace(table, status="measured", provenance=one.table.provenance)
        found.append(MeasuredModel(table, model.published_as, model_shape(model.config), H200, parallel))
    return found


def test_attention_to_kv_and_the_host_are_learned_back(measured: list[MeasuredModel]) -> None:
    """Models differ in arithmetic a byte of KV and in launches; the eager path of one was not measured."""
    (one,) = measured
    host = {
        "full": (HostShare(2e-3, 2e-5), 0.0),
        "piecewise": (HostShare(4e-3, 2e-5), 5e-5),
        "eager": (HostShare(6e-3, 3e-5), 1e-3),
    }
    truth = replace(learn_from([one]), kv_memory=0.9, kv_compute=0.2, host=host)
    found = []
    for name in published_models():
        model = read_model(name)
        table = as_cells(estimate(truth, one.table, H200, model, 1, []))
        table = replace(table, status="measured", provenance=one.table.provenance)
        if name == "deepseek-v2-lite":
            table = replace(table, host={**table.host, "eager": table.host["piecewise"]})
        found.append(MeasuredModel(table, model.published_as, model_shape(model.config), H200))
    again = learn_from(found)
    assert (again.kv_memory, again.kv_compute) == pytest.approx((0.9, 0.2))
    for path, (fixed, launch_s) in host.items():
        assert tuple(again.host[path][0]) == pytest.approx(tuple(fixed), rel=1e-6)
        assert again.host[path][1] == pytest.approx(launch_s)
    assert launches(model_shape(read_model("deepseek-v2-lite").config), "piecewise") == 27 * 7


def test_tables_of_several_cards_are_held_out_apart(measured: list[MeasuredModel]) -> None:
    rows = held_out_errors([*measured, *several(measured[0])])
    of_model = {row.table for row in rows if row.held_out == "model"}
    # nothing of one card is left to learn from where OLMoE is held out, and Qwen's tables differ in cards alone
    assert of_model == {"qwen3-30b-a3b-tp2-h200", "qwen3-30b-a3b-tp2-ep-h200", ALL_TABLES[True]}
    assert all(row.p95 < 0.1 for row in rows if row.held_out == "model")
    assert over_all_tables(rows, 2)[0].table == ALL_TABLES[True]


@pytest.mark.parametrize("name", published_models())
@pytest.mark.parametrize("parallel", TWO_CARDS)
def test_two_cards_bind_at_no_less_than_half_of_one(name: str, parallel: Parallelism) -> None:
    model = model_shape(read_model(name).config)
    one = Roofline(model, H200.bf16_flop_s, H200.memory_byte_s, "")
    two = one._replace(parallel=parallel)
    for shape in (StepShape(0, 0, 0, 64, 64 * 1024, 4), StepShape(4096, 10_000_000, 4, 0, 0, 4)):
        (flop, moved), (each_flop, each_moved) = one.work(shape), two.work(shape)
        assert flop / 2 <= each_flop < 0.55 * flop and moved / 2 <= each_moved < 0.75 * moved
        assert one.bound_s(shape) / 2 <= two.bound_s(shape) < one.bound_s(shape)


def test_a_table_of_two_cards_has_the_roofline_of_two_cards(measured: list[MeasuredModel]) -> None:
    table = measured[0].table
    flags = table.provenance["runs"][0]["engine_flags"]
    run_of = {**table.provenance["runs"][0], "num_cards": 2}
    for expert_parallel in (False, True):
        run_of["engine_flags"] = {**flags, "tensor_parallel_size": 2, "enable_expert_parallel": expert_parallel}
        roofline = roofline_of(replace(table, provenance={"runs": [run_of]}))
        assert roofline is not None
        assert roofline.parallel == parallelism(run_of) == Parallelism(2, expert_parallel)
        assert roofline.flop_s == H200.bf16_flop_s and "of 2 cards" in roofline.source


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(published_models()),
    st.sampled_from(sorted(CARDS)),
    st.integers(1, 8000),
    st.integers(1, 6),
    st.booleans(),
)
def test_no_estimate_beats_the_binding_roofline(name: str, card: str, n: int, k: int, decode: bool) -> None:
    model, perfect = (
        model_shape(read_model(name).config),
        Efficiencies(1.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0),
    )
    roofline = Roofline(model, CARDS[card].bf16_flop_s, CARDS[card].memory_byte_s, "")
    shape = StepShape(0, 0, 0, n, 0, k) if decode else StepShape(n, 0, -(-n // 1024), 0, 0, k)
    seconds = device_s(model, CARDS[card], perfect, n, k, decode=decode)
    assert float(seconds) >= roofline.bound_s(shape) * (1 - 1e-9) > 0


def test_the_roofline_s_ends_are_arithmetic_and_memory() -> None:
    roofline = Roofline(SHAPE, H200.bf16_flop_s, H200.memory_byte_s, "")
    flop, moved = roofline.work(StepShape(8192, 8 * 1024 * 1025 // 2, 8, 0, 0, 32))
    assert flop / H200.bf16_flop_s > moved / H200.memory_byte_s
    flop, moved = roofline.work(StepShape(0, 0, 0, 16, 16 * 4096, 32))
    assert moved / H200.memory_byte_s > flop / H200.bf16_flop_s
    # a KV token of OLMoE: keys and values of 16 heads of 128 in 16 layers, bf16
    assert moved - roofline.work(StepShape(0, 0, 0, 16, 0, 32))[1] == 16 * 4096 * 2 * 2 * 16 * 128 * 16


def test_known_efficiencies_are_learned_back() -> None:
    truth = Efficiencies(0.5, 0.4, 0.7, 0.6, 20.0, 3.0, 8.0, 4e-6, 9e-5, 2e-5)
    models = [
        model_shape(split_config(read_model(name).config, splits)) for name in published_models() for splits in (1, 4)
    ]
    grids = []
    for model in models:
        for decode in (False, True):
            ks = [k for k in (1, 2, 4, 6, 16, 24) if k <= model.top_k]
            n, k = np.array(list(product([1, 8, 64, 256, 1024, 8192], ks)), dtype=np.float64).T
            grids.append(GridPoints(model, H200, decode, n, k, device_s(model, H200, truth, n, k, decode=decode)))
    found = learn(grids)
    for grid in grids:
        again = device_s(grid.model, H200, found, grid.num_tokens, grid.k, decode=grid.decode)
        assert again == pytest.approx(grid.device_s, rel=0.05)
    a100 = CARDS["a100-80gb"]
    n, k = np.array([16.0, 4096.0]), np.array([4.0, 4.0])
    assert device_s(SHAPE, a100, found, n, k, decode=False) == pytest.approx(
        device_s(SHAPE, a100, truth, n, k, decode=False), rel=0.1
    )


def test_a_layer_timed_alone_tells_experts_from_the_rest() -> None:
    """Grids at one k and few sizes leave open what is the experts' and what the dense layers'; a layer settles it."""
    compute, memory = 0.35, 0.55
    truth = Efficiencies(expert_compute=compute, expert_memory=memory, dense_compute=0.9, experts_s=1e-5)
    n, k = np.array([2048.0, 4096.0, 8192.0]), np.full(3, 8.0)
    grid = GridPoints(SHAPE, H200, False, n, k, device_s(SHAPE, H200, truth, n, k, decode=False))
    at, ks = np.array(list(product([1, 16, 64, 256, 1024, 2048, 8192], [1, 8, 32])), dtype=np.float64).T
    work = step_work(SHAPE, at, ks, decode=False)
    products = work.expert_flop / compute / H200.bf16_flop_s, work.expert_bytes / memory / H200.memory_byte_s
    moved_s = truth.pair_traffic * work.pair_bytes / H200.memory_byte_s
    products_s = np.linalg.norm(products, ord=OVERLAP, axis=0)
    layer = LayerPoints(SHAPE, H200, at, ks, (products_s + moved_s) / SHAPE.num_moe_layers + 1e-5)
    alone, both = learn([grid]), learn([grid], [layer])
    assert both.expert_compute == pytest.approx(compute, rel=0.15)
    assert both.expert_memory == pytest.approx(memory, rel=0.15)
    assert abs(both.expert_compute - compute) < 0.5 * abs(alone.expert_compute - compute)
    assert abs(both.expert_memory - memory) < 0.5 * abs(alone.expert_memory - memory)


def test_nothing_learned_leaves_what_is_believed() -> None:
    assert learn([]) == Efficiencies()
    with pytest.raises(ProfileError, match="no measured table"):
        learn_from([])


def test_every_shipped_measured_table_is_learned_from() -> None:
    tables = [load_profile(name).table for name in profile_names()]
    usable = {table.name for table in tables if table.status == "measured" and table.captured_sizes}
    found = {one.table.name: one for one in shipped(profile_names())}
    assert set(found) == usable >= {DEFAULT_PROFILE}
    assert found[DEFAULT_PROFILE].shape == SHAPE
    assert found[DEFAULT_PROFILE].base == OLMOE.published_as


def test_cells_behind_the_host_teach_only_where_the_device_was_held(measured: list[MeasuredModel]) -> None:
    """Small prefill cells of a table hold bounds, unless its fit had times of a held device."""
    (one,) = measured
    table = as_cells(one.table)
    slow = tuple(
        tuple(cell._replace(device_s=cell.device_s * 0.5) if size < 512 else cell for cell in row)
        for size, row in zip(table.prefill.sizes, table.prefill.cells, strict=True)
    )
    table = replace(table, prefill=replace(table.prefill, cells=slow))
    held_row = {"kind": "prefill", "clock": "held", "source": "fitted", "num_samples": 1}
    held = replace(table, provenance={**table.provenance, "fit": {"residuals": [held_row]}})
    bounds = replace(table, provenance={**table.provenance, "fit": {"residuals": []}})
    as_before = replace(as_cells(one.table), provenance=bounds.provenance)
    of_bounds, of_held, before = (learn_from([one._replace(table=each)]).device for each in (bounds, held, as_before))
    n = np.array([64.0, 128.0])
    assert of_bounds == before
    assert (
        device_s(SHAPE, H200, of_held, n, 16, decode=False) < device_s(SHAPE, H200, before, n, 16, decode=False)
    ).all()


def test_the_card_at_hand_is_estimated_as_it_was_measured(measured: list[MeasuredModel]) -> None:
    (one,) = measured
    table = estimate(learn_from(measured), one.table, H200, OLMOE, 4, [])
    assert (table.k_max, table.block_size, table.captured_sizes) == (32, 16, one.table.captured_sizes)
    # the memory an engine keeps is learned, so the KV that is left is the one seen
    assert table.num_gpu_blocks == pytest.approx(one.table.num_gpu_blocks, abs=1)
    assert table.attention.prefill_pair_s == pytest.approx(one.table.attention.prefill_pair_s)
    for path, share in one.table.host.items():
        assert tuple(table.host[path]) == pytest.approx(tuple(share))
    assert table.update == one.table.update


@pytest.mark.parametrize("card", sorted(CARDS))
@pytest.mark.parametrize("splits", [1, 4])
def test_estimates_load_and_are_marked(card: str, splits: int, measured: list[MeasuredModel]) -> None:
    table = estimate(learn_from(measured), measured[0].table, CARDS[card], OLMOE, splits, [])
    again = parse_table(dump_table(table).encode(), "estimate")
    assert again.status == "estimated"
    assert again.k_max == 8 * splits == again.prefill.ks[-1]
    roofline = roofline_of(again)
    assert roofline is not None and roofline.flop_s == CARDS[card].bf16_flop_s


def test_a_faster_card_is_never_slower(measured: list[MeasuredModel]) -> None:
    learned = learn_from(measured)
    h100, h200 = (estimate(learned, measured[0].table, CARDS[c], OLMOE, 4, []) for c in ("h100", "h200"))
    for name in ("prefill", "decode"):
        assert (np.array(getattr(h100, name).seconds) >= np.array(getattr(h200, name).seconds) * (1 - 1e-12)).all()
    assert h100.decode_kv[0][1] > h200.decode_kv[0][1]
    assert h100.num_gpu_blocks < h200.num_gpu_blocks


def test_weights_that_do_not_fit_are_refused(measured: list[MeasuredModel]) -> None:
    with pytest.raises(UsageError, match=r"weights take 61\.1 GB in bf16"):
        estimate(learn_from(measured), measured[0].table, CARDS["rtx-4090"], read_model("qwen3-30b-a3b"), 1, [])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--gpu", "h100", "--model", "olmoe-1b-7b", "--split", "7"],
            "cannot split experts of intermediate_size 1024",
        ),
        (["--gpu", "h100", "--model", "olmoe-1b-7b", "--tensor-parallel", "3"], "cannot spread the model over 3 cards"),
        (["--gpu", "rtx-4090", "--model", "qwen3-30b-a3b"], "weights take 61.1 GB in bf16; of"),
    ],
)
def test_a_layout_that_cannot_be_is_refused_before_anything_is_learned(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def learns(*_: object) -> None:
        raise AssertionError("learned")

    monkeypatch.setattr("simmoe.profiles.estimating.learned.learn_from", learns)
    monkeypatch.setattr("simmoe.profiles.estimating.held_out.learn_from", learns)
    assert run(["profile", "roofline", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_what_does_not_fit_one_card_fits_two(measured: list[MeasuredModel]) -> None:
    learned, like, qwen = learn_from(measured), measured[0].table, read_model("qwen3-30b-a3b")
    with pytest.raises(UsageError, match=r"weights take 61\.1 GB in bf16;"):
        estimate(learned, like, CARDS["l40s"], qwen, 1, [])
    for parallel in TWO_CARDS:
        table = parse_table(dump_table(estimate(learned, like, CARDS["l40s"], qwen, 1, [], parallel)).encode(), "two")
        roofline = roofline_of(table)
        assert roofline is not None and roofline.parallel == parallel
    with pytest.raises(UsageError, match=r"30\.5 GB in bf16 on each of 2 cards"):
        estimate(learned, like, CARDS["rtx-4090"], qwen, 1, [], Parallelism(2))


def test_how_prompts_are_routed_depends_on_the_weights(measured: list[MeasuredModel]) -> None:
    learned, like, qwen = learn_from(measured), measured[0].table, read_model("qwen3-30b-a3b")
    alike, apart = (
        estimate(learned, like, H200, qwen, 1, [], weights=weights) for weights in ("dummy", "simmoe-dummy 2")
    )
    at = alike.prefill.sizes.index(128)
    assert apart.prefill.seconds[at][-1] > 1.5 * alike.prefill.seconds[at][-1]
    assert apart.decode == alike.decode
    bounds = [roofline_of(table) for table in (alike, apart)]
    assert [roofline.routed_alike for roofline in bounds if roofline] == [True, False]
    # what is measured under other weights does not tell how alike these route
    again = learn_from([measured[0]._replace(table=relabelled(measured[0].table, "simmoe-dummy 2"))])
    assert (again.device.alike, again.device.alike_with_shared) == pytest.approx((ALIKE, ALIKE_WITH_SHARED), rel=1e-3)


def relabelled(table: StepTable, weights: str) -> StepTable:
    """Return a table measured under weights of that name."""
    return replace(
        table, provenance={**table.provenance, "runs": [{**table.provenance["runs"][0], "weights": weights}]}
    )


def test_two_cards_are_faster_than_one_where_the_device_binds(measured: list[MeasuredModel]) -> None:
    learned, like = learn_from(measured), measured[0].table
    one, two = (estimate(learned, like, H200, OLMOE, 1, [], parallel) for parallel in (ONE_CARD, Parallelism(2)))
    assert 0.5 < two.prefill.seconds[-1][-1] / one.prefill.seconds[-1][-1] < 0.8
    assert two.decode_kv[0][1] == one.decode_kv[0][1] / 2
    assert two.num_gpu_blocks > 2 * one.num_gpu_blocks


def test_as_much_is_held_out_as_the_other_tables_allow(measured: list[MeasuredModel]) -> None:
    (one,) = measured
    assert {row.held_out for row in held_out_errors(measured)} == {"budgets"}
    other_split = as_measured(one, "olmoe-1b-7b", 1)
    assert {row.held_out for row in held_out_errors([one, other_split])} == {"layout"}
    deepseek = as_measured(one, "deepseek-v2-lite", 4)
    rows = held_out_errors([one, deepseek])
    names = {DEFAULT_PROFILE, deepseek.table.name, ALL_TABLES[False]}
    assert {(row.table, row.held_out) for row in rows} == {(name, "model") for name in names}
    # the second table is what the first predicts, so predicting it back is exact
    predicted = [row for row in rows if row.table == deepseek.table.name]
    assert all(row.p95 < 1e-3 and row.number for row in predicted)
    assert {(row.steps, row.sizes) for row in predicted} == {
        ("prefill", "up to 512"), ("prefill", "above 512"), ("decode", "up to 32"), ("decode", "above 32")
    }  # fmt: skip
    rows = held_out_errors([one, other_split, deepseek])
    assert [row.held_out for row in rows] == sorted((row.held_out for row in rows), reverse=True)
    held_alone = {row.table for row in rows if row.held_out == "layout"}
    assert held_alone == {one.table.name, other_split.table.name, ALL_TABLES[False]}
    assert {row.held_out for row in over_all_tables(rows)} == {"model"}
    assert {row.table for row in over_all_tables(rows)} == {ALL_TABLES[False]}


def test_no_layout_of_a_model_teaches_what_its_layouts_take(measured: list[MeasuredModel]) -> None:
    """A model whose device takes twice what all others teach comes out at half where the device binds, unless one of
    its layouts may be learned from."""
    twice = [as_measured(measured[0], "deepseek-v2-lite", splits, factor=2.0) for splits in (1, 4)]
    rows = {
        (row.held_out, row.table, row.steps, row.sizes, row.bound_by): row
        for row in held_out_errors([measured[0], *twice])
    }
    for one in twice:
        unseen = rows["model", one.table.name, "prefill", "above 512", "device"]
        assert 0.45 < unseen.median <= 0.51
        assert rows["layout", one.table.name, "prefill", "above 512", "device"].median < unseen.median - 0.1
        assert unseen.number <= rows["model", one.table.name, "prefill", "above 512", "device or host"].number
    together = rows["model", ALL_TABLES[False], "prefill", "above 512", "device"]
    assert together.number == sum(
        rows["model", one.table.name, "prefill", "above 512", "device"].number for one in (measured[0], *twice)
    )


def test_a_table_that_teaches_nothing_says_why(measured: list[MeasuredModel]) -> None:
    estimated = estimate(learn_from(measured), measured[0].table, H200, OLMOE, 4, [])
    table: StepTable = measured[0].table
    run_of = table.provenance["runs"][0]
    tables = {
        "estimated, not measured": estimated,
        "synthetic, not measured": load_profile("synthetic-olmoe-split4").table,
        "no graphs that follow k": replace(table, provenance={"runs": [{**run_of, "graphs": "default"}]}),
        "no datasheet of 'NVIDIA B200'": replace(table, provenance={"runs": [{**run_of, "card": "NVIDIA B200"}]}),
        "the shape of 'mine' is not known": replace(
            table, provenance={"runs": [{**run_of, "model": "mine", "model_config": {}}]}
        ),
        "it does not say what was measured": replace(table, provenance={}),
    }
    assert {left_out(other): other for other in tables.values()} == tables
    assert measured_models((other, None) for other in tables.values()) == []
    assert left_out(table) is None


@pytest.mark.parametrize("name", ["h200", "H200", "NVIDIA H200", "nvidia h200"])
def test_cards_are_found_by_either_name(name: str) -> None:
    assert card_named(name) is H200


def test_an_unknown_card_lists_those_known() -> None:
    with pytest.raises(UsageError, match=r"no card 'h20'.*known: .*mi300x"):
        card_named("h20")


#: card -> (bf16 operations a unit does in a clock, its boost clock in Hz, memory bus in bits, bits a second a pin).
#: Tensor cores of GeForce cards accumulate in fp32 at half the rate; the H800 is taken as an H100.
MADE_OF = {
    "a100-80gb": (2048, 1.410e9, 5120, 3.186e9),
    "h100": (4096, 1.830e9, 5120, 5.234e9),
    "h800": (4096, 1.830e9, 5120, 5.234e9),
    "h200": (4096, 1.830e9, 6144, 6.25e9),
    "rtx-a6000": (1024, 1.800e9, 384, 16e9),
    "l40s": (1024, 2.520e9, 384, 18e9),
    "rtx-4090": (512, 2.520e9, 384, 21e9),
    "mi300x": (2048, 2.100e9, 8192, 5.2e9),
}


def test_the_cards_of_the_issue_are_there_with_their_sources() -> None:
    assert set(CARDS) == set(MADE_OF)
    for card in CARDS.values():
        assert "datasheet" in card.source or "data sheet" in card.source or "whitepaper" in card.source


@pytest.mark.parametrize("name", sorted(MADE_OF))
def test_a_card_s_rates_are_those_of_its_units_and_pins(name: str) -> None:
    """No sparsity, the right accumulator, the right variant: 1.2% lets the L40S's datasheet pass, which contradicts
    itself by that much."""
    card, (flop, clock_hz, bus_bits, pin_bit_s) = CARDS[name], MADE_OF[name]
    assert card.bf16_flop_s == pytest.approx(card.num_sms * flop * clock_hz, rel=0.013 if name == "l40s" else 0.001)
    assert card.memory_byte_s == pytest.approx(bus_bits * pin_bit_s / 8, rel=0.005)
    # whole gigabytes of 2 ** 30 bytes, of which ECC may keep a sixteenth
    datasheet = {"a100-80gb": 80, "h100": 80, "h800": 80, "h200": 141, "rtx-a6000": 48, "l40s": 48, "rtx-4090": 24}
    assert 15 / 16 - 1e-3 <= card.memory_bytes / 2**30 / datasheet.get(name, 192) <= 1


def test_the_command_prints_and_keeps_a_marked_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a100.json"
    options = ["profile", "roofline", "--gpu", "a100-80gb", "--model", "olmoe-1b-7b"]
    assert run([*options, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "olmoe-1b-7b-split4-a100-80gb (estimated)" in printed and "method's error" in printed
    loaded = load_profile(str(out))
    assert loaded.label == "olmoe-1b-7b-split4-a100-80gb (estimated)"
    first = out.read_bytes()
    assert run([*options, "--out", str(out)]) == 0
    assert out.read_bytes() == first


def test_an_estimate_of_what_was_measured_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profile", "roofline", "--gpu", "h200", "--model", "olmoe-1b-7b"]) == 0
    captured = capsys.readouterr()
    assert f"{DEFAULT_PROFILE} (estimated)" in captured.out
    assert captured.err == f"the shipped profile '{DEFAULT_PROFILE}' was measured on this card\n"


def test_what_is_simulated_on_an_estimate_is_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = tmp_path / "a100.json"
    assert run(["profile", "roofline", "--gpu", "a100-80gb", "--model", "olmoe-1b-7b", "--out", str(table)]) == 0
    load = ["--trace", "azure", "--requests", "20"]
    capsys.readouterr()
    assert run(["run", *load, "--rate", "5", "--profile", str(table), "--out", str(tmp_path / "sim")]) == 0
    captured = capsys.readouterr()
    assert "(estimated)" in captured.out and "(estimated)" in captured.err
    assert run(["run", *load, "--rate", "5", "--out", str(tmp_path / "other")]) == 0
    assert run(["compare", str(tmp_path / "sim"), str(tmp_path / "other")]) == 0
    first, second = capsys.readouterr().out.split("first ")[1].split("second ")[:2]
    assert "olmoe-1b-7b-split4-a100-80gb, estimated)" in first and "estimated" not in second
    sweep = ["--rates", "5", "--seeds", "2", "--policy", "fifo", "--profile", str(table), "--out", str(tmp_path / "s")]
    assert run(["sweep", *load, *sweep]) == 0
    assert "(estimated)" in capsys.readouterr().err
    assert json.loads((tmp_path / "s" / "manifest.json").read_text())["profile"]["status"] == "estimated"


def test_a_model_of_one_s_own_needs_no_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {k: v for k, v in OLMOE.config.items() if k != "_name_or_path"} | {"num_hidden_layers": 4}
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = ["profile", "roofline", "--gpu", "h100", "--split", "2", "--model"]
    assert run([*options, str(tmp_path)]) == 0
    assert f"{tmp_path.name}-split2-h100 (estimated)" in capsys.readouterr().out
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "mixtral"}))
    assert run([*options, str(tmp_path)]) == 3
    assert "'mixtral' is not supported; supported families: deepseek_v2, olmoe, qwen3_moe" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ([], 2, "name the card and the model"),
        (["--gpu", "h100"], 2, "name the card and the model"),
        (["--gpu", "b200", "--model", "olmoe-1b-7b"], 2, "no card 'b200'"),
        (["--gpu", "a100", "--model", "olmoe-1b-7b"], 2, "did you mean 'a100-80gb'?"),
        (["--gpu", "", "--model", "olmoe-1b-7b"], 2, "no card ''; known"),
        (["--gpu", "h100", "--model", ""], 2, "no model ''"),
        (["--gpu", "h100", "--model", "olmoe-1b-7b", "--out", "table"], 2, "end it in .json"),
        (["--gpu", "h100", "--model", "olmoe"], 2, "did you mean 'olmoe-1b-7b'"),
        (["--gpu", "h100", "--model", "olmoe-1b-7b", "--split", "3"], 2, "it must divide the width"),
        (["--gpu", "rtx-4090", "--model", "qwen3-30b-a3b"], 2, "leaves no room for KV"),
        (["--gpu", "h100", "--model", "olmoe-1b-7b", "--expert-parallel"], 2, "say how many with --tensor-parallel"),
        (["--gpu", "h100", "--model", "olmoe-1b-7b", "--tensor-parallel", "3"], 2, "must divide its expert width, 256"),
        (
            ["--gpu", "h100", "--model", "qwen3-30b-a3b", "--split", "1", "--tensor-parallel", "6"],
            2,
            "must divide its KV heads, 4",
        ),
    ],
)
def test_what_cannot_be_estimated_is_said(
    options: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["profile", "roofline", *options]) == code
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_the_docs_print_the_method_s_error_as_the_command_does(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profile", "roofline", "--error"]) == 0
    printed = capsys.readouterr().out
    page = (Path(__file__).parents[2] / "docs" / "profiles.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```\n(estimated / measured.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)
    assert blocks == [printed], "put what 'simmoe profile roofline --error' prints into docs/profiles.md"
    for row in held_out_errors(shipped(profile_names())):
        numbers = rf"\{row.bias:+z.1%} +{row.median:.1%} +{row.p95:.1%} "
        assert re.search(rf"^{row.table} .* {numbers}", printed, re.MULTILINE)
    assert max(map(len, printed.splitlines())) < 130
