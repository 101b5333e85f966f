"""What ``simmoe serve`` tells of itself, whoever asks and whatever happens meanwhile, over stub engines."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.deployment import IN_TIME_S, Deployment, deployed, wait_for

if find_spec("httptools") is None or find_spec("prometheus_client") is None:
    pytest.skip("the server is not installed: pip install 'simmoe[serve]'", allow_module_level=True)

from simmoe.live.server.router import OUTCOMES
from tests.live.test_live_run import stub

K_MAX = 8
"""Largest budget of the stubs."""


@pytest.fixture
def deployment(tmp_path: Path) -> Iterator[Deployment]:
    with deployed(tmp_path / "serve.log", ["tests.support.stub_serving"]) as running:
        yield running


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """One that is only asked."""
    with deployed(tmp_path_factory.mktemp("standing") / "serve.log", ["tests.support.stub_serving"]) as running:
        yield running


Sample = tuple[str, tuple[tuple[str, str], ...]]
"""A sample's name and labels."""


def scrape(deployment: Deployment) -> tuple[dict[Sample, float], dict[Sample, float]]:
    """Return the samples that never fall, counters' and histograms', and the others."""
    from prometheus_client.parser import text_string_to_metric_families

    status, text, headers = deployment.ask("GET", "/metrics")
    assert status == 200 and headers.get_content_type() == "text/plain"
    growing: dict[Sample, float] = {}
    others: dict[Sample, float] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            grows = family.type in ("counter", "histogram") and not sample.name.endswith("_created")
            (growing if grows else others)[sample.name, tuple(sorted(sample.labels.items()))] = sample.value
    return growing, others


def values(samples: dict[Sample, float], name: str, label: str) -> dict[str, float]:
    """Return a metric's samples by the value of its one label."""
    return {dict(labels)[label]: value for (found, labels), value in samples.items() if found == name}


def test_every_counter_is_there_from_the_start(deployment: Deployment) -> None:
    growing, others = scrape(deployment)
    ranks = {"0": 0.0, "1": 0.0}
    for name in ("simmoe_routed_total", "simmoe_failovers_total", "simmoe_replica_deaths_total"):
        assert values(growing, name, "rank") == ranks
    assert values(growing, "simmoe_requests_total", "outcome") == dict.fromkeys(OUTCOMES, 0.0)
    assert values(growing, "simmoe_requests_by_budget_total", "k") == {str(k): 0.0 for k in range(1, K_MAX + 1)}
    assert not any(growing.values())
    assert others["simmoe_inflight_requests", (("rank", "1"),)] == 0.0


BAD: list[Any] = [
    b"", b"{", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"prompt": "\\ud800", "vllm_xargs": {"simmoe_k": 0}}',
    *({"prompt": "x", "vllm_xargs": {"simmoe_k": k}} for k in (0, K_MAX + 1, -1, True, 2.0, "3", None, 10**30, [1])),
    *({"prompt": "x", "vllm_xargs": {"simmoe_k": k}} for k in ('1"}\n# evil', "\u0663", "1\\")),
    *({"prompt": "x", "model": f"tiny:k={k}"} for k in ("", "0", "9", "03", "\u0663", '1"} 5\nevil 1', "1\n", "-1")),
    {"prompt": "x", "vllm_xargs": []}, {"prompt": ["x"] * 65},
]  # fmt: skip


def test_no_request_adds_a_series_or_counts_twice(deployment: Deployment, tmp_path: Path) -> None:
    before, _ = scrape(deployment)
    for body in BAD:
        assert deployment.ask("POST", "/v1/completions", body)[0] == 400, body
    for k in range(1, K_MAX + 1):
        assert deployment.complete(model=f"tiny:k={k}")[0] == 200
    stream = deployment.stream(stub={"hold": str(tmp_path / "never"), "hold_at": 1})
    stream.event()
    stream.hang_up()
    wait_for(lambda: deployment.metric("simmoe_requests_total", outcome="gone"), "it is told that the client left")
    after, others = scrape(deployment)
    assert after.keys() == before.keys()
    ends = values(after, "simmoe_requests_total", "outcome")
    expected = {"bad request": len(BAD), "answered": K_MAX, "gone": 1}
    assert ends == {**dict.fromkeys(OUTCOMES, 0.0), **expected}
    budgets = {str(k): 1.0 for k in range(1, K_MAX)} | {str(K_MAX): 2.0}
    assert values(after, "simmoe_requests_by_budget_total", "k") == budgets
    assert set(values(others, "simmoe_inflight_requests", "rank").values()) == {0.0}


def test_counters_never_fall_while_a_replica_is_killed_and_comes_back(deployment: Deployment) -> None:
    stop = threading.Event()
    num_asked = 0
    fallen: list[Any] = []

    def ask() -> None:
        nonlocal num_asked
        while not stop.is_set():
            deployment.complete(max_tokens=2)
            num_asked += 1

    def watch() -> None:
        last: dict[Sample, float] = {}
        while not stop.is_set():
            now, _ = scrape(deployment)
            fallen.extend(
                (sample, value, now.get(sample)) for sample, value in last.items() if now.get(sample, -1.0) < value
            )
            last = now

    threads = [threading.Thread(target=target, daemon=True) for target in (ask, watch)]
    for thread in threads:
        thread.start()
    for count in (1, 2):
        pid = deployment.replica_pid(0)
        deployment.kill(0, partial(os.kill, pid, signal.SIGKILL))
        wait_for(lambda: deployment.states()["0"] == "up", "it is back")
        assert deployment.metric("simmoe_replica_deaths_total", rank="0") >= count
    stop.set()
    for thread in threads:
        thread.join(IN_TIME_S)
        assert not thread.is_alive()
    assert not fallen
    growing, others = scrape(deployment)
    assert sum(values(growing, "simmoe_requests_total", "outcome").values()) == num_asked > 0
    assert set(values(others, "simmoe_inflight_requests", "rank").values()) == {0.0}


def test_it_is_told_how_it_stands_during_a_drain(deployment: Deployment, tmp_path: Path) -> None:
    gate = tmp_path / "open"
    stream = deployment.stream(max_tokens=5, stub={"hold": str(gate), "hold_at": 1})
    stream.event()
    deployment.process.send_signal(signal.SIGTERM)
    wait_for(lambda: deployment.ask("GET", "/health")[0] == 503, "it drains")
    status, health, _ = deployment.ask("GET", "/health")
    assert (status, health["status"]) == (503, "draining")
    assert deployment.complete()[0] == 503
    growing, others = scrape(deployment)
    assert values(growing, "simmoe_requests_total", "outcome")["turned away"] == 1
    assert values(others, "simmoe_inflight_requests", "rank")[str(stream.rank)] == 1
    gate.touch()
    assert len(stream.rest()) == 5
    assert deployment.process.wait(IN_TIME_S) == 0


def raw(deployment: Deployment, head: bytes) -> bytes:
    """Return all that is answered to what is sent."""
    with contextlib.closing(socket.create_connection(("127.0.0.1", deployment.port), IN_TIME_S)) as connection:
        connection.sendall(head)
        return b"".join(iter(lambda: connection.recv(1 << 16), b""))


@pytest.mark.parametrize("target", ["/metrics", "/metrics?name[]=up", "/%6Detrics", "http://anybody:1/metrics"])
@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_scrape_may_be_asked_for_in_any_way_http_has(standing: Deployment, target: str, version: str) -> None:
    accept = "accept: application/openmetrics-text; version=1.0.0\r\naccept-encoding: gzip\r\nconnection: close"
    answer = raw(standing, f"GET {target} HTTP/{version}\r\nhost: x\r\n{accept}\r\n\r\n".encode())
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 OK\r\n") and b"content-type: text/plain; version=0.0.4" in head
    assert b"\nsimmoe_replica_up{" in body and body.endswith(b"\n")


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/metrics"), ("GET", "/metrics/"), ("GET", "//metrics"), ("GET", "/replicas/2/metrics"),
        ("GET", "/replicas/-1/metrics"), ("GET", "/replicas/metrics"), ("GET", "/replicas/0/x/metrics"),
        ("GET", "/replicas/00/metrics"), ("GET", "/replicas/%0d%0aevil:1/metrics"), ("GET", "/replicas/0"),
    ],
)  # fmt: skip
def test_what_is_nowhere_is_a_404_in_json(standing: Deployment, method: str, path: str) -> None:
    status, answer, headers = standing.ask(method, path)
    assert status == 404 and answer["error"]["code"] == 404
    assert "evil" not in headers


def test_a_model_is_found_by_its_name_in_a_path(standing: Deployment) -> None:
    for path in ("/v1/models/tiny:k=3", "/v1/models/tiny%3Ak%3D3"):
        status, answer, _ = standing.ask("GET", path)
        assert (status, answer["id"]) == (200, "tiny:k=3")


def test_a_key_is_asked_for_however_the_path_is_written(tmp_path: Path) -> None:
    with deployed(tmp_path / "serve.log", ["tests.support.stub_serving", "--api-key", "secret"]) as deployment:
        for path in ("/v1/models", "/%76%31/models", "/v1%2Fmodels", "/v1/completions"):
            assert deployment.ask("GET", path)[0] == 401
        assert deployment.ask("GET", "/metrics")[0] == 200


def test_a_dead_replica_s_own_metrics_are_a_503_that_says_why(tmp_path: Path) -> None:
    with contextlib.closing(socket.socket()) as taken, stub() as (_, url):
        taken.bind(("127.0.0.1", 0))  # and not listened on
        nobody = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with deployed(
            tmp_path / "log", ["simmoe", "serve", "--url", url, "--url", nobody, "--port", "0"]
        ) as deployment:
            assert deployment.ask("GET", "/replicas/0/metrics")[0] == 200
            status, answer, _ = deployment.ask("GET", "/replicas/1/metrics")
    assert status == 503
    assert answer["error"]["message"].startswith("replica 1 does not answer: ConnectionRefusedError: ")


RAISES = """
import sys

class Own(BaseException):
    pass

def deeper():
    return deeper()

class Raises:
    def route(self, request, ranks, now_s, /):
        match request.k_qos:
            case 1: raise KeyboardInterrupt
            case 2: raise Own("mine")
            case 3: sys.exit(0)
            case 4: deeper()
            case 5: raise GeneratorExit
            case 6: return len(ranks)
        return 0
"""


def test_no_route_policy_takes_the_server_along(tmp_path: Path) -> None:
    """Whatever it raises, even what would stop an event loop."""
    path = tmp_path / "mine.py"
    path.write_text(RAISES)
    told = {
        1: "mine.py:13: KeyboardInterrupt", 2: "mine.py:14: Own: mine", 3: "mine.py:15: SystemExit: 0",
        4: "RecursionError", 5: "mine.py:17: GeneratorExit", 6: "route returned 2; it must return one of",
    }  # fmt: skip
    with deployed(tmp_path / "serve.log", ["tests.support.stub_serving", "--policy", f"{path}:Raises"]) as deployment:
        for k, what in told.items():
            status, answer, _ = deployment.complete(model=f"tiny:k={k}")
            assert status == 500
            assert "the route policy failed: policy Raises: " in answer["error"]["message"]
            assert what in answer["error"]["message"]
            assert deployment.complete(model="tiny:k=7")[0] == 200
        assert deployment.metric("simmoe_policy_errors_total") == len(told)
        assert deployment.metric("simmoe_requests_total", outcome="policy error") == len(told)
        assert deployment.stop() == 0
