"""The fit recovers the engine that made the samples, and says what it cannot tell."""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import lsq_linear

from simmoe.errors import ProfileError
from simmoe.profiles.fitting.fit import fit_table
from simmoe.profiles.fitting.monotone import monotone_grid
from simmoe.profiles.fitting.regression import fit_cells
from simmoe.profiles.recorded_steps import RecordedStep
from simmoe.profiles.residuals import Predictor, residuals
from simmoe.profiles.samples import Sample
from simmoe.profiles.shape import StepShape
from simmoe.profiles.step_cost import ProfileStepCost, Surfaces
from simmoe.profiles.synthetic import BUDGETS, CAPTURED_SIZES, SyntheticEngine, make_sample
from simmoe.profiles.table import HostShare, StepTable
from simmoe.profiles.table_file import dump_table, parse_table


def fit(engine: SyntheticEngine, samples: list[Sample]) -> StepTable:
    table = fit_table([(engine.header(), samples)], "fitted", "synthetic", "a made-up engine")
    return parse_table(dump_table(table).encode(), "fitted")


def worst_step_error(table: StepTable, engine: SyntheticEngine) -> float:
    cost = ProfileStepCost(Surfaces.of(table), async_scheduling=True)
    shapes = {sample.shape for sample in engine.samples()}
    return max(abs(cost.step_s(shape) / engine.step_s(shape) - 1) for shape in shapes)


def test_without_noise_every_step_is_recovered() -> None:
    engine = SyntheticEngine()
    table = fit(engine, engine.samples())
    assert worst_step_error(table, engine) < 1e-4
    assert table.attention.prefill_pair_s == pytest.approx(engine.pair_s)
    assert table.attention.mixed_seq_s == pytest.approx(engine.mixed_seq_s, rel=1e-3)
    assert table.attention.mixed_kv_token_s == pytest.approx(engine.mixed_kv_token_s, rel=1e-3)
    assert [slope for _, slope in table.decode_kv] == pytest.approx([engine.decode_kv_token_s] * len(table.decode_kv))
    assert table.host["full"].base_s == pytest.approx(engine.host_s[0], rel=1e-3)
    assert table.host["piecewise"].per_seq_s == pytest.approx(engine.host_seq_s, rel=1e-3)


def test_an_engine_bound_by_its_host_is_recovered_too() -> None:
    engine = SyntheticEngine(host_s=(4e-3, 9e-3))
    table = fit(engine, engine.samples())
    facts = table.provenance["fit"]
    assert facts["steps_the_grids_rest_on"] < facts["steps"]
    assert worst_step_error(table, engine) < 0.03  # steps bound by the host, if barely, may pass for the device's


#: Its host decides every step of fewer than some thousand prompt tokens, and of few sequences.
SLOW_HOST = SyntheticEngine(host_s=(4e-3, 9e-3))


def hidden_by_the_host(engine: SyntheticEngine, noise: float = 0.0, seed: int = 0) -> list[Sample]:
    """The samples of a device that waits for its host: its clock shows the gaps between launches too.

    The host is slow for a spell, so that a step's bound on the device is not the same each pass.
    """
    rng = np.random.default_rng(seed)

    def shown(s: Sample) -> Sample:
        host_s = engine.host_share_s(s.shape) * float(rng.uniform(1.0, 1.4))
        if s.clock == "host" or engine.device_s(s.shape) > engine.host_share_s(s.shape):
            return s
        seconds = max(host_s * (0.95 if s.clock == "device" else 1.0), s.median_s)
        return replace(s, median_s=seconds, p10_s=seconds, p90_s=seconds)

    return [shown(s) for s in engine.samples(noise, seed)]


def worst_device_error(table: StepTable, engine: SyntheticEngine) -> float:
    """Of all shapes, those that the host hides and that were held out too."""
    device = Predictor(table, async_scheduling=True)
    return max(abs(device.device_s(s.shape) / engine.device_s(s.shape) - 1) for s in engine.samples())


def test_a_device_that_was_held_shows_what_its_host_hides() -> None:
    samples = hidden_by_the_host(SLOW_HOST)
    assert worst_device_error(fit(SLOW_HOST, samples), SLOW_HOST) > 0.5
    table = fit(SLOW_HOST, [*samples, *SLOW_HOST.held_samples()])
    assert worst_device_error(table, SLOW_HOST) < 0.02
    rows = {(row["kind"], row["clock"]): row for row in table.provenance["fit"]["residuals"]}
    # steps whose host was barely the slower have their part in what attention adds
    assert rows["decode", "held"]["p95"] < 5e-3 and rows["prefill", "held"]["p95"] < 5e-3


def test_few_budgets_held_are_enough() -> None:
    """What lies between them follows their curve: as many experts as a step's pairs touch."""
    table = fit(SLOW_HOST, [*hidden_by_the_host(SLOW_HOST), *SLOW_HOST.held_samples((1, 4, 12, 32))])
    assert worst_device_error(table, SLOW_HOST) < 0.08


@pytest.mark.parametrize("seed", range(3))
def test_a_held_device_is_recovered_through_noise(seed: int) -> None:
    noise = 0.02
    samples = [*hidden_by_the_host(SLOW_HOST, noise, seed), *SLOW_HOST.held_samples(BUDGETS, noise, seed + 9)]
    table = fit(SLOW_HOST, samples)
    device = Predictor(table, async_scheduling=True)
    errors = [device.device_s(s.shape) / SLOW_HOST.device_s(s.shape) - 1 for s in SLOW_HOST.samples()]
    assert abs(np.mean(errors)) < noise / 2
    assert np.median(np.abs(errors)) < noise
    assert np.quantile(np.abs(errors), 0.95) < 3 * noise


def test_a_synchronous_step_is_right_where_the_host_would_have_hidden_the_device() -> None:
    table = fit(SLOW_HOST, [*hidden_by_the_host(SLOW_HOST), *SLOW_HOST.held_samples()])
    host = {path: HostShare(SLOW_HOST.host_s[path != "full"], SLOW_HOST.host_seq_s) for path in table.host}
    cost = ProfileStepCost(Surfaces.of(replace(table, host=host)), async_scheduling=False)
    for shape in {s.shape for s in SLOW_HOST.samples()}:
        # nothing tells when a graph can begin but that it can when it is launched; then the pieces of prompts can, too
        graph_s = SLOW_HOST.host_s[False] + SLOW_HOST.host_seq_s * (shape.num_prefill_seqs + shape.num_decode_seqs)
        true_s = max(SLOW_HOST.host_share_s(shape), graph_s + SLOW_HOST.device_s(shape))
        assert cost.step_s(shape) == pytest.approx(true_s, rel=0.01)


def test_steps_held_up_by_the_host_do_not_raise_the_grid() -> None:
    engine = SyntheticEngine()

    def stalled(s: Sample) -> Sample:
        late = s.clock == "step" and s.kind == "prefill" and s.num_prefill_tokens in (64, 256, 512)
        slow = 2.5 * s.median_s
        return replace(s, median_s=slow, p10_s=slow, p90_s=slow) if late else s

    table = fit(engine, [stalled(s) for s in engine.samples()])
    assert worst_step_error(table, engine) < 0.15  # a stalled cell is only known to lie below the next size


def test_a_pass_in_a_slow_spell_of_the_host_changes_nothing() -> None:
    """Three rows a point, a pass each; a spell of the second pass met a third of the points."""
    engine = SyntheticEngine()

    def slow(s: Sample) -> Sample:
        return replace(s, median_s=2 * s.median_s, p90_s=2 * s.p90_s)

    exact = engine.samples()
    passes = [*exact, *(slow(s) if i % 3 == 0 and s.clock == "step" else s for i, s in enumerate(exact)), *exact]
    table = fit(engine, passes)
    assert worst_step_error(table, engine) < 1e-4
    points = {(s.shape.num_tokens, s.k): 0 for s in exact}
    assert sum(cell.repetitions for row in table.decode.cells for cell in row) > 2 * len(points)


def test_the_host_is_as_slow_as_in_the_calibration_recording() -> None:
    """While it serves, the host takes 3.5 ms a decode step instead of 1; held-out steps must not tell."""
    engine, serving = SyntheticEngine(), SyntheticEngine(host_s=(3.5e-3, 3.5e-3))
    shapes = [StepShape(0, 0, 0, n, n * 900, 8) for n in range(1, 33)] * 40
    recorded = [served(shape, serving.step_s(shape)) for shape in shapes]
    held_out = [r._replace(sample=replace(r.sample, median_s=9.0, p90_s=9.0, held_out=True)) for r in recorded]
    table = fit_table([(engine.header(), engine.samples())], "x", "synthetic", "x", [*recorded, *held_out])
    assert table.host["full"].base_s == pytest.approx(3.5e-3, rel=0.01)
    facts = table.provenance["fit"]
    assert facts["calibration_steps"] == len(recorded)
    assert [row["num_samples"] for row in facts["residuals"] if row["source"] == "recorded"] == [len(held_out)]
    without = fit_table([(engine.header(), engine.samples())], "x", "synthetic", "x")
    assert (table.decode, table.prefill, table.attention) == (without.decode, without.prefill, without.attention)


def served(
    shape: StepShape,
    seconds: float,
    device_bound: bool | None = None,
    launch_s: float | None = None,
    update_s: float | None = None,
    late_s: float | None = None,
) -> RecordedStep:
    """A step of the calibration recording, of a busy engine."""
    sample = make_sample(shape, "step", "graphs", [seconds])
    return RecordedStep("calibration", sample, True, None, device_bound, launch_s, update_s, late_s)


def test_what_the_host_takes_to_take_a_step_in_is_fitted() -> None:
    engine = SyntheticEngine()
    shapes = [StepShape(0, 0, 0, n, n * 900, 8) for n in range(1, 200)]
    recorded = [served(s, engine.step_s(s), update_s=2.7e-4 + 9e-6 * s.num_decode_seqs) for s in shapes]
    recorded += [served(shapes[4], 0.01, update_s=0.1), served(shapes[8], 0.01, update_s=0.2)]  # two stalls
    table = fit_table([(engine.header(), engine.samples())], "x", "synthetic", "x", recorded)
    assert tuple(table.update) == pytest.approx((2.7e-4, 9e-6))
    assert tuple(fit(engine, engine.samples()).update) == (0.0, 0.0)


def test_how_long_before_the_end_of_a_launch_a_graph_begins_is_told_by_steps_launched_late() -> None:
    """Graphs begin 0.7 ms before; what is launched kernel by kernel, with prompts or nearly in time tells nothing."""
    engine = SyntheticEngine()
    late = [1.1e-3, 1.6e-3, 2.5e-3, 4e-3, 9e-3] * 4
    graphs = [StepShape(0, 0, 0, n, n * 900, 8) for n in (16, 32, 64, 256) for _ in range(5)]
    recorded = [
        served(s, engine.device_s(s) + late_s - 0.7e-3, device_bound=False, late_s=late_s)
        for s, late_s in zip(graphs, late, strict=True)
    ]
    recorded[3] = served(graphs[3], 0.2, device_bound=False, late_s=4e-3)  # a stall
    others = [StepShape(0, 0, 0, CAPTURED_SIZES[-1] + n, 9000, 8) for n in range(1, 20)]
    others += [StepShape(n, n * n // 2, 1, 5, 900, 8) for n in range(100, 120)]
    told_nothing = [served(s, 0.05, device_bound=False, late_s=5e-3) for s in others]
    told_nothing += [served(s, 2 * engine.device_s(s), device_bound=False, late_s=0.9e-3) for s in graphs]
    told_nothing += [step._replace(late_s=None) for step in recorded]
    told_nothing += [step._replace(late_s=9e-3, sample=replace(step.sample, held_out=True)) for step in recorded]

    def fitted(steps: list[RecordedStep], tail_of: StepTable | None = None) -> StepTable:
        return fit_table([(engine.header(), engine.samples())], "x", "synthetic", "x", steps, tail_of)

    table = fitted([*recorded, *told_nothing])
    assert table.graph_tail_s == pytest.approx(0.7e-3, rel=1e-3)
    assert fitted([*recorded[:9], *told_nothing]).graph_tail_s is None
    elsewhere = replace(table, name="other", graph_tail_s=0.5e-3)
    taken = fitted(told_nothing, elsewhere)
    assert (taken.graph_tail_s, taken.provenance["fit"]["graph_tail_of"]) == (0.5e-3, "other")
    own = fitted(recorded, elsewhere)
    assert own.graph_tail_s == pytest.approx(0.7e-3, rel=1e-3) and "graph_tail_of" not in own.provenance["fit"]


def test_prompts_beside_decodes_have_a_share_of_their_own_where_attention_launches_both_apart() -> None:
    """Latent attention: prompts alone take 2.5 ms, short ones beside decodes too, longer ones 9 ms and now and then a
    stall; the device hides all of it."""
    engine = SyntheticEngine()
    header = replace(engine.header(), kernels={"attention": "FLASH_ATTN_MLA"})
    decodes = [StepShape(0, 0, 0, n, n * 2000, 8) for n in range(150, 200)]
    mixed = [StepShape(n, n * n // 2, 1, 20, 20_000, 8) for n in range(1000, 1060)]
    recorded = [served(s, engine.device_s(s), device_bound=True, launch_s=9e-4, update_s=1e-4) for s in decodes]
    for i, shape in enumerate(mixed):
        launch_s = 8.9e-3 + (0.05 if i % 10 == 0 else 0.0)
        recorded.append(served(shape, engine.device_s(shape), device_bound=True, launch_s=launch_s, update_s=1e-4))
    held_out = [r._replace(launch_s=1.0, sample=replace(r.sample, held_out=True)) for r in recorded]
    table = fit_table([(header, engine.samples())], "x", "synthetic", "x", [*recorded, *held_out])
    assert table.mixed_host is not None and table.mixed_host.above_tokens == 512
    assert table.mixed_host.share.base_s == pytest.approx(9e-3 - 21 * engine.host_seq_s, rel=1e-3)
    assert table.host["piecewise"].base_s == pytest.approx(engine.host_s[1], rel=0.02)
    read = parse_table(dump_table(table).encode(), "x")
    cost = ProfileStepCost(Surfaces.of(read), async_scheduling=True)
    short, long = StepShape(512, 512 * 513 // 2, 1, 4, 400, 8), StepShape(513, 513 * 514 // 2, 1, 4, 400, 8)
    assert cost.parts_s(long).host_s == pytest.approx(9e-3, rel=0.01)
    for shape in (short, long._replace(num_decode_seqs=0, decode_kv_tokens=0)):
        assert cost.parts_s(shape).host_s == pytest.approx(engine.host_s[1], rel=0.05)
    # other attention has one call for all tokens, and few clocked steps tell nothing
    for head, few in ((engine.header(), recorded), (header, recorded[:69])):
        other = fit_table([(head, engine.samples())], "x", "synthetic", "x", few)
        assert other.mixed_host is None
        assert other.host["piecewise"].base_s == pytest.approx(engine.host_s[1], rel=0.05)


def test_a_step_that_waited_for_its_launch_tells_nothing_of_mixed_steps() -> None:
    """Half of the served mixed steps took twice as long, for their launch; their clocks say so."""
    engine = SyntheticEngine()
    samples = [s for s in engine.samples() if s.kind != "mixed"]
    shapes = [StepShape(n, n * n // 2, 1, d, 1500 * d, 8) for n in range(1030, 3000, 37) for d in (10, 60, 250)]
    prompt_s = {True: 1.0, False: 2.0}
    recorded = [
        served(s, prompt_s[bound] * engine.device_s(s), device_bound=bound) for s in shapes for bound in (True, False)
    ]
    table = fit_table([(engine.header(), samples)], "x", "synthetic", "x", recorded)
    cost = ProfileStepCost(Surfaces.of(table), async_scheduling=True)
    errors = [cost.step_s(s) / engine.device_s(s) - 1 for s in shapes]
    assert np.quantile(np.abs(errors), 0.95) < 0.02


def test_points_without_graphs_tell_the_hosts_share_and_are_judged_by_it() -> None:
    """Without graphs the host takes 20 ms a step, with them at most 2.5."""
    engine, eager = SyntheticEngine(), SyntheticEngine(host_s=(20e-3, 20e-3))
    without = [
        replace(s, mode="eager")
        for s in eager.samples()
        if s.kind != "mixed" and s.shape.num_tokens in CAPTURED_SIZES and not s.held_out
    ]
    table = fit(engine, [*engine.samples(), *without])
    assert worst_step_error(table, engine) < 1e-4
    assert table.host["eager"].base_s == pytest.approx(20e-3, rel=1e-3)
    rows = {(row["source"], row["kind"], row["clock"]): row for row in table.provenance["fit"]["residuals"]}
    for kind in ("prefill", "decode"):
        assert rows["fitted, without graphs", kind, "step"]["p95"] < 1e-3
        assert rows["fitted", kind, "step"]["p95"] < 1e-3


def test_with_noise_the_table_is_as_good_as_the_noise() -> None:
    noise = 0.02
    engine = SyntheticEngine()
    table = fit(engine, engine.samples(noise, seed=1))
    for row in residuals(table, engine.samples(), async_scheduling=True, source="exact"):
        assert abs(row.bias) < noise / 2, row
        assert row.median < noise, row
        assert row.p95 < 2.5 * noise, row
    assert 0 < table.provenance["fit"]["monotone_projection_moved_at_most"]["decode"] < 4 * noise


def test_held_out_samples_take_no_part() -> None:
    engine = SyntheticEngine()
    samples = engine.samples()
    spoilt = [
        replace(s, median_s=9.0, p10_s=9.0, p90_s=9.0) if s.held_out else s for s in samples
    ]  # would ruin any fit they took part in
    assert worst_step_error(fit(engine, spoilt), engine) < 1e-4
    rows = fit(engine, spoilt).provenance["fit"]["residuals"]
    assert {row["source"] for row in rows} == {"fitted", "held out"}
    assert all((row["p95"] > 0.5) == (row["source"] == "held out") for row in rows)


def test_a_cell_not_measured_is_filled_and_marked() -> None:
    engine = SyntheticEngine()
    table = fit(engine, [s for s in engine.samples() if (s.shape.num_tokens, s.k) != (4096, 8)])
    grid = table.prefill
    i, j = grid.sizes.index(4096), grid.ks.index(8)
    filled = grid.cells[i][j]
    assert filled.repetitions == 0
    assert grid.cells[i][j - 1].device_s < filled.device_s < grid.cells[i][j + 1].device_s
    assert grid.cells[i][j - 1].repetitions > 0


def test_budgets_of_an_original_model_are_told_in_sub_expert_units() -> None:
    engine = SyntheticEngine()
    original = replace(engine.header(), k_max=8, k_granularity=4, captured_ks=[1, 2, 4, 8])
    few = [s for s in engine.samples() if s.k <= 8]
    table = fit_table([(original, few)], "original", "synthetic", "x")
    assert (table.k_max, table.k_granularity, table.captured_ks) == (32, 4, (4, 8, 16, 32))
    assert table.prefill.ks == (4, 8, 16, 32)
    assert np.array(table.prefill.seconds) == pytest.approx(np.array(fit(engine, few).prefill.seconds))


def test_an_eager_engine_has_one_launch_path_and_no_padding() -> None:
    engine = SyntheticEngine(host_s=(1e-3, 1e-3))
    eager = replace(engine.header(), captured_sizes=[], captured_ks=[], graphs="none")
    samples = [replace(s, mode="eager") for s in engine.samples() if s.shape.num_tokens in CAPTURED_SIZES]
    table = fit_table([(eager, samples)], "eager", "synthetic", "x")
    assert list(table.host) == ["eager"]
    cost = ProfileStepCost(Surfaces.of(table), async_scheduling=True)
    for shape in {s.shape for s in samples}:
        assert cost.step_s(shape) == pytest.approx(engine.step_s(shape), rel=1e-3)
    low, high = (cost.step_s(StepShape(n, n * (n + 1) // 2, 1, 0, 0, 8)) for n in (4096, 8192))
    assert low < cost.step_s(StepShape(6000, 6000 * 6001 // 2, 1, 0, 0, 8)) < high


def test_what_cannot_be_fitted_is_refused() -> None:
    engine = SyntheticEngine()
    samples = engine.samples()
    with pytest.raises(ProfileError, match="no sample files"):
        fit_table([], "x", "synthetic", "x")
    with pytest.raises(ProfileError, match="no prefill step was measured"):
        fit(engine, [s for s in samples if s.kind == "decode"])
    with pytest.raises(ProfileError, match="no batch size was decoded at two contexts"):
        fit(engine, [s for s in samples if s.kind != "decode" or s.decode_kv_tokens == 128 * s.num_decode_seqs])
    with pytest.raises(ProfileError, match="no samples under the host clock"):
        fit(engine, [s for s in samples if s.clock != "host"])
    with pytest.raises(ProfileError, match="asynchronously"):
        fit_table([(replace(engine.header(), async_scheduling=False), samples)], "x", "synthetic", "x")
    other = replace(engine.header(), card="another card")
    with pytest.raises(ProfileError, match="sample files disagree on card"):
        fit_table([(engine.header(), samples), (other, samples)], "x", "synthetic", "x")
    whole_experts = replace(engine.header(), engine_flags={"enable_expert_parallel": True})
    with pytest.raises(ProfileError, match="disagree on enable_expert_parallel"):
        fit_table([(engine.header(), samples), (whole_experts, samples)], "x", "synthetic", "x")


@pytest.mark.parametrize("seed", range(5))
def test_cells_and_terms_are_the_constrained_optimum(seed: int) -> None:
    rng = np.random.default_rng(seed)
    keys = [(int(a), int(b)) for a, b in rng.integers(0, 3, (40, 2))]
    terms = rng.random((40, 3))
    seconds = 1 + rng.random(40) + terms @ [0.5, -0.8, 0.0]
    fitted = fit_cells(keys, terms, seconds)
    names = sorted(set(keys))
    design = np.hstack([np.array([[key == name for name in names] for key in keys], dtype=float), terms])
    lower = np.r_[np.full(len(names), -np.inf), np.zeros(3)]
    oracle = lsq_linear(design / seconds[:, None], np.ones(40), (lower, np.inf), tol=1e-13)
    assert [fitted.cells[name] for name in names] == pytest.approx(oracle.x[: len(names)].tolist(), abs=1e-5)
    assert fitted.values == pytest.approx(oracle.x[len(names) :], abs=1e-5)
    assert fitted.values[1] == 0


def test_a_term_that_never_varies_within_a_cell_is_left_to_the_cells() -> None:
    fitted = fit_cells([1, 1, 2], [[5.0], [5.0], [9.0]], [1.0, 1.0, 2.0])
    assert fitted.values.tolist() == [0.0]
    assert fitted.cells == pytest.approx({1: 1.0, 2: 2.0})


@pytest.mark.parametrize("seed", range(3))
def test_the_monotone_projection_is_the_nearest(seed: int) -> None:
    values = np.exp(np.random.default_rng(seed).normal(size=(3, 4)) / 3)
    projected, moved = monotone_grid(values)
    assert (np.diff(projected, axis=0) >= 0).all() and (np.diff(projected, axis=1) >= 0).all()
    assert moved == pytest.approx(np.abs(projected / values - 1).max())
    # Brute force: a cell's value is the largest over upper sets of the smallest mean over lower sets, both holding it.
    logs = np.log(values)
    lower = [
        np.arange(4) < np.array(ends)[:, None]
        for ends in itertools.product(range(5), repeat=3)
        if list(ends) == sorted(ends, reverse=True)
    ]
    for at in np.ndindex(3, 4):
        uppers, lowers = [~low for low in lower if not low[at]], [low for low in lower if low[at]]
        nearest = max(min(float(logs[up & low].mean()) for low in lowers) for up in uppers)
        assert np.log(projected[at]) == pytest.approx(nearest, abs=1e-6)


def test_a_monotone_grid_stays_as_it_is() -> None:
    values = np.add.outer(np.arange(1.0, 5), np.arange(1.0, 4))
    projected, moved = monotone_grid(values)
    assert projected == pytest.approx(values)
    assert moved == pytest.approx(0, abs=1e-12)
