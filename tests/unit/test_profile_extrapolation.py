"""Beyond a measured grid steps follow the rooflines that bind them, as the rest of a measured table shows."""

from __future__ import annotations

import pickle
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simmoe.profiles.catalog import Profile, load_profile, profile_names
from simmoe.profiles.estimating.scaling import rooflines_of
from simmoe.profiles.grid import Grid
from simmoe.profiles.shape import StepParts, StepShape
from simmoe.profiles.step_cost import Surfaces, prompt_shape
from simmoe.profiles.table import GridTable, StepTable

MEASURED = [name for name in profile_names() if load_profile(name).status == "measured"]
DOCS = Path(__file__).parents[2] / "docs" / "profiles.md"

#: What is kept of a grid: its sizes up to this share of the last one, its budgets up to this share of the largest.
CUTS = ((1 / 8, 1.0), (1 / 4, 1.0), (1 / 2, 1.0), (1.0, 1 / 4), (1.0, 1 / 2), (1 / 4, 1 / 2))

#: What the rest of all tables together, cut so, is held to: the size of the bias, the median of the error's size and
#: its 95th percentile. Straight lines would be off by up to 30%, 30% and 110%.
MOST_BIAS, MOST_MEDIAN, MOST_P95 = 0.08, 0.08, 0.27

#: And any point of any one table.
MOST = 0.45


def cut(points: GridTable, of_sizes: float, of_ks: float) -> GridTable:
    num_sizes = sum(size <= points.sizes[-1] * of_sizes for size in points.sizes)
    num_ks = sum(k <= points.ks[-1] * of_ks for k in points.ks)
    cells = tuple(row[:num_ks] for row in points.cells[:num_sizes])
    return GridTable(points.sizes[:num_sizes], points.ks[:num_ks], cells)


def cut_table(table: StepTable, of_sizes: float, of_ks: float) -> StepTable:
    return replace(table, prefill=cut(table.prefill, of_sizes, of_ks), decode=cut(table.decode, of_sizes, of_ks))


def grids(table: StepTable, decode: bool) -> tuple[GridTable, Grid]:
    surfaces = Surfaces.of(table)
    return (table.decode, surfaces.decode) if decode else (table.prefill, surfaces.prefill)


@cache
def errors(of_sizes: float, of_ks: float, decode: bool, rooflines: bool = True) -> dict[str, np.ndarray]:
    """Return predicted / measured - 1 at every cell that was cut off, by table; those that lose no budget left out."""
    found = {}
    for name in MEASURED:
        table = load_profile(name).table
        less = cut_table(table, of_sizes, of_ks)
        full, _ = grids(table, decode)
        seen, grid = (
            grids(less if rooflines else replace(less, provenance={}), decode) if less.prefill.ks else (full, None)
        )
        if grid is None or (of_ks < 1 and seen.ks == full.ks):
            continue
        found[name] = np.array(
            [
                grid.seconds(size, k) / cell.device_s - 1
                for size, row in zip(full.sizes, full.cells, strict=True)
                for k, cell in zip(full.ks, row, strict=True)
                if size > seen.sizes[-1] or k > seen.ks[-1]
            ]
        )
    return found


def printed(of_sizes: float, of_ks: float, decode: bool) -> str:
    """Return the row of docs/profiles.md: bias, median, 95th percentile, worst; and of straight lines."""
    kept = [f"{what} up to 1/{round(1 / share)}" for what, share in (("n", of_sizes), ("k", of_ks)) if share < 1]
    cells = [", ".join(kept), "decode" if decode else "prompts"]
    for rooflines in (True, False):
        by_table = errors(of_sizes, of_ks, decode, rooflines)
        off = np.concatenate(list(by_table.values()))
        p95 = np.quantile(np.abs(off), 0.95)
        cells += [] if not rooflines else [f"{len(off)} of {len(by_table)}"]
        cells.append(
            f"{off.mean():+.1%}, {np.median(np.abs(off)):.1%}, {p95:.1%} ({off.min():+.0%} to {off.max():+.0%})"
        )
    return f"| {' | '.join(cells)} |"


@pytest.mark.parametrize("decode", [False, True])
@pytest.mark.parametrize(("of_sizes", "of_ks"), CUTS)
def test_cut_tables_tell_the_rest_of_themselves(of_sizes: float, of_ks: float, decode: bool) -> None:
    off = np.concatenate(list(errors(of_sizes, of_ks, decode).values()))
    straight = np.concatenate(list(errors(of_sizes, of_ks, decode, rooflines=False).values()))
    size = np.abs(off)
    assert abs(off.mean()) < MOST_BIAS
    assert np.median(size) < MOST_MEDIAN
    assert np.quantile(size, 0.95) < MOST_P95
    assert size.max() < MOST
    assert size.mean() < np.abs(straight).mean()


def test_the_docs_print_the_errors_of_cut_tables() -> None:
    text = DOCS.read_text()
    for of_sizes, of_ks in CUTS:
        for decode in (False, True):
            assert printed(of_sizes, of_ks, decode) in text


@pytest.mark.parametrize("name", MEASURED)
def test_beyond_the_grid_no_step_is_faster_than_the_card_allows(name: str) -> None:
    table = load_profile(name).table
    for of_sizes, of_ks in ((1.0, 1.0), *CUTS):
        for decode in (False, True):
            less = cut_table(table, of_sizes, of_ks)
            if less.prefill.ks:
                points, grid = grids(less, decode)
                rooflines = rooflines_of(table, decode=decode)
                assert rooflines is not None
                for size in (*points.sizes, *(points.sizes[-1] * times for times in (2, 3, 8, 64))):
                    for k in (*points.ks, 2 * points.ks[-1] - 1, 8 * points.ks[-1]):
                        if grid.outside_sizes(size) or grid.outside_ks(k):
                            assert grid.seconds(size, k) >= rooflines.bound_s(grid.runs_at(size), k) * (1 - 1e-12)


@pytest.mark.parametrize("name", MEASURED)
def test_beyond_the_grid_prompts_keep_to_their_share_of_the_roofline(name: str) -> None:
    """Nor are they twice as slow beside the roofline as the largest step measured."""
    table = load_profile(name).table
    seen, grid = grids(table, decode=False)
    rooflines, last = rooflines_of(table, decode=False), seen.sizes[-1]
    assert rooflines is not None
    for k in seen.ks:
        shares = [rooflines.bound_s(size, k) / grid.seconds(size, k) for size in (last, 2 * last, 16 * last)]
        assert max(shares) < 1
        assert all(shares[0] / 2 < share < 2 * shares[0] for share in shares), (k, shares)


points = st.tuples(st.integers(1, 40_000), st.integers(1, 100))


@given(st.sampled_from(MEASURED), st.sampled_from(CUTS[:-1]), st.booleans(), points, points)
def test_more_of_anything_never_takes_less_beyond_the_grid(
    name: str, kept: tuple[float, float], decode: bool, one: tuple[int, int], other: tuple[int, int]
) -> None:
    _, grid = cut_grids(name, *kept)[decode]
    more = max(one[0], other[0]), max(one[1], other[1])
    assert grid.seconds(*more) >= grid.seconds(*one) * (1 - 1e-12)


@cache
def cut_grids(name: str, of_sizes: float, of_ks: float) -> tuple[tuple[GridTable, Grid], tuple[GridTable, Grid]]:
    table = load_profile(name).table
    less = cut_table(table, of_sizes, of_ks)
    less = less if less.prefill.ks else table
    return grids(replace(less, captured_sizes=()), False), grids(replace(less, captured_sizes=()), True)


@given(st.sampled_from(MEASURED), st.booleans(), st.data())
def test_the_grid_goes_on_from_its_edge(name: str, decode: bool, data: st.DataObject) -> None:
    """A token or a unit of budget beyond the edge costs no more than a few times its share of what is there."""
    seen, grid = cut_grids(name, 1 / 4, 1.0)[decode]
    n, k = seen.sizes[-1], seen.ks[-1]
    edge_k, edge_n = data.draw(st.integers(1, k)), data.draw(st.integers(1, n))
    assert 1 <= grid.seconds(n + 1, edge_k) / grid.seconds(n, edge_k) < 1 + 4 / n
    assert 1 <= grid.seconds(edge_n, k + 1) / grid.seconds(edge_n, k) < 1 + 4 / k


@given(st.sampled_from(MEASURED), points)
def test_beyond_a_corner_what_each_edge_grows_by_multiplies(name: str, point: tuple[int, int]) -> None:
    for seen, grid in cut_grids(name, 1 / 4, 1.0):
        n, k = seen.sizes[-1], seen.ks[-1]
        size, budget = n + point[0], k + point[1]
        grown = grid.seconds(size, k) * grid.seconds(n, budget) / grid.seconds(n, k)
        assert grid.seconds(size, budget) >= grown * (1 - 1e-12)


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_decode_lines_beyond_the_grid_equal_their_steps_bit_for_bit(async_scheduling: bool) -> None:
    profile = load_profile("qwen3-30b-a3b-h200")
    cost = profile.cost(async_scheduling)
    for num_seqs, k in ((1500, 8), (5000, 3), (7, 12), (9000, 16)):
        base_s, per_kv_token_s, floor_s, *rest = profile.cost(async_scheduling).decode_line(num_seqs, k)
        for kv_tokens in (num_seqs, 10**6 + 7):
            step_s = cost.step_s(StepShape(0, 0, 0, num_seqs, kv_tokens, k))
            parts = StepParts(base_s + per_kv_token_s * kv_tokens, floor_s, *rest)
            assert (max(parts.device_s, floor_s) if async_scheduling else parts.alone_s) == step_s


def test_what_lies_beyond_is_the_same_whatever_was_asked_before_and_in_another_process() -> None:
    asked = [(n, k) for n in (9000, 20_000, 100_000) for k in (1, 7, 32, 40, 64)]
    profile = load_profile()
    forth = [profile.cost().prefill_s(n, k) for n, k in asked]
    fresh = pickle.loads(pickle.dumps(load_profile()))
    back = [fresh.cost().prefill_s(n, k) for n, k in reversed(asked)]
    again = pickle.loads(pickle.dumps(profile))
    assert forth == back[::-1] == [again.cost().prefill_s(n, k) for n, k in asked]


def test_a_run_within_the_grid_counts_no_work() -> None:
    code = (
        "import sys; from simmoe.profiles.catalog import load_profile; cost = load_profile().cost(); "
        "cost.prefill_s(8192, 32); assert 'simmoe.profiles.estimating.step_work' not in sys.modules; "
        "cost.prefill_s(9000, 32); assert 'simmoe.profiles.estimating.step_work' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_table_that_names_no_card_goes_straight_on() -> None:
    table = replace(load_profile("olmoe-1b-7b-h200").table, provenance={})
    profile, last = Profile(table), table.prefill.sizes[-1]
    by_size = [profile.cost().parts_s(prompt_shape(last * times, 8)).device_s for times in (1, 2, 3)]
    assert by_size[2] - by_size[1] == pytest.approx(by_size[1] - by_size[0])


def test_noise_in_the_last_points_hardly_moves_a_straight_line() -> None:
    """A grid with 2% of noise, fine to its end as measured ones are; twice and eight times its last size."""
    rng = np.random.default_rng(0)
    sizes, ks = list(range(512, 8193, 512)), [1, 2, 4, 8, 16, 20, 24, 28, 32]
    true = np.array([[1e-3 + 1e-6 * n * (1 + k / 8) for k in ks] for n in sizes])
    for _ in range(50):
        seen = true * rng.uniform(0.99, 1.01, true.shape)
        seen = np.maximum.accumulate(np.maximum.accumulate(seen, axis=0), axis=1)
        grid = Grid(sizes, ks, seen.tolist(), [])
        for n in (16384, 65536):
            for k in (1, 8, 32, 64):
                assert grid.seconds(n, k) == pytest.approx(1e-3 + 1e-6 * n * (1 + k / 8), rel=0.1)


def rows() -> Iterator[str]:
    """Yield the rows of docs/profiles.md, for ``python -m tests.unit.test_profile_extrapolation``."""
    for of_sizes, of_ks in CUTS:
        for decode in (False, True):
            yield printed(of_sizes, of_ks, decode)


if __name__ == "__main__":
    print("\n".join(rows()))
