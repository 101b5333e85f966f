"""Downloads against a server on the loopback: whole or absent, resumed or started over."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from simmoe.cli import run
from simmoe.errors import OutputError, TraceError
from simmoe.traces.catalog import TRACES, NamedTrace, TraceFile
from simmoe.traces.fetch import fetch

CONTENT = b"TIMESTAMP,ContextTokens,GeneratedTokens\n" + b"2023-11-16 18:15:46.6805900,374,44\n" * 20_000


@dataclass
class Server:
    """What the server does, and what it was asked."""

    content: bytes = CONTENT
    cut_after: int | None = None
    """Close the connection after this many bytes of a body."""
    ranges: bool = True
    status: int = 200
    asked: list[str | None] = field(default_factory=list)
    """The Range header of each request."""
    url: str = ""


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            wanted = self.headers.get("Range")
            state.asked.append(wanted)
            if state.status != 200:
                self.send_error(state.status)
                return
            start = int(wanted.removeprefix("bytes=").removesuffix("-")) if wanted and state.ranges else 0
            if start and start >= len(state.content):
                self.send_error(416)
                return
            body = state.content[start:]
            self.send_response(206 if start else 200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[: state.cut_after])

        def log_message(self, format: str, *args: object) -> None:
            pass

    httpd = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=httpd.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    state.url = f"http://127.0.0.1:{httpd.server_port}/trace.csv"
    yield state
    httpd.shutdown()
    thread.join()
    httpd.server_close()


def trace_file(server: Server, checked: bool = True) -> TraceFile:
    sha256 = hashlib.sha256(CONTENT).hexdigest() if checked else None
    return TraceFile("trace.csv", (), server.url, sha256, "CC0", "nobody")


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("checked", [True, False])
def test_whole_file(server: Server, tmp_path: Path, checked: bool) -> None:
    seen: list[tuple[int, int | None]] = []
    path, sha256 = fetch(trace_file(server, checked), tmp_path / "new", progress=lambda *done: seen.append(done))
    assert path.read_bytes() == CONTENT
    assert sha256 == hashlib.sha256(CONTENT).hexdigest()
    assert left(tmp_path / "new") == ["trace.csv"]
    assert seen[-1] == (len(CONTENT), len(CONTENT))


def test_broken_download_is_resumed(server: Server, tmp_path: Path) -> None:
    server.cut_after = 100_000
    with pytest.raises(TraceError, match=r"broke off after 100,000 of 700,040 bytes; run the command again"):
        fetch(trace_file(server), tmp_path)
    assert left(tmp_path) == ["trace.csv.partial"]
    server.cut_after = None
    path, _ = fetch(trace_file(server), tmp_path)
    assert path.read_bytes() == CONTENT
    assert left(tmp_path) == ["trace.csv"]
    assert server.asked == [None, "bytes=100000-"]


def test_server_without_ranges_starts_over(server: Server, tmp_path: Path) -> None:
    (tmp_path / "trace.csv.partial").write_bytes(CONTENT[:1000])
    server.ranges = False
    assert fetch(trace_file(server), tmp_path)[0].read_bytes() == CONTENT
    assert server.asked == ["bytes=1000-"]


@pytest.mark.parametrize("stale", [b"of another version", CONTENT + b"and more", CONTENT])
def test_what_was_left_need_not_fit(server: Server, tmp_path: Path, stale: bytes) -> None:
    (tmp_path / "trace.csv.partial").write_bytes(stale)
    assert fetch(trace_file(server), tmp_path)[0].read_bytes() == CONTENT


def test_without_checksum_nothing_is_resumed(server: Server, tmp_path: Path) -> None:
    (tmp_path / "trace.csv.partial").write_bytes(b"of another version")
    assert fetch(trace_file(server, checked=False), tmp_path)[0].read_bytes() == CONTENT
    assert server.asked == [None]


def test_other_bytes_are_refused(server: Server, tmp_path: Path) -> None:
    server.content = CONTENT.replace(b"374", b"375", 1)
    with pytest.raises(TraceError, match=r"serves other bytes than trace\.csv as published"):
        fetch(trace_file(server), tmp_path)
    assert left(tmp_path) == []


def test_without_checksum_the_header_is_looked_at(server: Server, tmp_path: Path) -> None:
    server.content = b"<html>sign in</html>\n"
    with pytest.raises(TraceError, match=r"does not serve a trace: .*no known header"):
        fetch(trace_file(server, checked=False), tmp_path)
    assert left(tmp_path) == []


def test_a_file_already_there_stays_until_the_new_one_is_whole(server: Server, tmp_path: Path) -> None:
    (tmp_path / "trace.csv").write_bytes(b"old")
    server.cut_after = 5
    with pytest.raises(TraceError, match="broke off"):
        fetch(trace_file(server), tmp_path)
    assert (tmp_path / "trace.csv").read_bytes() == b"old"


def test_http_error_and_no_server(server: Server, tmp_path: Path) -> None:
    server.status = 404
    with pytest.raises(TraceError, match="HTTP 404 Not Found"):
        fetch(trace_file(server), tmp_path)
    with pytest.raises(TraceError, match=r"cannot fetch http://127\.0\.0\.1:9/x"):
        fetch(trace_file(server), tmp_path, url="http://127.0.0.1:9/x")


def test_command_replaces_what_is_not_as_published(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SIMMOE_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    named = NamedTrace("mine", trace_file(server), "a trace")
    monkeypatch.setitem(TRACES, "mine", named)
    cached = tmp_path / "simmoe" / "trace.csv"
    cached.parent.mkdir()
    cached.write_bytes(b"damaged")
    assert run(["traces", "fetch", "mine"]) == 0
    assert cached.read_bytes() == CONTENT
    first = capsys.readouterr()
    assert "is not trace.csv as published" in first.err
    assert f"{cached}  sha256 {named.file.sha256} (as published)" in first.out
    assert run(["traces", "fetch", "mine"]) == 0
    assert f"already at {cached}" in capsys.readouterr().out
    assert len(server.asked) == 1


def test_folder_that_cannot_be_made(server: Server, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="XDG_CACHE_HOME"):
        fetch(trace_file(server), tmp_path / "file" / "cache")
