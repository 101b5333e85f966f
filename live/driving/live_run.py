"""One workload against one target: sent, drained, judged, recorded."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import math
import signal
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from simmoe.errors import LiveError
from simmoe.live.driving.endpoint import Endpoint
from simmoe.live.driving.engines import LocalEngines, running_engines
from simmoe.live.driving.lag import SendLag, judge_lag
from simmoe.live.driving.life import Life
from simmoe.live.driving.recording import (
    CLOCKS_FILE,
    HOST_FILE,
    clocks_csv,
    host_csv_gz,
    rank_totals,
    request_columns,
    step_columns,
)
from simmoe.live.driving.replay import random_prompts, replay
from simmoe.live.engine.steps import StepRecord
from simmoe.live.server.launch import EngineLaunch
from simmoe.live.server.stall import STALL_TIMEOUT_S
from simmoe.records import RunRecord
from simmoe.traces.workload import Workload

DRAIN_INTERVAL_S = 2.0
"""How often steps are fetched from the engines: what is lost at most if one dies."""

_LAST_FETCH_S = 30.0
"""How long the last steps are waited for: engines may hang, or be busy."""
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)

Host = LocalEngines | Endpoint


@dataclass(frozen=True, slots=True)
class LiveResult:
    """A live run."""

    record: RunRecord
    ranks: list[dict[str, float]]
    """Sums over each rank's steps; zeros where no steps are known."""
    lag: SendLag
    is_interrupted: bool
    reasons: Mapping[str, int]
    """Why requests failed or were rejected, by reason."""
    steps: Mapping[int, Sequence[StepRecord]]
    """Each rank's steps as its engine recorded them, on the machine's monotonic clock; empty where none are known."""


class _StepKeeper:
    """Fetches steps while the run goes on, so that a dying engine takes few with it."""

    def __init__(self, host: Host) -> None:
        self.steps: dict[int, list[StepRecord]] = defaultdict(list)
        self.facts: dict[int, dict[str, Any]] = {}
        self.lost: set[int] = set()
        """Ranks that did not give their steps out when they were last asked."""
        self.why_lost = "the engine has gone"
        self._host = host

    async def fetch(self) -> None:
        """Fetch what there is."""
        drained = await self._host.drain()
        for rank, (facts, steps) in drained.items():
            self.facts[rank] = facts
            self.steps[rank] += steps
        self.lost = self.facts.keys() - drained.keys()

    async def keep(self, stop: asyncio.Event) -> None:
        """Go on fetching, a last time once ``stop`` is set; a fetch that is given up would take steps with it."""
        is_last = False
        while not is_last:
            with contextlib.suppress(TimeoutError):
                is_last = await asyncio.wait_for(stop.wait(), DRAIN_INTERVAL_S)
            await self.fetch()


def run_live(
    workload: Workload,
    host: AbstractAsyncContextManager[Host],
    manifest: dict[str, Any],
    *,
    vocab_size: int,
    seed: int,
    before_sending: Callable[[RunRecord], None] = lambda record: None,
    on_progress: Callable[[int, int], None] = lambda sent, done: None,
) -> LiveResult:
    """Replay a workload; SIGINT or SIGTERM ends it early, with what was in progress aborted and the rest never sent.

    Args:
        workload: what to replay.
        host: whom to send to.
        manifest: what the caller knows.
        vocab_size: prompts are drawn from it where the engines do not tell theirs.
        seed: of the prompts.
        before_sending: given what is known of the engines, as a record without requests; may refuse them.
        on_progress: see :func:`simmoe.live.driving.replay.replay`.
    Raises:
        LiveError: the target does not come up.
    """
    import uvloop

    handlers = {number: signal.getsignal(number) for number in _STOP_SIGNALS}
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_run(workload, host, manifest, vocab_size, seed, before_sending, on_progress))
    finally:
        for number, handler in handlers.items():  # uvloop leaves its own behind, which do nothing
            signal.signal(number, handler)


async def _run(
    workload: Workload,
    host: AbstractAsyncContextManager[Host],
    manifest: dict[str, Any],
    vocab_size: int,
    seed: int,
    before_sending: Callable[[RunRecord], None],
    on_progress: Callable[[int, int], None],
) -> LiveResult:
    async with host as target:
        result = await run_once(
            workload, target, manifest, vocab_size=vocab_size, seed=seed, before_sending=before_sending,
            on_progress=on_progress,
        )  # fmt: skip
        for number in _STOP_SIGNALS:  # engines are stopped anyway, and the run is not to be had again
            asyncio.get_running_loop().add_signal_handler(number, lambda: None)
        return result


async def run_once(
    workload: Workload,
    target: Host,
    manifest: dict[str, Any],
    *,
    vocab_size: int,
    seed: int,
    before_sending: Callable[[RunRecord], None] = lambda record: None,
    on_progress: Callable[[int, int], None] = lambda sent, done: None,
) -> LiveResult:
    """Replay a workload against what is up, as :func:`run_live` does; engines can serve one run after another.

    The collector of this process's garbage is kept off the prompts: to go through them would make it late.
    """
    stop = asyncio.Event()
    keeper = _StepKeeper(target)
    await keeper.fetch()  # whatever the engines did before is none of this run's
    keeper.steps.clear()
    before_sending(RunRecord(requests={}, manifest=_described(target, manifest, keeper.facts)))
    before = _policies(keeper.facts)
    vocab_size = next((facts["vocab_size"] for facts in keeper.facts.values()), vocab_size)
    prompts = random_prompts(workload, vocab_size, seed)
    for number in _STOP_SIGNALS:
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    is_over = asyncio.Event()
    keeping = asyncio.create_task(keeper.keep(is_over))
    gc.collect()
    gc.freeze()
    try:
        lives, start_s = await replay(workload, prompts, target, stop, on_progress)
        is_over.set()
        await asyncio.wait((keeping,), timeout=_LAST_FETCH_S)
    finally:
        gc.unfreeze()
        keeping.cancel()
        (failure,) = await asyncio.gather(keeping, return_exceptions=True)
    if failure is not None:  # or policies not show their state
        keeper.lost = set(keeper.facts)
        keeper.why_lost = str(failure) or f"no answer within {_LAST_FETCH_S:g} s"
    result = _result(target, workload, lives, start_s, keeper, before, manifest, stop.is_set())
    for number in _STOP_SIGNALS:
        asyncio.get_running_loop().remove_signal_handler(number)
    return result


def _result(
    target: Host,
    workload: Workload,
    lives: list[Life],
    start_s: float,
    keeper: _StepKeeper,
    policies_before: Mapping[int, dict[str, Any]],
    manifest: dict[str, Any],
    is_interrupted: bool,
) -> LiveResult:
    requests = request_columns(workload, lives, start_s, keeper.steps)
    has_steps = any(keeper.steps.values())
    table = step_columns(keeper.steps, start_s, partial(_replays, keeper.facts))
    manifest = _described(target, manifest, keeper.facts)
    ranks = rank_totals(manifest["config"]["num_ranks"], keeper.steps, table, requests)
    policies = _policies(keeper.facts)
    asked = {rank: _asked(told, policies_before[rank]) for rank, told in policies.items() if rank in policies_before}
    for rank, cost in asked.items():
        ranks[rank]["num_plans"] = cost["num_plans"]
    answered = requests["status"] == "finished"
    due_s = start_s + requests["arrival_s"]
    sent_s = np.array([life.sent_s for life in lives])
    sent = ~np.isnan(sent_s)
    ttft_s = (requests["first_token_s"] - requests["arrival_s"])[answered]
    lag = judge_lag((sent_s - due_s)[sent], ttft_s)
    ends_s = [*requests["finished_s"][answered].tolist(), *(life.sent_s - start_s for life in lives)]
    reasons = Counter(f"{life.status}: {life.reason}" for life in lives if life.reason)
    full = {
        **manifest,
        "host": "live",
        "engines": {str(rank): facts for rank, facts in keeper.facts.items()},
        "end_s": max((end_s for end_s in ends_s if not math.isnan(end_s)), default=0.0),
        "ranks": ranks,
        "policy_state": _policy_state(target, policies),
        "policy_cost": {str(rank): cost for rank, cost in asked.items()},
        "send_lag": lag.as_dict(),
        "interrupted": is_interrupted,
        "notes": {
            "reasons": dict(reasons),
            "steps_lost_on_ranks": sorted(keeper.lost),
            "steps_lost_because": keeper.why_lost if keeper.lost else "",
            "gates_opened": sum(cost["gates_opened"] for cost in asked.values()),
        },
        "clocks": {
            "arrival_s": "the sender's: when the request was due",
            "dispatched_s": "the front end's: when it had handed the request to the engine; of an endpoint, as sent",
            "scheduled_s, steps": "the engine's, the device's where its worker tells; absent where none does",
            "first_token_s, finished_s": "the front end's: when it had the token; of an endpoint, the client's",
            CLOCKS_FILE: "the same request's other times; all clocks of one machine are one monotonic clock",
            HOST_FILE: "what each step took of the host, on its engine's clock; absent where its worker does not tell",
        },
    }
    record = RunRecord(requests=requests, manifest=full, steps=table if has_steps else None)
    if isinstance(target, LocalEngines):
        record.files[CLOCKS_FILE] = clocks_csv(requests["request_id"], lives, start_s)
        engine = next(iter(keeper.facts.values()), {})
        host = host_csv_gz(keeper.steps, engine.get("distributed_executor_backend", "uni"))
        if host is not None:
            record.files[HOST_FILE] = host
    full["counts"] = record.counts()
    return LiveResult(record, ranks, lag, is_interrupted, reasons, keeper.steps)


def _described(target: Host, manifest: dict[str, Any], facts: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    """Return a manifest with what the engines, and an endpoint, have told of themselves."""
    if isinstance(target, Endpoint):
        told = target.deployment
        manifest = {
            **manifest,
            **told,
            "versions": {**manifest["versions"], **told.get("versions", {})},
            "target": {**manifest["target"], **told.get("target", {})},
        }
    num_ranks = max((manifest["config"].get("num_ranks") or 1, *(rank + 1 for rank in facts)))
    return {**manifest, "config": {**manifest["config"], **_config(facts, num_ranks)}}


def _policies(facts: Mapping[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
    """Return what each engine tells of the batch policy it hosts, see ``PolicyMixin.policy_stats``."""
    return {rank: told["policy"] for rank, told in facts.items() if "policy" in told}


def _asked(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return how often a policy was asked in between, what that took, and how many plans were overruled."""
    return {name: now[name] - before[name] for name in ("num_plans", "plan_s", "policy_s", "gates_opened")}


def _policy_state(target: Host, policies: Mapping[int, dict[str, Any]]) -> dict[str, Any]:
    """Return the states of the policies that show theirs, under the simulator's names."""
    state = {"route_0": target.dispatcher.snapshot() if isinstance(target, LocalEngines) else None}
    state |= {f"batch_{rank}": told["snapshot"] for rank, told in policies.items()}
    return {name: snapshot for name, snapshot in state.items() if snapshot is not None}


def _replays(facts: Mapping[int, dict[str, Any]], rank: int, num_tokens: int, k: int) -> bool:
    """Return whether a step replays CUDA graphs, as its engine says what it captured."""
    told = facts.get(rank, {})
    return k in told.get("captured_ks", ()) and num_tokens <= max(told.get("captured_sizes", ()), default=0)


def _config(facts: Mapping[int, dict[str, Any]], num_ranks: int) -> dict[str, Any]:
    """Return the engines' limits under the names of the simulator's configuration."""
    config: dict[str, Any] = {"num_ranks": num_ranks}
    if facts:
        first = facts[min(facts)]
        names = (
            "max_num_batched_tokens", "max_num_seqs", "enable_chunked_prefill", "block_size", "num_gpu_blocks",
            "enable_prefix_caching", "async_scheduling", "distributed_executor_backend", "captured_ks",
            "captured_sizes", "uncaptured_k", "graph_gib", "graph_memory_gib",
        )  # fmt: skip
        config |= {"k_max": first["k_max"], "engine": {name: first[name] for name in names if name in first}}
    return config


@asynccontextmanager
async def endpoint_host(
    url: str, model: str, api_key: str, stall_timeout_s: float = STALL_TIMEOUT_S
) -> AsyncIterator[Host]:
    """Yield an endpoint that answers, under its first model's name if ``model`` is empty.

    Raises:
        LiveError: nobody answers there, or it serves no such model.
    """
    models = await Endpoint(url, model, api_key).models()
    if not models or (model and model not in models):
        raise LiveError(f"{url} serves no model '{model}'; it serves {', '.join(models[:5]) or 'none'}")
    yield Endpoint(url, model or models[0], api_key, stall_timeout_s)


@asynccontextmanager
async def engine_host(
    launch: EngineLaunch,
    prefill_s: Callable[[int, int], float],
    on_start: Callable[[str], None],
    stall_timeout_s: float = STALL_TIMEOUT_S,
) -> AsyncIterator[Host]:
    """Yield engines of this machine; see :func:`simmoe.live.driving.engines.running_engines`."""
    async with running_engines(launch, prefill_s, on_start, stall_timeout_s) as engines:
        yield engines
