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
from typing import Any, TypeVar

_ROOT = Path(__file__).parents[2]

_T = TypeVar("_T")

_CHANGE = re.compile(r"^(\S+ \S+) simmoe: replica (\d+) is (down|starting|unresponsive|up):", re.MULTILINE)

NOTICED_S = 1.0
"""The death of a replica is noticed within this."""

IN_TIME_S = 300.0
"""What happens at all has happened by then, on a machine however slow and busy; what has not hangs."""

START_S = 900.0
"""An engine's start may take minutes there."""


def wait_for(holds: Callable[[], Any], what: str, seconds: float = IN_TIME_S) -> Any:
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
        self, method: str, path: str, body: dict[str, Any] | bytes | None = None, timeout_s: float = IN_TIME_S
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
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=IN_TIME_S)
        connection.request("POST", "/v1/completions", json.dumps(completion(stream=True, **fields)), self.headers)
        self.streams.append(Stream(connection.getresponse(), connection))
        return self.streams[-1]

    def stream_at(self, rank: int, **fields: Any) -> Stream:
        """Open a stream at a replica, past others that are asked first, or while it is slow to answer."""

        def opened() -> Stream | None:
            stream = self.stream(**fields)
            assert stream.event()
            if stream.rank == rank:
                return stream
            stream.hang_up()
            return None

        stream: Stream = wait_for(opened, f"replica {rank} takes a stream")
        return stream

    def metric(self, name: str, **labels: str) -> float:
        """Return a sample of /metrics, 0 if absent."""
        text = ",".join(f'{key}="{value}"' for key, value in labels.items())
        sample = re.escape(f"{name}{{{text}}}" if labels else name)
        found = re.search(rf"^{sample} (\S+)$", self.ask("GET", "/metrics")[1], re.MULTILINE)
        return float(found.group(1)) if found else 0.0

    def states(self) -> dict[str, str]:
        """Return each replica's state."""
        return dict(self.ask("GET", "/health")[1]["replicas"])

    def undisturbed(self, call: Callable[[], _T]) -> _T:
        """Return what a call gives while every replica is up, from its beginning to its end.

        One that the machine keeps from answering for long is passed over until it does, as it should be: where requests
        go then is no news. The call is made again if that happened meanwhile.
        """
        while True:
            num_changes = len(self._changes())
            wait_for(lambda: set(self.states().values()) == {"up"}, "all are up")
            value = call()
            if len(self._changes()) == num_changes:
                return value

    def kill(self, rank: int, kill: Callable[[], None]) -> float:
        """Kill a replica that is up, or what it lives by; return after how many seconds the router noticed, by its log.

        What the machine takes does not count. Neither when this process gets to look, which shares it with all others
        and may find the replica back again, nor for how long the router was kept from running meanwhile.
        """
        wait_for(lambda: self.states()[str(rank)] == "up", f"replica {rank} is up")
        withheld_before_s, since_s = withheld_s(self.process.pid), time.time()
        kill()
        killed_s = time.time()
        noticed_s = wait_for(lambda: self._losses_s(rank, since_s), f"replica {rank} is lost, says the log")[0]
        lasted_s, kept_s = noticed_s - killed_s, withheld_s(self.process.pid) - withheld_before_s
        print(f"replica {rank}: noticed after {lasted_s:.3f} s, of which {kept_s:.3f} s at most without a processor")
        return float(lasted_s - kept_s)

    def _changes(self) -> list[tuple[float, int, str]]:
        """Return every change of a replica's state that the router has told: when (``time.time()``), rank, state."""
        found = _CHANGE.findall(self.log.read_text())
        return [(datetime.strptime(at, "%Y-%m-%d %H:%M:%S,%f").timestamp(), int(rank), to) for at, rank, to in found]

    def _losses_s(self, rank: int, since_s: float) -> list[float]:
        """Return the times, to a millisecond, at which a replica stopped taking requests; ``since_s`` if it had."""
        lost = ("down", "unresponsive")
        before = [state for at_s, who, state in self._changes() if who == rank and at_s < since_s - 1e-3]
        if before[-1] in lost:
            return [since_s]
        return [
            at_s for at_s, who, state in self._changes() if who == rank and state in lost and at_s >= since_s - 1e-3
        ]

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
        return self.process.wait(IN_TIME_S)


def withheld_s(pid: int) -> float:
    """Return for how long the machine has kept a process from running that could, at most; 0 where it does not tell.

    It waited for a processor that others had (proc_pid_schedstat), or for one that the machine itself was without: the
    time stolen from a virtual one (proc_stat) may have been this process's.
    """
    waited_s = stolen_s = 0.0
    with contextlib.suppress(OSError):
        waited_s = int(Path(f"/proc/{pid}/schedstat").read_text().split()[1]) / 1e9
    with contextlib.suppress(OSError):
        stolen_s = int(Path("/proc/stat").read_text().split()[8]) / os.sysconf("SC_CLK_TCK")
    return waited_s + stolen_s


def completion(**fields: Any) -> dict[str, Any]:
    """Return a completion request of token ids whose length is forced."""
    return {"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4, "ignore_eos": True, "temperature": 0.0, **fields}


def children(pid: int) -> list[int]:
    """Return the child processes of a process."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):  # a thread that has ended since
            found += map(int, (task / "children").read_text().split())
    return found


@contextlib.contextmanager
def deployed(log: Path, arguments: Sequence[str], start_s: float = IN_TIME_S, **variables: str) -> Iterator[Deployment]:
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
                process.wait(IN_TIME_S)
            except subprocess.TimeoutExpired:
                process.kill()
        stdout.close()
        process.wait()
