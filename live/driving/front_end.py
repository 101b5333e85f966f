"""One engine's front end: a process that hands requests to vLLM's ``AsyncLLM`` and notes what it hears of them.

As ``vllm serve`` has one API server an engine, a live run has one of these: a process that takes in the tokens of
several engines is busy with them when requests arrive. Like vLLM's server it keeps the garbage collector off what its
start left behind (a full collection of it stops a process for half a second), and it lets vLLM hand over each request's
first token and its last alone (``stream_interval``): nothing else is asked of a stream here.

``python -m simmoe.live.driving.front_end FD ARGUMENT...``, the arguments those of ``vllm serve``. Messages are JSON
lines on the inherited socket FD:

========================================================= ==========================================================
to it: ``["send", id, prompt, output_tokens, k]``         a request
``["abort", id]``                                         stop one
``["call", id, method, arguments]``                       call the engine's scheduler
``["call_workers", id, method, arguments]``               call each of the engine's workers
from it: ``["up", facts]``, ``["down", reason]``          the engine has started, or has not
``["counts", [num_waiting, ...], number, stalled_s]``     every PUBLISH_INTERVAL_S: ``Counts``; requests received; how
                                                          long it has had some and made no step
``["end", id, values]``                                   a request has ended: fields of ``Life``
``["answer", id, value, error]``                          what a call returned
``["dead"]``                                              before an answer or an end: the engine has died
========================================================= ==========================================================
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Coroutine, Sequence
from typing import Any

from simmoe.errors import LiveError
from simmoe.live.driving.life import Life
from simmoe.live.engine.transport import K_ARG
from simmoe.live.server.state import EngineCounts, engine_state

PUBLISH_INTERVAL_S = 0.1
"""How often an engine's counts reach the route policy, as from vLLM's coordinator."""

LINE_BYTES = 1 << 26
"""Longest message."""

STOP_S = 20
"""How long it may take to stop its engine when its parent is gone."""

_PR_SET_PDEATHSIG = 1


class FrontEnd:
    """The process's side of the conversation."""

    def __init__(self, llm: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._llm = llm
        self._reader = reader
        self._writer = writer
        self._num_received = 0
        self._tasks: dict[int, asyncio.Task[None]] = {}

    async def serve(self) -> None:
        """Do what is asked until the socket closes."""
        try:
            facts = await self._answer(engine_state(self._llm))
        except LiveError as error:
            self._tell("down", str(error))
            return
        self._tell("up", facts)
        publishing = asyncio.create_task(self._publish())
        with contextlib.suppress(ConnectionError):  # closed with something unread
            while line := await self._reader.readline():
                what, number, *rest = json.loads(line)
                if what == "send":
                    self._num_received += 1
                    self._start(number, self._send(number, *rest))
                elif what == "abort":
                    if number in self._tasks:
                        self._tasks[number].cancel()
                else:
                    self._start(number, self._call(number, what == "call_workers", *rest))
        publishing.cancel()

    def _start(self, key: int, work: Coroutine[Any, Any, None]) -> None:
        task = self._tasks[key] = asyncio.create_task(work)
        task.add_done_callback(lambda _: self._tasks.pop(key))

    async def _send(self, number: int, prompt: list[int], output_tokens: int, k: int) -> None:
        from vllm import SamplingParams
        from vllm.exceptions import VLLMValidationError
        from vllm.sampling_params import RequestOutputKind

        life = Life(number, received_s=time.monotonic())
        parameters = SamplingParams(
            max_tokens=output_tokens, min_tokens=output_tokens, ignore_eos=True, temperature=1.0, detokenize=False,
            output_kind=RequestOutputKind.DELTA, stream_interval=output_tokens, extra_args={K_ARG: k},
        )  # fmt: skip
        stream: Any = None
        try:
            stream = await self._llm.add_request(f"live-{number}", {"prompt_token_ids": prompt}, parameters)
            life.dispatched_s = time.monotonic()
            while life.status != "finished":
                output = stream.get_nowait() or await stream.get()
                life.finished_s = time.monotonic()
                if not life.output_tokens:
                    life.first_token_s = life.finished_s
                life.output_tokens += len(output.outputs[0].token_ids)
                _note(life, output.metrics)
                if output.finished:
                    life.end("finished")
        except asyncio.CancelledError:
            if stream is not None:
                await self._llm.abort(stream.request_id, internal=True)
            life.end("aborted")
        except (ValueError, VLLMValidationError) as error:  # a request this engine can never serve
            life.end("rejected", str(error))
        except Exception as error:
            self._tell_death()
            life.end("failed", f"{type(error).__name__}: {error}")
        self._tell("end", number, life.told())

    async def _call(self, number: int, of_workers: bool, method: str, arguments: list[Any]) -> None:
        try:
            if of_workers:
                value = await self._answer(self._llm.collective_rpc(method, args=tuple(arguments)))
            else:
                core = self._llm.engine_core
                value = await self._answer(core.call_utility_async("simmoe_scheduler", method, arguments))
        except Exception as error:
            self._tell_death()
            self._tell("answer", number, None, f"{type(error).__name__}: {error}")
        else:
            self._tell("answer", number, value, "")

    async def _answer(self, call: Coroutine[Any, Any, Any]) -> Any:
        """Return what the engine answers. One that has died does not, and vLLM would have whoever asked wait for ever.

        Raises:
            LiveError: it has died.
        """
        asked = asyncio.ensure_future(call)
        while not asked.done():
            is_dead = self._llm.errored  # what it said before it died has arrived by then
            await asyncio.wait((asked,), timeout=PUBLISH_INTERVAL_S)
            if is_dead and not asked.done():
                asked.cancel()
                raise LiveError("the engine has died")
        return asked.result()

    async def _publish(self) -> None:
        counts = EngineCounts.of(self._llm)
        while True:
            told = (counts.num_waiting, counts.num_running, counts.kv_used, counts.k_running)
            self._tell("counts", told, self._num_received, counts.stalled_s())
            await asyncio.sleep(PUBLISH_INTERVAL_S)

    def _tell_death(self) -> None:
        if self._llm.errored:
            self._tell("dead")

    def _tell(self, *message: Any) -> None:
        self._writer.write(json.dumps(message).encode() + b"\n")


def _note(life: Life, metrics: Any) -> None:
    """Take over the engine's own times of a request."""
    if metrics is not None:
        life.queued_s, life.scheduled_s = metrics.queued_ts, metrics.scheduled_ts
        life.first_output_s, life.last_output_s = metrics.first_token_ts, metrics.last_token_ts
        life.num_preemptions = metrics.num_preemptions
        # the call that hands a request over may return after the engine has it
        life.dispatched_s = min(life.dispatched_s, life.queued_s)


def _start_engine(arguments: Sequence[str]) -> Any:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser
    from vllm.v1.engine.async_llm import AsyncLLM

    parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    return AsyncLLM.from_engine_args(AsyncEngineArgs.from_cli_args(parser.parse_args(list(arguments))))


async def _main(connection: socket.socket, arguments: Sequence[str]) -> None:
    reader, writer = await asyncio.open_connection(sock=connection, limit=LINE_BYTES)
    try:
        llm = _start_engine(arguments)
    except (Exception, SystemExit) as error:
        writer.write(json.dumps(["down", f"{type(error).__name__}: {error}"]).encode() + b"\n")
        await writer.drain()
        return
    from vllm.utils.gc_utils import freeze_gc_heap

    freeze_gc_heap()
    try:
        await FrontEnd(llm, reader, writer).serve()
    finally:
        llm.shutdown()


def stop(*_: object) -> None:
    """End this process; what it leads is killed if it has not ended in time.

    An engine whose policy never returns does not listen, and would be waited for, and keep its device, for ever.
    """
    signal.signal(signal.SIGALRM, lambda *_: os.killpg(os.getpid(), signal.SIGKILL))
    signal.alarm(STOP_S)
    sys.exit(0)


def main() -> None:
    """Serve until the socket closes, or the process that made it is gone."""
    import uvloop

    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    signal.signal(signal.SIGTERM, stop)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_main(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:]))


if __name__ == "__main__":
    main()
