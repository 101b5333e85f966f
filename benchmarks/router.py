"""What the router adds to each streamed token: a stub engine, `simmoe serve` and this client, one process each.

``python benchmarks/router.py [--streams 100] [--rate 20] [--seconds 10]``, from the repository's root. Every stream
gets ``rate`` tokens a second, its start staggered. The stub stamps each token as it sends it (the machine's monotonic
clock), the client reads the stamp when the token is in its hands: once directly from the stub, once through the router.
What is added is the difference of the two, percentile by percentile. Client and stub have the same delays in both.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

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
    """Open the streams, staggered over one token's gap and a second, and return every token's delay, seconds."""
    address, delays_s = Address.parse(url), list[float]()
    script = {"gap_s": 1 / rate, "stamp": True}
    body = {"model": "tiny", "prompt": [1], "max_tokens": int(rate * seconds), "stream": True, "stub": script}
    request = address.request("POST", "/v1/completions", {}, json.dumps(body).encode())

    async def stream(i: int) -> None:
        await asyncio.sleep(i / streams)
        sink = Stamps(delays_s)
        connection = await connect(address, request, sink)
        assert await connection.done and sink.status == 200, f"stream {i} ended with status {sink.status}"

    await asyncio.gather(*(stream(i) for i in range(streams)))
    assert len(delays_s) == streams * body["max_tokens"], "a token was lost"
    return np.array(delays_s)


@contextmanager
def started(*arguments: str) -> Iterator[str]:
    """Yield the first line a process prints."""
    process = subprocess.Popen([sys.executable, "-m", *arguments], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        yield process.stdout.readline().strip()
    finally:
        process.terminate()
        process.wait()


def main() -> None:
    """Measure, print percentiles, and exit with 1 if more than the target is added at p99."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=100)
    parser.add_argument("--rate", type=float, default=20.0)
    parser.add_argument("--seconds", type=float, default=10.0)
    args = parser.parse_args()
    with started("tests.support.stub_engine") as port:
        direct_url = f"http://127.0.0.1:{port}"
        with started("simmoe", "serve", "--url", direct_url, "--port", "0", "--policy", "lanes") as line:
            routed_url = line.split(" at ")[1].split("/v1")[0]
            urls = {"direct": direct_url, "routed": routed_url}
            runs = {name: uvloop.run(drive(url, args.streams, args.rate, args.seconds)) for name, url in urls.items()}
    percentiles = (50, 90, 99, 99.9)
    print(f"{args.streams} streams at {args.rate:g} tokens/s for {args.seconds:g} s; delay of a token, ms")
    print(f"{'':8}" + "".join(f"{f'p{p:g}':>9}" for p in percentiles))
    for name, delays_s in runs.items():
        print(f"{name:8}" + "".join(f"{1e3 * np.percentile(delays_s, p):9.3f}" for p in percentiles))
    added_s = [float(np.percentile(runs["routed"], p) - np.percentile(runs["direct"], p)) for p in percentiles]
    print(f"{'added':8}" + "".join(f"{1e3 * s:9.3f}" for s in added_s))
    sys.exit(int(added_s[percentiles.index(99)] > TARGET_S))


if __name__ == "__main__":
    main()
