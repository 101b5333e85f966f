"""Asking an engine's server how it is: simmoe's endpoint where it has one, else vLLM's ``/health``, ``/metrics``."""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

from simmoe.live.server.answers import MALFORMED
from simmoe.live.server.dispatch import Counts
from simmoe.live.server.stall import STALL_TIMEOUT_S
from simmoe.live.server.state import STATE_PATH
from simmoe.live.server.upstream import Address, fetch

_GAUGES = {
    "vllm:num_requests_waiting": "num_waiting",
    "vllm:num_requests_running": "num_running",
    "vllm:kv_cache_usage_perc": "kv_used",
}
_LIMITS = ("k_max", "default_k", "max_num_seqs", "max_num_batched_tokens")
"""Of an engine, for the router."""

_MOST = 1 << 53
"""More is no count."""

_SAMPLE = re.compile(r"^([a-z_:]+)(?:\{[^}]*\})? ([0-9.eE+-]+)$", re.MULTILINE)


class Answer(NamedTuple):
    """What an engine's server said."""

    is_healthy: bool
    counts: Counts
    facts: dict[str, Any]
    """The engine's limits, from simmoe's own endpoint; empty from any other server."""
    reason: str = "its server says that the engine is dead"
    """Why it is not healthy, where it is not."""
    metrics: str = ""
    """Those of a server that is none of simmoe's."""


class Prober:
    """Asks one server; finds out by itself which way it can be asked.

    Args:
        address: where it listens.
        stall_timeout_s: an engine that says that it has made no step for this long, though it has requests, is dead.
    """

    def __init__(self, address: Address, stall_timeout_s: float = STALL_TIMEOUT_S) -> None:
        self._address = address
        self._stall_timeout_s = stall_timeout_s
        self._has_state: bool | None = None

    async def ask(self, timeout_s: float) -> Answer:
        """Return the server's answer.

        Raises:
            OSError: it did not answer; ConnectionRefusedError, ConnectionResetError and FileNotFoundError mean that
                nobody is there, TimeoutError that nobody answered in time.
        """
        if self._has_state is not False:
            status, body = await fetch(self._address, STATE_PATH, timeout_s)
            answer = _parse_state(body, self._stall_timeout_s) if status == 200 else None
            if answer is not None:
                self._has_state = True
                return answer
            if self._has_state:
                return _ill(STATE_PATH, status)
        status, _ = await fetch(self._address, "/health", timeout_s)
        if status != 200:
            return _ill("/health", status)
        self._has_state = False  # it is well, so what it answered before was no fault of the moment
        status, body = await fetch(self._address, "/metrics", timeout_s)
        metrics = body.decode("utf-8", "replace") if status == 200 else ""
        return Answer(True, parse_metrics(metrics), {}, metrics=metrics)


def _ill(path: str, status: int) -> Answer:
    return Answer(False, Counts(), {}, f"it answers {path} with {status}")


def _parse_state(body: bytes, stall_timeout_s: float) -> Answer | None:
    """Return what simmoe's endpoint says; None if something else speaks, a proxy that answers any path."""
    try:
        facts = json.loads(body)
        counts = Counts(
            facts.pop("num_waiting"), facts.pop("num_running"), facts.pop("kv_used"), facts.pop("k_running", None)
        )
        is_healthy = facts.pop("healthy")
        is_stalled = bool(facts.pop("stalled_s", 0.0) >= stall_timeout_s)
        k_running = 0 if counts.k_running is None else counts.k_running
        numbers = (counts.num_waiting, counts.num_running, k_running, *(facts[name] for name in _LIMITS))
    except MALFORMED:
        return None
    has_numbers = all(type(number) is int and 0 <= number < _MOST for number in numbers)
    has_numbers = has_numbers and k_running <= facts["k_max"]
    has_share = isinstance(counts.kv_used, int | float) and counts.kv_used >= 0.0
    if not (has_numbers and has_share and isinstance(is_healthy, bool)):
        return None
    if is_stalled:
        return Answer(False, counts, facts, f"it has requests and has made no step for {stall_timeout_s:g} s")
    return Answer(is_healthy, counts, facts)


def parse_metrics(text: str) -> Counts:
    """Return the counts in vLLM's Prometheus exposition; what it does not name, or gives no count of, is 0.

    >>> parse_metrics('vllm:num_requests_running{engine="0",model_name="m"} 3.0')
    Counts(num_waiting=0, num_running=3, kv_used=0.0, k_running=None)
    """
    found: dict[str, list[float]] = {}
    for name, value in _SAMPLE.findall(text):
        if name in _GAUGES:
            found.setdefault(_GAUGES[name], []).append(_count(value))
    kv_used = found.get("kv_used", [0.0])
    return Counts(int(sum(found.get("num_waiting", ()))), int(sum(found.get("num_running", ()))), max(kv_used))


def _count(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        return 0.0
    return value if 0.0 <= value < _MOST else 0.0
