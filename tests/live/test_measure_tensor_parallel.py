"""Measuring an engine of two workers: every one of them takes part in what is asked, the first one's clock counts."""

from __future__ import annotations

import gc
import os
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

from simmoe.live.measure import MeasuredModel, Measuring, measure, pinning
from simmoe.live.measure.engine import EngineSetup
from simmoe.live.measure.loads import Loads
from simmoe.live.measure.models import write_model
from simmoe.live.measure.plan import DecodePoint, MixedPoint, Plan, PrefillPoint
from simmoe.live.measure.recording import read
from simmoe.profiles.samples import read_samples
from tests.live.tiny import TINY_OLMOE

pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: pip install 'simmoe[live-cpu]'"),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two workers need two CPUs"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own, at import and at exit
]

KS = (1, 4, 8)


def test_two_workers_are_measured_as_one_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpus = sorted(os.sched_getaffinity(0))
    # one NUMA node does not make vLLM guess which threads are whose
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{cpus[0]}|{cpus[1]}")
    # as if there were cores enough to pin three main threads
    cores: list[tuple[int, ...]] = [(cpus[0],), (cpus[1],), (cpus[0],), (cpus[0],), (cpus[1],)]
    monkeypatch.setattr(pinning, "physical_cores", lambda allowed: cores)
    setup = EngineSetup(
        write_model(TINY_OLMOE, tmp_path / "model", 2048),
        captured_sizes=(),
        tensor_parallel_size=2,
        async_scheduling=False,
        max_num_batched_tokens=256,
        max_num_seqs=16,
        max_model_len=2048,
        dtype="float32",
        pin=True,
        overrides={"kv_cache_memory_bytes": 1 << 27},
    )
    plan = Plan(
        KS,
        prefill=(PrefillPoint(16), PrefillPoint(128, num_prompts=4)),
        decode=(DecodePoint(1, 16), DecodePoint(4, 64)),
        mixed=(MixedPoint(32, 4, 32, (1, 8)),),
        passes=1,
        repetitions=5,  # a loaded machine may pause the engine between any two steps, and one after a pause is left out
        front_end_requests=3,
        front_end_lengths=(30, 3),
    )
    run = Measuring(
        MeasuredModel("tiny", TINY_OLMOE), setup, plan, tmp_path / "samples.jsonl", loads=Loads(4, ()),
    )  # fmt: skip
    affinity: dict[str, set[int]] = {}

    def look(what: str, done: int, total: int) -> None:
        for pid in pinning.descendants(os.getpid()):
            if name := pinning.title(pid):
                affinity[name] = os.sched_getaffinity(pid)

    before = os.sched_getaffinity(0)
    try:
        assert measure(run, look) == []
    finally:
        os.sched_setaffinity(0, before)
    assert affinity == {
        "VLLM::EngineCore": {cpus[0]}, "VLLM::Worker_TP0": {cpus[0]}, "VLLM::Worker_TP1": {cpus[1]},
    }  # fmt: skip

    header, rows = read_samples(run.out)
    assert header.num_cards == 2
    assert header.engine_flags["tensor_parallel_size"] == 2
    assert not header.engine_flags["enable_expert_parallel"]
    assert header.engine_flags["pin"]
    assert header.engine_flags["VLLM_CPU_OMP_THREADS_BIND"] == f"{cpus[0]}|{cpus[1]}"
    assert any(f"Worker_TP1 on CPU {cpus[1]}" in note for note in header.notes)
    assert set(header.front_end) == {"ingress_s", "egress_s", "start_s"}
    measured = Counter((s.kind, s.num_prefill_tokens, s.num_decode_seqs, s.k, s.clock) for s in rows)
    for k in KS:
        for clock in ("step", "device", "host"):
            assert measured["prefill", 16, 0, k, clock] == measured["prefill", 128, 0, k, clock] == 1
            assert measured["decode", 0, 1, k, clock] == measured["decode", 0, 4, k, clock] == 1
    (recording,) = read(run.recording_path)
    assert recording.steps
    gc.collect()  # the engine, while its warnings are still ignored
