"""One request carried through an engine: its answer passed on as it comes, or kept until it is whole.

Nothing is sent to the client before the engine's first event (of a stream) or before the whole answer (of any other),
so that a request whose engine dies before can go to another one, and none is ever answered twice.
"""

from __future__ import annotations

import asyncio
import json
import time
from enum import Enum

from simmoe.live.server.client import ClientConnection, Listener, error_body
from simmoe.live.server.upstream import Address, UpstreamConnection, connect

MAX_EVENT_BYTES = 16 * 1024 * 1024
"""A longer event is passed on in parts."""

_PASSED_HEADERS = ("x-request-id", "retry-after")
_EVENT_END = b"\n\n"
_ERROR_EVENT = b'data: {"error"'
_LAST_EVENT = b"data: [DONE]\n\n"


class Outcome(Enum):
    """How an attempt ended."""

    ANSWERED = "answered"
    """The client has the whole answer."""
    BROKEN = "broken"
    """The connection was lost after the client had a part; it has been told."""
    LOST = "lost"
    """The connection was lost, or never made, and the client has nothing."""
    REFUSED = "refused"
    """The engine answered with a server error, kept back; ``Exchange.pass_on`` sends it."""
    GONE = "gone"
    """The client left."""


class Exchange(Listener):
    """A client's request, through one attempt or several."""

    def __init__(self, client: ClientConnection, num_sequences: int = 1) -> None:
        self.num_sequences = num_sequences
        """Engine requests it is."""
        self.first_event_s: float | None = None
        """``time.monotonic()`` of the first piece sent to the client."""
        self.num_silent_looks = 1
        """How often its replica has looked since the engine last sent a part of an answer; 0: it has since."""
        self._client = client
        client.listener = self
        self._connecting: asyncio.Task[UpstreamConnection] | None = None
        self._connection: UpstreamConnection | None = None
        self._is_gone = client.is_gone
        self._is_slow = False
        self._reset({})

    def _reset(self, extra_headers: dict[str, str]) -> None:
        self._status = 0
        self._content_type = ""
        self._extra_headers = extra_headers
        self._is_stream = self._is_held = self._is_aborted = False
        self.num_silent_looks = 1
        self._kept: list[bytes] = []
        self._last_sent = b""

    @property
    def has_started(self) -> bool:
        """Whether the client has been sent anything."""
        return self.first_event_s is not None

    async def attempt(self, address: Address, request: bytes, extra_headers: dict[str, str], who: str) -> Outcome:
        """Send the request to an engine and pass its answer on.

        Args:
            address: the engine's server.
            request: head and body.
            extra_headers: added to the answer.
            who: the engine, for the client's error message.
        """
        assert not self.has_started
        if self._is_gone:
            return Outcome.GONE
        self._reset(extra_headers)
        self._connecting = asyncio.ensure_future(connect(address, request, self))
        try:
            is_complete = await self._read_answer(self._connecting)
        finally:
            self._connecting = self._connection = None
        if self._is_gone:
            return Outcome.GONE
        if self._last_sent.endswith(_LAST_EVENT):
            is_complete = True  # whatever else was lost, the client has the whole answer
        if not is_complete and self.has_started:
            message = f"{who} was lost while it answered; what came before is all there is"
            self._end_stream_with(error_body(502, message))
            return Outcome.BROKEN
        if not is_complete:
            return Outcome.LOST
        if self._status >= 500 or self._is_held:
            return Outcome.REFUSED
        self.pass_on()
        return Outcome.ANSWERED

    async def _read_answer(self, connecting: asyncio.Task[UpstreamConnection]) -> bool:
        """Return whether the engine's answer came whole."""
        await asyncio.wait((connecting,))
        if connecting.cancelled() or isinstance(connecting.exception(), OSError):
            return False
        self._connection = connection = connecting.result()
        try:
            return not self._is_aborted and await connection.done
        finally:
            connection.abort()

    def look(self) -> int:
        """Return how often in a row this has been asked, nothing having come; while the client takes nothing, once."""
        self.num_silent_looks = 1 if self._is_slow else self.num_silent_looks + 1
        return self.num_silent_looks

    def abort(self) -> None:
        """Lose the engine's connection, made or on its way, as if the engine had died."""
        self._is_aborted = True
        if self._connection is not None:
            self._connection.abort()
        elif self._connecting is not None:
            self._connecting.cancel()  # a host that has vanished would be tried for two minutes

    def pass_on(self) -> None:
        """Send the client what was kept, and end its answer."""
        kept = b"".join(self._kept)
        if not self._is_stream:
            self.first_event_s = time.monotonic()
            self._client.respond(self._status, kept, self._extra_headers, self._content_type)
            return
        if kept or not self.has_started:
            self._start()
        if kept:
            self._client.write(kept)
        self._client.end_stream()

    def _end_stream_with(self, error: dict[str, object]) -> None:
        self._client.write(b"data: " + json.dumps(error).encode() + b"\n\ndata: [DONE]\n\n")
        self._client.end_stream()

    def _start(self) -> None:
        if self.first_event_s is None:
            self.first_event_s = time.monotonic()
            self._client.start_stream(self._status, self._content_type, self._extra_headers)

    # ------------------------------------------------------------------------------------------------- upstream's sink

    def head(self, status: int, headers: dict[str, str]) -> None:
        """Note what the answer will be."""
        self._status = status
        self._content_type = headers.get("content-type", "application/json")
        self._is_stream = status == 200 and self._content_type.startswith("text/event-stream")
        self._extra_headers |= {name: headers[name] for name in _PASSED_HEADERS if name in headers}

    def body(self, data: bytes) -> None:
        """Pass whole events on; keep the rest, and everything of an answer that is no stream."""
        if not self._is_stream or self._is_held:
            self._kept.append(data)
            if self._status == 200:
                self.num_silent_looks = 0
            return
        self.num_silent_looks = 0
        if self._kept:
            data = b"".join((*self._kept, data))
            self._kept.clear()
        if not data.endswith(_EVENT_END):
            end = data.rfind(_EVENT_END) + len(_EVENT_END)
            if end < len(_EVENT_END):
                end = len(data) if len(data) > MAX_EVENT_BYTES else 0
            if end < len(data):
                self._kept.append(data[end:])
                data = data[:end]
            if not data:
                return
        if self.first_event_s is None:
            if data.startswith(_ERROR_EVENT):
                self._is_held = True  # an engine that died before this request's first token says so in its first event
                self._kept.insert(0, data)
                return
            self._start()
        self._last_sent = data
        self._client.write(data)

    # -------------------------------------------------------------------------------------------- the client's listener

    def client_gone(self) -> None:
        """Let the engine know: it aborts the request."""
        self._is_gone = True
        self.abort()

    def client_slow(self, is_slow: bool) -> None:
        """Read from the engine no faster than the client does."""
        self._is_slow = is_slow
        if self._connection is not None:
            self._connection.set_paused(is_slow)
