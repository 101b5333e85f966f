"""Captured CUDA graphs run at the k that was asked, FULL and PIECEWISE alike: logits against an eager engine's.

So does what has no graphs, because the bound of their memory left its budget out.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from simmoe.live.engine.transport import CONFIG_KEY
from simmoe.live.measure import MeasuredModel, Measuring, measure, proof
from simmoe.live.measure.engine import EngineSetup, import_vllm, running
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


CONFIG = {**split_config(OLMOE_1B_7B, 4), "num_hidden_layers": 2}


def setups(folder: Path) -> tuple[EngineSetup, EngineSetup]:
    """Return two layers of OLMoE-1B-7B split by 4 without graphs, and with graphs at every size and KS."""
    model = write_model(CONFIG, folder / "model", 4096)
    eager = EngineSetup(
        model,
        captured_sizes=(),
        max_model_len=4096,
        max_num_batched_tokens=512,
        max_num_seqs=16,
        gpu_memory_utilization=0.5,
    )
    return eager, replace(eager, captured_sizes=(1, 2, 4, 8, 16, 64, 256, 320, 512), captured_ks=KS)


def test_graphs_run_at_the_k_asked(tmp_path: Path) -> None:
    """Probes: piecewise prefill of 320 and 256, whole-model decode of 8 and 1."""
    eager, graphs = setups(tmp_path)
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
    run = Measuring(MeasuredModel("two layers", CONFIG), graphs, plan, out, reference, BATCHES, layer=True)
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


class Modes:
    """A stat logger of vLLM's that keeps how the runner launched each step."""

    def __init__(self) -> None:
        self.seen: set[str] = set()

    def record(self, scheduler_stats: Any = None, *args: Any, **kwargs: Any) -> None:
        graphs = None if scheduler_stats is None else scheduler_stats.cudagraph_stats
        if graphs is not None:
            self.seen.add(graphs.runtime_mode.rpartition(".")[2])

    def __getattr__(self, name: str) -> Any:
        if name.startswith(("log", "record")):
            return lambda *args, **kwargs: None
        raise AttributeError(name)


async def probed(setup: EngineSetup) -> tuple[dict[str, Any], dict[str, dict[int, Any]], dict[int, set[str]]]:
    """Return what was captured, the probes' logits by step kind and k, and how the steps of each k were launched."""
    logits: dict[str, dict[int, Any]] = {"prefill": {}, "decode": {}}
    launched: dict[int, set[str]] = {}
    async with running(setup) as engine:
        told = await engine.call("captured_graphs")
        modes = Modes()
        engine.llm.logger_manager.stat_loggers.append(modes)
        for k in KS:
            modes.seen = set()
            for kind, by_k in (await proof.probe(engine, (k,), BATCHES)).items():
                logits[kind] |= by_k
            await engine.drain()  # what the engine told before its answer has been heard
            launched[k] = modes.seen
    return told, logits, launched


def bounded(setup: EngineSetup, graph_memory_gib: float) -> EngineSetup:
    """Return the engine with graphs in no more memory, and vLLM telling how it launched each step; 0: no bound said."""
    options = {"record_steps": True, "captured_ks": list(KS), "graph_memory_gib": graph_memory_gib}
    return replace(setup, overrides={"additional_config": {CONFIG_KEY: options}, "cudagraph_metrics": True})


def test_budgets_beyond_the_bound_run_at_their_own_k_without_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    eager, graphs = setups(tmp_path)
    import_vllm()
    monkeypatch.setenv("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS", "1")
    expected = asyncio.run(probed(eager))[1]
    whole = asyncio.run(probed(bounded(graphs, 0.0)))
    # three quarters of what four banks took: the first is captured, as vLLM is asked for no estimate, and not all
    monkeypatch.setenv("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS", "0")
    part = asyncio.run(probed(bounded(graphs, 0.75 * whole[0]["graph_gib"])))

    assert whole[0]["captured_ks"] == list(KS)
    assert 0 < whole[0]["graph_gib"] <= whole[0]["graph_memory_gib"], "by vLLM's estimate, and a share of what was left"
    captured = part[0]["captured_ks"]
    assert captured == list(KS)[-len(captured) :] and 0 < len(captured) < len(KS), part[0]
    assert len(captured) == 1 or part[0]["graph_gib"] <= part[0]["graph_memory_gib"]

    for told, logits, launched in (whole, part):
        for kind, by_k in logits.items():
            proved, seen = proof.verdict(by_k, expected[kind])
            assert proved, (told, kind, seen)
        for k, modes in launched.items():
            assert modes == ({"FULL", "PIECEWISE"} if k in told["captured_ks"] else {"NONE"}), (told, k, modes)
