"""Two engines, each in a process of its own: lanes before them, tiers inside, and a policy that brings one down."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from simmoe.live.engine.decisions import Recording
from simmoe.policies.protocols import PolicyContext
from simmoe.policies.registry import parse_policy
from simmoe.policies.views import RankView, RequestView
from simmoe.profiles.catalog import DEFAULT_PROFILE, load_profile
from tests.live.test_policy_host import ENGINE, FAULTY, add, finish
from tests.live.tiny import TINY_OLMOE

pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: pip install 'simmoe[live-cpu]'"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own, at import and at exit
]


def ask(llm: Any, method: str, *args: Any) -> Any:
    """Call a method of the scheduler in the engine's process."""
    return llm.llm_engine.engine_core.call_utility("simmoe_scheduler", method, list(args))


def test_lanes_over_two_engines_with_tiers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm import LLM
    from vllm.v1.engine.exceptions import EngineDeadError

    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "1")
    (tmp_path / "config.json").write_text(json.dumps(TINY_OLMOE))
    (tmp_path / "faulty.py").write_text(FAULTY)
    paths = [tmp_path / f"decisions-{rank}.jsonl" for rank in range(2)]
    hosting = {"policy": "tiers", "profile": DEFAULT_PROFILE, "num_ranks": 2, "evidence": str(tmp_path)}
    engines: list[Any] = []
    try:
        for rank, path in enumerate(paths):
            options = {**hosting, "dp_rank": rank, "decisions": str(path)}
            config = {"simmoe": {"record_steps": True}, "simmoe_policy": options}
            engines.append(LLM(str(tmp_path), additional_config=config, **ENGINE))

        context = PolicyContext(load_profile().cost(False).prefill_s, 1, 8, 2, 8, 64)
        lanes = parse_policy("lanes,start=4,window=0,adaptive=false,bypass=false").route(context)
        sent = [0, 0]
        for i in range(16):
            k = 1 + i % 8
            ranks = [RankView(rank, count, 0, count, 1, 0.0, 0, 0.0) for rank, count in enumerate(sent)]
            rank = lanes.route(RequestView(f"r{i:02d}", 0.0, 40, 0, k), ranks, 0.0)
            sent[rank] += 1
            add(engines[rank], f"r{i:02d}", k, prompt_tokens=40, output_tokens=3)
        done = [finish(llm) for llm in engines]
        assert [len(outputs) for outputs in done] == sent == [8, 8]
        # StepRecord's fields as they cross the process boundary: k_exec is the eleventh
        low, high = ([step[10] for step in ask(llm, "drain_steps")] for llm in engines)
        assert max(low) == 4 and min(low) < 4
        assert max(high) == 8 and 5 <= min(high) < 8

        for llm, path in zip(engines, paths, strict=True):
            num_plans = ask(llm, "policy_stats")["num_plans"]
            ask(llm, "host_policy", {**hosting, "policy": "fifo"})
            recording = Recording(path)
            tiers = parse_policy("tiers").batch(recording.context(load_profile().cost(False).prefill_s))
            assert recording.replay(tiers) == num_plans > 0

        ask(engines[1], "host_policy", {**hosting, "policy": f"{tmp_path}/faulty.py:Faulty", "dp_rank": 1})
        add(engines[1], "unplaced", 5)
        add(engines[1], "good", 4)
        reasons = {output.request_id: output.outputs[0].finish_reason for output in finish(engines[1])}
        assert reasons == {"unplaced": "error", "good": "length"}, "its queue_key fails at 5: refused, and that is all"
        add(engines[1], "bad", 7)
        with pytest.raises(EngineDeadError):
            finish(engines[1])
        saved = json.loads((tmp_path / "policy_call-rank1.json").read_text())
        assert saved["view"]["dp_rank"] == 1
        add(engines[0], "alive", 2)
        assert len(finish(engines[0])) == 1
    finally:
        for llm in engines:
            llm.llm_engine.engine_core.shutdown()
