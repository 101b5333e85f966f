"""A host that is twice as slow in spells, and hides the device of more steps the slower it is, moves no device term."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from simmoe.profiles.fitting.evidence import device_bound
from simmoe.profiles.fitting.fit import fit_table
from simmoe.profiles.recorded_steps import RecordedStep
from simmoe.profiles.residuals import Predictor
from simmoe.profiles.samples import Clock, Sample
from simmoe.profiles.shape import StepShape
from simmoe.profiles.synthetic import CAPTURED_SIZES, SyntheticEngine, make_sample
from simmoe.profiles.table import PATHS, HostShare, StepTable

#: It takes 22 ms for a step with prompt tokens, 44 in a slow spell, where its device takes 4 to 60.
ENGINE = SyntheticEngine(host_s=(2.5e-3, 22e-3), decode_kv_token_s=4e-8, mixed_kv_token_s=4e-8)

#: Steps of up to so many tokens are measured with the device held.
HELD_UP_TO = 1024


def spells(count: int, seed: int, share: float, length: int = 12) -> list[float]:
    """How many times slower than at its best the host is at each of a row of moments."""
    rng = np.random.default_rng(seed)
    slow = np.repeat(rng.random(count // length + 1) < share, length)[:count]
    return [float(f) for f in np.where(slow, 2.0, 1.0) * rng.uniform(1.0, 1.06, count)]


def measured(seed: int, share: float, gaps: bool, noise: float = 5e-3) -> list[Sample]:
    """What a measuring run sees of the engine, a pass over points whose order has nothing to do with their size.

    A train of like steps takes the longer of device and host. A host that is faster than the device fills its queue
    with long steps and waits as it launches: its own time is then the step's.

    Args:
        gaps: whether the device is seen idle between steps that the host decides, or only within them.
    """
    exact = [s for s in ENGINE.samples() if s.clock == "step" and not s.held_out]
    rng = np.random.default_rng(seed)
    rows = [exact[i] for i in rng.permutation(len(exact))]
    out: list[Sample] = []
    for s, slow in zip(rows, spells(len(rows), seed, share), strict=True):
        device_s = ENGINE.device_s(s.shape) * float(np.exp(noise * rng.standard_normal()))
        host_s = ENGINE.host_share_s(s.shape) * slow
        step_s = max(device_s, host_s)
        waits = device_s > host_s and s.shape.num_tokens > 512
        busy_s = step_s if device_s >= host_s or not gaps else max(device_s, 0.93 * step_s)
        for clock, seconds in (("step", step_s), ("device", busy_s), ("host", 0.98 * step_s if waits else host_s)):
            out.append(replace(s, clock=clock, median_s=seconds, p10_s=seconds, p90_s=seconds))
        if s.shape.num_tokens <= HELD_UP_TO and s.kind != "mixed":
            out.append(replace(s, clock="held", median_s=device_s, p10_s=device_s, p90_s=device_s))
    return out


def mixed_shapes(seed: int, count: int = 150) -> list[StepShape]:
    rng = np.random.default_rng(seed)
    prompts, decodes = rng.integers(900, 4000, count), rng.integers(5, 200, count)
    kv_tokens = decodes * rng.integers(300, 3000, count)
    return [
        StepShape(int(p), int(p * (p + 1) // 2), 1, int(d), int(kv), 32)
        for p, d, kv in zip(prompts, decodes, kv_tokens, strict=True)
    ]


def served(seed: int, share: float, workers: int = 1) -> list[RecordedStep]:
    """Steps of the calibration recording, each after a decode-only one, with what the first worker's clocks tell."""
    shapes = mixed_shapes(seed)
    slow = [spells(len(shapes), seed + 1 + worker, share) for worker in range(workers)]
    steps = []
    for shape, *factors in zip(shapes, *slow, strict=True):
        device_s = ENGINE.device_s(shape)
        # it was begun 2 ms before the device was done with the step before
        late_s = [ENGINE.host_share_s(shape) * factor - 2e-3 for factor in factors]
        seconds = max(device_s, *late_s)
        sample = make_sample(shape, "step", "graphs", [seconds])
        steps.append(RecordedStep("calibration", sample, True, None, late_s[0] <= 0.87 * seconds, late_s=late_s[0]))
    return steps


def fit(samples: list[Sample], recorded: list[RecordedStep], num_cards: int = 1) -> StepTable:
    header = replace(ENGINE.header(), num_cards=num_cards)
    return fit_table([(header, samples)], "fitted", "synthetic", "a made-up engine", recorded)


def device_errors(table: StepTable, shapes: list[StepShape]) -> list[float]:
    device = Predictor(table, async_scheduling=True)
    return [device.device_s(shape) / ENGINE.device_s(shape) - 1 for shape in shapes]


@pytest.mark.parametrize(
    ("share", "gaps", "cards", "seed"), [(0.0, False, 1, 2), (0.6, False, 1, 1), (0.6, True, 1, 5), (0.3, False, 2, 2)]
)
def test_what_the_device_takes_is_told_whatever_part_of_the_time_the_host_is_slow(
    share: float, gaps: bool, cards: int, seed: int
) -> None:
    """Of two cards the second worker's launches are not clocked, and hold steps up as the first's do."""
    table = fit(measured(seed, share, gaps), served(seed, share, cards), cards)
    assert table.attention.prefill_pair_s == pytest.approx(ENGINE.pair_s, rel=0.2)
    errors = np.array(device_errors(table, mixed_shapes(seed + 5)))
    assert abs(errors.mean()) < 0.02
    assert np.median(np.abs(errors)) < 0.01
    assert np.quantile(np.abs(errors), 0.95) < 0.06


def test_cells_that_no_point_shows_are_told_by_served_steps() -> None:
    """The host is slow while points are measured, and hides all but the largest; while the engine serves it is not."""
    samples, shapes = measured(seed=1, share=1.0, gaps=False), mixed_shapes(6)
    bounds = np.abs(device_errors(fit(samples, []), shapes))
    errors = np.abs(device_errors(fit(samples, served(1, share=0.0)), shapes))
    assert np.median(bounds) > 0.05
    assert np.quantile(errors, 0.95) < 0.05


@pytest.mark.parametrize(
    ("step_s", "busy_s", "bound"), [(20e-3, 20e-3, True), (20e-3, 19e-3, False), (11e-3, 11e-3, False)]
)
def test_a_launch_that_waits_for_a_full_queue_does_not_pass_for_the_hosts_time(
    step_s: float, busy_s: float, bound: bool
) -> None:
    """The host takes 10 ms for a short step, and for a long one, by its clock, all of the step."""
    clock = {path: HostShare(10e-3, 0.0) for path in PATHS}
    rows = [make_sample(StepShape(n, n * (n + 1) // 2, 1, 0, 0, 8), "host", "graphs", [10e-3]) for n in range(1, 11)]
    long = StepShape(4096, 4096 * 4097 // 2, 1, 0, 0, 8)
    times: list[tuple[Clock, float]] = [("step", step_s), ("device", busy_s), ("host", 0.98 * step_s)]
    rows += [make_sample(long, of, "graphs", [seconds]) for of, seconds in times]
    assert [told for _, told in device_bound(rows, clock, CAPTURED_SIZES)] == [bound]
