"""``simmoe serve`` with two real vLLM servers on the CPU: one deployment, from start through its faults to its drain.

Engines take long to start, so one test goes through it all; ``test_serve_stub`` has every case by itself.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from simmoe.cli import run as cli
from simmoe.live.engine.steps import StepRecord
from simmoe.profiles.weights import WEIGHTS
from tests.support.deployment import (
    IN_TIME_S,
    NOTICED_S,
    START_S,
    Deployment,
    Stream,
    children,
    completion,
    deployed,
    wait_for,
)

pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: pip install 'simmoe[live-cpu]'"),
]

LONG = 2000
"""Output tokens of a stream that outlives what is done beside it, and is read to its end."""

USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}

POLICY = '''
from simmoe.policies.lanes import Lanes


class Picky(Lanes):
    """Lanes that fail on a budget of 5; where others go follows from their budgets, whatever the router last heard."""

    def __init__(self, context):
        super().__init__(context, adaptive=False, bypass=False)

    def route(self, request, ranks, now_s, /):
        if request.k_qos == 5:
            raise LookupError("five")
        return super().route(request, ranks, now_s)
'''


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    from tests.support.tiny_model import LONG_CONTEXT, VLLM_ARGUMENTS, write_tiny_model

    policy = tmp_path / "picky.py"
    policy.write_text(POLICY)
    model = write_tiny_model(tmp_path / "model")
    arguments = ["simmoe", "serve", "--model", str(model), "--replicas", "2", "--policy", f"tiers+{policy}:Picky"]
    arguments += ["--port", "0", "--log-dir", str(tmp_path), "--record-steps"]
    arguments += ["--record-decisions", str(tmp_path / "decisions"), "--", *VLLM_ARGUMENTS, *LONG_CONTEXT]
    with deployed(tmp_path / "serve.log", arguments, START_S, VLLM_API_KEY="secret") as running:
        running.headers = {"Authorization": "Bearer secret"}
        yield running


def test_a_deployment_from_start_to_drain(deployment: Deployment, tmp_path: Path) -> None:
    check_answers(deployment)
    check_device_clock(deployment)
    check_live_run(deployment, tmp_path)
    check_client_that_leaves(deployment)
    check_policy_that_raises(deployment)
    check_killed_server(deployment)
    check_killed_engine(deployment)
    check_drain(deployment)
    check_recordings(tmp_path / "decisions", f"tiers+{tmp_path}/picky.py:Picky")


def check_answers(deployment: Deployment) -> None:
    low, high = (
        deployment.undisturbed(partial(deployment.complete, model=f"tiny:k={k}", max_tokens=8)) for k in (1, 8)
    )
    assert (low[0], high[0]) == (200, 200)
    assert low[2]["x-simmoe-rank"] == "0"
    assert high[2]["x-simmoe-rank"] == "1"
    # the same prompt under another budget is another computation; under the same one it is the same on any rank
    assert low[1]["choices"][0]["text"] != high[1]["choices"][0]["text"]
    by_argument = deployment.complete(max_tokens=8, vllm_xargs={"simmoe_k": 1})
    assert by_argument[1]["choices"][0]["text"] == low[1]["choices"][0]["text"]
    unnamed = deployment.complete(max_tokens=8)
    assert unnamed[1]["choices"][0]["text"] == high[1]["choices"][0]["text"]
    status, answer, _ = deployment.complete(model="tiny:k=9")
    assert (status, answer["error"]["message"]) == (400, "simmoe_k is 9; it must be an integer from 1 to 8")
    *tokens, usage, done = deployment.stream(max_tokens=8, **USAGE).rest()
    assert "".join(token["choices"][0]["text"] for token in tokens) == high[1]["choices"][0]["text"]
    assert (usage["usage"]["completion_tokens"], done) == (8, "[DONE]")
    chat = {"model": "tiny:k=2", "messages": [{"role": "user", "content": "w5 w6"}], "max_tokens": 3}
    status, answer, _ = deployment.ask("POST", "/v1/chat/completions", {**chat, "ignore_eos": True})
    assert (status, answer["usage"]["completion_tokens"]) == (200, 3)
    assert deployment.ask("GET", "/v1/models/tiny:k=2")[0] == 200
    assert "vllm:num_requests_running" in deployment.ask("GET", "/replicas/1/metrics")[1]
    deployment.headers, kept = {}, deployment.headers
    assert deployment.complete()[0] == 401
    deployment.headers = kept


def check_device_clock(deployment: Deployment) -> None:
    """What the engines recorded of the answers so far has the device's own times of each step, between the host's."""
    ranks = deployment.ask("POST", "/simmoe/steps")[1]["ranks"]
    for facts in ranks.values():
        steps = [StepRecord(*row) for row in facts["steps"]]
        assert facts["device_clock"] and steps
        # it was warmed up before it was asked anything: the longest prompt, the largest batch
        assert max(step.num_prefill_tokens for step in steps) == facts["max_num_batched_tokens"]
        assert max(step.num_decode_seqs for step in steps) > 16
        for step in steps:
            assert step.device_start_s is not None and step.device_end_s is not None
            assert step.schedule_start_s <= step.device_start_s <= step.device_end_s <= step.update_end_s
    assert not any(facts["steps"] for facts in deployment.ask("POST", "/simmoe/steps")[1]["ranks"].values())


def check_live_run(deployment: Deployment, folder: Path) -> None:
    """A workload over HTTP gives the same record as the simulator's, steps included."""
    from simmoe.cli import run
    from simmoe.records import read_record

    trace = folder / "trace.csv"
    rows = [f"{i * 0.05:.2f},{20 + i},{3 + i % 5}" for i in range(20)]
    trace.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]) + "\n")
    out = folder / "record"
    url = f"http://127.0.0.1:{deployment.port}/v1"
    arguments = ["live", "run", "--url", url, "--api-key", "secret", "--trace", str(trace), "--k-max", "8"]

    def drive() -> int:
        shutil.rmtree(out, ignore_errors=True)
        return run([*arguments, "--mix", "2:0.5,7:0.5", "--out", str(out)])

    assert deployment.undisturbed(drive) in (0, 8)  # 8: sent too late, and said so
    record = read_record(out)
    assert record.counts()["finished"] == 20
    assert record.steps is not None
    prompt_tokens, output_tokens = record.requests["prompt_tokens"], record.requests["output_tokens"]
    assert record.steps["num_prefill_tokens"].sum() == prompt_tokens.sum()
    assert record.steps["num_decode_tokens"].sum() == (output_tokens - 1).sum()
    assert set(record.requests["dp_rank"]) == {0, 1}
    # what a run on engines of one's own records of them, the endpoint tells of its own
    manifest = record.manifest
    assert manifest["policy"]["given"].startswith("tiers+") and manifest["policy"]["given"].endswith("picky.py:Picky")
    assert manifest["profile"]["sha256"] and "--scheduler-cls" in manifest["flags"]
    assert manifest["target"] == {"url": url, "served_model": "", "model": "model", "weights": WEIGHTS}
    assert {"simmoe", "torch"} <= set(manifest["versions"])
    assert all(cost["num_plans"] > 0 and cost["policy_s"] > 0 for cost in manifest["policy_cost"].values())
    assert manifest["config"]["engine"]["num_gpu_blocks"] > 0 and manifest["config"]["num_ranks"] == 2


def check_whole(events: list[Any], output_tokens: int) -> None:
    """A stream that was not disturbed: vLLM may put several tokens into one event, so usage tells how many came."""
    *_, usage, done = events
    assert done == "[DONE]"
    assert usage["usage"]["completion_tokens"] == output_tokens


def running(deployment: Deployment, rank: int) -> float:
    return deployment.metric("simmoe_num_requests_running", rank=str(rank))


def k_running(deployment: Deployment, rank: int) -> Any:
    """Return the largest budget that an engine says it runs."""
    return deployment.ask("POST", "/simmoe/steps")[1]["ranks"][str(rank)]["k_running"]


def generated(deployment: Deployment) -> float:
    """Return how many tokens both engines have generated."""
    count = 0.0
    for rank in (0, 1):
        text = deployment.ask("GET", f"/replicas/{rank}/metrics")[1]
        found = re.search(r"^vllm:generation_tokens_total\{.*\} (\S+)$", text, re.MULTILINE)
        assert found
        count += float(found.group(1))
    return count


def check_client_that_leaves(deployment: Deployment) -> None:
    """Its request is aborted."""
    from tests.support.tiny_model import ENDLESS

    before, num_gone = generated(deployment), deployment.metric("simmoe_requests_total", outcome="gone")
    stream = deployment.stream(max_tokens=ENDLESS, vllm_xargs={"simmoe_k": 6})
    assert stream.event()
    wait_for(lambda: k_running(deployment, stream.rank) == 6, "the engine tells what it runs")
    stream.hang_up()
    wait_for(lambda: k_running(deployment, stream.rank) == 0, "the engine is idle")
    wait_for(lambda: running(deployment, stream.rank) == 0, "and the router knows")
    assert generated(deployment) - before < ENDLESS
    wait_for(
        lambda: deployment.metric("simmoe_requests_total", outcome="gone") == num_gone + 1, "the router has seen it go"
    )


def check_policy_that_raises(deployment: Deployment) -> None:
    status, answer, _ = deployment.complete(model="tiny:k=5")
    assert status == 500
    assert "policy Picky" in answer["error"]["message"]
    assert "LookupError: five" in answer["error"]["message"]
    assert (deployment.log.parent / "policy_call.json").exists()
    assert deployment.complete(model="tiny:k=4")[0] == 200


def check_killed_server(deployment: Deployment) -> None:
    """kill -9 of a replica's server with streams open on both replicas and requests that come meanwhile."""
    from tests.support.tiny_model import ENDLESS

    victim = deployment.stream_at(1, model="tiny:k=8", max_tokens=ENDLESS)
    survivor = deployment.stream_at(0, model="tiny:k=1", max_tokens=LONG, **USAGE)
    pid = deployment.replica_pid(1)
    engine_pids = children(pid)
    noticed_s = deployment.kill(1, lambda: os.kill(pid, signal.SIGKILL))
    results = during_the_outage(deployment)
    assert noticed_s <= NOTICED_S
    check_broken(victim)
    check_whole(survivor.rest(), LONG)
    for events in results():
        check_whole(events, 3)
    wait_for(lambda: not any(Path(f"/proc/{child}").exists() for child in engine_pids), "its engine is gone too")
    wait_for(lambda: deployment.states() == {"0": "up", "1": "up"}, "it is back", START_S)
    deployment.stream_at(1, model="tiny:k=8", max_tokens=3).hang_up()


def check_killed_engine(deployment: Deployment) -> None:
    """kill -9 of the engine behind a replica's server, which lives on for a while and says so."""
    from tests.support.tiny_model import ENDLESS

    stream = deployment.stream(max_tokens=ENDLESS)
    assert stream.event()
    engine_pid = next(
        pid for pid in children(deployment.replica_pid(stream.rank))
        if "EngineCore" in Path(f"/proc/{pid}/comm").read_text()
        or b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes()
    )  # fmt: skip
    noticed_s = deployment.kill(stream.rank, lambda: os.kill(engine_pid, signal.SIGKILL))
    results = during_the_outage(deployment)
    assert noticed_s <= NOTICED_S
    check_broken(stream)
    for events in results():
        check_whole(events, 3)


def during_the_outage(deployment: Deployment) -> Any:
    """Send four requests at once; return a function that waits for all of their events."""
    results: list[list[Any]] = []

    def ask(k: int) -> None:
        stream = deployment.stream(model=f"tiny:k={k}", max_tokens=3, **USAGE)
        results.append(stream.rest())

    threads = [threading.Thread(target=ask, args=(k,), daemon=True) for k in (1, 8, 1, 8)]
    for thread in threads:
        thread.start()

    def wait() -> list[list[Any]]:
        for thread in threads:
            thread.join(IN_TIME_S)
        assert len(results) == len(threads), "every one was answered"
        return results

    return wait


def check_broken(stream: Stream) -> None:
    """A stream whose engine died ends with an error, and says that it ends."""
    *_, error, done = stream.rest()
    assert done == "[DONE]"
    assert error["error"]["message"]


def check_drain(deployment: Deployment) -> None:
    stream = deployment.stream(model="tiny:k=8", max_tokens=LONG, **USAGE)
    assert stream.event()
    deployment.process.send_signal(signal.SIGTERM)
    wait_for(lambda: deployment.ask("GET", "/health")[0] == 503, "it drains")
    status, answer, _ = deployment.ask("POST", "/v1/completions", completion())
    assert (status, "shutting down" in answer["error"]["message"]) == (503, True)
    check_whole(stream.rest(), LONG)
    assert deployment.process.wait(IN_TIME_S) == 0


def check_recordings(folder: Path, policy: str) -> None:
    """What the policies were asked, in engines that were killed too, is asked again: the answers are the same."""
    names = {path.name for path in folder.iterdir()}
    assert {"decisions-rank0.jsonl", "decisions-rank1.jsonl", "decisions-route.jsonl"} < names
    assert any(name.endswith(".1.jsonl") for name in names), "that of an engine that was killed"
    for name in names:
        assert cli(["policies", "check", policy, "--replay", str(folder / name)]) == 0
