"""Laws of building a workload: independent streams, arrival processes, budgets, which rows are taken."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from simmoe.errors import TraceError, UsageError
from simmoe.traces.build import build_workload
from simmoe.traces.spec import WorkloadSpec
from simmoe.traces.streams import stream
from simmoe.traces.workload import Workload

NUM_ROWS = 40
#: 3.89 standard errors: a law that holds fails once in ten thousand draws, and the seeds below are fixed.
Z = 3.89


def spec_of(budgets: str | None, **fields: Any) -> WorkloadSpec:
    """A specification with tiers where its budgets are mixed, for only those take any."""
    return WorkloadSpec(budgets=budgets, mix=((1, 1.0), (16, 2.0), (32, 0.5)) if budgets == "mix" else (), **fields)


SPECS = st.builds(
    spec_of,
    trace=st.just("trace"),
    arrivals=st.sampled_from([None, "poisson", "gamma", "constant", "onoff"]),
    rate=st.floats(0.01, 1000.0) | st.just(float("inf")),
    cv=st.floats(0.1, 10.0),
    on_s=st.floats(0.01, 100.0),
    off_s=st.floats(0.0, 100.0),
    requests=st.none() | st.integers(1, 3 * NUM_ROWS),
    min_total_tokens=st.none() | st.integers(2, 50),
    clip_total_tokens=st.none() | st.integers(30, 200),
    budgets=st.sampled_from([None, "normal", "fixed", "mix", "trace"]),
    mu=st.floats(-10, 50),
    sigma=st.floats(0, 50),
    seed=st.integers(0, 2**63),
)


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows told apart by their prompts, 21 to 21 + NUM_ROWS - 1; two arrive at each instant."""
    path = tmp_path_factory.mktemp("traces") / "trace.csv"
    rows = (f"r{i},{(i // 2) * 1.5},{21 + i},{i % 7 + 1},{i % 32 + 1}\n" for i in range(NUM_ROWS))
    path.write_text("request_id,arrival_s,prompt_tokens,output_tokens,k_qos\n" + "".join(rows))
    return path


@pytest.fixture(scope="module")
def hashed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows with prefix hashes: row i has prompts of i + 1 blocks, all its ids of its own but the first."""
    path = tmp_path_factory.mktemp("traces") / "hashed.jsonl"
    lines = (
        f'{{"timestamp": {i * 100}, "input_length": {512 * i + 100}, "output_length": 3, '
        f'"hash_ids": {[0, *range(i * 100 + 1, i * 100 + 1 + i)]}}}\n'
        for i in range(10)
    )
    path.write_text("".join(lines))
    return path


def same(a: Workload, b: Workload, *columns: str) -> bool:
    return all(np.array_equal(getattr(a, name), getattr(b, name)) for name in columns)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(spec=SPECS)
def test_every_workload_is_sound(trace: Path, spec: WorkloadSpec) -> None:
    """Sorted from 0, as many as asked, budgets in range, lengths within the clip, and the same when built again."""
    spec = replace(spec, trace=str(trace))
    workload = build_workload(spec)
    assert len(workload) == (spec.requests or workload.source["filter"]["rows_kept"])  # type: ignore[index]
    assert workload.arrival_s[0] == 0
    assert (np.diff(workload.arrival_s) >= 0).all()
    assert len(set(workload.request_id)) == len(workload)
    assert workload.k_qos.min() >= 1 and workload.k_qos.max() <= spec.k_max
    total = workload.prompt_tokens + workload.output_tokens
    assert workload.prompt_tokens.min() >= 1
    assert spec.clip_total_tokens is None or total.max() <= spec.clip_total_tokens
    again = build_workload(spec)
    assert same(workload, again, "arrival_s", "prompt_tokens", "output_tokens", "k_qos")
    assert list(workload.request_id) == list(again.request_id)
    assert workload.source == again.source


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(spec=SPECS, other=SPECS)
def test_streams_leave_each_other_alone(trace: Path, spec: WorkloadSpec, other: WorkloadSpec) -> None:
    """Another arrival process or rate keeps lengths and budgets; other budgets keep lengths and arrivals."""
    spec = replace(spec, trace=str(trace))
    base = build_workload(spec)
    arrivals = {name: getattr(other, name) for name in ("arrivals", "rate", "cv", "on_s", "off_s")}
    assert same(base, build_workload(replace(spec, **arrivals)), "prompt_tokens", "output_tokens", "k_qos")
    budgets = {name: getattr(other, name) for name in ("budgets", "mix", "mu", "sigma")}
    assert same(base, build_workload(replace(spec, **budgets)), "prompt_tokens", "output_tokens", "arrival_s")
    clipped = build_workload(replace(spec, clip_total_tokens=other.clip_total_tokens))
    assert same(base, clipped, "output_tokens", "arrival_s", "k_qos")


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    process=st.sampled_from(["poisson", "gamma", "constant", "onoff", "replay"]),
    rate=st.floats(0.01, 100),
    factor=st.floats(0.01, 100),
    seed=st.integers(0, 2**32),
)
def test_a_rate_scales_one_pattern(trace: Path, process: str, rate: float, factor: float, seed: int) -> None:
    """Common random numbers: arrivals at another rate are the same ones, sooner (but on/off phases, in seconds)."""
    spec = WorkloadSpec(trace=str(trace), arrivals=process, rate=rate, seed=seed, off_s=0.0)
    slow, fast = build_workload(spec), build_workload(replace(spec, rate=rate * factor))
    np.testing.assert_allclose(slow.arrival_s, fast.arrival_s * factor, rtol=1e-9)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("process", "options", "cv"),
    [
        ("poisson", {}, 1.0),
        ("gamma", {"cv": 0.5}, 0.5),
        ("gamma", {"cv": 2.0}, 2.0),
        ("constant", {}, 0.0),
    ],
)
def test_gaps_have_the_mean_and_variation_asked_for(
    trace: Path, process: str, options: dict[str, float], cv: float, seed: int
) -> None:
    n = 20_000
    spec = WorkloadSpec(trace=str(trace), arrivals=process, rate=4.0, requests=n, seed=seed, **options)  # type: ignore[arg-type]
    gaps = np.diff(build_workload(spec).arrival_s)
    assert gaps.mean() == pytest.approx(0.25, abs=Z * 0.25 * cv / np.sqrt(n) + 1e-12)
    assert gaps.std() / gaps.mean() == pytest.approx(cv, rel=0.1, abs=1e-9)


def test_exponential_gaps_by_their_distribution(trace: Path) -> None:
    from scipy import stats

    gaps = np.diff(build_workload(WorkloadSpec(trace=str(trace), rate=2.0, requests=5000)).arrival_s)
    assert stats.kstest(gaps, stats.expon(scale=0.5).cdf).pvalue > 1e-3
    gamma = WorkloadSpec(trace=str(trace), arrivals="gamma", cv=2.0, rate=2.0, requests=5000)
    gaps = np.diff(build_workload(gamma).arrival_s)
    assert stats.kstest(gaps, stats.gamma(0.25, scale=2.0).cdf).pvalue > 1e-3


@pytest.mark.parametrize("seed", range(3))
def test_on_off_bursts(trace: Path, seed: int) -> None:
    """Gaps have the mean asked for and the variation of an interrupted Poisson process.

    It is a renewal process whose gaps are hyperexponential of order two, with squared coefficient of variation
    1 + 2 r w / (w + v)**2 for rate r while on, and rates w of leaving on and v of leaving off (Kuczura, 1973).
    """
    on_s, off_s, rate, n = 2.0, 3.0, 8.0, 60_000
    spec = WorkloadSpec(trace=str(trace), arrivals="onoff", rate=rate, on_s=on_s, off_s=off_s, requests=n, seed=seed)
    arrival_s = build_workload(spec).arrival_s
    gaps = np.diff(arrival_s)
    rate_on, leave_on, leave_off = rate * (on_s + off_s) / on_s, 1 / on_s, 1 / off_s
    squared_cv = 1 + 2 * rate_on * leave_on / (leave_on + leave_off) ** 2
    assert gaps.mean() == pytest.approx(1 / rate, abs=Z * np.sqrt(squared_cv / n) / rate)
    assert gaps.var() / gaps.mean() ** 2 == pytest.approx(squared_cv, rel=0.1)


@pytest.mark.parametrize(("mu", "sigma"), [(16, 5), (12, 8), (30, 6), (2, 1)])
def test_normal_budgets_follow_eq_7(trace: Path, mu: float, sigma: float) -> None:
    """Each budget's share is the normal mass that rounds to it, the tails' mass at 1 and k_max."""
    from scipy import stats

    n, k_max = 50_000, 32
    k_qos = build_workload(
        WorkloadSpec(trace=str(trace), rate=1.0, requests=n, budgets="normal", mu=mu, sigma=sigma)
    ).k_qos
    edges = np.concatenate([[-np.inf], np.arange(1, k_max) + 0.5, [np.inf]])
    expected = np.diff(stats.norm.cdf(edges, mu, sigma))
    shares = np.bincount(k_qos, minlength=k_max + 1)[1:] / n
    assert (np.abs(shares - expected) <= Z * np.sqrt(expected * (1 - expected) / n) + 1e-9).all()


def test_no_spread_is_one_budget(trace: Path) -> None:
    spec = WorkloadSpec(trace=str(trace), rate=1.0, budgets="normal", mu=12.5, sigma=0.0)
    assert set(build_workload(spec).k_qos.tolist()) == {12}  # halves to even
    assert set(build_workload(replace(spec, mu=99.0)).k_qos.tolist()) == {32}
    assert set(build_workload(replace(spec, mu=-99.0)).k_qos.tolist()) == {1}


def test_mixed_budgets_have_their_weights(trace: Path) -> None:
    n = 50_000
    mix = ((4, 2.0), (16, 5.0), (32, 3.0))
    k_qos = build_workload(WorkloadSpec(trace=str(trace), rate=1.0, requests=n, budgets="mix", mix=mix)).k_qos
    for k, weight in mix:
        share = weight / 10
        assert (k_qos == k).mean() == pytest.approx(share, abs=Z * np.sqrt(share * (1 - share) / n))


def test_fixed_budgets(trace: Path) -> None:
    spec = WorkloadSpec(trace=str(trace), rate=1.0, budgets="fixed", k_max=24)
    assert set(build_workload(spec).k_qos.tolist()) == {24}
    assert set(build_workload(replace(spec, k=8)).k_qos.tolist()) == {8}


def test_budgets_of_the_trace_stay_with_their_rows(trace: Path) -> None:
    """A file that has budgets is believed unless other budgets are asked for."""
    workload = build_workload(WorkloadSpec(trace=str(trace), rate=1.0))
    assert workload.k_qos.tolist() == [(p - 21) % 32 + 1 for p in workload.prompt_tokens.tolist()]
    assert workload.source["budgets"] == {"generator": "trace", "column": "k_qos"}


@pytest.mark.parametrize("requests", [1, NUM_ROWS - 1, NUM_ROWS, NUM_ROWS + 1, 2 * NUM_ROWS, 5 * NUM_ROWS + 3])
def test_no_row_twice_before_every_row_once(trace: Path, requests: int) -> None:
    prompts = build_workload(WorkloadSpec(trace=str(trace), rate=1.0, requests=requests)).prompt_tokens.tolist()
    for start in range(0, requests, NUM_ROWS):
        part = Counter(prompts[start : start + NUM_ROWS])
        assert max(part.values()) == 1
    assert prompts != sorted(prompts) or requests == 1


def test_another_seed_takes_other_rows(trace: Path) -> None:
    spec = WorkloadSpec(trace=str(trace), rate=1.0, requests=20)
    picks = {tuple(build_workload(replace(spec, seed=seed)).prompt_tokens.tolist()) for seed in range(20)}
    assert len(picks) == 20


def test_request_ids_are_the_files_while_rows_come_once(trace: Path) -> None:
    workload = build_workload(WorkloadSpec(trace=str(trace), rate=1.0))
    assert list(workload.request_id) == [f"r{p - 21}" for p in workload.prompt_tokens.tolist()]
    twice = build_workload(WorkloadSpec(trace=str(trace), rate=1.0, requests=NUM_ROWS + 1))
    assert list(twice.request_id) == [str(i) for i in range(NUM_ROWS + 1)]


def test_replay_is_the_trace(trace: Path) -> None:
    workload = build_workload(WorkloadSpec(trace=str(trace)))
    assert workload.arrival_s.tolist() == [(i // 2) * 1.5 for i in range(NUM_ROWS)]
    assert workload.prompt_tokens.tolist() == list(range(21, 21 + NUM_ROWS))
    first = build_workload(WorkloadSpec(trace=str(trace), requests=7))
    assert first.arrival_s.tolist() == workload.arrival_s[:7].tolist()
    assert first.prompt_tokens.tolist() == workload.prompt_tokens[:7].tolist()


def test_replay_starts_at_0_after_a_filter(trace: Path) -> None:
    workload = build_workload(WorkloadSpec(trace=str(trace), min_total_tokens=40))
    assert workload.arrival_s[0] == 0
    assert np.diff(workload.arrival_s).max() <= 3.0


@pytest.mark.parametrize("rate", [0.1, 1.0, 7.0])
def test_replay_stretched_to_a_rate(trace: Path, rate: float) -> None:
    """The mean gap is 1 / rate, and gaps keep their proportions."""
    recorded = build_workload(WorkloadSpec(trace=str(trace), arrivals="replay")).arrival_s
    arrival_s = build_workload(WorkloadSpec(trace=str(trace), arrivals="replay", rate=rate)).arrival_s
    assert np.diff(arrival_s).mean() == pytest.approx(1 / rate)
    np.testing.assert_allclose(arrival_s / arrival_s[-1], recorded / recorded[-1])


@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(bounds=st.tuples(st.integers(22, 60), st.integers(22, 60)).map(sorted))
def test_the_filter_keeps_what_lies_within_its_bounds(trace: Path, bounds: list[int]) -> None:
    low, high = bounds
    totals = [21 + i + i % 7 + 1 for i in range(NUM_ROWS)]
    spec = WorkloadSpec(trace=str(trace), min_total_tokens=low, max_total_tokens=high)
    expected = [total for total in totals if low <= total <= high]
    if expected:
        workload = build_workload(spec)
        assert (workload.prompt_tokens + workload.output_tokens).tolist() == expected
    else:
        with pytest.raises(TraceError, match="none of"):
            build_workload(spec)


@given(seed=st.integers(0, 2**128), names=st.lists(st.text(max_size=5), min_size=2, max_size=2, unique=True))
def test_streams_differ_by_name_and_seed(seed: int, names: list[str]) -> None:
    draws = [stream(seed + more, name).random(4).tolist() for name in names for more in (0, 1)]
    assert len({tuple(draw) for draw in draws}) == 4
    assert draws[0] == stream(seed, names[0]).random(4).tolist()


def test_replay_invents_no_rows(trace: Path) -> None:
    with pytest.raises(UsageError, match=f"requests is {NUM_ROWS + 1}, but the trace has {NUM_ROWS} rows to replay"):
        build_workload(WorkloadSpec(trace=str(trace), requests=NUM_ROWS + 1))


@pytest.mark.parametrize("process", ["poisson", "gamma", "constant", "onoff", "replay"])
def test_an_infinite_rate_is_all_at_once(trace: Path, process: str) -> None:
    workload = build_workload(WorkloadSpec(trace=str(trace), arrivals=process, rate=float("inf")))
    assert not workload.arrival_s.any()


@pytest.mark.parametrize("process", ["poisson", "gamma", "constant", "onoff"])
def test_a_process_needs_a_rate(trace: Path, process: str) -> None:
    with pytest.raises(UsageError, match="give --rate"):
        build_workload(WorkloadSpec(trace=str(trace), arrivals=process))


def test_clipping_shortens_prompts_alone_and_counts(trace: Path) -> None:
    spec = WorkloadSpec(trace=str(trace), rate=1.0)
    whole, clipped = build_workload(spec), build_workload(replace(spec, clip_total_tokens=40))
    expected = np.minimum(whole.prompt_tokens, 40 - whole.output_tokens)
    assert clipped.prompt_tokens.tolist() == expected.tolist()
    assert clipped.source["clip"] == {
        "total_tokens": 40,
        "prompts_shortened": int((expected < whole.prompt_tokens).sum()),
        "prompt_tokens_removed": int((whole.prompt_tokens - expected).sum()),
    }


@pytest.mark.parametrize("requests", [3, 10, 27])
@pytest.mark.parametrize("seed", range(4))
def test_hashed_traces_keep_their_order(hashed: Path, requests: int, seed: int) -> None:
    """From a random row, around the end; a later pass shares no block with an earlier one."""
    workload = build_workload(WorkloadSpec(trace=str(hashed), rate=1.0, requests=requests, seed=seed))
    index = (workload.prompt_tokens - 100) // 512
    assert (np.diff(index) % 10 == 1).all()
    assert workload.prefix_hashes is not None
    seen: list[set[int]] = []
    for start in range(0, requests, 10):
        runs = workload.prefix_hashes[start : start + 10]
        assert len({run[0] for run in runs}) == 1  # the block that all share
        seen.append({block for run in runs for block in run})
        assert [len(run) for run in runs] == (index[start : start + 10] + 1).tolist()
    assert len(set().union(*seen)) == sum(map(len, seen))


def test_clipped_prompts_keep_the_blocks_they_still_have(hashed: Path) -> None:
    spec = WorkloadSpec(trace=str(hashed), rate=1.0)
    whole, clipped = build_workload(spec), build_workload(replace(spec, clip_total_tokens=1500))
    assert whole.prefix_hashes is not None and clipped.prefix_hashes is not None
    for before, after, prompt in zip(whole.prefix_hashes, clipped.prefix_hashes, clipped.prompt_tokens, strict=True):
        assert after == before[: -(-int(prompt) // 512)]


def test_the_hash_seed_of_python_changes_nothing(trace: Path) -> None:
    code = (
        "import sys, hashlib\n"
        "from simmoe.traces.build import build_workload\n"
        "from simmoe.traces.spec import WorkloadSpec\n"
        "w = build_workload(WorkloadSpec(trace=sys.argv[1], arrivals='onoff', rate=2.0, budgets='normal'))\n"
        "print(hashlib.sha256(b''.join(c.tobytes() for c in (w.arrival_s, w.prompt_tokens, w.k_qos))).hexdigest())\n"
        "print(sorted(m for m in ('pandas', 'pyarrow', 'scipy', 'matplotlib', 'rich') if m in sys.modules))"
    )
    printed = {
        subprocess.run(
            [sys.executable, "-c", code, str(trace)],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("0", "1")
    }
    assert len(printed) == 1
    assert printed.pop().splitlines()[1] == "[]", "building a workload imports nothing heavy"
