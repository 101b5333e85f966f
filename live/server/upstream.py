"""HTTP/1.1 with engines: one connection a request, so that a lost connection is always that request's own news."""

from __future__ import annotations

import asyncio
import functools
import re
import ssl
from typing import NamedTuple, Protocol, cast
from urllib.parse import urlsplit

import httptools

from simmoe.errors import UsageError

_PLAIN = re.compile("[!-~]*")
"""What a host or a path is made of, as it is sent: ASCII without blanks."""

MAX_FETCH_BYTES = 1 << 28
"""A longer answer to :func:`fetch` is none: an hour's steps of an engine are a tenth of it."""


class UnusableServer(OSError):
    """Somebody listens, but no engine's server that can be asked: what the message says has to be mended first."""


class Address(NamedTuple):
    """Where an engine's server listens."""

    host: str
    """Name or number; empty for a Unix socket."""
    port: int = 0
    uds: str = ""
    """Path of a Unix socket."""
    is_tls: bool = False
    prefix: str = ""
    """Path before ``/v1``."""

    @classmethod
    def parse(cls, url: str) -> Address:
        """Return the address of a URL; a trailing ``/v1`` is left out.

        Raises:
            UsageError: it is no http or https URL.
        """
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise UsageError(f"'{url}' is no URL: {error}; write http://host:port") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"'{url}' is no URL of a server; write http://host:port")
        if parts.username is not None or parts.query or parts.fragment:
            what = "a user's name" if parts.username is not None else "a query" if parts.query else "a fragment"
            raise UsageError(f"the URL of {parts.hostname} has {what}, which is not sent; write http://host:port")
        if port == 0:
            raise UsageError(f"'{url}' has port 0, where nobody can listen; write http://host:port")
        if not (_PLAIN.fullmatch(parts.hostname) and _PLAIN.fullmatch(parts.path)):
            raise UsageError(f"'{url}' has what no request line can hold; write the host as xn--..., the path with %20")
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        is_tls = parts.scheme == "https"
        return cls(parts.hostname, port or (443 if is_tls else 80), is_tls=is_tls, prefix=prefix)

    def __str__(self) -> str:
        return f"unix:{self.uds}" if self.uds else f"http{'s' * self.is_tls}://{self._authority}{self.prefix}"

    @property
    def _authority(self) -> str:
        host = self.host or "localhost"
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"

    def request(self, method: str, path: str, headers: dict[str, str] | None = None, body: bytes = b"") -> bytes:
        """Return a request's bytes."""
        lines = [f"{method} {self.prefix}{path} HTTP/1.1", f"host: {self._authority}", "connection: close"]
        lines += [f"{name}: {value}" for name, value in (headers or {}).items()]
        if body or method == "POST":
            lines += ["content-type: application/json", f"content-length: {len(body)}"]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + body


class Sink(Protocol):
    """Where an answer's parts go as they arrive."""

    def head(self, status: int, headers: dict[str, str]) -> None:
        """Take the status and the headers, names in lower case."""
        ...

    def body(self, data: bytes) -> None:
        """Take a piece of the body."""
        ...


class UpstreamConnection(asyncio.Protocol):
    """One request to an engine and its answer."""

    def __init__(self, request: bytes, sink: Sink) -> None:
        self.done: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        """True once the answer is complete, False if the connection was lost before."""
        self._request = request
        self._sink = sink
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[str, str] = {}
        self._pieces: list[bytes] = []

    def abort(self) -> None:
        """Give the request up; an engine aborts a request whose connection is lost."""
        self._transport.abort()

    def set_paused(self, is_paused: bool) -> None:
        """Stop reading, or go on."""
        if not self._transport.is_closing():
            (self._transport.pause_reading if is_paused else self._transport.resume_reading)()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Send the request."""
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        """Parse, and pass the body's new bytes on in one piece."""
        if self.done.done():
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.abort()
            return
        if self._pieces:
            pieces = self._pieces
            body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            pieces.clear()
            self._sink.body(body)
        if self._is_complete and not self.done.done():
            self.done.set_result(True)
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        """Settle the outcome."""
        if not self.done.done():
            self.done.set_result(False)

    _is_complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect a header."""
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Pass the head on, unless it announces another."""
        if self._is_interim:
            self._headers = {}
            return
        self._sink.head(self._parser.get_status_code(), self._headers)

    def on_body(self, data: bytes) -> None:
        """Collect what one read brought."""
        self._pieces.append(data)

    def on_message_complete(self) -> None:
        """Note the end."""
        self._is_complete = not self._is_interim

    @property
    def _is_interim(self) -> bool:
        return bool(self._parser.get_status_code() < 200)


async def connect(address: Address, request: bytes, sink: Sink) -> UpstreamConnection:
    """Connect and send a request; its answer goes to ``sink``.

    Whoever waits for it may be cancelled: nothing is left open then.

    Raises:
        OSError: nobody listens there; UnusableServer: who does is not trusted, or speaks no TLS.
    """
    loop = asyncio.get_running_loop()

    def make() -> UpstreamConnection:
        return UpstreamConnection(request, sink)

    if address.uds:
        _, connection = await loop.create_unix_connection(make, address.uds)
    else:
        tls = _tls() if address.is_tls else None
        try:
            _, connection = await loop.create_connection(make, address.host, address.port, ssl=tls)
        except ssl.SSLCertVerificationError as error:
            raise UnusableServer(
                f"its certificate is not trusted: {error.verify_message.rstrip('.')}; "
                f"SSL_CERT_FILE names the authorities that are"
            ) from None
        except ssl.SSLEOFError:
            raise  # it went in the middle of the handshake
        except ssl.SSLError as error:
            raise UnusableServer(f"no TLS can be spoken with it: {error.reason}; is its URL an http one?") from None
    return connection


@functools.cache
def _tls() -> ssl.SSLContext:
    """Return what verifies servers; to read the authorities' certificates takes tens of milliseconds."""
    return ssl.create_default_context()


class _Collector:
    def __init__(self) -> None:
        self.status = 0
        self.location = ""
        """Where a redirect leads."""
        self.has_length = True
        self.content = bytearray()
        self.connection: UpstreamConnection | None = None

    def head(self, status: int, headers: dict[str, str]) -> None:
        self.status = status
        self.location = headers.get("location", "")
        self.has_length = not headers.keys().isdisjoint(("content-length", "transfer-encoding"))

    def body(self, data: bytes) -> None:
        self.content += data
        if len(self.content) > MAX_FETCH_BYTES and self.connection is not None:
            self.connection.abort()


async def fetch(
    address: Address,
    path: str,
    timeout_s: float,
    headers: dict[str, str] | None = None,
    method: str = "GET",
    body: bytes = b"",
) -> tuple[int, bytes]:
    """Return the status and the body of a small request.

    Raises:
        OSError: nobody listens there, the connection was lost, the answer is no HTTP or longer than
            ``MAX_FETCH_BYTES``, or ``timeout_s`` passed (TimeoutError). UnusableServer: as :func:`connect`; or it sends
            elsewhere, or does not tell where its answer ends.
    """
    collector = _Collector()
    connection = None
    try:
        async with asyncio.timeout(timeout_s):
            connection = await connect(address, address.request(method, path, headers, body), collector)
            collector.connection = connection
            if not await connection.done:
                if not collector.has_length:
                    raise UnusableServer(f"its answer to {path} has no length and no chunks, as HTTP/1.1 wants")
                raise ConnectionResetError(f"{address} closed the connection before it had answered {path}")
    finally:
        if connection is not None:
            connection.abort()
    if collector.location and 300 <= collector.status < 400:
        raise UnusableServer(
            f"it answers {path} with {collector.status}, to be asked at '{collector.location}'; "
            f"redirects are not followed: give the URL they lead to"
        )
    return collector.status, bytes(collector.content)


def described(error: OSError) -> str:
    """Return an error in a few words; that of a timeout has none of its own."""
    if isinstance(error, UnusableServer):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
