"""A served deployment as a test sees it: from outside, over HTTP, by its processes."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).parents[2]


NOTICED_S = 1.0
"""The death of a replica is noticed within this."""


def wait_for(holds: Callable[[], Any], what: str, seconds: float = 20.0) -> Any:
    """Return the first true value of ``holds()``; fail after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not (value := holds()):
        assert time.monotonic() < deadline, f"not within {seconds:g} s: {what}"
        time.sleep(0.01)
    return value


class Stream:
    """A streamed completion being read."""

    def __init__(self, response: http.client.HTTPResponse, connection: http.client.HTTPConnection) -> None:
        self._response, self._connection = response, connection
        self.status = response.status
        self.rank = int(response.headers.get("x-simmoe-rank", "-1"))

    def event(self) -> dict[str, Any] | str | None:
        """Return the next event, ``"[DONE]"``, or None at the end."""
        for line in iter(self._response.readline, b""):
            text = line.decode().strip()
            if text.startswith("data: "):
                payload = text.removeprefix("data: ")
                return payload if payload == "[DONE]" else json.loads(payload)
        return None

    def rest(self) -> list[Any]:
        """Return every event that is still to come."""
        return list(iter(self.event, None))

    def hang_up(self) -> None:
        """Leave, the answer unread."""
        self._response.close()
        self._connection.close()


class Deployment:
    """A running server."""

    def __init__(self, process: subprocess.Popen[str], port: int, log: Path) -> None:
        self.process, self.port, self.log = process, port, log
        self.headers: dict[str, str] = {}
        self.streams: list[Stream] = []

    def ask(
        self, method: str, path: str, body: dict[str, Any] | bytes | None = None, timeout_s: float = 60.0
    ) -> tuple[int, Any, http.client.HTTPMessage]:
        """Return status, answer (parsed where it is JSON) and headers."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout_s)
        with contextlib.closing(connection):
            data = json.dumps(body) if isinstance(body, dict) else body
            connection.request(method, path, data, self.headers)
            response = connection.getresponse()
            content = response.read()
            is_json = response.headers.get_content_type() == "application/json"
            return response.status, json.loads(content) if is_json else content.decode(), response.headers

    def complete(self, **fields: Any) -> tuple[int, Any, http.client.HTTPMessage]:
        """Ask for a completion, whole."""
        return self.ask("POST", "/v1/completions", completion(**fields))

    def stream(self, **fields: Any) -> Stream:
        """Ask for a completion as a stream; returns once its first event is on its way."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=120.0)
        connection.request("POST", "/v1/completions", json.dumps(completion(stream=True, **fields)), self.headers)
        self.streams.append(Stream(connection.getresponse(), connection))
        return self.streams[-1]

    def metric(self, name: str, **labels: str) -> float:
        """Return a sample of /metrics, 0 if absent."""
        text = ",".join(f'{key}="{value}"' for key, value in labels.items())
        sample = re.escape(f"{name}{{{text}}}" if labels else name)
        found = re.search(rf"^{sample} (\S+)$", self.ask("GET", "/metrics")[1], re.MULTILINE)
        return float(found.group(1)) if found else 0.0

    def states(self) -> dict[str, str]:
        """Return each replica's state."""
        return dict(self.ask("GET", "/health")[1]["replicas"])

    def kill(self, rank: int, kill: Callable[[], None]) -> float:
        """Kill a replica that is up, or what it lives by; return after how many seconds the router noticed, by its log.

        When this process gets to look does not count: it shares the machine, and the replica may be back by then.
        """
        wait_for(lambda: self.states()[str(rank)] == "up", f"replica {rank} is up")
        killed_s = time.time()
        kill()
        noticed_s = wait_for(lambda: self._losses_s(rank, killed_s), f"replica {rank} is lost, says the log")
        return float(noticed_s[0] - killed_s)

    def _losses_s(self, rank: int, since_s: float) -> list[float]:
        """Return the times (``time.time()``, to a millisecond) at which a replica stopped taking requests."""
        line = re.compile(rf"^(\S+ \S+) simmoe: replica {rank} is (?:down|unresponsive)", re.MULTILINE)
        stamps = (datetime.strptime(text, "%Y-%m-%d %H:%M:%S,%f") for text in line.findall(self.log.read_text()))
        return [stamp.timestamp() for stamp in stamps if stamp.timestamp() >= since_s - 1e-3]

    def replica_pid(self, rank: int) -> int:
        """Return the process of a replica's server."""
        for pid in children(self.process.pid):
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
            if f"replica{rank}.sock".encode() in command:
                return pid
        raise AssertionError(f"replica {rank} has no process")

    def stop(self) -> int:
        """Ask it to stop; return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)


def completion(**fields: Any) -> dict[str, Any]:
    """Return a completion request of token ids whose length is forced."""
    return {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True, "temperature": 0.0, **fields}


def children(pid: int) -> list[int]:
    """Return the child processes of a process."""
    tasks = Path(f"/proc/{pid}/task")
    return [int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()]


@contextlib.contextmanager
def deployed(log: Path, arguments: Sequence[str], start_s: float = 60.0, **variables: str) -> Iterator[Deployment]:
    """Run ``python -m ARGUMENTS`` in the log's folder until it says where it serves; kill what is left at the end."""
    with log.open("w") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", *arguments], stdout=subprocess.PIPE, stderr=output, text=True,
            cwd=log.parent, env={**os.environ, "PYTHONPATH": str(_ROOT), **variables},
        )  # fmt: skip
    stdout = process.stdout
    assert stdout is not None
    try:
        os.set_blocking(stdout.fileno(), False)
        line = wait_for(lambda: stdout.readline() or process.poll() is not None, "it serves", start_s)
        assert isinstance(line, str), f"it ended with {process.returncode}: {log.read_text()}"
        found = re.search(r"at http://127\.0\.0\.1:(\d+)/v1", line)
        assert found, line
        running = Deployment(process, int(found.group(1)), log)
        yield running
        for stream in running.streams:
            stream.hang_up()
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
        stdout.close()
        process.wait()
