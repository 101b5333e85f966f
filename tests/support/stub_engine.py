"""A stand-in for an engine's server: it answers completions as vLLM does, with tokens that come when asked for.

``python -m tests.support.stub_engine [--uds PATH | --port N] [--plain] [--gap-s S] [--k-max K]``. A request's ``stub``
object scripts its answer: ``first_s`` and ``gap_s`` (when tokens come), ``hold`` (until a file of that name exists, no
token from number ``hold_at`` on comes; 0 if not given), ``die_after`` (kill this process after so many), ``error``
(answer with that status), ``stamp`` (each token tells when it left).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import uvloop

from simmoe.live.server.client import ClientConnection, Listener, Request, error_body

FACTS: dict[str, Any] = {
    "healthy": True, "k_max": 8, "default_k": 8, "max_num_seqs": 64, "max_num_batched_tokens": 1024,
    "enable_chunked_prefill": True, "enable_prefix_caching": False, "async_scheduling": False, "block_size": 16,
    "num_gpu_blocks": 1000, "vocab_size": 512, "max_model_len": 512,
}  # fmt: skip


class StubEngine(Listener):
    """One stub; keeps what it was asked, in order, as the answer to ``GET /stub/seen``."""

    def __init__(self, *, has_state: bool, gap_s: float = 0.0, k_max: int = FACTS["k_max"]) -> None:
        self.has_state = has_state
        self.k_max = k_max
        self.gap_s = gap_s
        """Between tokens, where a request does not say."""
        self.running = 0
        self.seen: list[dict[str, Any]] = []
        self.aborted: list[str] = []
        self.connections: set[ClientConnection] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def handle(self, request: Request, client: ClientConnection) -> None:
        """Answer one request."""
        if request.method == "POST" and request.path.endswith("completions"):
            task = asyncio.get_running_loop().create_task(self.complete(request, client))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        elif request.path == "/simmoe/state" and self.has_state:
            counts = {"num_waiting": 0, "num_running": self.running, "kv_used": 0.0}
            client.respond(200, {**FACTS, **counts, "k_max": self.k_max, "monotonic_s": time.monotonic()})
        elif request.path == "/health":
            client.respond(200, b"")
        elif request.path == "/metrics":
            client.respond(200, f'vllm:num_requests_running{{engine="0"}} {float(self.running)}\n'.encode())
        elif request.path == "/v1/models":
            client.respond(200, {"object": "list", "data": [{"id": "tiny", "object": "model", "max_model_len": 512}]})
        elif request.path == "/stub/seen":
            client.respond(200, {"seen": self.seen, "aborted": self.aborted})
        else:
            client.respond(404, error_body(404, "not here"))

    async def complete(self, request: Request, client: ClientConnection) -> None:
        """Answer a completion."""
        body = json.loads(request.body)
        script = body.pop("stub", {})
        self.seen.append({"path": request.path, "headers": dict(request.headers), "body": body})
        if "error" in script:
            client.respond(script["error"], error_body(script["error"], "as scripted"))
            return
        self.running += 1
        try:
            if body.get("stream"):
                await self.stream(body, script, client)
            else:
                await self.hold(script, client)
                await asyncio.sleep(script.get("first_s", 0.0))
                usage = {"prompt_tokens": 1, "completion_tokens": body["max_tokens"]}
                client.respond(200, {"choices": [{"index": 0, "text": "x" * body["max_tokens"]}], "usage": usage})
        finally:
            self.running -= 1

    async def hold(self, script: dict[str, Any], client: ClientConnection) -> None:
        """Wait for the script's file, or for the client to leave."""
        while "hold" in script and not Path(script["hold"]).exists() and not client.is_gone:
            await asyncio.sleep(0.005)

    async def stream(self, body: dict[str, Any], script: dict[str, Any], client: ClientConnection) -> None:
        """Send tokens one by one."""
        client.start_stream(200, "text/event-stream; charset=utf-8", {})
        await asyncio.sleep(script.get("first_s", 0.0))
        due_s, count = time.monotonic(), body["max_tokens"]
        for i in range(count):
            if i == script.get("hold_at", 0):
                await self.hold(script, client)
            if client.is_gone:
                self.aborted.append(body.get("user", ""))
                return
            if script.get("die_after") == i:
                os.kill(os.getpid(), signal.SIGKILL)
            reason = "length" if i == count - 1 else None
            event: dict[str, Any] = {"choices": [{"index": 0, "text": f"t{i} ", "finish_reason": reason}]}
            if "stamp" in script:
                event["sent_ns"] = time.monotonic_ns()
            client.write(b"data: " + json.dumps(event).encode() + b"\n\n")
            due_s += script.get("gap_s", self.gap_s)
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
        if (body.get("stream_options") or {}).get("include_usage"):
            usage = {"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": count}}
            client.write(b"data: " + json.dumps(usage).encode() + b"\n\n")
        client.write(b"data: [DONE]\n\n")
        if script.get("hold_at") == count:
            await self.hold(script, client)
        client.end_stream()

    def connection(self) -> ClientConnection:
        """Return the protocol of a new client."""
        return ClientConnection(self.handle, self.connections)


async def serve(args: argparse.Namespace) -> None:
    """Listen until killed; print the port."""
    loop = asyncio.get_running_loop()
    stub = StubEngine(has_state=not args.plain, gap_s=args.gap_s, k_max=args.k_max)
    if args.uds:
        server = await loop.create_unix_server(stub.connection, args.uds, backlog=2048)
    else:
        # as deep as vLLM's: a connection that finds the queue full waits a second for its next try
        server = await loop.create_server(stub.connection, "127.0.0.1", args.port, backlog=2048)
        print(server.sockets[0].getsockname()[1], flush=True)
    stop = asyncio.Event()
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--uds")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--plain", action="store_true", help="without simmoe's own endpoint")
    parser.add_argument("--gap-s", type=float, default=0.0)
    parser.add_argument("--k-max", type=int, default=FACTS["k_max"])
    uvloop.run(serve(parser.parse_args()))
