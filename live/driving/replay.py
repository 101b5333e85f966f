"""Open loop: each request is sent when it is due, whatever became of the others."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import numpy as np

from simmoe.live.driving.life import Life, Target
from simmoe.live.server.warm_up import FIRST_TOKEN_ID
from simmoe.traces.workload import Workload

_LEAD_S = 0.05
"""From the call to the first arrival."""

_SPIN_S = 0.002
"""So long before a request is due timers are no longer trusted: they may ring a millisecond late, or early."""


def random_prompts(workload: Workload, vocab_size: int, seed: int) -> list[list[int]]:
    """Return a prompt of random token ids for each request, of its length.

    The same (seed, row) gives the same tokens, whatever the other rows are.
    """
    rngs = (np.random.default_rng((seed, row)) for row in range(len(workload)))
    lengths = workload.prompt_tokens.tolist()
    return [
        rng.integers(FIRST_TOKEN_ID, vocab_size, length).tolist() for rng, length in zip(rngs, lengths, strict=True)
    ]


async def replay(
    workload: Workload,
    prompts: list[list[int]],
    target: Target,
    stop: asyncio.Event,
    on_progress: Callable[[int, int], None] = lambda sent, done: None,
) -> tuple[list[Life], float]:
    """Send every request at its time; return what became of each, in the workload's order, and when the clock began.

    Args:
        workload: arrivals from 0 s.
        prompts: token ids of each request.
        target: whom to send to.
        stop: once set, nothing more is sent and what is in progress is aborted.
        on_progress: called about once a second with the number sent and the number ended.
    """
    lives = [Life(row) for row in range(len(workload))]
    tasks: set[asyncio.Task[None]] = set()
    stopped = asyncio.ensure_future(stop.wait())
    start_s = time.monotonic() + _LEAD_S
    told_s = start_s

    async def send(life: Life) -> None:
        life.sent_s = time.monotonic()
        life.status = "running"
        row = life.index
        try:
            await target.send(life, prompts[row], int(workload.output_tokens[row]), int(workload.k_qos[row]))
        except asyncio.CancelledError:
            life.end("aborted")
        except Exception as error:
            life.end("aborted" if stop.is_set() else "failed", f"{type(error).__name__}: {error}")

    def tell() -> None:
        nonlocal told_s
        if time.monotonic() - told_s >= 1:
            told_s = time.monotonic()
            num_sent = sum(life.status != "queued" for life in lives)
            on_progress(num_sent, num_sent - len(tasks))

    try:
        for life, arrival_s in zip(lives, workload.arrival_s.tolist(), strict=True):
            life.due_s = start_s + arrival_s
            while (delay_s := life.due_s - time.monotonic()) > 0 and not stop.is_set():
                if delay_s > _SPIN_S:
                    await asyncio.wait((stopped,), timeout=delay_s - _SPIN_S)
                else:
                    await asyncio.sleep(0)
            if stop.is_set():
                break
            task = asyncio.create_task(send(life))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            tell()
        ended = asyncio.gather(*tasks)
        while not ended.done() and not stop.is_set():
            await asyncio.wait((ended, stopped), timeout=1, return_when=asyncio.FIRST_COMPLETED)
            tell()
    finally:
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks)
        stopped.cancel()
    return lives, start_s
