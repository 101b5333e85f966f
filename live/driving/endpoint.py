"""Requests over HTTP, to ``simmoe serve``, vLLM, or anything that speaks OpenAI's completions."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from typing import Any

from simmoe.errors import LiveError, UsageError
from simmoe.live.driving.events import EventStream
from simmoe.live.driving.life import Life
from simmoe.live.driving.patience import Patience
from simmoe.live.engine.steps import StepRecord
from simmoe.live.engine.transport import K_ARG
from simmoe.live.server.answers import MALFORMED, read_models
from simmoe.live.server.stall import STALL_TIMEOUT_S
from simmoe.live.server.state import STEPS_PATH
from simmoe.live.server.upstream import Address, UnusableServer, connect, described, fetch

_TIMEOUT_S = 30.0
"""A ``simmoe serve`` may wait a third of that for one of its engines before it answers itself."""
_MAX_ERROR_BYTES = 1 << 16
_RANK = re.compile("[0-9]{1,6}")
_REJECTIONS = (400, 401, 404, 413, 422, 429, 503)


class _Answer:
    """A streamed completion, read as it comes."""

    def __init__(self, life: Life, on_part: Callable[[], None]) -> None:
        self._life = life
        self._on_part = on_part
        self._events = EventStream()
        self._num_chunks = 0
        self.status = 0
        self.content = b""
        self.error = ""
        self.is_done = False

    def head(self, status: int, headers: dict[str, str]) -> None:
        """Note status and rank."""
        self.status = status
        rank = headers.get("x-simmoe-rank", "")
        self._life.dp_rank = int(rank) if _RANK.fullmatch(rank) else 0

    def body(self, data: bytes) -> None:
        """Note times and counts of the events that are whole."""
        if self.status != 200:
            self.content = (self.content + data)[:_MAX_ERROR_BYTES]
            return
        self._on_part()
        now_s = time.monotonic()
        for event in self._events.feed(data):
            if event == b"[DONE]":
                self.is_done = True
                continue
            try:
                self._take(json.loads(event), now_s)
            except MALFORMED:
                self.error = (
                    self.error or f"an event is none of a completion's: {event[:80].decode('utf-8', 'replace')}"
                )

    def _take(self, chunk: dict[str, Any], now_s: float) -> None:
        if "error" in chunk:
            error = chunk["error"]
            self.error = str(error.get("message", error) if isinstance(error, dict) else error)
            return
        usage = chunk.get("usage")
        num_tokens = int(usage["completion_tokens"]) if usage else None
        if chunk.get("choices"):
            self._num_chunks += 1
            if self._num_chunks == 1:
                self._life.first_token_s = now_s
            self._life.finished_s = now_s
        self._life.output_tokens = self._num_chunks if num_tokens is None else num_tokens

    def failure(self, *, is_complete: bool) -> str:
        """Return why it is no answer; empty if it is one."""
        if self.status != 200 and self.status:
            return f"{self.status}: {_message(self.content)}" if self.content else f"{self.status}"
        if self.error:
            return self.error
        if not is_complete:
            return "the connection was lost"
        return "" if self.is_done else "the answer ended without its [DONE]"


class Endpoint:
    """An OpenAI endpoint.

    Args:
        url: with or without ``/v1``.
        model: as the endpoint names it.
        api_key: sent along; empty: none.
        stall_timeout_s: how long requests are waited for while none of them gets on, see :class:`Patience`.
    Raises:
        UsageError: the URL is none of a server, or the key cannot be sent.
    """

    def __init__(self, url: str, model: str, api_key: str = "", stall_timeout_s: float = STALL_TIMEOUT_S) -> None:
        self._address = Address.parse(url)
        if not (api_key.isascii() and api_key.isprintable()):
            raise UsageError("the API key has characters that no header can hold; give --api-key in printable ASCII")
        self._model = model
        self.deployment: dict[str, Any] = {}
        """What a ``simmoe serve`` says of the engines it started, for the manifest; known once drained."""
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._patience = Patience(stall_timeout_s, self._metrics)

    async def send(self, life: Life, prompt: list[int], output_tokens: int, k: int) -> None:
        """Send one request and read its answer."""
        body = {
            "model": self._model, "prompt": prompt, "max_tokens": output_tokens, "min_tokens": output_tokens,
            "ignore_eos": True, "temperature": 0.0, "stream": True, "stream_options": {"include_usage": True},
            "vllm_xargs": {K_ARG: k},
        }  # fmt: skip
        answer = _Answer(life, self._patience.heard)
        request = self._address.request("POST", "/v1/completions", self._headers, json.dumps(body).encode())
        try:
            async with self._patience.waiting():
                connection = await connect(self._address, request, answer)
                try:
                    is_complete = await connection.done or answer.is_done  # which some end with the connection
                finally:
                    connection.abort()
        except TimeoutError as error:
            life.end("failed", str(error))
            return
        life.dispatched_s = life.sent_s
        if answer.status in _REJECTIONS:
            life.dp_rank = -1
            life.end("rejected", _message(answer.content))
        elif failure := answer.failure(is_complete=is_complete):
            life.end("failed", failure)
        elif life.output_tokens != output_tokens:
            life.end("failed", f"{life.output_tokens} tokens came where {output_tokens} were asked for")
        else:
            life.end("finished")

    async def _metrics(self, timeout_s: float) -> str:
        try:
            status, body = await fetch(self._address, "/metrics", timeout_s)
        except OSError:
            return ""
        return body.decode("utf-8", "replace") if status == 200 else ""

    async def models(self) -> list[str]:
        """Return the names of the endpoint's models.

        Raises:
            LiveError: it does not answer, or not with models.
        """
        try:
            status, body = await fetch(self._address, "/v1/models", _TIMEOUT_S, self._headers)
        except UnusableServer as error:
            raise LiveError(f"{self._address} cannot be driven: {error}") from None
        except OSError as error:
            raise LiveError(f"nobody answers at {self._address}: {described(error)}") from None
        if status != 200:
            raise LiveError(f"{self._address} answers /v1/models with {status}: {_message(body)}")
        try:
            return [model["id"] for model in read_models(body)]
        except MALFORMED:
            raise LiveError(
                f"{self._address} answers /v1/models with no list of models; is it an OpenAI API?"
            ) from None

    async def drain(self) -> dict[int, tuple[dict[str, Any], list[StepRecord]]]:
        """Return each engine's facts and its steps since the last call, on this machine's monotonic clock.

        Empty from an endpoint that is no ``simmoe serve``; without steps from one that does not record them.

        Raises:
            LiveError: it is one of another version, whose answer is not understood.
        """
        asked_s = time.monotonic()
        try:
            status, body = await fetch(self._address, STEPS_PATH, _TIMEOUT_S, self._headers, "POST")
        except OSError:
            return {}
        if status != 200:
            return {}
        heard_s = time.monotonic()
        try:
            answer = json.loads(body)
            ranks = answer["ranks"]
        except MALFORMED:
            return {}  # some other server, that answers any path
        drained: dict[int, tuple[dict[str, Any], list[StepRecord]]] = {}
        try:
            self.deployment = answer.get("deployment", {})
            for rank, facts in ranks.items():
                # on this machine the clocks are one; on another one theirs is read in the middle of the question
                offset_s = (asked_s + heard_s) / 2 - facts.pop("monotonic_s")
                if abs(offset_s) <= heard_s - asked_s:
                    offset_s = 0.0
                steps = [_shifted(StepRecord(*row), offset_s) for row in facts.pop("steps")]
                drained[int(rank)] = facts, steps
        except MALFORMED as error:
            raise LiveError(
                f"the steps that {self._address} hands out are not understood ({type(error).__name__}: {error}); "
                f"use the same version of simmoe there and here"
            ) from None
        return drained


def _shifted(step: StepRecord, offset_s: float) -> StepRecord:
    """Return a step with its times moved; those that are not known stay so."""
    names = ("schedule_start_s", "schedule_end_s", "output_s", "update_end_s", "device_start_s", "device_end_s")
    times_s = {name: getattr(step, name) for name in names}
    return step._replace(**{name: time_s + offset_s for name, time_s in times_s.items() if time_s is not None})


def _message(content: bytes) -> str:
    try:
        error = json.loads(content)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except MALFORMED:
        return content[:200].decode("utf-8", "replace")
