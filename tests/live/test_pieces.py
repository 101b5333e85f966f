"""The parts of the live room that need no engine."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simmoe.errors import LiveError, UsageError
from simmoe.live.engine.device_clock import DeviceTimes, longest_launches
from simmoe.live.engine.steps import StepRecord, StepRecorder, summarise
from simmoe.live.engine.transport import EngineOptions, request_k
from simmoe.live.measure.engine import CAPTURED_KS, CAPTURED_SIZES, Prompt, RequestTimes
from simmoe.live.measure.loads import Loads, Poisson, requests
from simmoe.live.measure.models import OLMOE_1B_7B, split_config
from simmoe.live.measure.plan import (
    MAX_HELD_KV_TOKENS,
    MAX_KV_TOKENS,
    DecodePoint,
    MixedPoint,
    Plan,
    PrefillPoint,
    default_plan,
)
from simmoe.live.measure.points import prompt_lengths, prompt_pairs, script_steps, wanted
from simmoe.live.measure.proof import verdict
from simmoe.live.measure.recording import Recording, append, poisson, read
from simmoe.live.measure.run import front_end_medians
from simmoe.live.measure.stages import Stages, beside, populations
from simmoe.live.measure.times import TimedStep, busy_steps, samples, timed_steps
from simmoe.profiles.models import read_model
from simmoe.profiles.recorded_steps import CALIBRATION
from simmoe.profiles.shape import StepShape


def test_options_name_what_is_wrong() -> None:
    assert EngineOptions(k_max=8).captured_ks == tuple(range(1, 9))
    assert EngineOptions(k_max=8).default_k == 8
    with pytest.raises(LiveError, match="default_k is 9; this model takes 1 to 8"):
        EngineOptions(k_max=8, default_k=9)
    for ks in ((4, 2, 8), (2, 4), (0, 8), (2, 2, 8)):
        with pytest.raises(LiveError, match="captured_ks"):
            EngineOptions(k_max=8, captured_ks=ks)
    for gib in (-1.0, math.inf, math.nan):
        with pytest.raises(LiveError, match="graph_memory_gib is"):
            EngineOptions(k_max=8, graph_memory_gib=gib)
    with pytest.raises(LiveError, match="uncaptured_k is 'above'; it must be one of eager, next"):
        EngineOptions(k_max=8, uncaptured_k="above")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"captured": [8]}, "has no option 'captured' (did you mean 'captured_ks'?)"),
        ({"k_max": 4}, "has no option 'k_max'"),
        ([8], "is a list; it must be an object"),
        ({"default_k": "3"}, "['default_k'] is '3'; it must be an integer"),
        ({"default_k": True}, "['default_k'] is True; it must be an integer"),
        ({"default_k": 2.0}, "['default_k'] is 2.0; it must be an integer"),
        ({"record_steps": "false"}, "['record_steps'] is 'false'; it must be true or false"),
        ({"captured_ks": 8}, "['captured_ks'] is 8; it must be a list of integers"),
        ({"captured_ks": ["8"]}, "['captured_ks'] is ['8']; it must be a list of integers"),
        ({"captured_ks": None}, "['captured_ks'] is None; it must be a list of integers"),
        ({"graph_memory_gib": "4"}, "['graph_memory_gib'] is '4'; it must be a number"),
        ({"graph_memory_gib": True}, "['graph_memory_gib'] is True; it must be a number"),
    ],
)
def test_what_vllms_configuration_says_of_simmoe_is_read_strictly(options: Any, message: str) -> None:
    config = SimpleNamespace(
        additional_config={"simmoe": options},
        model_config=SimpleNamespace(model="m", hf_text_config=SimpleNamespace(num_experts_per_tok=8)),
    )
    with pytest.raises(LiveError, match=re.escape(message)):
        EngineOptions.of(config)
    config.additional_config = {"simmoe": {"captured_ks": [2, 8], "default_k": 2}}
    assert EngineOptions.of(config) == EngineOptions(8, 2, (2, 8))
    config.additional_config = {"simmoe": {"graph_memory_gib": 4}}
    assert EngineOptions.of(config) == EngineOptions(8, graph_memory_gib=4.0)


def test_a_request_without_a_budget_gets_the_default() -> None:
    assert request_k(SimpleNamespace(extra_args=None), 5) == 5
    assert request_k(SimpleNamespace(extra_args={"other": 1}), 5) == 5
    assert request_k(SimpleNamespace(extra_args={"simmoe_k": 3}), 5) == 3


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 80), st.integers(1, 20), st.integers(1, 8)), max_size=12))
def test_summary_counts_every_query_key_pair(rows: list[tuple[int, int, int, int]]) -> None:
    """Against a count of the pairs one by one: rows are (prompt, context, scheduled, k)."""
    scheduled, requests, ks = {}, {}, {}
    tokens = pairs = slots = 0
    for i, (prompt, context, count, k) in enumerate(rows):
        scheduled[str(i)], ks[str(i)] = count, k
        requests[str(i)] = SimpleNamespace(num_computed_tokens=context + count, num_prompt_tokens=prompt)
        tokens += count
        pairs += sum(context + j + 1 for j in range(count))
        slots += k * count
    shape, qos_slots = summarise(scheduled, requests, ks)
    assert shape.num_tokens == tokens
    assert shape.prefill_kv_pairs + shape.decode_kv_tokens == pairs
    assert shape.num_prefill_seqs + shape.num_decode_seqs == len(rows)
    assert qos_slots == slots
    assert shape.k_exec == max((k for *_, k in rows), default=0)


def _record(step: int, start_s: float, output_s: float, *, k: int = 4, tokens: int = 10) -> StepRecord:
    recorder = StepRecorder()
    batch = summarise({"a": tokens}, {"a": SimpleNamespace(num_computed_tokens=tokens, num_prompt_tokens=99)}, {"a": k})
    recorder.scheduled(step, (start_s, start_s), batch, k, (0, 1, 0))
    recorder.finished(step, output_s, output_s)
    (record,) = recorder.drain()
    assert not recorder.drain()
    return record


def test_steps_nobody_drains_do_not_pile_up() -> None:
    recorder = StepRecorder(limit=3)
    for step in range(5):
        recorder.scheduled(step, (0.0, 0.0), summarise({}, {}, {}), 1, (0, 1, 0))
        recorder.finished(step, 1.0, 1.0)
    assert [record.step for record in recorder.drain()] == [2, 3, 4]


def test_only_steps_of_a_busy_engine_are_timed() -> None:
    records = [
        _record(0, 0.0, 1.0),
        _record(1, 0.5, 2.0),  # scheduled while step 0 ran
        _record(2, 5.0, 6.0),  # after a pause
        _record(4, 5.5, 7.0),  # a step is missing before it
        _record(5, 7.0005, 9.0),  # scheduled just after an output: synchronous scheduling
    ]
    assert [(t.step.step, t.seconds) for t in busy_steps(records, async_scheduling=True)] == [(1, 1.0)]
    assert [(t.step.step, t.seconds) for t in busy_steps(records, async_scheduling=False)] == [(1, 1.0), (5, 2.0)]


def test_a_busy_step_is_timed_on_every_clock_there_is() -> None:
    """The host sees the first step's output half a second late: the pace is the device's."""
    first = _record(0, 0.0, 1.5)._replace(device_start_s=0.1, device_end_s=1.0, launch_s=0.05)
    second = _record(1, 0.5, 2.2)._replace(device_start_s=1.0, device_end_s=2.0, launch_s=0.25)
    timed = timed_steps([first, second], async_scheduling=True)
    assert {t.clock: t.seconds for t in timed} == {"step": 1.0, "device": 1.0, "host": 0.25}
    # one of two ends unknown: the host's sight of both
    timed = timed_steps([first._replace(device_end_s=None), second], async_scheduling=True)
    assert {t.clock: t.seconds for t in timed}["step"] == pytest.approx(0.7)


def test_the_front_end_is_told_from_the_steps_a_lone_request_ran() -> None:
    prefill = _record(7, 10.002, 10.030)._replace(device_start_s=10.005, device_end_s=10.020)
    decode = _record(8, 10.021, 10.040, tokens=1)._replace(
        num_prefill_tokens=0, device_start_s=10.03, device_end_s=10.04
    )
    times = RequestTimes(Prompt(10, 4, 2), 10.0, (10.024, 10.05), 10.001, 10.002, (10.021, 10.04))
    found = front_end_medians([times], [prefill, decode])
    assert found == {"ingress_s": 0.001, "egress_s": 0.004, "start_s": 0.003}
    untimed = [step._replace(device_start_s=None, device_end_s=None) for step in (prefill, decode)]
    assert front_end_medians([times], untimed) == {"ingress_s": 0.001, "egress_s": 0.003}


@given(st.lists(st.tuples(st.sampled_from([64, 512]), st.integers(1, 400)), min_size=1, max_size=60, unique=True))
def test_populations_cover_every_decode_point_once_in_shrinking_batches(points: list[tuple[int, int]]) -> None:
    todo = {DecodePoint(num_seqs, context): [1, 4] for context, num_seqs in points}
    groups = list(populations(todo, repetitions=2))
    assert [point for group in groups for point in group] == sorted(todo, key=lambda p: (p.context, -p.num_seqs))
    for group in groups:
        context = next(iter(group)).context
        # with what filling takes, a mean of less than three contexts, above which a step would belong to another
        assert len(group) == 1 or sum(script_steps(ks, 2) for ks in group.values()) <= max(128, context / 2)


def test_a_pass_lacks_the_points_with_fewer_rows_than_passes() -> None:
    plan = Plan((1, 4), prefill=(PrefillPoint(64), PrefillPoint(64, num_chunks=2)), decode=(DecodePoint(8, 128),))
    first, second = (StepShape(64, 64 * 65 // 2 + 64 * 64 * chunk, 1, 0, 0, 1) for chunk in (0, 1))
    decode = StepShape(0, 0, 0, 8, 8 * 140, 4)
    rows = Counter({(first, "graphs", "step"): 2, (second, "graphs", "step"): 1, (decode, "graphs", "step"): 1})
    rows += Counter({(first, "graphs", "host"): 9, (first, "eager", "step"): 3, (decode, "eager", "step"): 9})
    parts: list[Any] = [
        SimpleNamespace(captured_sizes=(8, 64)),
        SimpleNamespace(plan=plan),
        SimpleNamespace(done=rows),
        None,
        None,
        0.0,
    ]
    stages = Stages(*parts)
    assert stages._missing(plan.prefill, "graphs", 1) == {plan.prefill[0]: [4], plan.prefill[1]: [4]}
    assert stages._missing(plan.prefill, "graphs", 2) == {plan.prefill[0]: [4], plan.prefill[1]: [1, 4]}
    assert stages._missing(plan.decode, "graphs", 1) == {plan.decode[0]: [1]}
    assert stages._missing(plan.decode, "graphs", 2) == {plan.decode[0]: [1, 4]}
    assert stages._missing(plan.prefill, "eager", 3) == {plan.prefill[0]: [4], plan.prefill[1]: [1, 4]}


def test_time_is_kept_for_the_recordings_that_lack(tmp_path: Path) -> None:
    loads = Loads(8, (Poisson("poisson-85", 0.85, 5.0), Poisson("poisson-50", 0.5, 7.0)))
    path = tmp_path / "recording.jsonl"
    plan = Plan((4,))
    run = SimpleNamespace(plan=plan, loads=loads, recording_path=path)
    stages = Stages(*[SimpleNamespace(captured_sizes=()), run, None, None, lambda *told: None, math.inf])  # type: ignore[arg-type]
    kept = [stages._recording_s()]
    for name in ("burst", "poisson-50", "poisson-85"):
        append(Recording(name, "", [], []), {}, path)
        kept.append(stages._recording_s())
    assert kept == [20 + 11 + 13, 11 + 13, 11, 0]


@pytest.mark.parametrize("k_max", [6, 8, 24, 32])
def test_loads_have_azure_lengths_and_budgets_of_the_models_scale(k_max: int) -> None:
    prompts = requests(4000, k_max, 3)
    assert prompts == requests(4000, k_max, 3)
    assert prompts != requests(4000, k_max, 4)
    totals = [p.num_tokens + p.output_tokens for p in prompts]
    assert min(totals) >= 1024 and max(totals) <= 2048
    ks = np.array([p.k for p in prompts])
    assert ks.min() >= 1 and ks.max() <= k_max
    # 1..k_max reaches 3.2 deviations on either side: four standard errors of the mean, and rounding
    assert ks.mean() == pytest.approx(k_max / 2, abs=4 * 5 / 32 * k_max / 4000**0.5 + 0.02 * k_max)


def test_samples_group_by_shape_and_budget() -> None:
    steps = [
        TimedStep(_record(i, 0.0, 1.0, k=k, tokens=n), "step", 0.01 * (i + 1))
        for i, (n, k) in enumerate([(10, 4)] * 3 + [(20, 8)])
    ]
    found = samples(steps, (16,))
    assert [(s.num_prefill_tokens, s.k, s.mode, s.repetitions) for s in found] == [
        (10, 4, "graphs", 3),
        (20, 8, "eager", 1),
    ]
    assert found[0].median_s == pytest.approx(0.02)
    assert [s.k for s in samples(steps, (16,), least=2)] == [4]


def test_a_split_model_keeps_its_parameters() -> None:
    config = split_config(OLMOE_1B_7B, 4)
    assert (config["num_experts"], config["intermediate_size"], config["num_experts_per_tok"]) == (256, 256, 32)
    assert config["num_experts"] * config["intermediate_size"] == 64 * 1024
    deepseek = split_config(read_model("deepseek-v2-lite").config, 4)
    assert deepseek["n_shared_experts"] * deepseek["moe_intermediate_size"] == 2 * 1408
    with pytest.raises(UsageError, match="into 3: it must divide"):
        split_config(OLMOE_1B_7B, 3)


def test_the_default_plan_reaches_every_captured_size_and_nothing_beyond_the_engine() -> None:
    plan = default_plan(CAPTURED_SIZES, CAPTURED_KS, 1024, 4096)
    assert {n for n in CAPTURED_SIZES if n >= 16} <= {p.num_tokens for p in plan.prefill}
    assert any(p.num_tokens not in CAPTURED_SIZES for p in plan.prefill)
    assert all(p.num_tokens <= 8192 and len(prompt_lengths(p)) <= 1024 for p in plan.prefill)
    assert {d.num_seqs for d in plan.decode} >= {n for n in CAPTURED_SIZES if n <= 1024}
    assert all(m.num_tokens + m.num_seqs <= 8192 for m in plan.mixed)
    assert len({m.context for m in plan.mixed}) > 1
    # a batch near the bound on KV at each context it leaves room for
    for context in (512, 2048):
        most = max(d.num_seqs for d in plan.decode if d.context == context)
        assert MAX_KV_TOKENS // 2 <= most * context <= MAX_KV_TOKENS
    # cut short after five populations, each batch was seen, and both contexts
    started = [next(iter(group)) for group in beside({point: [1] for point in plan.mixed})]
    assert len(started) == len({(m.num_seqs, m.context) for m in plan.mixed}) == 10
    assert len({m.num_seqs for m in started[:5]}) == 5
    assert len({m.context for m in started[:5]}) == 2
    held = [p.num_seqs * p.context for p in plan.held if not isinstance(p, PrefillPoint)]
    assert MAX_HELD_KV_TOKENS // 2 <= max(held) <= MAX_HELD_KV_TOKENS


def test_a_step_is_launched_when_the_slowest_worker_has() -> None:
    first = [DeviceTimes(i, 0.1 * i, 0.1 * i + 0.05, 0.01) for i in (1, 2, 3)]
    second = [DeviceTimes(i, 0.2 * i, 0.2 * i + 0.05, launch_s) for i, launch_s in ((2, 0.03), (3, 0.005), (4, 0.5))]
    told = list(longest_launches([first, second]))
    assert [step.launch_s for step in told] == [0.01, 0.03, 0.01]
    assert [step._replace(launch_s=0.01) for step in told] == first
    assert list(longest_launches([first])) == first


@given(st.floats(1.0, 200.0))
def test_shortened_recordings_last_as_long_as_asked_and_leave_the_fit_its_share(seconds: float) -> None:
    full, loads = Loads(), Loads.lasting(seconds)
    assert [p.name for p in loads.poisson] == [p.name for p in full.poisson]
    assert sum(p.seconds for p in loads.poisson) == pytest.approx(seconds)
    lasts_s = {p.name: p.seconds for p in loads.poisson}
    assert lasts_s[CALIBRATION] >= min(seconds / 3, {p.name: p.seconds for p in full.poisson}[CALIBRATION]) * (1 - 1e-9)
    assert lasts_s["poisson-85"] == pytest.approx(lasts_s["poisson-50"])


@given(st.integers(1, 64), st.integers(1, 16))
def test_prompts_of_a_step_fill_it(num_prompts: int, each: int) -> None:
    point = PrefillPoint(num_prompts * each + num_prompts // 2, num_prompts)
    lengths = prompt_lengths(point)
    assert sum(lengths) == point.num_tokens
    assert max(lengths) - min(lengths) <= 1
    shape = StepShape(point.num_tokens, prompt_pairs(lengths), num_prompts, k_exec=2)
    assert wanted(point, 2, shape)
    assert not wanted(point, 3, shape)


def test_a_point_knows_its_own_samples() -> None:
    decode = StepShape(num_decode_seqs=8, decode_kv_tokens=8 * 140, k_exec=4)
    assert wanted(DecodePoint(8, 128), 4, decode)
    assert not wanted(DecodePoint(8, 512), 4, decode)
    assert not wanted(DecodePoint(4, 128), 4, decode)
    mixed = decode._replace(num_prefill_tokens=64, num_prefill_seqs=1, prefill_kv_pairs=64 * 65 // 2)
    assert wanted(MixedPoint(64, 8, 128), 4, mixed)
    assert not wanted(MixedPoint(32, 8, 128), 4, mixed)
    assert not wanted(DecodePoint(8, 128), 4, mixed)


def test_the_verdict_accepts_rounding_and_refuses_a_neighbour() -> None:
    rng = np.random.default_rng(0)
    # logits that drift with k by 1 a step, rounding noise of 0.3
    base, drift = rng.normal(size=(40, 64)), rng.normal(size=(40, 64)) / 8
    reference = {k: base + drift * i for i, k in enumerate((1, 2, 4, 8))}
    measured = {k: a + rng.normal(size=a.shape) * 0.02 for k, a in reference.items()}
    assert verdict(measured, reference)[0]
    frozen = {k: measured[8] for k in reference}
    proved, line = verdict(frozen, reference)
    assert not proved
    assert "40 of 160 probes" in line


def test_poisson_arrivals_start_at_zero_and_keep_their_rate() -> None:
    arrivals = poisson([Prompt(1, 1)] * 4000, 20.0, 3)
    due_s = [t for t, _ in arrivals]
    assert due_s[0] == 0
    assert due_s == sorted(due_s)
    # the last of n Poisson arrivals has mean n/rate and deviation sqrt(n)/rate: four of them
    assert due_s[-1] == pytest.approx(4000 / 20, abs=4 * 4000**0.5 / 20)


def test_a_recording_begun_with_other_columns_is_not_continued(tmp_path: Path) -> None:
    path = tmp_path / "recording.jsonl"
    first = Recording("burst", "all at once", [], [])
    append(first, {"model": "tiny"}, path)
    second = Recording("poisson-50", "some", [], [], 12.5)
    append(second, {}, path)
    assert read(path) == [first, second]
    path.write_text(path.read_text().replace(', "update_end_s"', "", 1))
    with pytest.raises(LiveError, match=r"'recording\.jsonl' was begun with other columns"):
        append(first, {}, path)
