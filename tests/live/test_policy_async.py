"""Asynchronous scheduling, end to end: vLLM's engine core with two steps in flight, its model runner, the policy in it.

vLLM schedules asynchronously on a GPU alone: its CPU platform turns that off, and the model runner hands each step's
tokens over on a CUDA stream. Here the first is turned on again and stands-in take the place of the second, streams and
events that have nothing to wait for since the CPU has computed a step before the call returns. All else is vLLM's.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from simmoe.errors import PolicyError
from simmoe.live.engine.decisions import Recording
from simmoe.policies.registry import parse_policy
from simmoe.policies.views import RequestView
from simmoe.profiles.catalog import load_profile
from simmoe.simulator.config import EngineConfig
from tests.live.test_policy_host import ENGINE, FAULTY, add, finish, host
from tests.live.tiny import TINY_OLMOE
from tests.live.twin import Twin

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: pip install 'simmoe[live-cpu]'"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own, at import and at exit
]


class Stream:
    """A stream, or an event, of a device that has always finished."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        import torch

        self.device = torch.device("cpu")

    def __getattr__(self, name: str) -> Any:
        if name in ("wait_stream", "wait_event", "record", "synchronize"):
            return lambda *args, **kwargs: None
        raise AttributeError(name)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """One engine in this process; each test hosts its own policy in it."""
    import torch
    from vllm import LLM
    from vllm.platforms.cpu import CpuPlatform

    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_text(json.dumps(TINY_OLMOE))
    (folder / "faulty.py").write_text(FAULTY)
    check = CpuPlatform.check_and_update_config

    def keep_asynchronous(cls: Any, vllm_config: Any) -> None:
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        patch.setattr(CpuPlatform, "check_and_update_config", classmethod(keep_asynchronous))
        for name in ("Stream", "Event", "current_stream"):
            patch.setattr(torch.cuda, name, Stream)
        patch.setattr(torch.cuda, "stream", contextlib.nullcontext)
        arguments = {**ENGINE, "async_scheduling": True, "logprobs_mode": "raw_logits"}
        arguments["scheduler_cls"] = "simmoe.live.engine.policy_host.AsyncPolicyScheduler"
        llm = LLM(str(folder), additional_config={"simmoe": {"record_steps": True}}, **arguments)
        assert llm.llm_engine.engine_core.engine_core.batch_queue_size == 2
        yield llm
        llm.llm_engine.engine_core.shutdown()


@contextlib.contextmanager
def told(scheduler: Any) -> Iterator[list[tuple[str, Any]]]:
    """Yield what the engine core asks of its scheduler, in order: requests, steps composed, steps taken in."""
    events: list[tuple[str, Any]] = []
    add_request, schedule, update = scheduler.add_request, scheduler.schedule, scheduler.update_from_output

    def heard(kind: str, value: Any) -> Any:
        events.append((kind, value))
        return value

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "add_request", lambda r, *a, **kw: heard("add", r) and add_request(r, *a, **kw))
        patch.setattr(scheduler, "schedule", lambda *a, **kw: heard("schedule", schedule(*a, **kw)))
        patch.setattr(scheduler, "update_from_output", lambda o, *a, **kw: heard("update", o) and update(o, *a, **kw))
        yield events


def drive(llm: Any, seed: int, size: int = 24) -> None:
    """Send requests of random sizes between the steps, and step until all are answered in full."""
    rng = np.random.default_rng(seed)
    due_steps = np.sort(rng.integers(0, 24, size))
    lengths, num_sent, num_steps, answered = [], 0, 0, {}
    while num_sent < size or llm.llm_engine.has_unfinished_requests():
        while num_sent < size and due_steps[num_sent] <= num_steps:
            prompt, output, k = (int(rng.integers(*bounds)) for bounds in ((1, 150), (20, 60), (1, 9)))
            add(llm, f"s{num_sent:02d}", k, prompt, output, reuse=False)
            lengths.append(output)
            num_sent += 1
        for output in llm.llm_engine.step():
            if output.finished:
                answered[output.request_id] = len(output.outputs[0].token_ids)
        num_steps += 1
    assert [answered[f"s{i:02d}"] for i in range(size)] == lengths


@pytest.mark.parametrize("policy", ["fifo", "tiers", "tiers,max_wait_s=0.05", "fixed-k,k=6"])
def test_two_steps_in_flight_are_the_simulators(llm: Any, tmp_path: Path, policy: str) -> None:
    """In the order in which the engine core asked, at the times it had: the same tokens, budgets and preemptions."""
    path = tmp_path / "decisions.jsonl"
    scheduler = host(llm, policy, decisions=str(path))
    with told(scheduler) as events:
        drive(llm, 3)
    steps, num_plans = scheduler.drain_steps(), scheduler.policy_stats()["num_plans"]
    host(llm, "fifo")  # which closes the recording

    recording = Recording(path)
    assert recording.async_scheduling
    context = recording.context(load_profile(recording.profile).cost(True).prefill_s)
    assert recording.replay(parse_policy(recording.policy).batch(context)) == num_plans

    lines = [json.loads(line) for line in path.read_text().splitlines()[1:]]
    views = {line[1]: RequestView(line[1], line[2], line[3], 0, line[4]) for line in lines if line[0] == "+"}
    config = EngineConfig(
        max_num_batched_tokens=64, max_num_seqs=8, block_size=32, num_gpu_blocks=17, async_scheduling=True
    )
    twin, rows, most_in_flight, num_preempted = Twin(policy, config), iter(steps), 0, 0
    in_flight: dict[int, int] = {}
    """The twin's step of each of vLLM's outputs, by its identity; an empty step has none."""
    for kind, value in events:
        if kind == "add":
            twin.add(views[value.request_id], value.max_tokens)
        elif kind == "update":
            if id(value) in in_flight:
                twin.scheduler.finish(in_flight.pop(id(value)))
        elif value.num_scheduled_tokens:
            row, before = next(rows), twin.totals.num_preemptions
            step = twin.scheduler.compose(row.schedule_start_s)
            assert step is not None
            in_flight[id(value)] = step.index
            most_in_flight = max(most_in_flight, len(in_flight))
            num_preempted += row.num_preempted
            assert (
                step.num_prefill_tokens + step.num_decode_seqs, step.qos_slots, step.k_exec, step.num_running,
                twin.totals.num_preemptions - before,
            ) == (row.shape.num_tokens, row.qos_slots, row.k_exec, row.num_running, row.num_preempted)  # fmt: skip
    assert next(rows, None) is None and not twin.scheduler.running
    assert most_in_flight == 2 and num_preempted > 0


def test_tokens_do_not_depend_on_who_schedules(llm: Any) -> None:
    """One budget for all: what is answered is what an idle engine answers to each alone."""
    host(llm, "tiers")
    answers: list[dict[str, list[int]]] = []
    for together in (True, False):
        found: dict[str, list[int]] = {}
        for i in range(6):
            add(llm, f"r{i}", 4, prompt_tokens=10 + 20 * i, output_tokens=12, reuse=False)
            if not together:
                found |= {output.request_id: list(output.outputs[0].token_ids) for output in finish(llm)}
        found |= {output.request_id: list(output.outputs[0].token_ids) for output in finish(llm)}
        answers.append(found)
    assert answers[0] == answers[1] and len(answers[0]) == 6


IDS = list(range(2, 66))
"""Tokens whose logits are looked at."""

TOLERANCE = 1e-4
"""Of a logit, in float32: another batch adds up in another order."""


def logits(llm: Any, requests: list[tuple[int, int]], together: bool) -> np.ndarray:
    """Return [request, IDS] raw logits of each request's one output token; requests are (prompt tokens, k)."""
    from vllm import SamplingParams

    found: dict[str, list[float]] = {}
    for i, (prompt_tokens, k) in enumerate(requests):
        params = SamplingParams(
            max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False, logprob_token_ids=IDS,
            extra_args={"simmoe_k": k}, skip_reading_prefix_cache=True,
        )  # fmt: skip
        tokens = [2 + (7 * i + j) % 500 for j in range(prompt_tokens)]
        llm.llm_engine.add_request(f"l{i:02d}", {"prompt_token_ids": tokens}, params)
        if not together or i == len(requests) - 1:
            for output in finish(llm):
                found[output.request_id] = [output.outputs[0].logprobs[0][token].logprob for token in IDS]
    return np.array([found[name] for name in sorted(found)])


def test_each_of_two_steps_in_flight_runs_at_its_own_budget(llm: Any) -> None:
    """By logits: a prompt fills a step, the next one has another budget and is composed before its tokens are in."""
    scheduler = host(llm, "fifo")
    requests = [(64, (1, 8)[i % 2]) for i in range(8)]
    with told(scheduler) as events:
        found = logits(llm, requests, together=True)
    steps = scheduler.drain_steps()
    assert [(step.num_prefill_tokens, step.k_exec) for step in steps] == requests
    kinds = [kind for kind, value in events if kind != "add" and value.num_scheduled_tokens]
    assert kinds == ["schedule", *["schedule", "update"] * 7, "update"], "the next is composed before one is taken in"
    alone = logits(llm, requests, together=False)
    others = logits(llm, [(64, 9 - k) for _, k in requests], together=False)
    assert np.abs(found - alone).max() < TOLERANCE
    assert np.abs(found - others).max(axis=1).min() > 100 * TOLERANCE, "the other budget would be seen"


def test_a_step_of_several_budgets_runs_at_the_largest_with_another_in_flight(llm: Any) -> None:
    """By logits: two prompts a step, budgets 1 and 8, then 1 and 3."""
    scheduler = host(llm, "fifo")
    requests = [(32, k) for k in (1, 8, 1, 3) * 3]
    found = logits(llm, requests, together=True)
    assert [step.k_exec for step in scheduler.drain_steps()] == [8, 3] * 3
    alone = logits(llm, [(32, k) for k in (8, 8, 3, 3) * 3], together=False)
    assert np.abs(found - alone).max() < TOLERANCE


def test_an_abort_with_two_steps_in_flight_leaves_nothing(llm: Any) -> None:
    """In the middle of a prompt, while it decodes, and while it waits."""
    scheduler = host(llm, "tiers")
    for i in range(10):
        add(llm, f"r{i}", 1 + i % 8, prompt_tokens=140, output_tokens=30)
    done: set[str] = set()
    for victim in ("r0", "r9", "r1", "r8"):
        for _ in range(3):
            done |= {output.request_id for output in llm.llm_engine.step() if output.finished}
        llm.llm_engine.abort_request([victim])
    done |= {output.request_id for output in finish(llm)}
    assert done == {f"r{i}" for i in range(2, 8)}
    assert not scheduler.requests and not scheduler.request_ks and not scheduler.running and not len(scheduler.waiting)
    assert scheduler.kv_cache_manager.block_pool.get_num_free_blocks() == 16


def test_a_policy_that_fails_loses_no_token_in_flight(llm: Any, tmp_path: Path) -> None:
    folder = Path(llm.llm_engine.vllm_config.model_config.model)
    scheduler = host(llm, f"{folder}/faulty.py:Faulty", evidence=str(tmp_path))
    add(llm, "before", 3, output_tokens=30)
    for _ in range(3):
        llm.llm_engine.step()
    add(llm, "bad", 7)
    with pytest.raises(PolicyError, match="seven is too many"):
        finish(llm)
    llm.llm_engine.abort_request(["bad"])
    add(llm, "after", 2)
    tokens = {output.request_id: len(output.outputs[0].token_ids) for output in finish(llm)}
    assert tokens == {"before": 30, "after": 8}
    assert not scheduler.requests
