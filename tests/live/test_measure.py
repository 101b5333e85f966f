"""Measuring end to end on the CPU: a tiny model, a tiny plan, the same code as on a GPU."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from simmoe.errors import LiveError, ProfileError
from simmoe.live.measure import MeasuredModel, Measuring, measure
from simmoe.live.measure.engine import EngineSetup, Prompt, import_vllm, running
from simmoe.live.measure.loads import Loads, Poisson
from simmoe.live.measure.models import write_model
from simmoe.live.measure.plan import DecodePoint, MixedPoint, Plan, PrefillPoint
from simmoe.live.measure.recording import REQUEST_COLUMNS, STEP_COLUMNS, Recording, read
from simmoe.live.measure.run import write_reference
from simmoe.profiles.recorded_steps import read_recorded_steps
from simmoe.profiles.recording_file import is_recording
from simmoe.profiles.samples import read_samples
from tests.live.tiny import TINY_OLMOE

pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: pip install 'simmoe[live-cpu]'"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own, at import and at exit
]

KS = (1, 4, 8)
BATCHES = ((20, 20), (100,))


def setup_in(folder: Path) -> EngineSetup:
    return EngineSetup(
        write_model(TINY_OLMOE, folder / "model", 2048),
        captured_sizes=(),
        async_scheduling=False,
        max_num_batched_tokens=256,
        max_num_seqs=16,
        max_model_len=2048,
        dtype="float32",
        overrides={"kv_cache_memory_bytes": 1 << 27},
    )


def test_a_run_that_was_killed_goes_on_where_it_stopped(tmp_path: Path) -> None:
    setup = setup_in(tmp_path)
    reference, out = tmp_path / "reference.npz", tmp_path / "samples.jsonl"
    plan = Plan(
        KS,
        prefill=(PrefillPoint(16), PrefillPoint(128, num_prompts=4), PrefillPoint(64, num_chunks=3, ks=(1, 8))),
        decode=(DecodePoint(1, 16), DecodePoint(4, 64), DecodePoint(8, 64)),
        mixed=(MixedPoint(32, 4, 32, (1, 8)), MixedPoint(64, 4, 32, (1, 8)), MixedPoint(32, 4, 256, (1, 8))),
        held=(PrefillPoint(16), DecodePoint(4, 64)),  # a synchronous engine skips them
        held_eager=(PrefillPoint(16),),
        passes=2,
        repetitions=5,  # one of them at least after no pause of the engine, on a loaded machine too
        front_end_requests=3,
        front_end_lengths=(30, 3),
    )
    model = MeasuredModel("tiny", TINY_OLMOE)
    run = Measuring(model, setup, plan, out, reference, BATCHES)
    write_reference(setup, KS, reference, BATCHES)
    assert measure(replace(run, loads=Loads(4, (Poisson("poisson-50", 0.5, 3.0),)))) == []

    header, rows = read_samples(out)
    assert "9 of 9 probes" in header.k_check
    assert "18 of 18 probes" in header.k_check or "27 of 27 probes" in header.k_check
    assert set(header.front_end) == {"ingress_s", "egress_s", "start_s"}
    assert header.front_end["ingress_s"] > 0
    measured = Counter(
        (s.kind, s.num_prefill_tokens, s.num_prefill_seqs, s.num_decode_seqs, s.k, s.clock) for s in rows
    )
    # on a loaded machine the engine may pause between any two steps, and steps after a pause do not count
    for k in KS:
        for clock in ("step", "device", "host"):
            assert 1 <= measured["prefill", 16, 1, 0, k, clock] <= plan.passes
            assert 1 <= measured["prefill", 128, 4, 0, k, clock] <= plan.passes
            assert all(1 <= measured["decode", 0, 0, seqs, k, clock] <= plan.passes for seqs in (1, 4, 8))
    assert 1 <= measured["mixed", 64, 1, 4, 8, "step"] <= plan.passes
    contexts = {s.decode_kv_tokens // 4 > 128 for s in rows if s.kind == "mixed" and s.num_prefill_tokens == 32}
    assert contexts == {False, True}
    chunks = {s.prefill_kv_pairs for s in rows if s.num_prefill_tokens == 64 and s.kind == "prefill"}
    assert chunks == {64 * 65 // 2 + 64 * 64 * i for i in range(3)}

    recordings = read(run.recording_path)
    assert [r.name for r in recordings] == ["burst", "poisson-50"]
    assert recordings[0].drain_rate() > 0
    for recording in recordings:
        check_recording(recording)
    assert is_recording(run.recording_path)
    recorded = read_recorded_steps(run.recording_path, [])
    assert {s.held_out for s in recorded} <= {True}

    # killed in the middle of a row: that row is measured again, no other
    lines = out.read_text().splitlines()
    lost = next(i for i, line in enumerate(lines) if '"num_prefill_seqs": 4' in line and '"clock": "step"' in line)
    out.write_text("\n".join(lines[:lost] + lines[lost + 1 :]) + '\n{"kind": "pre')
    seen: list[str] = []
    assert measure(run, lambda what, done, total: seen.append(f"{done}/{total} {what}")) == []
    assert any("prefill num_tokens 128, num_prompts 4" in line for line in seen)
    _, again = read_samples(out)
    kept = lines[1:lost] + lines[lost + 1 :]
    assert out.read_text().splitlines()[1 : len(kept) + 1] == kept
    lacking = {s.key for s in again[len(kept) :]}
    assert any(shape.num_prefill_tokens == 128 and clock == "step" for shape, _, clock in lacking)
    rows_before = Counter(s.key for s in again[: len(kept)])
    assert all(rows_before[key] < plan.passes for key in lacking if key[2] == "step" and not key[0].num_decode_seqs)

    with pytest.raises(ProfileError, match="dtype"):
        measure(Measuring(model, EngineSetup(**{**vars(setup), "dtype": "bfloat16"}), plan, out))
    gc.collect()  # the engine that was refused, while its warnings are still ignored


def check_recording(recording: Recording) -> None:
    """Every token of every request is in a step, and times run forward."""
    steps: list[dict[str, Any]] = [dict(zip(STEP_COLUMNS, row, strict=True)) for row in recording.steps]
    requests = [dict(zip(REQUEST_COLUMNS, row, strict=True)) for row in recording.requests]
    assert sum(s["num_prefill_tokens"] for s in steps) == sum(r["prompt_tokens"] for r in requests)
    assert sum(s["num_decode_seqs"] for s in steps) == sum(r["output_tokens"] - 1 for r in requests)
    assert all(s["k_exec"] >= s["k_asked"] for s in steps)
    # the CPU is the device: a step is scheduled, run and seen in this order, to the microseconds times are written in
    for s in steps:
        assert s["start_s"] <= s["schedule_end_s"] <= s["device_start_s"] + 2e-6
        assert s["device_start_s"] <= s["device_end_s"] <= s["output_s"] + 2e-6 <= s["update_end_s"] + 4e-6
    order = ("due_s", "sent_s", "queued_s", "scheduled_s", "first_output_s", "last_output_s")
    for r in requests:
        assert [r[name] for name in order] == sorted(r[name] for name in order)
        assert r["first_received_s"] >= r["first_output_s"]


def test_a_cpu_refuses_to_be_held_and_goes_on(tmp_path: Path) -> None:
    async def refused() -> None:
        async with running(setup_in(tmp_path)) as engine:
            with pytest.raises(Exception, match="a CPU cannot be held before a step"):
                await engine.call_worker("hold_device", 0.01)
            await engine.run([Prompt(16, 4)])
            assert [step.num_prefill_tokens for step in await engine.drain()] == [16]

    import_vllm()
    asyncio.run(refused())
    gc.collect()


def test_the_reference_must_be_eager(tmp_path: Path) -> None:
    with pytest.raises(LiveError, match="must run eagerly"):
        write_reference(EngineSetup(tmp_path), KS, tmp_path / "reference.npz", BATCHES)
