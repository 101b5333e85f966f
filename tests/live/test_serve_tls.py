"""Engines and endpoints behind https, and URLs of every kind: what is taken, and what is refused in one line."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import os
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

if find_spec("httptools") is None:
    pytest.skip("the server is not installed: pip install 'simmoe[serve]'", allow_module_level=True)
pytest.importorskip("cryptography", reason="certificates are made with cryptography, which vLLM brings")

from simmoe.errors import UsageError
from simmoe.live.driving.endpoint import Endpoint
from simmoe.live.server import upstream
from simmoe.live.server.probe import Answer
from simmoe.live.server.replica import Replica
from simmoe.live.server.upstream import Address, UnusableServer, fetch
from tests.live.test_serve_hostile import Clock, close_at_once, engine, run, saying, watched, well
from tests.support.deployment import IN_TIME_S, deployed, wait_for
from tests.support.stub_engine import StubEngine

CRYPTOGRAPHY = (
    "cryptography.x509",
    "cryptography.hazmat.primitives.hashes",
    "cryptography.hazmat.primitives.serialization",
    "cryptography.hazmat.primitives.asymmetric.ec",
)

NO_PROXY_THERE = {
    name: "http://127.0.0.1:9" for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy")
}
"""A proxy nobody answers at: engines are asked directly, whatever the environment says."""


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an authority's certificate and key and certificate of several servers, as their names say."""
    x509, hashes, serialization, ec = map(import_module, CRYPTOGRAPHY)
    folder = tmp_path_factory.mktemp("certificates")
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    addresses = [x509.IPAddress(ipaddress.ip_address(text)) for text in ("127.0.0.1", "::1")]
    here = [x509.DNSName("localhost"), *addresses]

    def make(name: str, names: list[Any], days: int, authority: Any = None, is_authority: bool = False) -> Any:
        key = ec.generate_private_key(ec.SECP256R1())
        issuer, issuer_key = authority or (name, key)
        subject, by = (x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)]) for text in (name, issuer))
        builder = x509.CertificateBuilder(by, subject, key.public_key(), x509.random_serial_number())
        builder = builder.not_valid_before(now - 30 * day).not_valid_after(now + days * day)
        builder = builder.add_extension(x509.BasicConstraints(ca=is_authority, path_length=None), critical=True)
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        pem = serialization.Encoding.PEM
        plain = (pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
        certificate = builder.sign(issuer_key, hashes.SHA256()).public_bytes(pem)
        (folder / f"{name}.pem").write_bytes(certificate + (b"" if is_authority else key.private_bytes(*plain)))
        return name, key

    authority = make("authority", [], 30, is_authority=True)
    make("good", here, 30, authority)
    make("of another host", [x509.DNSName("gpu9.example")], 30, authority)
    make("expired", here, -1, authority)
    make("self-signed", here, 30)
    return folder


@pytest.fixture
def trusted(certificates: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The authority is trusted in this process, and in those it starts."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificates / "authority.pem"))
    upstream._tls.cache_clear()
    yield certificates
    upstream._tls.cache_clear()


class Stub:
    """A stub engine behind https, on a loop and a thread of its own."""

    def __init__(self, certificate: Path, host: str = "127.0.0.1") -> None:
        self.engine: StubEngine
        self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        self._context.load_cert_chain(certificate)
        self._host = host

    def __enter__(self) -> Stub:
        is_up = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(is_up)))
        self._thread.start()
        assert is_up.wait(IN_TIME_S)
        return self

    async def _serve(self, is_up: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self.engine = StubEngine(has_state=True)
        sockets: list[socket.socket] = []
        handshakes: list[asyncio.Task[Any]] = []

        def accept() -> None:
            sockets.append(listener.accept()[0])
            talk = self._loop.connect_accepted_socket(self.engine.connection, sockets[-1], ssl=self._context)
            handshakes.append(self._loop.create_task(talk))

        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        with socket.create_server((self._host, 0), family=family) as listener:
            self.port = listener.getsockname()[1]
            self._loop.add_reader(listener, accept)
            is_up.set()
            await self._stop.wait()
            self._loop.remove_reader(listener)
        # a server of asyncio's would leave a connection that is in its handshake to the garbage collector
        for handshake in handshakes:
            handshake.cancel()
        await asyncio.gather(*handshakes, return_exceptions=True)
        connections = list(self.engine.connections)
        for connection in connections:
            connection.abort()
        await asyncio.gather(*(connection.closed for connection in connections))
        for each in sockets:
            each.close()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End every connection and listen no more; harmless to call again."""
        if not self._thread.is_alive():
            return
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()


def has_ipv6() -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return True
    return False


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]"])
def test_a_trusted_engine_is_asked(trusted: Path, host: str) -> None:
    if host == "[::1]" and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    with Stub(trusted / "good.pem", "::1" if host == "[::1]" else "127.0.0.1") as stub:
        assert run(fetch(Address.parse(f"https://{host}:{stub.port}/v1/"), "/health", IN_TIME_S)) == (200, b"")


UNTRUSTED = {
    "self-signed": "self-signed certificate",
    "expired": "certificate has expired",
    "of another host": "Hostname mismatch, certificate is not valid for 'localhost'",
}


@pytest.mark.parametrize("name", UNTRUSTED)
def test_one_that_is_not_trusted_is_down_at_once_and_says_why(trusted: Path, name: str) -> None:
    told: list[str] = []

    async def first_change(address: Address) -> str:
        replica, changed = Replica(0, address), asyncio.Event()

        def note(replica: Replica, why: str) -> None:
            told.append(why)
            changed.set()

        replica.on_change = note
        watching = asyncio.create_task(replica.run())
        await changed.wait()
        watching.cancel()
        return replica.state

    with Stub(trusted / f"{name}.pem") as stub:
        assert run(first_change(Address.parse(f"https://localhost:{stub.port}"))) == "down"
    (why,) = told
    assert why == f"its certificate is not trusted: {UNTRUSTED[name]}; SSL_CERT_FILE names the authorities that are"


def untrusted(clock: Clock, timeout_s: float) -> Answer:
    raise UnusableServer("its certificate is not trusted: certificate has expired")


def test_a_certificate_that_expires_is_given_the_time_that_silence_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams that are open need it no more."""
    changes = watched(monkeypatch, well, *[untrusted] * 1000)
    assert [state for state, *_ in changes] == ["up", "unresponsive", "down"]


def test_https_of_who_speaks_http_and_the_other_way_round(trusted: Path) -> None:
    async def answer_plainly(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")

    async def plain() -> None:
        async with engine(answer_plainly) as address:
            await fetch(address._replace(is_tls=True), "/health", IN_TIME_S)

    async def gone() -> None:
        async with engine(close_at_once) as address:
            await fetch(address._replace(is_tls=True), "/health", IN_TIME_S)

    with pytest.raises(UnusableServer, match=r"^no TLS can be spoken with it: [A-Z_]+; is its URL an http one\?$"):
        run(plain())
    with pytest.raises(OSError) as lost:
        run(gone())
    assert not isinstance(lost.value, UnusableServer), "who goes in the middle of the handshake may come back"
    with Stub(trusted / "good.pem") as stub, pytest.raises(OSError):
        run(fetch(Address("127.0.0.1", stub.port), "/health", IN_TIME_S))


MOVED = b"HTTP/1.1 308 Permanent Redirect\r\nlocation: https://elsewhere/health\r\ncontent-length: 0\r\n\r\n"


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (MOVED, "it answers /health with 308, to be asked at 'https://elsewhere/health'; redirects are not followed"),
        (b"HTTP/1.0 200 OK\r\n\r\n{}", "its answer to /health has no length and no chunks, as HTTP/1.1 wants"),
    ],
)
def test_what_cannot_be_asked_says_why(answer: bytes, told: str) -> None:
    async def test() -> None:
        async with engine(saying({}, answer)) as address:
            await fetch(address, "/health", IN_TIME_S)

    with pytest.raises(UnusableServer) as refusal:
        run(test())
    assert str(refusal.value).startswith(told)


def test_an_answer_of_http_1_0_with_a_length_is_one() -> None:
    async def test() -> tuple[int, bytes]:
        async with engine(saying({}, b"HTTP/1.0 200 OK\r\ncontent-length: 2\r\n\r\n{}")) as address:
            return await fetch(address, "/health", IN_TIME_S)

    assert run(test()) == (200, b"{}")


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://gpu1", Address("gpu1", 80)),
        ("HTTP://GPU1/", Address("gpu1", 80)),
        ("https://gpu1", Address("gpu1", 443, is_tls=True)),
        ("https://gpu1:8443/v1", Address("gpu1", 8443, is_tls=True)),
        ("https://gpu1/team%20a/v1/", Address("gpu1", 443, is_tls=True, prefix="/team%20a")),
        ("http://[fe80::1]:8000", Address("fe80::1", 8000)),
        ("http://xn--bcher-kva.example", Address("xn--bcher-kva.example", 80)),
    ],
)
def test_a_url_names_an_address(url: str, address: Address) -> None:
    assert Address.parse(url) == address == Address.parse(str(address))


@pytest.mark.parametrize(
    "url",
    ["", "gpu1:8000", "ftp://gpu1", "http://", "http://[::1", "http://gpu1:0", "http://gpu1:65536", "http://gpu1:x",
     "http://b\u00fccher.example", "http://gpu1/a b", "http://gpu1/\u00fc", "http://gpu 1", "http://a@gpu1", "http://gpu1?x"],
)  # fmt: skip
def test_any_other_url_is_refused_in_a_line(url: str) -> None:
    with pytest.raises(UsageError) as refusal:
        Address.parse(url)
    assert "write " in str(refusal.value)


@pytest.mark.parametrize("key", ["a\r\nx-evil: 1", "\u043a\u043b\u044e\u0447", "a\x7f"])
def test_a_key_that_no_header_can_hold_is_refused(key: str) -> None:
    with pytest.raises(UsageError, match=r"^the API key has characters that no header can hold") as refusal:
        Endpoint("http://gpu1", "tiny", key)
    assert key not in str(refusal.value)


def test_serving_engines_behind_https(trusted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, proxy in NO_PROXY_THERE.items():
        monkeypatch.setenv(name, proxy)
    with Stub(trusted / "good.pem") as stub:
        arguments = ["simmoe", "serve", "--url", f"https://localhost:{stub.port}", "--port", "0"]
        with deployed(tmp_path / "log", arguments) as deployment:
            status, answer, headers = deployment.complete(max_tokens=5)
            assert (status, answer["usage"]["completion_tokens"], headers["x-simmoe-rank"]) == (200, 5, "0")
            assert len(deployment.stream(max_tokens=2000).rest()) == 2001
            stream = deployment.stream(
                max_tokens=5, user="leaver", stub={"hold": str(tmp_path / "never"), "hold_at": 2}
            )
            stream.event()
            stream.hang_up()
            wait_for(lambda: stub.engine.aborted == ["leaver"], "the engine aborts the request")
            stream = deployment.stream(max_tokens=5, stub={"hold": str(tmp_path / "never"), "hold_at": 2})
            stream.event()
            stub.stop()
            *_, error, done = stream.rest()
            assert "replica 0 was lost" in error["error"]["message"] and done == "[DONE]"
            wait_for(lambda: deployment.states() == {"0": "down"}, "nobody answers any more")
            assert deployment.stop() == 0


def live_run(tmp_path: Path, url: str) -> subprocess.CompletedProcess[str]:
    trace = tmp_path / "trace.csv"
    trace.write_text("arrival_s,prompt_tokens,output_tokens\n" + "".join(f"0.{i:02d},20,5\n" for i in range(20)))
    arguments = ["live", "run", "--url", url, "--trace", str(trace), "--out", str(tmp_path / "record"), "--k-max", "8"]
    command = [sys.executable, "-m", "simmoe", *arguments, "--mu", "4", "--sigma", "2"]
    return subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **NO_PROXY_THERE}, timeout=IN_TIME_S, check=False
    )


def test_driving_an_endpoint_behind_https(trusted: Path, tmp_path: Path) -> None:
    with Stub(trusted / "good.pem") as stub:
        done = live_run(tmp_path, f"https://127.0.0.1:{stub.port}/v1")
    assert "20 injected = 20 finished" in done.stdout, done.stderr


def test_one_that_is_not_trusted_is_not_driven(trusted: Path, tmp_path: Path) -> None:
    with Stub(trusted / "expired.pem") as stub:
        done = live_run(tmp_path, f"https://localhost:{stub.port}")
    assert done.returncode == 8
    assert done.stderr.splitlines()[-1] == (
        f"simmoe: https://localhost:{stub.port} cannot be driven: its certificate is not trusted: "
        "certificate has expired; SSL_CERT_FILE names the authorities that are"
    )
