"""Batch policies inside real vLLM engines, on the CPU: failures, aborts, recordings, prefix caching, the steps' k."""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simmoe.cli import run as cli
from simmoe.errors import DataError, LiveError, PolicyError, UsageError
from simmoe.live.engine.decisions import Recording
from simmoe.policies.registry import parse_policy
from simmoe.policies.views import RequestView
from simmoe.profiles.catalog import DEFAULT_PROFILE, load_profile
from simmoe.simulator.config import EngineConfig
from tests.live.tiny import TINY_OLMOE
from tests.live.twin import Twin

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: pip install 'simmoe[live-cpu]'"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own, at import and at exit
]

FAULTY = """
from simmoe.policies.protocols import ADMIT_ALL, StepPlan

class Faulty:
    def queue_key(self, request, /):
        return 1 / (request.k_qos - 5)

    def plan(self, view, /):
        if any(request.k_qos == 7 for request in view.waiting):
            raise ValueError("seven is too many")
        if any(request.k_qos == 6 for request in view.waiting):
            return StepPlan(order=["nobody"])
        return ADMIT_ALL

class Shut:
    def plan(self, view, /):
        return StepPlan(k_max=0)

class Knows(Shut):
    clairvoyant = True

class TooHigh(Shut):
    k_floor = 9
"""
ENGINE = {
    "load_format": "simmoe-dummy", "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 480,
    "block_size": 32, "num_gpu_blocks_override": 17, "enable_prefix_caching": True, "enforce_eager": True,
    "max_num_batched_tokens": 64, "max_num_seqs": 8, "async_scheduling": False, "kv_cache_memory_bytes": 1 << 25,
    "scheduler_cls": "simmoe.live.engine.policy_host.PolicyScheduler",
    "worker_cls": "simmoe.live.measure.worker.MeasuringWorker",
}  # fmt: skip
"""KV for 16 blocks: two long requests and little more, so that some are preempted."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(TINY_OLMOE))
    (folder / "faulty.py").write_text(FAULTY)
    return folder


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[Any]:
    """One engine in this process; each test hosts its own policy in it."""
    from vllm import LLM

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        llm = LLM(str(folder), additional_config={"simmoe": {"record_steps": True}}, **ENGINE)
        yield llm
        llm.llm_engine.engine_core.shutdown()


def host(llm: Any, policy: str, **options: Any) -> Any:
    """Host a policy in an idle engine and return its scheduler."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    scheduler.host_policy({"policy": policy, "profile": DEFAULT_PROFILE, **options})
    scheduler.drain_steps()
    assert scheduler.reset_prefix_cache()
    return scheduler


def add(llm: Any, name: str, k: int, prompt_tokens: int = 20, output_tokens: int = 8, reuse: bool = True) -> None:
    """Send one request without waiting for it."""
    from vllm import SamplingParams

    params = SamplingParams(
        max_tokens=output_tokens, temperature=0.0, ignore_eos=True, detokenize=False, extra_args={"simmoe_k": k},
        skip_reading_prefix_cache=not reuse,
    )  # fmt: skip
    # a first token of its own, so that only requests of one name share a prefix
    tokens = [2 + zlib.crc32(name.encode()) % 500, *[3] * (prompt_tokens - 1)]
    llm.llm_engine.add_request(name, {"prompt_token_ids": tokens}, params)


def finish(llm: Any) -> list[Any]:
    """Step until nothing is left; return the finished outputs in the order they finished."""
    done = []
    while llm.llm_engine.has_unfinished_requests():
        done += [output for output in llm.llm_engine.step() if output.finished]
    return done


def send_random(llm: Any, count: int, seed: int = 0) -> None:
    """Send requests of random lengths and budgets, some steps between them."""
    rng = np.random.default_rng(seed)
    for i in range(count):
        prompt, output, k = (int(rng.integers(1, high)) for high in (150, 40, 9))
        add(llm, f"q{i:02d}", k, prompt, output)
        for _ in range(int(rng.integers(0, 4))):
            llm.llm_engine.step()
    finish(llm)


@pytest.mark.parametrize("policy", ["fifo", "tiers", "tiers,max_wait_s=0.02", "fixed-k,k=6"])
def test_a_recording_replays_to_equal_plans(
    llm: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], policy: str
) -> None:
    """Chunked prefill, prefix caching and preemptions included."""
    path = tmp_path / "decisions.jsonl"
    scheduler = host(llm, policy, decisions=str(path))
    send_random(llm, 18)
    steps, stats = scheduler.drain_steps(), scheduler.policy_stats()
    host(llm, "fifo")  # which closes the recording
    assert sum(step.num_preempted for step in steps) > 0
    assert stats["num_plans"] > 10 and stats["policy"] == policy
    if policy == "fixed-k,k=6":
        assert {step.k_exec for step in steps} == {6, 7, 8}
    recording = Recording(path)
    context = recording.context(load_profile(recording.profile).cost(False).prefill_s)
    assert recording.replay(parse_policy(recording.policy).batch(context)) == stats["num_plans"]
    assert cli(["policies", "check", policy, "--replay", str(path)]) == 0
    assert f"{policy} answers {stats['num_plans']} calls as '{policy}' did" in capsys.readouterr().out
    if policy == "fifo":
        with pytest.raises(PolicyError, match=r"call \d+ at .* s: live .*, replayed"):
            recording.replay(parse_policy("tiers").batch(context))


def test_a_cut_recording_is_read_as_far_as_it_goes(llm: Any, tmp_path: Path) -> None:
    path = tmp_path / "decisions.jsonl"
    host(llm, "tiers", decisions=str(path))
    send_random(llm, 6)
    host(llm, "fifo")
    text = path.read_text()
    path.write_text(text[: len(text) - 20])
    recording = Recording(path)
    tiers = parse_policy("tiers").batch(recording.context(load_profile(DEFAULT_PROFILE).cost(False).prefill_s))
    assert recording.replay(tiers) > 0
    path.write_text(text.replace('["?"', '["!"', 1))
    with pytest.raises(DataError, match=r"line \d+ does not follow from those before"):
        recording.replay(tiers)
    path.write_text("{}")
    with pytest.raises(DataError, match="is no recording of decisions"):
        Recording(path)


@pytest.mark.parametrize(
    ("k", "what"), [(7, r"faulty.py:\d+: ValueError: seven is too many"), (6, "lets in 'nobody', which does not wait")]
)
def test_a_policy_that_fails_is_named_and_the_engine_goes_on(
    llm: Any, folder: Path, tmp_path: Path, k: int, what: str
) -> None:
    scheduler = host(llm, f"{folder}/faulty.py:Faulty", evidence=str(tmp_path))
    add(llm, "before", 3, output_tokens=30)
    llm.llm_engine.step()
    add(llm, "bad", k)
    with pytest.raises(PolicyError, match=rf"rank 0: policy Faulty: .*{what}.*; its view is saved in '.*'"):
        finish(llm)
    saved = json.loads((tmp_path / "policy_call-rank0.json").read_text())
    assert [request["k_qos"] for request in saved["view"]["waiting"]] == [k]
    llm.llm_engine.abort_request(["bad"])
    add(llm, "after", 2)
    tokens = {output.request_id: len(output.outputs[0].token_ids) for output in finish(llm)}
    assert tokens == {"before": 30, "after": 8}
    assert not scheduler.requests


def test_a_queue_key_that_fails_refuses_the_request(llm: Any, folder: Path) -> None:
    scheduler = host(llm, f"{folder}/faulty.py:Faulty")
    with pytest.raises(
        PolicyError, match=r"^rank 0: policy Faulty: .*faulty.py:\d+: ZeroDivisionError.*; its view is saved"
    ):
        add(llm, "bad", 5)
    assert not scheduler.requests and not scheduler.request_ks and not len(scheduler.waiting)
    llm.llm_engine.abort_request(["bad"])
    add(llm, "good", 4)
    assert [output.request_id for output in finish(llm)] == ["good"]


def test_a_gate_that_admits_nobody_is_opened(llm: Any, folder: Path) -> None:
    scheduler = host(llm, f"{folder}/faulty.py:Shut")
    for i in range(3):
        add(llm, f"r{i}", 2 + i)
    assert len(finish(llm)) == 3
    assert scheduler.policy_stats()["gates_opened"] > 0


@pytest.mark.parametrize(
    ("policy", "error", "what"),
    [
        ("{}/faulty.py:Knows", LiveError, "is clairvoyant"),
        ("{}/faulty.py:TooHigh", PolicyError, "policy TooHigh: k_floor is 9; it must be a whole number in 0..8"),
        ("teirs", UsageError, "did you mean 'tiers'"),
    ],
)
def test_a_policy_no_engine_can_host_is_refused(
    llm: Any, folder: Path, policy: str, error: type[Exception], what: str
) -> None:
    scheduler = host(llm, "fixed-k")
    with pytest.raises(error, match=what):
        host(llm, policy.format(folder))
    assert scheduler.hosting.policy == "fixed-k"


def test_a_busy_engine_keeps_its_policy(llm: Any) -> None:
    host(llm, "fifo")
    add(llm, "r", 2)
    with pytest.raises(LiveError, match="1 requests are in the engine; change its policy when none is"):
        host(llm, "tiers")
    finish(llm)


def test_aborted_requests_leave_nothing_behind(llm: Any) -> None:
    scheduler = host(llm, "tiers")
    for i in range(12):
        add(llm, f"r{i:02d}", 1 + i % 8, prompt_tokens=40, output_tokens=12)
    for _ in range(3):
        llm.llm_engine.step()
    gone = {"r00", "r05", "r11"}
    for requests in (scheduler.running, scheduler.waiting):
        assert any(request.request_id.startswith(tuple(gone)) for request in requests)
    llm.llm_engine.abort_request(sorted(gone))
    assert {output.request_id for output in finish(llm)} == {f"r{i:02d}" for i in range(12)} - gone
    assert not scheduler.requests and not scheduler.request_ks and not scheduler.running
    assert not len(scheduler.waiting) and not scheduler.views._recomputed


@pytest.mark.parametrize("policy", ["fifo", "tiers"])
def test_a_prompt_aborted_in_its_middle_frees_its_blocks(llm: Any, policy: str) -> None:
    """Before its first step, and after each of the chunks it is cut into."""
    scheduler = host(llm, policy)
    for num_steps in range(5):
        add(llm, "long", 7, prompt_tokens=300, reuse=False)
        add(llm, "short", 2, prompt_tokens=10, reuse=False)
        for _ in range(num_steps):
            llm.llm_engine.step()
        llm.llm_engine.abort_request(["long"])
        assert "short" in {output.request_id for output in finish(llm)} or num_steps > 2
        assert not scheduler.requests and not scheduler.request_ks and not len(scheduler.waiting)
        assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 16


def test_a_prompt_longer_than_the_model_takes_is_refused(llm: Any) -> None:
    from vllm.exceptions import VLLMValidationError

    scheduler = host(llm, "tiers")
    with pytest.raises((ValueError, VLLMValidationError), match="480"):
        add(llm, "huge", 4, prompt_tokens=600)
    assert not scheduler.requests and not scheduler.request_ks
    add(llm, "good", 4, prompt_tokens=470)
    assert [output.request_id for output in finish(llm)] == ["good"]


def test_a_policy_s_file_is_read_anew_each_time_it_is_hosted(llm: Any, tmp_path: Path) -> None:
    ks = []
    for floor in (3, 6):
        path = tmp_path / "mine.py"
        path.write_text(
            "from simmoe.policies.protocols import ADMIT_ALL\n"
            f"class Mine:\n    k_floor = {floor}\n    def plan(self, view, /):\n        return ADMIT_ALL\n"
        )
        scheduler = host(llm, f"{path}:Mine")
        add(llm, "r", 1)
        finish(llm)
        ks.append({step.k_exec for step in scheduler.drain_steps()})
    assert ks == [{3}, {6}]


def test_the_prefix_cache_is_salted_by_k(llm: Any) -> None:
    host(llm, "fifo")
    cached = []
    for k in (4, 5, 4):
        add(llm, "same", k, prompt_tokens=60)
        cached += [output.num_cached_tokens for output in finish(llm)]
    assert cached == [0, 0, 32]


def test_tiers_run_low_budgets_first(llm: Any) -> None:
    """Full prompts of alternating budgets: under FIFO every step runs at 8, under tiers the low ones run at 1."""
    ks = {}
    for policy in ("fifo", "tiers"):
        scheduler = host(llm, policy)
        for i in range(8):
            add(llm, f"r{i}", 8 if i % 2 == 0 else 1, prompt_tokens=32, output_tokens=1)
        finish(llm)
        ks[policy] = [step.k_exec for step in scheduler.drain_steps()]
    assert ks == {"fifo": [8, 8, 8, 8], "tiers": [1, 1, 8, 8]}


@pytest.mark.parametrize("k", [0, 9, "4"])
def test_a_budget_out_of_range_is_refused_with_the_range(llm: Any, k: Any) -> None:
    from vllm.exceptions import VLLMValidationError

    scheduler = host(llm, "tiers")
    with pytest.raises(VLLMValidationError, match=r"simmoe_k is .*; it must be an integer from 1 to 8"):
        add(llm, "bad", k)
    assert not scheduler.requests


@pytest.mark.parametrize("policy", ["fifo", "tiers", "tiers,max_wait_s=0.05"])
def test_the_simulator_decides_the_same_on_a_runs_own_times(llm: Any, tmp_path: Path, policy: str) -> None:
    """Arrivals as the recording has them, steps begun when they began: the same steps, to the token and the block.

    Requests are sent between the steps, whatever those take, so that on any machine some wait and some are preempted.
    """
    path = tmp_path / "decisions.jsonl"
    scheduler = host(llm, policy, decisions=str(path))
    rng = np.random.default_rng(3)
    size = 24
    due_steps = np.sort(rng.integers(0, 16, size))
    outputs = [int(n) for n in rng.integers(20, 60, size)]
    added_s: list[float] = []
    num_steps = 0
    while len(added_s) < size or llm.llm_engine.has_unfinished_requests():
        while len(added_s) < size and due_steps[len(added_s)] <= num_steps:
            i = len(added_s)
            added_s.append(time.monotonic())
            add(llm, f"s{i:02d}", int(rng.integers(1, 9)), int(rng.integers(1, 150)), outputs[i], reuse=False)
        llm.llm_engine.step()
        num_steps += 1
    steps = scheduler.drain_steps()
    host(llm, "fifo")
    lines = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    views = [RequestView(line[1], line[2], line[3], 0, line[4]) for line in lines if line[0] == "+"]
    assert len(views) == size

    config = EngineConfig(
        max_num_batched_tokens=64, max_num_seqs=8, block_size=32, num_gpu_blocks=17, async_scheduling=False
    )
    twin = Twin(policy, config)
    sent = 0
    for row in steps:
        while sent < size and added_s[sent] <= row.schedule_start_s:
            twin.add(views[sent], outputs[sent])
            sent += 1
        preempted = twin.totals.num_preemptions
        step = twin.scheduler.compose(row.schedule_start_s)
        assert step is not None
        assert (
            step.num_prefill_tokens + step.num_decode_seqs, step.qos_slots, step.k_exec, step.num_waiting,
            step.num_running, twin.totals.num_preemptions - preempted,
        ) == (
            row.shape.num_tokens, row.qos_slots, row.k_exec, row.num_waiting, row.num_running, row.num_preempted,
        )  # fmt: skip
        twin.scheduler.finish(step.index)
    assert not twin.scheduler.running and sent == size
    assert sum(row.num_preempted for row in steps) > 0
    assert max(row.num_waiting for row in steps) > 3
