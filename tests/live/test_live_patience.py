"""An endpoint that hangs is waited for so long and no longer; one that gets on, for as long as it does."""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable
from importlib.util import find_spec

import pytest

from simmoe.cli import run as cli
from tests.support.deployment import IN_TIME_S

if find_spec("httptools") is None:
    pytest.skip("the server is not installed: pip install 'simmoe[serve]'", allow_module_level=True)

from simmoe.live.driving.endpoint import Endpoint
from simmoe.live.driving.life import Life
from simmoe.live.driving.patience import Patience

LIMIT_S = 1.0
GIVEN_UP = f"nothing came of any answer for {LIMIT_S:g} s, nor did an engine show work"


def run(test: Awaitable[None]) -> None:
    async def in_time() -> None:
        await asyncio.wait_for(test, IN_TIME_S)

    asyncio.run(in_time())


def always(metrics: str) -> Callable[[float], Awaitable[str]]:
    async def ask(timeout_s: float) -> str:
        return metrics

    return ask


@pytest.mark.parametrize("metrics", ["vllm:kv_cache_usage_perc 0.5", "", "llama_tokens_total 7"])
def test_all_that_is_waited_for_is_given_up_at_once_and_what_comes_later_is_not(metrics: str) -> None:
    async def test() -> None:
        patience = Patience(LIMIT_S, always(metrics))

        async def wait() -> None:
            with pytest.raises(TimeoutError, match=f"^{GIVEN_UP}$"):
                async with patience.waiting():
                    await asyncio.Event().wait()

        await asyncio.gather(wait(), wait())
        async with patience.waiting():
            await asyncio.sleep(LIMIT_S / 2)
        await wait()

    run(test())


def test_work_that_an_engine_shows_is_waited_for() -> None:
    """Its metrics are asked for once in a quarter of the limit."""

    async def test() -> None:
        shown, done = itertools.count(), asyncio.Event()

        async def ask(timeout_s: float) -> str:
            number = next(shown)
            if number == 12:
                done.set()
            return f"vllm:kv_cache_usage_perc {number}"

        async with Patience(LIMIT_S, ask).waiting():
            await done.wait()

    run(test())


def test_an_answer_that_gets_on_is_enough_for_all_and_costs_the_endpoint_nothing() -> None:
    async def test() -> None:
        num_asked = 0

        async def ask(timeout_s: float) -> str:
            nonlocal num_asked
            num_asked += 1
            return ""

        patience, loop = Patience(LIMIT_S, ask), asyncio.get_running_loop()
        async with patience.waiting():
            end_s = loop.time() + 3 * LIMIT_S
            while loop.time() < end_s:
                patience.heard()
                await asyncio.sleep(0.01)
        assert num_asked == 0

    run(test())


def test_for_ever_is_for_ever() -> None:
    async def test() -> None:
        async with Patience(math.inf, always("")).waiting():
            assert len(asyncio.all_tasks()) == 2  # this one, and that which waits for it

    run(test())


@pytest.mark.parametrize("command", [["live", "run"], ["serve"], ["validate", "--out", "out"]])
@pytest.mark.parametrize(("value", "told"), [("nan", "is nan; give seconds, or inf"), ("0.5", "not in the range x>=1")])
def test_what_is_no_time_to_wait_is_refused(
    command: list[str], value: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli([*command, "--url", "http://127.0.0.1:9", "--stall-timeout-s", value]) == 2
    assert told in capsys.readouterr().err


def test_who_is_cancelled_is_cancelled_and_nothing_goes_on_looking() -> None:
    async def test() -> None:
        patience = Patience(LIMIT_S, always(""))

        async def wait() -> None:
            async with patience.waiting():
                await asyncio.Event().wait()

        waiting = asyncio.create_task(wait())
        await asyncio.sleep(0)
        assert patience._looking is not None
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert patience._looking is None

    run(test())


def test_a_request_to_an_endpoint_that_hangs_has_failed_and_says_why() -> None:
    """Whether it hangs before the head of an answer or after it: a head is sent before an engine has done anything."""

    async def test() -> None:
        answers = itertools.cycle([b"", b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"])

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(next(answers))
            await reader.read()
            writer.close()

        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            endpoint = Endpoint(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "tiny", "", LIMIT_S)
            lives = [Life(0, sent_s=0.0), Life(1, sent_s=0.0)]
            await asyncio.gather(*(endpoint.send(life, [1, 2], 2, 1) for life in lives))
            assert [(life.status, life.reason) for life in lives] == 2 * [("failed", GIVEN_UP)]

    run(test())
