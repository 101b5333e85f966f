"""What the router adds to each streamed token: a stub engine, `simmoe serve` and this client, one process each.

``python benchmarks/router.py [--streams 100] [--rate 20] [--seconds 5] [--json FILE]``, from the root, takes
half a minute; it needs ``simmoe[serve]`` and no vLLM. Every stream gets ``rate`` tokens a second, staggered. The stub
stamps each token as it sends it (the machine's monotonic clock), the client reads the stamp when the token is in its
hands: once directly from the stub, once through the router. What is added is the difference of the two, percentile by
percentile. Client and stub have the same delays in both.
The two are measured in turn, ``--rounds`` times, and the median round counts: a neighbour's burst is not the router's.
The router's processor time a token does not depend on neighbours at all.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import uvloop

from simmoe.live.server.upstream import Address, connect

TARGET_S = 1e-3


class Stamps:
    """A stream's delays, from stamp to hand."""

    def __init__(self, delays_s: list[float]) -> None:
        self.delays_s = delays_s
        self.status = 0

    def head(self, status: int, headers: dict[str, str]) -> None:
        """Note the status."""
        self.status = status

    def body(self, data: bytes) -> None:
        """Note the delay of each event in a read."""
        now_ns = time.monotonic_ns()
        for event in data.split(b"\n\n"):
            _, found, stamp = event.partition(b'"sent_ns": ')
            if found:
                self.delays_s.append((now_ns - int(stamp.rstrip(b"}"))) / 1e9)


async def drive(url: str, streams: int, rate: float, seconds: float) -> np.ndarray:
    """Open the streams, evenly staggered over one token's gap, and return every token's delay, seconds."""
    address, delays_s = Address.parse(url), list[float]()
    script = {"gap_s": 1 / rate, "stamp": True}
    body = {"model": "tiny", "prompt": [1], "max_tokens": int(rate * seconds), "stream": True, "stub": script}
    request = address.request("POST", "/v1/completions", {}, json.dumps(body).encode())

    async def stream(i: int) -> None:
        await asyncio.sleep(i / streams / rate)
        sink = Stamps(delays_s)
        connection = await connect(address, request, sink)
        assert await connection.done and sink.status == 200, f"stream {i} ended with status {sink.status}"

    await asyncio.gather(*(stream(i) for i in range(streams)))
    assert len(delays_s) == streams * body["max_tokens"], "a token was lost"
    return np.array(delays_s)


@contextmanager
def started(*arguments: str) -> Iterator[tuple[str, int]]:
    """Yield the first line a process prints, and its id."""
    process = subprocess.Popen([sys.executable, "-m", *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip(), process.pid
    finally:
        process.terminate()
        process.wait()


def processor_s(pid: int) -> float:
    """Return the processor seconds a process has used."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    """Measure, print percentiles, and exit with 1 if more than the target is added at p99."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--rate", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="where to keep every round's percentiles")
    args = parser.parse_args()
    percentiles = (50, 90, 99, 99.9)
    rounds: dict[str, list[list[float]]] = {"direct": [], "routed": []}
    used_s = 0.0
    with started("tests.support.stub_engine") as (port, _):
        direct_url = f"http://127.0.0.1:{port}"
        with started("simmoe", "serve", "--url", direct_url, "--port", "0", "--policy", "lanes") as (line, pid):
            urls = {"direct": direct_url, "routed": line.split(" at ")[1].split("/v1")[0]}
            for _ in range(args.rounds):
                for name, url in urls.items():
                    before_s = processor_s(pid)
                    delays_s = uvloop.run(drive(url, args.streams, args.rate, args.seconds))
                    rounds[name].append([float(np.percentile(delays_s, p)) for p in percentiles])
                    used_s += processor_s(pid) - before_s if name == "routed" else 0.0
    print(f"{args.streams} streams at {args.rate:g} tokens/s for {args.seconds:g} s; delay of a token, ms")
    print(f"{'':8}" + "".join(f"{f'p{p:g}':>9}" for p in percentiles))
    direct, routed = np.array(rounds["direct"]), np.array(rounds["routed"])
    added_s = np.median(routed - direct, axis=0)
    for name, row in (("direct", np.median(direct, 0)), ("routed", np.median(routed, 0)), ("added", added_s)):
        print(f"{name:8}" + "".join(f"{1e3 * seconds:9.3f}" for seconds in row))
    tokens = args.rounds * args.streams * int(args.rate * args.seconds)
    print(f"router: {1e6 * used_s / tokens:.1f} us of processor time a token")
    if args.json:
        described = {"streams": args.streams, "rate": args.rate, "seconds": args.seconds, "cores": os.cpu_count()}
        measured = {"percentiles": percentiles, "delays_s": rounds, "added_s": added_s.tolist()}
        args.json.write_text(
            json.dumps({**described, **measured, "router_s_a_token": used_s / tokens}, indent=2) + "\n"
        )
    sys.exit(int(added_s[percentiles.index(99)] > TARGET_S))


if __name__ == "__main__":
    main()
