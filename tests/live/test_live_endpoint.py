"""OpenAI endpoints of all kinds as a run drives them; steps from engines on a machine whose clock is another."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
import time
from collections.abc import Callable, Coroutine
from importlib.util import find_spec
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simmoe.errors import LiveError
from simmoe.live.driving.events import EventStream
from simmoe.live.driving.life import Life
from simmoe.live.engine.steps import StepRecord

if find_spec("httptools") is None:
    pytest.skip("the server is not installed: pip install 'simmoe[serve]'", allow_module_level=True)

from simmoe.live.driving import endpoint
from simmoe.live.driving.endpoint import Endpoint

STEP = StepRecord(0, 10.0, 10.1, 11.0, 11.1, 8, 36, 1, 0, 0, 4, 4, 32, 0, 1, 0)
TIMED = STEP._replace(step=1, device_start_s=10.2, device_end_s=10.9, launch_s=0.3)
TIMES = ("schedule_start_s", "schedule_end_s", "output_s", "update_end_s", "device_start_s", "device_end_s")


def drained(ahead_s: float) -> list[StepRecord]:
    """Return both steps as a client on this machine has them, the server's clock being so far ahead of its own."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        rank: dict[str, Any] = {"monotonic_s": time.monotonic() + ahead_s, "steps": [STEP, TIMED]}
        body = json.dumps({"ranks": {"0": rank}, "deployment": {"flags": ["--some"]}}).encode()
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        await writer.drain()
        writer.close()
        closed.set()

    closed = asyncio.Event()

    async def run() -> list[StepRecord]:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            endpoint = Endpoint(f"http://127.0.0.1:{port}", "tiny")
            steps = (await endpoint.drain())[0][1]
            assert endpoint.deployment == {"flags": ["--some"]}
            await closed.wait()  # no connection is left to whoever collects it
            return steps

    return asyncio.run(run())


def test_one_machine_has_one_clock() -> None:
    assert drained(0.0) == [STEP, TIMED]


@pytest.mark.parametrize("ahead_s", [1000.0, -1000.0])
def test_all_times_of_a_step_move_together(ahead_s: float) -> None:
    plain, timed = drained(ahead_s)
    assert plain.device_end_s is None and plain.launch_s is None
    assert timed.launch_s == TIMED.launch_s, "a duration stays"
    moved_s = plain.output_s - STEP.output_s
    assert moved_s == pytest.approx(-ahead_s, abs=endpoint._TIMEOUT_S / 2), "the answer took less than twice that"
    for name in TIMES:
        assert getattr(timed, name) - getattr(TIMED, name) == pytest.approx(moved_s)


def asked(response: bytes, call: Callable[[Endpoint], Coroutine[Any, Any, Any]]) -> Any:
    """Return what a call of an endpoint returns that answers everything with ``response``, and closes."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        if length := re.search(rb"content-length: (\d+)", head):
            await reader.readexactly(int(length[1]))
        writer.write(response)
        await writer.drain()
        writer.close()

    async def run() -> Any:
        async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await call(Endpoint(f"http://127.0.0.1:{port}", "tiny"))

    return asyncio.run(run())


def sent(response: bytes) -> Life:
    """Return what becomes of a request for two tokens."""
    life = Life(0, sent_s=0.0)
    asked(response, lambda endpoint: endpoint.send(life, [1, 2], 2, 1))
    return life


def streamed(body: bytes, length: int | None = None, head: bytes = b"") -> bytes:
    size = len(body) if length is None else length
    return b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n%bcontent-length: %d\r\n\r\n%b" % (head, size, body)


TOKEN = b'data: {"choices": [{"index": 0, "text": "x"}]}\n\n'
USAGE = b'data: {"choices": [], "usage": {"completion_tokens": 2}}\n\n'
DONE = b"data: [DONE]\n\n"

ANSWERS = {
    "vLLM's": TOKEN + TOKEN + USAGE + DONE,
    "no usage": TOKEN + TOKEN + DONE,
    "two tokens in an event": TOKEN + USAGE + DONE,
    "carriage returns": (TOKEN + USAGE + DONE).replace(b"\n", b"\r\n"),
    "comments to keep it alive": b": ping\n\n" + TOKEN + b": ping\n\n" + USAGE + DONE,
    "named events": (b"event: completion\nid: 7\n" + TOKEN) + USAGE + DONE,
    "no space after the colon": (TOKEN + USAGE + DONE).replace(b"data: ", b"data:"),
    "data in two lines": TOKEN.replace(b'"choices": ', b'"choices":\ndata: ') + USAGE + DONE,
    "usage of null": TOKEN + TOKEN.replace(b"]}", b'], "usage": null}') + USAGE + DONE,
}


@pytest.mark.parametrize("body", ANSWERS.values(), ids=list(ANSWERS))
def test_whoever_speaks_openais_completions_is_understood(body: bytes) -> None:
    life = sent(streamed(body))
    assert (life.status, life.reason, life.output_tokens) == ("finished", "", 2)
    assert 0 < life.first_token_s <= life.finished_s


@given(st.sampled_from(list(ANSWERS.values())), st.data())
def test_events_do_not_depend_on_how_they_arrive(body: bytes, data: st.DataObject) -> None:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(body)))))
    whole, pieces = EventStream(), EventStream()
    parts = (body[start:end] for start, end in itertools.pairwise([0, *cuts, len(body)]))
    assert [event for part in parts for event in pieces.feed(part)] == whole.feed(body)


FAILURES = {
    "lost in the middle": (streamed(TOKEN, length=1000), "failed", "the connection was lost"),
    "nothing": (b"", "failed", "the connection was lost"),
    "no HTTP": (b"SSH-2.0-OpenSSH\r\n", "failed", "the connection was lost"),
    "no end": (streamed(TOKEN + TOKEN), "failed", "the answer ended without its [DONE]"),
    "one token short": (streamed(TOKEN + DONE), "failed", "1 tokens came where 2 were asked for"),
    "no JSON": (streamed(b"data: <html>\n\n" + DONE), "failed", "an event is none of a completion's: <html>"),
    "a number": (streamed(b"data: 5\n\n" + DONE), "failed", "an event is none of a completion's: 5"),
    "nonsense for usage": (
        streamed(TOKEN + b'data: {"usage": {"completion_tokens": null}}\n\n' + DONE), "failed",
        'an event is none of a completion\'s: {"usage": {"completion_tokens": null}}',
    ),
    "an error": (streamed(b'data: {"error": {"message": "died"}}\n\n' + DONE), "failed", "died"),
    "an error of text": (streamed(b'data: {"error": "died"}\n\n' + DONE), "failed", "died"),
    "a page": (streamed(b"<html></html>"), "failed", "the answer ended without its [DONE]"),
    "moved": (b"HTTP/1.1 307 Moved\r\nlocation: /x\r\ncontent-length: 0\r\n\r\n", "failed", "307"),
    "at fault": (b"HTTP/1.1 500 Oh\r\ncontent-length: 2\r\n\r\nno", "failed", "500: no"),
    "overloaded": (b'HTTP/1.1 429 Oh\r\ncontent-length: 17\r\n\r\n{"error": "busy"}', "rejected", "busy"),
}  # fmt: skip


@pytest.mark.parametrize(("response", "status", "reason"), FAILURES.values(), ids=list(FAILURES))
def test_what_is_no_answer_is_a_failure_with_a_reason(response: bytes, status: str, reason: str) -> None:
    life = sent(response)
    assert (life.status, life.reason[: len(reason)]) == (status, reason)


@pytest.mark.parametrize(("rank", "known"), [(b"3", 3), (b"\xb2", 0), (b"-1", 0), (b"9" * 5000, 0), (b"", 0)])
def test_a_rank_is_a_number_or_the_first(rank: bytes, known: int) -> None:
    assert sent(streamed(TOKEN + USAGE + DONE, head=b"x-simmoe-rank: %b\r\n" % rank)).dp_rank == known


def ok(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)


@pytest.mark.parametrize(
    "body", [b"<html>", b"[]", b"{}", b'{"data": 1}', b'{"data": [1]}', b'{"data": [{}]}', b"[" * 10**5]
)
def test_a_server_without_models_is_told_from_one_with(body: bytes) -> None:
    assert asked(ok(b'{"data": [{"id": "tiny"}]}'), lambda endpoint: endpoint.models()) == ["tiny"]
    with pytest.raises(LiveError, match="answers /v1/models with no list of models"):
        asked(ok(body), lambda endpoint: endpoint.models())


@pytest.mark.parametrize("body", [b"<html>", b"[]", b"{}", b"5", b"[" * 10**5])
def test_a_server_that_answers_any_path_has_no_steps(body: bytes) -> None:
    assert asked(ok(body), lambda endpoint: endpoint.drain()) == {}


@pytest.mark.parametrize("facts", [{"steps": [[1, 2]]}, {"steps": 5}, {}, 5])
def test_steps_of_another_version_are_refused(facts: Any) -> None:
    rank = {"monotonic_s": 1.0, **facts} if isinstance(facts, dict) else facts
    with pytest.raises(LiveError, match="use the same version of simmoe there and here"):
        asked(ok(json.dumps({"ranks": {"0": rank}}).encode()), lambda endpoint: endpoint.drain())
