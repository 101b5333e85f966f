"""HTTP/1.1 with engines: one connection a request, so that a lost connection is always that request's own news."""

from __future__ import annotations

import asyncio
import functools
import ssl
from typing import NamedTuple, Protocol, cast
from urllib.parse import urlsplit

import httptools

from simmoe.errors import UsageError

MAX_FETCH_BYTES = 1 << 28
"""A longer answer to :func:`fetch` is none: an hour's steps of an engine are a tenth of it."""


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
        OSError: nobody listens there.
    """
    loop = asyncio.get_running_loop()

    def make() -> UpstreamConnection:
        return UpstreamConnection(request, sink)

    if address.uds:
        _, connection = await loop.create_unix_connection(make, address.uds)
    else:
        tls = _tls() if address.is_tls else None
        _, connection = await loop.create_connection(make, address.host, address.port, ssl=tls)
    return connection


@functools.cache
def _tls() -> ssl.SSLContext:
    """Return what verifies servers; to read the authorities' certificates takes tens of milliseconds."""
    return ssl.create_default_context()


class _Collector:
    def __init__(self) -> None:
        self.status = 0
        self.content = bytearray()
        self.connection: UpstreamConnection | None = None

    def head(self, status: int, headers: dict[str, str]) -> None:
        self.status = status

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
            ``MAX_FETCH_BYTES``, or ``timeout_s`` passed (TimeoutError).
    """
    collector = _Collector()
    connection = None
    try:
        async with asyncio.timeout(timeout_s):
            connection = await connect(address, address.request(method, path, headers, body), collector)
            collector.connection = connection
            if not await connection.done:
                raise ConnectionResetError(f"{address} closed the connection before it had answered {path}")
    finally:
        if connection is not None:
            connection.abort()
    return collector.status, bytes(collector.content)


def described(error: OSError) -> str:
    """Return an error in a few words; that of a timeout has none of its own."""
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
