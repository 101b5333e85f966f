"""Random weights of two cards: each draws its own share, and both the same where both hold the same."""

from __future__ import annotations

import gc
import json
import math
import os
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.live.tiny import TINY_DEEPSEEK_V2, TINY_OLMOE, TINY_QWEN3_MOE, split

pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: pip install 'simmoe[live-cpu]'"),
    pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two workers need two CPUs"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own, at import and at exit
]


@pytest.mark.parametrize(
    ("config", "expert_parallel", "whole"),
    [
        (split(TINY_OLMOE), False, {".gate."}),
        ({**TINY_QWEN3_MOE, "num_key_value_heads": 1}, False, {".gate.", "qkv_proj.weight k", "qkv_proj.weight v"}),
        (split(TINY_DEEPSEEK_V2), True, {".gate.", "kv_a_proj_with_mqa"}),
    ],
    ids=["olmoe-split", "qwen3_moe-one-kv-head", "deepseek_v2-split-whole-experts"],
)
def test_what_both_cards_hold_is_the_same_and_nothing_else(
    config: dict[str, Any], expert_parallel: bool, whole: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from vllm import LLM

    from simmoe.live.measure.layer_alone import held_experts

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.syspath_prepend(Path(__file__).parent)  # workers are processes of their own, which know no tests
    cpus = sorted(os.sched_getaffinity(0))
    # one NUMA node does not make vLLM guess which threads are whose
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", f"{cpus[0]}|{cpus[1]}")
    (tmp_path / "config.json").write_text(json.dumps(config))
    llm = LLM(
        str(tmp_path), load_format="simmoe-dummy-told", worker_cls="drawn.TellingWorker", dtype="bfloat16",
        tensor_parallel_size=2, enable_expert_parallel=expert_parallel, skip_tokenizer_init=True, enforce_eager=True,
        max_model_len=256, enable_prefix_caching=False, kv_cache_memory_bytes=1 << 27,
    )  # fmt: skip
    try:
        ranks = [first for first, _ in llm.collective_rpc("drawn")]
    finally:
        llm.llm_engine.engine_core.shutdown()
    del llm
    gc.collect()  # the engine, while its warnings are still ignored
    assert ranks[0].keys() == ranks[1].keys()
    found: set[str] = set()
    for name, (shape, *_, digest) in ranks[0].items():
        if len(shape) == 1:
            continue
        same = digest == ranks[1][name].digest
        assert same == any(part in name for part in whole), name
        found |= {part for part in whole if part in name}
    assert found == whole

    # the first card's experts as they are timed without an engine
    held = held_experts(config, 2, expert_parallel, "cpu", torch.bfloat16)
    for name, (shape, *_) in ranks[0].items():
        for end, alone in (("w13_weight", held.w13), ("w2_weight", held.w2)):
            assert not name.endswith(end) or tuple(alone.shape) == tuple(shape)

    # a card's share of what is added up over cards is as large as the whole's, not as its own width would have it
    width = config.get("moe_intermediate_size", config["intermediate_size"])
    heads = config["num_attention_heads"] * config.get("v_head_dim", config.get("head_dim", 32))
    for rank in ranks:
        for name, (shape, _, deviation, _) in rank.items():
            number = math.prod(shape)
            if name.endswith("w2_weight"):
                assert shape[-1] == (width if expert_parallel else width // 2)
                assert deviation == pytest.approx(width**-0.5, rel=5 / (2 * number) ** 0.5)
            if ".o_proj." in name:
                assert shape[-1] == heads // 2
                assert deviation == pytest.approx(0.1 * heads**-0.5, rel=5 / (2 * number) ** 0.5)
