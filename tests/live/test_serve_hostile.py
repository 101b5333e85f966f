"""Engines that answer anything but what engines answer, and clients that do not behave: in one process, by socket."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterable
from importlib.util import find_spec
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.deployment import IN_TIME_S, NOTICED_S
from tests.support.stub_engine import FACTS

if find_spec("httptools") is None:
    pytest.skip("the server is not installed: pip install 'simmoe[serve]'", allow_module_level=True)

from simmoe.live.server import client as client_module
from simmoe.live.server import replica as replica_module
from simmoe.live.server import upstream
from simmoe.live.server.client import IDLE_TIMEOUT_S, MAX_BODY_BYTES, ClientConnection, Request
from simmoe.live.server.dispatch import Counts
from simmoe.live.server.exchange import Exchange, Outcome
from simmoe.live.server.probe import Answer, Prober, parse_metrics
from simmoe.live.server.replica import HUNG_S, PUBLISH_INTERVAL_S, UNRESPONSIVE_S, Replica
from simmoe.live.server.upstream import Address, fetch

Peer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def run(test: Coroutine[Any, Any, Any]) -> Any:
    """Return what a coroutine returns, in time."""

    async def in_time() -> Any:
        return await asyncio.wait_for(test, IN_TIME_S)

    return asyncio.run(in_time())


@contextlib.asynccontextmanager
async def engine(peer: Peer) -> AsyncIterator[Address]:
    """Yield the address of a server that treats each connection as ``peer`` does, and closes it then."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await peer(reader, writer)
            await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield Address("127.0.0.1", server.sockets[0].getsockname()[1])


def saying(answers: dict[str, bytes], otherwise: bytes = b"") -> Peer:
    """Answer with what there is for the path."""

    async def peer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readline()).split()[1].decode()
        while (await reader.readline()).strip():
            pass
        writer.write(answers.get(path, otherwise))

    return peer


def ok(body: bytes, head: bytes = b"") -> bytes:
    return b"HTTP/1.1 200 OK\r\n%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body)


STATE = {"healthy": True, "num_waiting": 1, "num_running": 2, "kv_used": 0.5, **FACTS}

NO_STATE: dict[str, Any] = {
    "no JSON": b"<html>Welcome to nginx!</html>",
    "a list": b"[]",
    "nested without end": b"[" * 100_000,
    "counts that are none": json.dumps(STATE | {"num_waiting": "many"}).encode(),
    "a count below 0": json.dumps(STATE | {"num_running": -1}).encode(),
    "a share that is none": json.dumps(STATE | {"kv_used": float("nan")}).encode(),
    "no largest budget": json.dumps({name: value for name, value in STATE.items() if name != "k_max"}).encode(),
    "a largest budget of text": json.dumps(STATE | {"k_max": "8"}).encode(),
    "a running budget of text": json.dumps(STATE | {"k_running": "8"}).encode(),
    "a running budget above the largest": json.dumps(STATE | {"k_running": FACTS["k_max"] + 1}).encode(),
    "health that is none": json.dumps(STATE | {"healthy": "perhaps"}).encode(),
}


@pytest.mark.parametrize("body", NO_STATE.values(), ids=list(NO_STATE))
def test_a_server_that_is_none_of_simmoes_is_asked_as_vllms(body: bytes) -> None:
    metrics = ok(b'vllm:num_requests_running{engine="0"} 3.0\nvllm:num_requests_waiting{engine="0"} 1.2.3\n')

    async def test() -> Answer:
        async with engine(saying({"/health": ok(b""), "/metrics": metrics}, ok(body))) as address:
            return await Prober(address).ask(IN_TIME_S)

    answer = run(test())
    assert answer.is_healthy and not answer.facts
    assert (answer.counts.num_running, answer.counts.num_waiting) == (3, 0)


def test_a_server_that_is_not_up_yet_may_still_turn_out_to_be_simmoes() -> None:
    """A proxy answers for it with 502 until it is."""
    answers: dict[str, bytes] = {}

    async def test() -> tuple[Answer, Answer]:
        async with engine(saying(answers, b"HTTP/1.1 502 Bad Gateway\r\ncontent-length: 0\r\n\r\n")) as address:
            prober = Prober(address)
            before = await prober.ask(IN_TIME_S)
            answers["/simmoe/state"] = ok(json.dumps(STATE).encode())
            return before, await prober.ask(IN_TIME_S)

    before, after = run(test())
    assert not before.is_healthy
    assert after.is_healthy and after.facts["k_max"] == 8


@given(st.text(alphabet="0123456789.eE+-infa", max_size=12))
def test_metrics_are_counts_whatever_they_say(value: str) -> None:
    counts = parse_metrics(
        "".join(f"vllm:{name} {value}\n" for name in ("num_requests_waiting", "num_requests_running"))
    )
    assert counts.num_waiting == counts.num_running >= 0


async def close_at_once(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    pass


async def talk_nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"SSH-2.0-OpenSSH_9.6\r\n")


async def stop_in_the_middle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nabc")


async def never_end(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999\r\n\r\n")
    while True:
        writer.write(bytes(1 << 16))
        await writer.drain()


@pytest.mark.parametrize("peer", [close_at_once, talk_nonsense, stop_in_the_middle, never_end])
def test_no_answer_is_an_os_error(peer: Peer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upstream, "MAX_FETCH_BYTES", 1 << 20)

    async def test() -> None:
        async with engine(peer) as address:
            with pytest.raises(ConnectionResetError):
                await fetch(address, "/health", IN_TIME_S)

    run(test())


def test_an_answer_may_be_announced() -> None:
    async def test() -> tuple[int, bytes]:
        early = b"HTTP/1.1 103 Early Hints\r\nlink: </x>\r\n\r\n" + ok(b"body")
        async with engine(saying({}, early)) as address:
            return await fetch(address, "/", IN_TIME_S)

    assert run(test()) == (200, b"body")


@pytest.mark.parametrize(("host", "named"), [("::1", "[::1]:8000"), ("gpu1", "gpu1:8000")])
def test_a_host_is_named_as_in_a_url(host: str, named: str) -> None:
    address = Address.parse(f"http://{named}/v1")
    assert (address.host, str(address)) == (host, f"http://{named}")
    assert f"\r\nhost: {named}\r\n".encode() in address.request("GET", "/health")


@pytest.mark.parametrize("url", ["http://user:secret@gpu1:8000/v1", "http://gpu1/v1?x=1", "http://gpu1/v1#x"])
def test_what_of_a_url_would_not_be_sent_is_refused(url: str) -> None:
    from simmoe.errors import UsageError

    with pytest.raises(UsageError, match=r"^the URL of gpu1 has a .*, which is not sent; write http://host:port$"):
        Address.parse(url)


class Clock:
    """Time as the one who watches a replica sees it, and what each question comes to."""

    def __init__(self, questions: Iterable[Question]) -> None:
        self.now_s = 0.0
        self.num_pauses = 0
        self.is_over = asyncio.Event()
        self._questions = iter(questions)

    def monotonic(self) -> float:
        return self.now_s

    async def ask(self, timeout_s: float) -> Answer:
        question = next(self._questions, None)
        if question is None:
            self.is_over.set()
            await asyncio.Event().wait()
        assert question is not None
        return question(self, timeout_s)


class Watched(Replica):
    """Asks the clock, and waits by it."""

    def __init__(self, clock: Clock) -> None:
        super().__init__(0, Address("gpu1", 8000))
        self._prober = clock  # type: ignore[assignment]
        self._clock = clock

    async def _pause(self, seconds: float) -> None:
        self._clock.now_s += seconds
        self._clock.num_pauses += 1


Question = Callable[[Clock, float], Answer]


def well(clock: Clock, timeout_s: float) -> Answer:
    return Answer(True, Counts(), {})


def ill(clock: Clock, timeout_s: float) -> Answer:
    return Answer(False, Counts(), {})


def silent(clock: Clock, timeout_s: float) -> Answer:
    clock.now_s += timeout_s
    raise TimeoutError


def refused(clock: Clock, timeout_s: float) -> Answer:
    raise ConnectionRefusedError


def reset(clock: Clock, timeout_s: float) -> Answer:
    raise ConnectionResetError


def unreachable(clock: Clock, timeout_s: float) -> Answer:
    raise OSError(errno.EHOSTUNREACH, "No route to host")


def stood_still(clock: Clock, timeout_s: float) -> Answer:
    """The one who asks was stopped for an hour."""
    clock.now_s += 3600.0
    raise TimeoutError


def watched(monkeypatch: pytest.MonkeyPatch, *questions: Question) -> list[tuple[str, float, int]]:
    """Return each state a replica comes to, how long after its last good answer, and the pauses since."""
    changes: list[tuple[str, float, int]] = []

    async def test() -> None:
        clock = Clock(questions)
        monkeypatch.setattr(replica_module, "time", clock)
        replica = Watched(clock)

        def note(replica: Replica, why: str) -> None:
            if replica.state == "up":
                clock.now_s, clock.num_pauses = 0.0, 0
            changes.append((replica.state, clock.now_s, clock.num_pauses))
            if replica.state == "down":
                clock.is_over.set()

        replica.on_change = note
        watching = asyncio.create_task(replica.run())
        await clock.is_over.wait()
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)

    run(test())
    return changes


@pytest.mark.parametrize("first", [refused, reset])
@pytest.mark.parametrize("second", [refused, reset])
def test_who_is_lost_is_asked_again_at_once(monkeypatch: pytest.MonkeyPatch, first: Question, second: Question) -> None:
    _, down = watched(monkeypatch, well, first, second)
    assert down == ("down", PUBLISH_INTERVAL_S, 1), "no pause but the one before the first question"


def test_one_lost_connection_is_no_proof(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [state for state, *_ in watched(monkeypatch, well, reset, well, reset, well)] == ["up"]


@pytest.mark.parametrize("how", [silent, unreachable])
def test_who_is_silent_is_noticed_within_the_bound_and_dead_in_the_end(
    monkeypatch: pytest.MonkeyPatch, how: Question
) -> None:
    changes = watched(monkeypatch, well, *[how] * 1000)
    assert [state for state, *_ in changes] == ["up", "unresponsive", "down"]
    (_, noticed_s, _), (_, dead_s, _) = changes[1:]
    assert noticed_s <= UNRESPONSIVE_S + PUBLISH_INTERVAL_S < NOTICED_S
    assert HUNG_S <= dead_s < HUNG_S + 2 * UNRESPONSIVE_S


def test_an_engine_does_not_die_of_a_router_that_stood_still(monkeypatch: pytest.MonkeyPatch) -> None:
    changes = watched(monkeypatch, well, stood_still, well, stood_still, stood_still, well)
    assert [state for state, *_ in changes] == ["up", "unresponsive", "up", "unresponsive", "up"]


def test_an_engine_that_says_it_is_dead_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [state for state, *_ in watched(monkeypatch, well, silent, ill)] == ["up", "unresponsive", "down"]


class Clients:
    """A server of :class:`ClientConnection` whose requests a test answers itself."""

    def __init__(self) -> None:
        self.requests: asyncio.Queue[tuple[Request, ClientConnection]] = asyncio.Queue()
        self.connections: set[ClientConnection] = set()

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        """Yield a client's two ends."""
        loop = asyncio.get_running_loop()
        async with await loop.create_server(self._connection, "127.0.0.1", 0) as server:
            reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname(), limit=1 << 16)
            yield reader, writer
            writer.close()

    def _connection(self) -> ClientConnection:
        return ClientConnection(lambda *asked: self.requests.put_nowait(asked), self.connections, IN_TIME_S)


ASK = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 2\r\n\r\n{}"


async def gone(connections: set[ClientConnection]) -> None:
    await asyncio.gather(*(connection.closed for connection in connections))


def test_a_request_waits_while_its_host_cannot_be_reached_no_longer_than_it_is_wanted() -> None:
    """A full queue of connections is a host that does not answer: the connection is on its way for minutes."""

    async def test(end: Callable[[Exchange, ClientConnection], None]) -> Outcome:
        clients = Clients()
        with contextlib.ExitStack() as stack:
            full = stack.enter_context(socket.socket())
            full.bind(("127.0.0.1", 0))
            full.listen(0)
            for _ in range(3):
                waiting = stack.enter_context(socket.socket())
                waiting.setblocking(False)
                waiting.connect_ex(full.getsockname())
            async with clients.client() as (_, writer):
                writer.write(ASK)
                _, client = await clients.requests.get()
                exchange = Exchange(client)
                address = Address(*full.getsockname())
                attempt = asyncio.create_task(exchange.attempt(address, b"GET / HTTP/1.1\r\n\r\n", {}, "it"))
                await asyncio.sleep(0)
                end(exchange, client)
                return await attempt

    assert run(test(lambda exchange, client: exchange.abort())) is Outcome.LOST
    assert run(test(lambda exchange, client: client.abort())) is Outcome.GONE


@pytest.mark.parametrize("size", [MAX_BODY_BYTES + 1, 2 * MAX_BODY_BYTES])
def test_a_client_that_is_refused_reads_why_whatever_it_still_sends(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "_LINGER_S", IN_TIME_S)  # it sends as fast as it can, which is not the matter

    async def test() -> bytes:
        clients = Clients()
        async with clients.client() as (reader, writer):
            writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size)
            writer.write(bytes(size))
            await writer.drain()
            answer = await reader.read()
            writer.close()
            await gone(clients.connections)
            return answer

    answer = run(test())
    assert answer.startswith(b"HTTP/1.1 413 ")
    assert b"connection: close" in answer


def test_headers_after_a_body_are_none() -> None:
    async def test() -> Request:
        clients = Clients()
        async with clients.client() as (_, writer):
            writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n")
            writer.write(b"2\r\n{}\r\n0\r\nauthorization: Bearer x\r\n\r\n")
            request, _ = await clients.requests.get()
            return request

    request = run(test())
    assert request.body == b"{}"
    assert "authorization" not in request.headers


def test_an_answer_to_head_has_no_body() -> None:
    async def test() -> bytes:
        clients = Clients()
        async with clients.client() as (reader, writer):
            writer.write(b"HEAD /health HTTP/1.1\r\nhost: x\r\n\r\nGET /health HTTP/1.1\r\nhost: x\r\n\r\n")
            for _ in range(2):
                _, client = await clients.requests.get()
                client.respond(200, b"body")
            client.close()
            return await reader.read()

    head, get = run(test()).split(b"HTTP/1.1 200 OK")[1:]
    assert head.endswith(b"content-length: 4\r\n\r\n")
    assert get.endswith(b"content-length: 4\r\n\r\nbody")


LARGE = bytes(1 << 24)
"""More than a socket's buffers hold."""


def test_the_next_request_begins_once_the_last_answer_is_taken() -> None:
    """Else a client that asks and never reads would have answer after answer kept for it."""

    async def test() -> None:
        clients = Clients()
        async with clients.client() as (reader, writer):
            writer.write(2 * ASK)
            _, client = await clients.requests.get()
            client.respond(200, LARGE)
            await asyncio.sleep(0)
            assert clients.requests.empty()
            await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(len(LARGE))
            await clients.requests.get()

    run(test())


@pytest.mark.parametrize("is_stream", [False, True])
def test_a_client_that_takes_nothing_is_given_up(is_stream: bool) -> None:
    async def test() -> None:
        clients = Clients()
        async with clients.client() as (_, writer):
            writer.write(ASK)
            _, client = await clients.requests.get()
            client._idle_timeout_s = 0.01
            if is_stream:
                client.start_stream(200, "text/event-stream", {})
                client.write(LARGE)
            else:
                client.respond(200, LARGE)
            await gone(clients.connections)

    run(test())


class InstantLoop(asyncio.SelectorEventLoop):
    """Its time stands still while anything is to be done, and passes at once where nothing is to be done before."""

    _now_s = 0.0

    def time(self) -> float:
        return self._now_s

    def _run_once(self) -> None:
        if self._scheduled and not self._ready:  # type: ignore[attr-defined]
            self._now_s = max(self._now_s, self._scheduled[0].when())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]


class Reader(asyncio.Transport):
    """A client that has still to take some bytes."""

    def __init__(self, num_unsent: int) -> None:
        super().__init__()
        self.num_unsent = num_unsent
        self.is_aborted = False

    def get_write_buffer_size(self) -> int:
        return self.num_unsent

    def abort(self) -> None:
        self.is_aborted = True


def test_a_client_that_reads_slowly_is_not() -> None:
    """It may take far longer over its answer than it may take nothing of it."""

    async def test() -> None:
        reader = Reader(10)
        client = ClientConnection(lambda request, client: None, set())
        client.connection_made(reader)
        client.pause_writing()
        while reader.num_unsent:
            await asyncio.sleep(0.9 * IDLE_TIMEOUT_S)
            reader.num_unsent -= 1
            assert not reader.is_aborted
        reader.num_unsent = 10
        await asyncio.sleep(2 * IDLE_TIMEOUT_S)
        assert reader.is_aborted

    with asyncio.Runner(loop_factory=InstantLoop) as runner:
        runner.run(test())
