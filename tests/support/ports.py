"""A port for a server that is told where to listen, and does so only later."""

from __future__ import annotations

import secrets
import socket
from contextlib import suppress
from pathlib import Path

_LOWEST = 20_000
"""Below are the ports that servers commonly have, and 10,002 to 19,999, which Ray keeps for its workers."""


def later_port() -> int:
    """Return a port of 127.0.0.1 that nobody has, nor is given by the kernel where any will do.

    One that the kernel had chosen would be free again until the server listens, seconds later: it might choose it once
    more, for another server or for a client's end of a connection.
    """
    first, last = map(int, Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split())
    never_given = [port for port in range(_LOWEST, 1 << 16) if not first <= port <= last]
    while True:
        port = secrets.choice(never_given or range(_LOWEST, 1 << 16))
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
