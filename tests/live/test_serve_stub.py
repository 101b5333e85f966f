"""The endpoint against stub engines: every failure on purpose. ``test_serve`` has the same things with vLLM itself."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from simmoe.cli import run as cli
from simmoe.live.server.route_decisions import Built, RouteRecording
from tests.support.deployment import IN_TIME_S, NOTICED_S, Deployment, Stream, completion, deployed, wait_for

pytestmark = [
    pytest.mark.skipif(
        find_spec("httptools") is None, reason="the server is not installed: pip install 'simmoe[serve]'"
    )
]


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    with deployed(tmp_path / "serve.log", ["tests.support.stub_serving"]) as running:
        yield running


def in_background(count: int, call: Any) -> tuple[list[threading.Thread], list[Any]]:
    """Make ``count`` calls of ``call(i)`` at once; their results gather in the list."""
    results: list[Any] = []
    threads = [threading.Thread(target=lambda i=i: results.append(call(i)), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    return threads, results


def joined(threads: list[threading.Thread]) -> None:
    """Wait for their ends, which come."""
    for thread in threads:
        thread.join(IN_TIME_S)
        assert not thread.is_alive(), "a request hangs"


def test_answers_are_passed_on_whole_and_streamed(deployment: Deployment) -> None:
    def routed() -> Counter[str]:
        return Counter({rank: int(deployment.metric("simmoe_routed_total", rank=rank)) for rank in ("0", "1")})

    def complete() -> tuple[Any, list[str]]:
        before = routed()
        answered = deployment.complete(max_tokens=5)
        return answered, list((routed() - before).elements())

    (status, answer, headers), went_to = deployment.undisturbed(complete)
    assert (status, answer["usage"]["completion_tokens"]) == (200, 5)
    assert [headers["x-simmoe-rank"]] == went_to
    num_answered = deployment.metric("simmoe_requests_total", outcome="answered")
    stream = deployment.stream(max_tokens=3, stub={"gap_s": 0.01})
    *tokens, done = stream.rest()
    assert [token["choices"][0]["text"] for token in tokens] == ["t0 ", "t1 ", "t2 "]
    assert done == "[DONE]"
    status, answer, _ = deployment.ask("POST", "/v1/chat/completions", completion(messages=[]))
    assert status == 200
    assert deployment.metric("simmoe_requests_total", outcome="answered") == num_answered + 2


def test_a_stream_keeps_its_bytes(deployment: Deployment) -> None:
    """Compared with what the engine sends: by Unix socket, directly."""
    body = json.dumps(completion(stream=True, max_tokens=40)).encode()
    request = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b"
    command = Path(f"/proc/{deployment.replica_pid(0)}/cmdline").read_bytes().split(b"\0")
    engine = socket.socket(socket.AF_UNIX)
    engine.connect(command[command.index(b"--uds") + 1].decode())
    router = socket.create_connection(("127.0.0.1", deployment.port))
    contents = []
    for connection in (engine, router):
        connection.sendall(request % (len(body), body))
        response = http.client.HTTPResponse(connection)
        response.begin()
        contents.append(response.read())
        response.close()
        connection.close()
    assert contents[0] == contents[1]
    assert contents[0].endswith(b"data: [DONE]\n\n")


@pytest.mark.parametrize(
    ("fields", "k", "model"),
    [
        ({}, None, "tiny"),
        ({"model": "tiny:k=3"}, 3, "tiny"),
        ({"vllm_xargs": {"simmoe_k": 8}}, 8, "tiny"),
        ({"model": "tiny:k=2", "vllm_xargs": {"simmoe_k": 2, "other": 1}}, 2, "tiny"),
        ({"model": "a:b"}, None, "a:b"),
    ],
)
def test_a_budget_reaches_the_engine(deployment: Deployment, fields: dict[str, Any], k: int | None, model: str) -> None:
    rank = deployment.complete(**fields)[2]["x-simmoe-rank"]
    command = Path(f"/proc/{deployment.replica_pid(int(rank))}/cmdline").read_bytes().split(b"\0")
    engine = socket.socket(socket.AF_UNIX)
    engine.connect(command[command.index(b"--uds") + 1].decode())
    engine.sendall(b"GET /stub/seen HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    response = http.client.HTTPResponse(engine)
    response.begin()
    (seen,) = json.loads(response.read())["seen"]
    response.close()
    engine.close()
    assert seen["body"]["model"] == model
    assert seen["body"].get("vllm_xargs", {}).get("simmoe_k") == k


def test_what_no_engine_would_take_is_a_400_that_says_why(deployment: Deployment) -> None:
    for fields, message in (
        ({"model": "tiny:k=9"}, "simmoe_k is 9; it must be an integer from 1 to 8"),
        ({"model": "tiny:k=0"}, "simmoe_k is 0; it must be an integer from 1 to 8"),
        ({"model": "tiny:k=lots"}, "simmoe_k is 'lots'; it must be an integer from 1 to 8"),
        ({"vllm_xargs": {"simmoe_k": 2.5}}, "simmoe_k is 2.5; it must be an integer from 1 to 8"),
        ({"vllm_xargs": {"simmoe_k": True}}, "simmoe_k is True; it must be an integer from 1 to 8"),
        ({"vllm_xargs": {"simmoe_k": None}}, "simmoe_k is None; it must be an integer from 1 to 8"),
        ({"model": "tiny:k=2", "vllm_xargs": {"simmoe_k": 3}}, "contradict each other"),
        ({"model": f"tiny:k={'9' * 5000}"}, "it must be an integer from 1 to 8"),
        ({"model": "tiny:k=2", "vllm_xargs": [1]}, "vllm_xargs is a list; it must be an object"),
        ({"model": "tiny:k=2", "use_beam_search": True}, "beam search runs at 8"),
        ({"simmoe_k": 3}, "simmoe_k is a field of vllm_xargs"),
        ({"n": 10**9}, "1000000000 sequences (prompts times n) are more than the 64 served at once"),
        ({"n": "65"}, "65 sequences"),
        ({"n": 65.0, "prompt": [[1], [2]]}, "130 sequences"),
        ({"prompt": [[1]] * 65}, "65 sequences"),
    ):
        status, answer, _ = deployment.complete(**fields)
        assert status == 400
        assert message in answer["error"]["message"]
    for body in (b"{", b"[]", b"\xff"):
        assert deployment.ask("POST", "/v1/completions", body)[0] == 400
    assert deployment.ask("GET", "/v1/completions")[0] == 405
    assert deployment.ask("GET", "/v1/nothing")[0] == 404
    assert deployment.metric("simmoe_routed_total", rank="0") == 0


def test_models_are_listed_with_their_aliases(deployment: Deployment) -> None:
    _, answer, _ = deployment.ask("GET", "/v1/models")
    assert [model["id"] for model in answer["data"]] == ["tiny", *(f"tiny:k={k}" for k in range(1, 9))]
    assert deployment.ask("GET", "/v1/models/tiny:k=4")[1]["id"] == "tiny:k=4"
    assert deployment.ask("GET", "/v1/models/tiny:k=9")[0] == 404
    assert deployment.ask("GET", "/v1/models/other")[0] == 404
    assert deployment.ask("GET", f"/v1/models/tiny:k={'9' * 5000}")[0] == 404
    for rank in ("2", "-1", "01", "9" * 5000):
        assert deployment.ask("GET", f"/replicas/{rank}/metrics")[0] == 404


def test_requests_on_one_connection_are_answered_in_their_order(deployment: Deployment) -> None:
    body = json.dumps(completion()).encode()
    first = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
    with socket.create_connection(("127.0.0.1", deployment.port)) as connection:
        connection.sendall(first + b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n" + b"nonsense\r\n\r\n")
        seen = b""
        while data := connection.recv(65536):
            seen += data
    assert re.findall(rb"HTTP/1\.1 (\d+)", seen) == [b"200", b"200", b"400"]
    assert seen.index(b"choices") < seen.index(b"replicas")


def test_only_loopback_is_listened_on(deployment: Deployment) -> None:
    listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    mine = [fields[1].split(":") for fields in listening if fields[3] == "0A"]
    addresses = {address for address, port in mine if int(port, 16) == deployment.port}
    assert addresses == {"0100007F"}


def test_keys_are_asked_for_as_vllm_asks(tmp_path: Path) -> None:
    arguments = ["tests.support.stub_serving", "--replicas", "1", "--api-key", "one", "--api-key", "two"]
    with deployed(tmp_path / "serve.log", arguments) as deployment:
        for headers, status in (
            ({}, 401),
            ({"Authorization": "Bearer three"}, 401),
            ({"Authorization": "Basic one"}, 401),
            ({"Authorization": "Bearer one"}, 200),
            ({"authorization": "bearer two"}, 200),
        ):
            deployment.headers = headers
            assert deployment.complete()[0] == status
            assert deployment.ask("GET", "/v1/models")[0] == status
        deployment.headers = {}
        assert deployment.complete()[1] == {"error": "Unauthorized"}
        assert deployment.ask("GET", "/health")[0] == 200
        assert deployment.ask("GET", "/metrics")[0] == 200


def test_too_many_requests_are_turned_away(tmp_path: Path) -> None:
    gate = tmp_path / "open"
    with deployed(tmp_path / "serve.log", ["tests.support.stub_serving", "--max-inflight", "3"]) as deployment:
        threads, results = in_background(3, lambda i: deployment.complete(stub={"hold": str(gate)})[0])
        wait_for(lambda: inflight(deployment) == 3, "three requests are in flight")
        status, answer, headers = deployment.complete()
        assert (status, headers["retry-after"]) == (429, "1")
        assert "3 requests are in flight of 3" in answer["error"]["message"]
        gate.touch()
        joined(threads)
        assert results == [200, 200, 200]
        assert deployment.complete()[0] == 200


def inflight(deployment: Deployment) -> float:
    return sum(deployment.metric("simmoe_inflight_requests", rank=str(rank)) for rank in range(2))


def test_a_client_that_leaves_frees_its_engine(deployment: Deployment) -> None:
    stream = deployment.stream(max_tokens=100_000, stub={"gap_s": 0.01})
    assert stream.event()
    rank = str(stream.rank)
    wait_for(lambda: deployment.metric("simmoe_num_requests_running", rank=rank) == 1, "the engine runs it")
    stream.hang_up()
    wait_for(lambda: deployment.metric("simmoe_num_requests_running", rank=rank) == 0, "the engine has aborted it")
    assert inflight(deployment) == 0
    assert deployment.metric("simmoe_requests_total", outcome="gone") == 1


def test_a_client_that_does_not_read_holds_its_engine_back(deployment: Deployment) -> None:
    """An engine that streams without pause ahead of a client that reads nothing must not fill the router's memory."""
    stream = deployment.stream(max_tokens=400_000)
    pid = deployment.process.pid

    def resident_bytes() -> int:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    before = resident_bytes()
    for _ in range(50):
        assert deployment.complete()[0] == 200
    assert resident_bytes() - before < 20 << 20
    stream.hang_up()


def test_a_killed_replica(deployment: Deployment, tmp_path: Path) -> None:
    """Streams of it end with an error, what had not started goes elsewhere, others never notice, it comes back."""
    gate = tmp_path / "open"
    streams: list[Stream] = []
    while len(streams) < 4 or {stream.rank for stream in streams} != {0, 1}:
        streams.append(deployment.stream(max_tokens=200, stub={"hold": str(gate), "hold_at": 3}))
        assert streams[-1].event()
    num_broken = [stream.rank for stream in streams].count(0)
    threads: list[threading.Thread] = []
    answers: list[list[Any]] = []
    while len(threads) < 6 or deployment.metric("simmoe_inflight_requests", rank="0") == num_broken:
        thread, answer = in_background(1, lambda i: deployment.stream(max_tokens=3, stub={"hold": str(gate)}).rest())
        threads.extend(thread)
        answers.append(answer)
        wait_for(lambda: inflight(deployment) == len(streams) + len(threads), "all are at an engine")
    num_not_started = deployment.metric("simmoe_inflight_requests", rank="0") - num_broken
    pid = deployment.replica_pid(0)
    assert deployment.kill(0, lambda: os.kill(pid, signal.SIGKILL)) <= NOTICED_S
    gate.touch()
    joined(threads)
    for (events,) in answers:
        assert [event["choices"][0]["text"] for event in events[:-1]] == ["t0 ", "t1 ", "t2 "]
    assert deployment.metric("simmoe_failovers_total", rank="0") >= num_not_started > 0
    for stream in streams:
        events = stream.rest()
        assert events[-1] == "[DONE]"
        if stream.rank == 0:
            assert "replica 0 was lost while it answered" in events[-2]["error"]["message"]
        else:
            assert len(events) == 200
    wait_for(lambda: deployment.states() == {"0": "up", "1": "up"}, "it is back")
    assert deployment.replica_pid(0) != pid
    assert deployment.metric("simmoe_requests_total", outcome="broken") == num_broken
    assert inflight(deployment) == 0


def test_a_replica_killed_after_its_last_event_has_answered(deployment: Deployment, tmp_path: Path) -> None:
    """The client has everything: no error follows, nor a second end."""
    stream = deployment.stream(max_tokens=3, stub={"hold": str(tmp_path / "never"), "hold_at": 3})
    assert [stream.event() for _ in range(4)][-1] == "[DONE]"
    pid = deployment.replica_pid(stream.rank)
    assert deployment.kill(stream.rank, lambda: os.kill(pid, signal.SIGKILL)) <= NOTICED_S
    assert stream.rest() == []
    assert deployment.metric("simmoe_requests_total", outcome="answered") == 1
    assert deployment.metric("simmoe_requests_total", outcome="broken") == 0


def test_a_replica_that_dies_on_every_token_is_given_up(deployment: Deployment) -> None:
    """A request that kills whoever takes it before the first token is tried a few times, then refused."""
    stream = deployment.stream(stub={"die_after": 0})
    assert stream.status == 503
    wait_for(lambda: deployment.states() == {"0": "up", "1": "up"}, "both are back")
    assert deployment.complete()[0] == 200


def test_nobody_hangs_vanishes_or_is_answered_twice(deployment: Deployment) -> None:
    """Sixteen clients ask without pause while replicas are killed in turn: every answer is one of three."""
    fates: dict[str, int] = {"whole": 0, "broken": 0, "refused": 0}
    lock, stop = threading.Lock(), threading.Event()
    mistakes: list[Any] = []

    def fate_of(stream: Stream) -> str:
        if stream.status != 200:
            return "refused" if stream.status == 503 else f"status {stream.status}"
        *events, done = stream.rest()
        tokens = [event["choices"][0]["text"] for event in events if "choices" in event]
        if done == "[DONE]" and tokens == [f"t{i} " for i in range(len(tokens))]:
            if len(tokens) == len(events) == 10:
                return "whole"
            if len(tokens) == len(events) - 1 and "error" in events[-1]:
                return "broken"
        return f"{events} {done}"

    def client() -> None:
        while not stop.is_set():
            try:
                stream = deployment.stream(max_tokens=10, stub={"gap_s": 0.003})
                fate = fate_of(stream)
            except Exception as error:
                fate = repr(error)
            with lock:
                if fate in fates:
                    fates[fate] += 1
                else:
                    mistakes.append(fate)

    clients = [threading.Thread(target=client, daemon=True) for _ in range(16)]
    for thread in clients:
        thread.start()
    for rank in (0, 1) * 3:
        wait_for(lambda: deployment.states() == {"0": "up", "1": "up"}, "both are up")
        pid = deployment.replica_pid(rank)
        assert deployment.kill(rank, partial(os.kill, pid, signal.SIGKILL)) <= NOTICED_S
    stop.set()
    joined(clients)
    assert not mistakes, mistakes[:3]
    assert fates["whole"] > 0
    assert fates["broken"] > 0
    counted = {
        name: deployment.metric("simmoe_requests_total", outcome=outcome)
        for name, outcome in (("whole", "answered"), ("broken", "broken"), ("refused", "no replica"))
    }
    assert counted == fates
    assert inflight(deployment) == 0


def test_an_engine_s_own_error_is_passed_on(deployment: Deployment) -> None:
    status, answer, _ = deployment.complete(stub={"error": 500})
    assert (status, answer["error"]["message"]) == (500, "as scripted")
    assert deployment.metric("simmoe_failovers_total", rank="0") == 0


def test_a_hung_replica_gets_no_new_requests(deployment: Deployment) -> None:
    pid = deployment.replica_pid(0)
    try:
        assert deployment.kill(0, lambda: os.kill(pid, signal.SIGSTOP)) <= NOTICED_S
        assert deployment.states()["0"] == "unresponsive"
        assert {deployment.complete()[2]["x-simmoe-rank"] for _ in range(5)} == {"1"}
    finally:
        with contextlib.suppress(ProcessLookupError):  # it was given up, and another one started
            os.kill(pid, signal.SIGCONT)
    wait_for(lambda: deployment.states()["0"] == "up", "it is back")


RAISES = '''
class Raises:
    """Fails on a budget of 5."""

    def route(self, request, ranks, now_s, /):
        return ranks[1 // (request.k_qos - 5)].dp_rank if request.k_qos == 5 else ranks[0].dp_rank
'''


def test_a_policy_that_raises_fails_that_request_by_name(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(RAISES)
    arguments = ["tests.support.stub_serving", "--policy", f"{path}:Raises"]
    with deployed(tmp_path / "serve.log", arguments) as deployment:
        assert deployment.complete()[0] == 200
        for count in (1, 2):
            status, answer, _ = deployment.complete(model="tiny:k=5")
            assert status == 500
            assert "policy Raises" in answer["error"]["message"]
            assert f"{path}:6: ZeroDivisionError" in answer["error"]["message"]
            assert deployment.metric("simmoe_policy_errors_total") == count
        assert deployment.complete()[0] == 200
        assert inflight(deployment) == 0
    assert deployment.log.read_text().count("policy Raises") == 2
    assert (tmp_path / "policy_call.json").exists()


def test_a_drain_finishes_what_is_open_and_refuses_the_rest(deployment: Deployment, tmp_path: Path) -> None:
    gate = tmp_path / "open"
    stream = deployment.stream(max_tokens=50, stub={"hold": str(gate), "hold_at": 1})
    assert stream.event()
    idle = socket.create_connection(("127.0.0.1", deployment.port))
    deployment.process.send_signal(signal.SIGTERM)
    assert idle.recv(1) == b""
    idle.close()
    status, answer, headers = deployment.complete()
    assert (status, headers["retry-after"]) == (503, "1")
    assert "shutting down" in answer["error"]["message"]
    assert deployment.ask("GET", "/health")[0] == 503
    pids = [deployment.replica_pid(rank) for rank in range(2)]
    gate.touch()
    assert len(stream.rest()) == 50
    assert deployment.process.wait(IN_TIME_S) == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_drain_ends_when_the_last_answer_is_taken(tmp_path: Path) -> None:
    """The router has long handed it to the kernel, which has no room for it while the client does not read."""
    size = 20_000_000
    with engines_elsewhere(tmp_path, "queue-aware") as (_, deployment):
        client = socket.create_connection(("127.0.0.1", deployment.port))
        body = json.dumps(completion(max_tokens=size)).encode()
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        response = http.client.HTTPResponse(client)
        response.begin()
        deployment.process.send_signal(signal.SIGTERM)
        wait_for(lambda: deployment.ask("GET", "/health")[0] == 503, "it drains")
        assert len(json.loads(response.read())["choices"][0]["text"]) == size
        response.close()
        client.close()
        assert deployment.process.wait(IN_TIME_S) == 0


def test_an_address_that_is_taken_is_refused_before_an_engine_is_started(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        # nobody answers at this URL: it would be waited for
        command = [sys.executable, "-m", "simmoe", "serve", "--url", "http://127.0.0.1:1", "--port", str(port)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=IN_TIME_S, cwd=tmp_path)
    assert f"cannot listen on 127.0.0.1:{port}: Address already in use" in done.stderr
    assert done.returncode == 5


def test_a_second_signal_cuts_off(deployment: Deployment) -> None:
    stream = deployment.stream(max_tokens=100_000, stub={"gap_s": 0.02})
    deployment.process.send_signal(signal.SIGTERM)
    wait_for(lambda: deployment.ask("GET", "/health")[0] == 503, "it drains")
    deployment.process.send_signal(signal.SIGTERM)
    assert deployment.process.wait(IN_TIME_S) == 1
    with contextlib.suppress(http.client.HTTPException, ConnectionError):
        assert "[DONE]" not in stream.rest()


def test_an_engine_that_does_not_start_stops_it_all(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.stub_serving", "--broken"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=IN_TIME_S, env={**os.environ, "TMPDIR": str(tmp_path)}
    )
    assert done.returncode == 8
    assert "did not start: its process exited with 1 (RuntimeError: no weights); see '" in done.stdout
    log = Path(done.stdout.rpartition("see '")[2].strip().removesuffix("'"))
    assert "RuntimeError: no weights" in log.read_text()


def test_one_of_several_hosts_may_be_down(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.stub_engine"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as engine:
        try:
            assert engine.stdout is not None
            port = engine.stdout.readline().strip()
            arguments = ["simmoe", "serve", "--port", "0", "--policy", "lanes", "--url", "http://127.0.0.1:1"]
            with deployed(tmp_path / "serve.log", [*arguments, "--url", f"http://127.0.0.1:{port}"]) as deployment:
                wait_for(lambda: deployment.states() == {"0": "down", "1": "up"}, "the other one is up")
                assert deployment.complete()[2]["x-simmoe-rank"] == "1"
            assert "replica 0 is down: nobody answers at http://127.0.0.1:1" in deployment.log.read_text()
        finally:
            engine.kill()


@contextlib.contextmanager
def engines_elsewhere(
    tmp_path: Path, policy: str, *flags: str
) -> Iterator[tuple[list[subprocess.Popen[str]], Deployment]]:
    """Yield two engines started by somebody and the endpoint over them."""
    command = [sys.executable, "-m", "tests.support.stub_engine", *flags]
    engines = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    try:
        arguments = ["simmoe", "serve", "--port", "0", "--policy", policy, "--k-max", "8"]
        for engine in engines:
            assert engine.stdout is not None
            arguments += ["--url", f"http://127.0.0.1:{engine.stdout.readline().strip()}/v1"]
        with deployed(tmp_path / "serve.log", arguments) as deployment:
            yield engines, deployment
    finally:
        for engine in engines:
            engine.kill()
            engine.wait()
            assert engine.stdout is not None
            engine.stdout.close()


def test_an_engine_that_comes_back_with_another_model_gets_no_requests(tmp_path: Path) -> None:
    with engines_elsewhere(tmp_path, "round-robin") as (engines, deployment):
        port = str(re.findall(r"http://127\.0\.0\.1:(\d+)", deployment.log.read_text())[0])
        engines[0].kill()
        wait_for(lambda: deployment.states()["0"] == "down", "it is lost")
        command = [sys.executable, "-m", "tests.support.stub_engine", "--port", port, "--k-max", "4"]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as other:
            try:
                wait_for(lambda: "its largest budget is 4, not 8" in deployment.log.read_text(), "it is looked at")
                assert {deployment.complete()[2]["x-simmoe-rank"] for _ in range(4)} == {"1"}
                assert deployment.metric("simmoe_replica_up", rank="0") == 0
            finally:
                other.kill()


def test_an_empty_key_is_none(tmp_path: Path) -> None:
    """The value of a variable that is not set is no password."""
    command = [sys.executable, "-m", "simmoe", "serve", "--url", "http://127.0.0.1:1", "--api-key", ""]
    done = subprocess.run(command, capture_output=True, text=True, timeout=IN_TIME_S, cwd=tmp_path)
    assert (done.returncode, "--api-key is empty" in done.stderr) == (2, True)


@pytest.mark.parametrize("flags", [(), ("--plain",)], ids=["simmoe's", "vLLM's"])
def test_engines_elsewhere_are_watched_too(tmp_path: Path, flags: tuple[str, ...]) -> None:
    # where a request goes follows from its budget, whatever the router last heard of the engines
    with engines_elsewhere(tmp_path, "lanes,adaptive=false,bypass=false", *flags) as (engines, deployment):
        for k, rank in ((1, "0"), (8, "1")):
            answer = deployment.undisturbed(partial(deployment.complete, model=f"tiny:k={k}"))
            assert answer[2]["x-simmoe-rank"] == rank

        def only_stream() -> Stream:
            for stream in deployment.streams:
                stream.hang_up()
            script = {"hold": str(tmp_path / "never"), "hold_at": 3}
            return deployment.stream(model="tiny:k=8", stub=script)

        stream = deployment.undisturbed(only_stream)
        wait_for(lambda: deployment.metric("simmoe_num_requests_running", rank="1") == 1, "its counts are read")
        assert deployment.kill(1, engines[1].kill) <= NOTICED_S
        *_, error, _ = stream.rest()
        assert "replica 1 was lost" in error["error"]["message"]
        assert deployment.complete(model="tiny:k=8")[2]["x-simmoe-rank"] == "0"
        wait_for(lambda: deployment.states()["1"] == "down", "it is given up")
        # one that is only silent is noticed as soon, before the kernel knows of any death
        assert deployment.kill(0, lambda: engines[0].send_signal(signal.SIGSTOP)) <= NOTICED_S
        engines[0].kill()
        wait_for(lambda: deployment.ask("GET", "/health")[0] == 503, "nobody is up")
        assert deployment.complete()[0] == 503
        assert deployment.stop() == 0


def test_what_the_policy_is_asked_is_recorded_over_a_replica_s_death(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And replayed, for the ranks it was built for each time; a second server in the folder keeps the first one's."""
    arguments = ["tests.support.stub_serving", "--policy", "lanes,window=0", "--record-decisions", str(tmp_path)]
    with deployed(tmp_path / "first.log", arguments) as first:
        for i in range(12):
            assert first.complete(vllm_xargs={"simmoe_k": 1 + i % 8})[0] == 200
        first.kill(0, partial(os.kill, first.replica_pid(0), signal.SIGKILL))
        for i in range(12):
            assert first.complete(vllm_xargs={"simmoe_k": 1 + i % 8})[0] == 200
        num_attempts = sum(int(first.metric("simmoe_routed_total", rank=str(rank))) for rank in range(2))
        assert first.stop() == 0
    with deployed(tmp_path / "second.log", arguments) as second:
        assert second.complete()[0] == 200
        assert second.stop() == 0
    path = tmp_path / "decisions-route.1.jsonl"
    built = [event.ranks for event in RouteRecording(path).events() if isinstance(event, Built)]
    assert [0, 1] in built and [1] in built
    for name, calls in ((path.name, num_attempts), ("decisions-route.jsonl", 1)):
        assert cli(["policies", "check", "lanes,window=0", "--replay", str(tmp_path / name)]) == 0
        assert f" answers {calls} calls as 'lanes,window=0' did" in capsys.readouterr().out
