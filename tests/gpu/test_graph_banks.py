"""Captured CUDA graphs run at the k that was asked, FULL and PIECEWISE alike: logits against an eager engine's."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from simmoe.live.measure import MeasuredModel, Measuring, measure, proof
from simmoe.live.measure.engine import EngineSetup
from simmoe.live.measure.models import OLMOE_1B_7B, split_config, write_model
from simmoe.live.measure.plan import DecodePoint, MixedPoint, Plan, PrefillPoint
from simmoe.live.measure.run import write_reference
from simmoe.profiles.layer_times import read_layer_times
from simmoe.profiles.samples import read_samples
from tests.gpu.cards import has_card

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not has_card(), reason="needs an NVIDIA GPU and vLLM: pip install 'simmoe[live]'"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own, at import and at exit
]

KS = (1, 4, 16, 32)
BATCHES = ((40,) * 8, (200,))


def test_graphs_run_at_the_k_asked(tmp_path: Path) -> None:
    """Two layers of OLMoE-1B-7B split by 4. Probes: piecewise prefill of 320 and 256, whole-model decode of 8 and 1."""
    config = {**split_config(OLMOE_1B_7B, 4), "num_hidden_layers": 2}
    model = write_model(config, tmp_path / "model", 4096)
    eager = EngineSetup(
        model,
        captured_sizes=(),
        max_model_len=4096,
        max_num_batched_tokens=512,
        max_num_seqs=16,
        gpu_memory_utilization=0.5,
    )
    graphs = replace(eager, captured_sizes=(1, 2, 4, 8, 16, 64, 256, 320, 512), captured_ks=KS)
    plan = Plan(
        KS,
        prefill=(PrefillPoint(64), PrefillPoint(300)),
        decode=(DecodePoint(8, 64),),
        mixed=(MixedPoint(64, 8, 64),),
        eager=(PrefillPoint(64), DecodePoint(8, 64)),
        passes=1,
        front_end_requests=3,
    )
    reference, out = tmp_path / "reference.npz", tmp_path / "samples.jsonl"
    write_reference(eager, KS, reference, BATCHES)
    run = Measuring(MeasuredModel("two layers", config), graphs, plan, out, reference, BATCHES, layer=True)
    assert measure(run) == []

    header, samples = read_samples(out)
    assert header.captured_ks == list(KS)
    assert header.k_check.count("probes nearest") == 2  # prefill, decode: measure raises where it is not proved
    assert {s.mode for s in samples} == {"graphs", "eager"}
    assert {(s.kind, s.clock) for s in samples} >= {
        ("prefill", "step"), ("decode", "step"), ("mixed", "step"), ("prefill", "device"), ("decode", "host"),
    }  # fmt: skip

    # the device's work for a step lies within the engine's pace, to the clock's resolution and another step's spread
    paces = {s.key[0]: s.p90_s for s in samples if s.clock == "step"}
    assert all(s.p10_s <= paces[s.key[0]] + 2e-5 for s in samples if s.clock == "device")

    # no point beats the card's own ceilings by more than those vary
    layer = read_layer_times(run.layer_path)
    assert {row.k for row in layer.rows} <= set(KS)
    assert all(layer.bound_s(row) < 1.1 * row.seconds for row in layer.rows)

    # the test can fail: graphs frozen at k_max would have been seen
    logits = proof.load(out.with_suffix(".logits.npz"))
    expected = proof.load(reference)
    for kind, by_k in logits.items():
        frozen = {k: by_k[KS[-1]] for k in by_k}
        assert not proof.verdict(frozen, expected[kind])[0]
