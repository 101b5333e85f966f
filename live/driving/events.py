"""Server-sent events as they arrive in pieces: the WHATWG standard's, of which servers use one subset or another."""

from __future__ import annotations


class EventStream:
    """Splits a stream into the data of its events.

    >>> stream = EventStream()
    >>> stream.feed(b': ping\\r\\n\\r\\ndata: {"a":'), stream.feed(b" 1}\\n\\ndata:[DONE]\\n\\n")
    ([], [b'{"a": 1}', b'[DONE]'])

    Source: https://html.spec.whatwg.org/multipage/server-sent-events.html#parsing-an-event-stream, without lines that
    end in a carriage return alone.
    """

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of the events that ``data`` completes; those without any, comments, are none."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        events = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if not line and self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
            elif line == b"data" or line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
        return events
