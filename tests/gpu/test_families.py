"""Every family, original and split, in every mode a GPU has: the k asked is the k that runs, by logits against eager.

A prompt within the captured sizes replays piecewise graphs, a longer one runs the compiled model, decoding replays
whole-model graphs.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from simmoe.live.measure import proof
from simmoe.live.measure.engine import EngineSetup, import_vllm, running
from simmoe.live.measure.models import split_config, write_model
from simmoe.profiles.models import read_model
from tests.gpu.cards import has_card

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not has_card(), reason="needs an NVIDIA GPU and vLLM: pip install 'simmoe[live]'"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own, at import and at exit
]

NUM_LAYERS = 3
"""DeepSeek-V2's first has no experts."""

SIZES = (1, 2, 4, 8, 16, 64, 128, 256)
MODES = {"piecewise": ((200,), (40,) * 6), "compiled": ((400,),) * 7}
"""Prompt lengths of the batches that are probed; what they decode replays whole-model graphs in both.

As many prompts in either: where one expert is all of a token, rounding now and then picks another, and a probe is lost.
"""


def setups(model: Path, ks: tuple[int, ...]) -> tuple[EngineSetup, EngineSetup]:
    """Return the same engine without graphs and compiler, and with graphs keyed by k."""
    eager = EngineSetup(
        model,
        captured_sizes=(),
        max_model_len=1024,
        max_num_batched_tokens=512,
        max_num_seqs=16,
        gpu_memory_utilization=0.1,
        overrides={"kv_cache_memory_bytes": 1 << 30},  # so that several engines may share a card
    )
    return eager, replace(eager, captured_sizes=SIZES, captured_ks=ks)


async def probes(setup: EngineSetup, ks: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    """Return the engine's logits, see :func:`proof.probe`, for the batches of each mode."""
    async with running(setup) as engine:
        return {mode: await proof.probe(engine, ks, batches) for mode, batches in MODES.items()}


@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("name", ["olmoe-1b-7b", "qwen3-30b-a3b", "deepseek-v2-lite"])
def test_the_k_asked_is_the_k_that_runs(tmp_path: Path, name: str, splits: int) -> None:
    config = {**split_config(read_model(name).config, splits), "num_hidden_layers": NUM_LAYERS}
    k_max = config["num_experts_per_tok"]
    ks = (1, k_max // 2, k_max)
    eager, graphs = setups(write_model(config, tmp_path / "model", 1024), ks)
    import_vllm()
    expected, found = (asyncio.run(probes(setup, ks)) for setup in (eager, graphs))
    for mode, by_kind in found.items():
        for kind, by_k in by_kind.items():
            proved, seen = proof.verdict(by_k, expected[mode][kind])
            assert proved, (mode, kind, seen)
            # the test can fail: a k frozen at the largest would have been seen
            assert not proof.verdict(dict.fromkeys(ks, by_k[k_max]), expected[mode][kind])[0]
