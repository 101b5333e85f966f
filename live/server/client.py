"""HTTP/1.1 with clients: requests in, answers and event streams out, as little as possible done a chunk."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast
from urllib.parse import unquote

import httptools

MAX_HEAD_BYTES = 64 * 1024
MAX_BODY_BYTES = 64 * 1024 * 1024
IDLE_TIMEOUT_S = 75.0
"""How long a connection may stay without a complete request, or a client take nothing of its answer."""

_LINGER_S = 5.0
"""How long what a refused client still sends is read: a connection closed on it would take the refusal along."""

_MAX_PIPELINED = 8
_REASONS = {
    200: "OK", 400: "Bad Request", 401: "Unauthorized", 404: "Not Found", 405: "Method Not Allowed",
    408: "Request Timeout", 413: "Content Too Large", 429: "Too Many Requests",
    431: "Request Header Fields Too Large", 500: "Internal Server Error", 502: "Bad Gateway",
    503: "Service Unavailable",
}  # fmt: skip


class Request(NamedTuple):
    """One complete request."""

    method: str
    path: str
    """Without the query, percent signs read."""
    headers: Mapping[str, str]
    """Names in lower case."""
    body: bytes


class Listener:
    """What an exchange in progress wants to hear of its client; the default is nothing."""

    def client_gone(self) -> None:
        """The connection was lost."""

    def client_slow(self, is_slow: bool) -> None:
        """The client's buffer is full, or has room again."""


_NOBODY = Listener()


class ClientConnection(asyncio.Protocol):
    """One client's connection; exchanges follow one another on it.

    Args:
        handle: called with each request and the connection to answer it on, once the one before is answered.
        connections: the server's open connections; this one adds and removes itself.
        idle_timeout_s: see ``IDLE_TIMEOUT_S``.
    """

    def __init__(
        self,
        handle: Callable[[Request, ClientConnection], None],
        connections: set[ClientConnection],
        idle_timeout_s: float = IDLE_TIMEOUT_S,
    ) -> None:
        self.listener: Listener = _NOBODY
        self.is_gone = False
        self.closes = False
        """Whether the connection is closed after the answer in progress."""
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Done when the connection is no more, by either side."""
        self._handle = handle
        self._connections = connections
        self._idle_timeout_s = idle_timeout_s
        self._parser = httptools.HttpRequestParser(self)
        self._requests: deque[tuple[Request, bool, bool]] = deque()
        self._refusal: tuple[int, Mapping[str, Any]] | None = None
        """What is answered once the requests before it are, where what followed them is no request."""
        self._is_busy = self._is_head = self._is_chunked = self._is_paused = self._is_slow = self._is_refused = False
        self._num_unsent = 0
        self._new_message()

    # ------------------------------------------------------------------------------------------------------- answers

    def respond(
        self,
        status: int,
        content: bytes | Mapping[str, Any],
        headers: Mapping[str, str] | None = None,
        content_type: str = "application/json",
    ) -> None:
        """Answer the request in progress, whole."""
        body = content if isinstance(content, bytes) else json.dumps(content).encode()
        if not self.is_gone:
            head = self._head(status, content_type, {**(headers or {}), "content-length": str(len(body))})
            self._transport.write(head if self._is_head else head + body)
        self._next()

    def start_stream(self, status: int, content_type: str, headers: Mapping[str, str]) -> None:
        """Begin an answer of unknown length."""
        if not self.is_gone:
            framing = {"transfer-encoding": "chunked"} if self._is_chunked else {}
            self._transport.write(self._head(status, content_type, {**headers, "cache-control": "no-cache", **framing}))

    def write(self, data: bytes) -> None:
        """Send a piece of the answer begun."""
        if not self.is_gone:
            self._transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)

    def end_stream(self) -> None:
        """End the answer begun."""
        if not self.is_gone and self._is_chunked:
            self._transport.write(b"0\r\n\r\n")
        self._next()

    def close(self) -> None:
        """Close the connection as soon as nothing is being asked or answered on it."""
        self.closes = True
        if not self._is_busy and not self._is_receiving:
            self._close()

    @property
    def is_closing(self) -> bool:
        """Whether what is still to be sent is the last of it."""
        return bool(self._transport.is_closing())

    def abort(self) -> None:
        """Close the connection now."""
        self._transport.abort()

    def _head(self, status: int, content_type: str, headers: Mapping[str, str]) -> bytes:
        lines = [f"HTTP/1.1 {status} {_REASONS.get(status, 'Status')}", f"content-type: {content_type}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if self.closes:
            lines.append("connection: close")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1", "replace")

    def _next(self) -> None:
        self.listener = _NOBODY
        self._is_busy = False
        if self.is_gone:
            return
        if self._is_refused:
            self._linger()
            return
        if self.closes:
            self._close()
            return
        self._set_timer()
        if self._is_paused:
            self._is_paused = False
            self._transport.resume_reading()
        self._go_on()

    def _go_on(self) -> None:
        """Begin the next request, if there is one and the last answer is taken; refuse what came after the last."""
        if self._is_busy or self._is_slow:
            return
        if self._requests:
            self._begin(*self._requests.popleft())
        elif self._refusal is not None:
            self._is_busy = self._is_refused = self.closes = True
            self.respond(*self._refusal)

    def _begin(self, request: Request, keep_alive: bool, is_chunked: bool) -> None:
        self._timer.cancel()
        self._is_busy, self._is_head, self._is_chunked = True, request.method == "HEAD", is_chunked
        self.closes = self.closes or not keep_alive
        self._handle(request, self)

    def _refuse(self, status: int, message: str) -> None:
        """Answer what is no request, after those before it, and close: where the next one begins is unknown."""
        self._refusal = status, error_body(status, message)

    # ------------------------------------------------------------------------------------------------ asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Note the transport."""
        self._transport = cast(asyncio.Transport, transport)
        self._loop = asyncio.get_running_loop()
        self._connections.add(self)
        self._timer = self._loop.call_later(self._idle_timeout_s, self._time_out)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tell whoever answers on it."""
        self.is_gone = True
        self._connections.discard(self)
        self._timer.cancel()
        self._requests.clear()
        self.closed.set_result(None)
        self.listener.client_gone()

    def data_received(self, data: bytes) -> None:
        """Parse, and begin the first request that is complete."""
        if self._refusal is not None:
            return
        if not self._head_done:
            self._num_head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            self._refuse(400, "this endpoint speaks HTTP/1.1 alone; send no Upgrade header")
        except httptools.HttpParserError as error:
            self._refuse(400, f"not an HTTP/1.1 request: {error}")
        else:
            if not self._head_done and self._num_head_bytes > MAX_HEAD_BYTES:
                self._refuse(431, f"the request's head exceeds {MAX_HEAD_BYTES} bytes")
            elif self._num_body_bytes > MAX_BODY_BYTES:
                self._refuse(413, f"the request's body exceeds {MAX_BODY_BYTES} bytes")
        self._go_on()
        if len(self._requests) > _MAX_PIPELINED and not self._is_paused and not self.is_gone:
            self._is_paused = True
            self._transport.pause_reading()

    def pause_writing(self) -> None:
        """Pass on that the client reads more slowly than it is written to."""
        self._is_slow = True
        self._set_timer()
        self.listener.client_slow(True)

    def resume_writing(self) -> None:
        """Pass on that the client has caught up."""
        self._is_slow = False
        if self._is_busy:
            self._timer.cancel()
        self.listener.client_slow(False)
        self._go_on()

    def _set_timer(self) -> None:
        self._timer.cancel()
        self._num_unsent = self._transport.get_write_buffer_size()
        self._timer = self._loop.call_later(_LINGER_S if self._is_refused else self._idle_timeout_s, self._time_out)

    def _time_out(self) -> None:
        """Close on a client that asks for nothing; give up one that takes nothing."""
        num_unsent = self._transport.get_write_buffer_size()
        if not num_unsent:
            self._transport.close()
        elif num_unsent < self._num_unsent:
            self._set_timer()
        else:
            self._transport.abort()

    def _close(self) -> None:
        """Close once everything is sent."""
        self._set_timer()
        self._transport.close()

    def _linger(self) -> None:
        """End the answers, and close once the client has, or does not for a while."""
        self._transport.write_eof()
        self._set_timer()

    # ------------------------------------------------------------------------------------------- httptools' callbacks

    def _new_message(self) -> None:
        self._url = b""
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []
        self._num_head_bytes = self._num_body_bytes = 0
        self._is_receiving = self._head_done = self._takes_chunks = self._keeps_alive = False

    def on_message_begin(self) -> None:
        """Note that a request has begun."""
        self._is_receiving = True

    def on_url(self, url: bytes) -> None:
        """Collect the target."""
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        """Collect a header; what follows a body in chunks is none."""
        if not self._head_done:
            self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """Let a client that asks first send its body."""
        self._head_done = True
        self._takes_chunks = self._parser.get_http_version() != "1.0"
        self._keeps_alive = self._takes_chunks and self._parser.should_keep_alive()
        if self._headers.get("expect", "").lower() == "100-continue" and not self._is_busy:
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        """Collect the body."""
        self._num_body_bytes += len(data)
        if self._num_body_bytes <= MAX_BODY_BYTES:
            self._body.append(data)

    def on_message_complete(self) -> None:
        """Queue the request."""
        if self._num_body_bytes <= MAX_BODY_BYTES:
            request = Request(
                self._parser.get_method().decode(), _path_of(self._url), self._headers, b"".join(self._body)
            )
            self._requests.append((request, self._keeps_alive, self._takes_chunks))
            self._new_message()


def _path_of(url: bytes) -> str:
    """Return what a request's target names, as servers are to read it: ``/v1/models/a%2Fb``, ``http://host/metrics``.

    >>> _path_of(b"/v1/models/a%2Fb?x=1"), _path_of(b"http://host/metrics"), _path_of(b"http://host")
    ('/v1/models/a/b', '/metrics', '/')
    """
    path = url.partition(b"?")[0].decode("latin-1")
    if not path.startswith("/") and "://" in path:
        path = "/" + path.partition("://")[2].partition("/")[2]
    return unquote(path)


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """Return an error in OpenAI's form, as vLLM answers it."""
    kind = {
        400: "BadRequestError", 404: "NotFoundError", 429: "RateLimitError", 500: "InternalServerError",
        502: "BadGatewayError", 503: "ServiceUnavailableError",
    }.get(status, "InvalidRequestError")  # fmt: skip
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}
