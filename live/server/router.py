"""The endpoint: authorises, admits, routes, tries again, and says how it all stands."""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import json
import logging
import secrets
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from simmoe.errors import PolicyError
from simmoe.live.server.answers import MALFORMED, read_models
from simmoe.live.server.budgets import ALIAS_MARK, BadRequest, Budgets, alias_budget, parse_request, split_alias
from simmoe.live.server.client import ClientConnection, Request, error_body
from simmoe.live.server.dispatch import Dispatcher
from simmoe.live.server.exchange import Exchange, Outcome
from simmoe.live.server.metrics import CONTENT_TYPE, RouterMetrics
from simmoe.live.server.replica import HUNG_S, Replica
from simmoe.live.server.state import STEPS_PATH
from simmoe.live.server.upstream import described, fetch
from simmoe.policies.views import RequestView

ROUTED_PATHS = ("/v1/completions", "/v1/chat/completions")
MAX_ATTEMPTS = 4
"""How many engines a request is tried on before it gets a 503."""

OUTCOMES = (
    *(outcome.value for outcome in Outcome if outcome is not Outcome.LOST),  # which is tried again
    "no replica", "policy error", "bad request", "turned away", "router error",
)  # fmt: skip
"""How a request can end."""

RETRY_AFTER_S = 1
_GUARDED = ("/v1", STEPS_PATH)
_PASSED_HEADERS = ("authorization", "x-request-id", "traceparent", "tracestate")
_FETCH_TIMEOUT_S = HUNG_S
"""One that takes longer is dead; a busy one is waited for, and what it then has to tell, its steps, is not lost."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RouterOptions:
    """How the endpoint behaves."""

    max_inflight: int
    """Engine requests in flight over all replicas; beyond, requests are turned away with 429."""
    api_keys: Sequence[str] = ()
    """A request to /v1 must bring one of these; none: anybody may ask."""


class Router:
    """Answers every request of the endpoint.

    Args:
        replicas: the engines, by rank.
        dispatcher: holds the policy.
        budgets: the deployment's.
        options: limits and keys.
        on_policy_error: called with each failure of the policy.
        described: what a run on this deployment records of it, see ``Launch.described``; empty: it is not known.
    """

    def __init__(
        self,
        replicas: Sequence[Replica],
        dispatcher: Dispatcher,
        budgets: Budgets,
        options: RouterOptions,
        on_policy_error: Callable[[PolicyError], None] = lambda error: None,
        described: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self.metrics = RouterMetrics([replica.rank for replica in replicas], OUTCOMES, budgets.k_max)
        self.connections: set[ClientConnection] = set()
        self._replicas = replicas
        self._dispatcher = dispatcher
        self._budgets = budgets
        self._options = options
        self._on_policy_error = on_policy_error
        self._described = described
        self._keys = [hashlib.sha256(key.encode()).digest() for key in options.api_keys]
        self._num_inflight = 0
        self._is_draining = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._ids = itertools.count()
        self._is_quiet = asyncio.Event()
        self._is_quiet.set()

    def make_connection(self) -> ClientConnection:
        """Return the protocol of a new client."""
        connection = ClientConnection(self._handle, self.connections)
        connection.closes = self._is_draining
        return connection

    async def drain(self) -> None:
        """Refuse new requests, and return when clients have the whole answers to those in progress."""
        self._is_draining = True
        for connection in list(self.connections):
            connection.close()
        await self._is_quiet.wait()
        answered = [connection.closed for connection in self.connections if connection.is_closing]
        await asyncio.gather(*answered)

    # ------------------------------------------------------------------------------------------------------- dispatch

    def _handle(self, request: Request, client: ClientConnection) -> None:
        is_guarded = request.path.startswith(_GUARDED) and request.method != "OPTIONS"
        if is_guarded and not self._is_authorised(request):
            client.respond(401, {"error": "Unauthorized"})
        elif request.path == STEPS_PATH and request.method == "POST":
            self._start(self._answer_steps(client), client)
        elif request.path in ROUTED_PATHS:
            if request.method == "POST":
                self._start(self._complete(request, client), client)
            else:
                client.respond(405, error_body(405, f"{request.path} takes POST, not {request.method}"))
        elif request.method != "GET":
            client.respond(404, error_body(404, f"{request.method} {request.path} is not served here"))
        elif request.path == "/health":
            self._answer_health(client)
        elif request.path == "/metrics":
            client.respond(200, self._render_metrics(), content_type=CONTENT_TYPE)
        elif request.path == "/v1/models" or request.path.startswith("/v1/models/"):
            self._start(self._answer_models(request, client), client)
        elif request.path.startswith("/replicas/") and request.path.endswith("/metrics"):
            self._start(self._answer_replica_metrics(request, client), client)
        else:
            client.respond(404, error_body(404, f"{request.path} is not served here"))

    def _start(self, answer: Coroutine[Any, Any, None], client: ClientConnection) -> None:
        task: asyncio.Task[None] = asyncio.get_running_loop().create_task(self._answer(answer, client))
        self._tasks.add(task)
        self._is_quiet.clear()
        task.add_done_callback(self._ended)

    async def _answer(self, answer: Coroutine[Any, Any, None], client: ClientConnection) -> None:
        """Let no client wait for an answer that failed before it began."""
        try:
            await answer
        except Exception:
            log.exception("a request failed inside the router")
            self.metrics.requests.labels("router error").inc()
            client.abort()

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not self._tasks:
            self._is_quiet.set()

    def _is_authorised(self, request: Request) -> bool:
        if not self._keys:
            return True
        scheme, _, token = request.headers.get("authorization", "").partition(" ")
        digest = hashlib.sha256(token.encode("latin-1")).digest()
        matches = [secrets.compare_digest(digest, key) for key in self._keys]
        return scheme.lower() == "bearer" and any(matches)

    # ----------------------------------------------------------------------------------------------------- completions

    async def _complete(self, request: Request, client: ClientConnection) -> None:
        arrival_s = time.monotonic()
        try:
            parsed = parse_request(request.body, self._budgets)
        except BadRequest as error:
            self._refuse(client, 400, error.body, "bad request")
            return
        if self._is_draining:
            self._refuse(client, 503, error_body(503, "the server is shutting down"), "turned away")
            return
        if parsed.num_sequences > self._options.max_inflight:
            message = (
                f"{parsed.num_sequences} sequences (prompts times n) are more than the {self._options.max_inflight} "
            )
            self._refuse(client, 400, error_body(400, message + "served at once; send fewer", "n"), "bad request")
            return
        if self._num_inflight + parsed.num_sequences > self._options.max_inflight:
            message = f"{self._num_inflight} requests are in flight of {self._options.max_inflight}; try again"
            self._refuse(client, 429, error_body(429, message), "turned away")
            return
        self.metrics.budgets.labels(parsed.k).inc()
        view = RequestView(f"router-{next(self._ids)}", arrival_s, parsed.num_prompt_tokens, 0, parsed.k)
        headers = {name: request.headers[name] for name in _PASSED_HEADERS if name in request.headers}
        exchange = Exchange(client, parsed.num_sequences)
        self._num_inflight += parsed.num_sequences
        try:
            outcome = await self._carry(exchange, view, request.path, headers, parsed.body, client)
        except Exception:
            log.exception("a request failed inside the router")
            outcome = "router error"
            if exchange.has_started:
                client.abort()
            else:
                client.respond(500, error_body(500, "the router failed; its log says why"))
        finally:
            self._num_inflight -= parsed.num_sequences
        self.metrics.requests.labels(outcome).inc()
        if exchange.first_event_s is not None:
            self.metrics.ttft.observe(exchange.first_event_s - arrival_s)

    async def _carry(
        self,
        exchange: Exchange,
        view: RequestView,
        path: str,
        headers: dict[str, str],
        body: bytes,
        client: ClientConnection,
    ) -> str:
        """Try engines until one answers; return how it ended."""
        for _ in range(MAX_ATTEMPTS):
            if not self._dispatcher.up:
                break
            now_s = time.monotonic()
            try:
                ticket = self._dispatcher.route(view, exchange.num_sequences, now_s)
            except PolicyError as error:
                self.metrics.policy_errors.inc()
                self._on_policy_error(error)
                client.respond(500, error_body(500, f"the route policy failed: {error}"))
                return "policy error"
            self.metrics.routing.observe(time.monotonic() - now_s)
            replica = self._replicas[ticket.rank]
            self.metrics.routed.labels(ticket.rank).inc()
            replica.exchanges.add(exchange)
            try:
                request = replica.address.request("POST", path, headers, body)
                outcome = await exchange.attempt(
                    replica.address, request, {"x-simmoe-rank": str(ticket.rank)}, f"replica {ticket.rank}"
                )
                is_lost = outcome is Outcome.LOST
                if (is_lost or outcome is Outcome.REFUSED) and (await replica.has_failed() or is_lost):
                    self.metrics.failovers.labels(ticket.rank).inc()
                    continue
            finally:
                replica.let_go(exchange)
                self._dispatcher.release(ticket)
            if outcome is Outcome.REFUSED:
                exchange.pass_on()
            elif outcome is Outcome.BROKEN:
                replica.look()
            return str(outcome.value)
        retry_after_s = {"retry-after": str(RETRY_AFTER_S)}
        message = "no replica is up" if not self._dispatcher.up else f"{MAX_ATTEMPTS} replicas were lost one by one"
        client.respond(503, error_body(503, f"{message}; try again"), retry_after_s)
        return "no replica"

    def _refuse(self, client: ClientConnection, status: int, body: dict[str, object], outcome: str) -> None:
        self.metrics.requests.labels(outcome).inc()
        client.respond(status, body, {"retry-after": str(RETRY_AFTER_S)} if status in (429, 503) else None)

    # ------------------------------------------------------------------------------------------------- everything else

    def _answer_health(self, client: ClientConnection) -> None:
        states = {str(replica.rank): replica.state for replica in self._replicas}
        is_well = bool(self._dispatcher.up) and not self._is_draining
        status = "draining" if self._is_draining else "ok" if is_well else "no replica is up"
        client.respond(200 if is_well else 503, {"status": status, "replicas": states})

    async def _answer_models(self, request: Request, client: ClientConnection) -> None:
        """List the engine's models, each also under its aliases."""
        for rank in list(self._dispatcher.up):
            headers = {name: request.headers[name] for name in _PASSED_HEADERS if name in request.headers}
            try:
                status, body = await fetch(self._replicas[rank].address, "/v1/models", _FETCH_TIMEOUT_S, headers)
                models = read_models(body) if status == 200 else None
            except (OSError, *MALFORMED):
                continue
            if models is None:
                client.respond(status, body)
                return
            wanted = request.path.removeprefix("/v1/models").removeprefix("/")
            if not wanted:
                ks = range(1, self._budgets.k_max + 1)
                aliases = [{**model, "id": f"{model['id']}{ALIAS_MARK}{k}"} for model in models for k in ks]
                client.respond(200, {"object": "list", "data": [*models, *aliases]})
                return
            name, k = split_alias(wanted)
            found = [model for model in models if model["id"] == name]
            if found and (k is None or alias_budget(k, self._budgets) in range(1, self._budgets.k_max + 1)):
                client.respond(200, {**found[0], "id": wanted})
            else:
                client.respond(404, error_body(404, f"no model '{wanted}'", "model"))
            return
        client.respond(503, error_body(503, "no replica is up"), {"retry-after": str(RETRY_AFTER_S)})

    async def _answer_steps(self, client: ClientConnection) -> None:
        """Hand out what is deployed, every engine's facts, and its steps since the last time where it tells them."""
        told = await asyncio.gather(*map(_steps, self._replicas))
        ranks = {str(replica.rank): steps for replica, steps in zip(self._replicas, told, strict=True) if steps}
        client.respond(200, {"deployment": self._described, "ranks": ranks})

    async def _answer_replica_metrics(self, request: Request, client: ClientConnection) -> None:
        """Pass an engine's own metrics on: a local engine listens on no port."""
        text = request.path.removeprefix("/replicas/").removesuffix("/metrics")
        replica = next((replica for replica in self._replicas if str(replica.rank) == text), None)
        if replica is None:
            client.respond(404, error_body(404, f"no replica '{text}'; there are {len(self._replicas)}, from 0"))
            return
        try:
            status, body = await fetch(replica.address, "/metrics", _FETCH_TIMEOUT_S)
        except OSError as error:
            client.respond(503, error_body(503, f"replica {text} does not answer: {described(error)}"))
            return
        client.respond(status, body, content_type=CONTENT_TYPE)

    def _render_metrics(self) -> bytes:
        metrics, dispatcher = self.metrics, self._dispatcher
        for replica in self._replicas:
            rank = replica.rank
            counts = dispatcher.counts(rank)
            metrics.up.labels(rank).set(rank in dispatcher.up)
            metrics.inflight.labels(rank).set(dispatcher.num_inflight(rank))
            metrics.waiting.labels(rank).set(counts.num_waiting)
            metrics.running.labels(rank).set(counts.num_running)
            metrics.kv_used.labels(rank).set(counts.kv_used)
        metrics.fallback.set(bool(dispatcher.fallback_reason))
        return metrics.render()


async def _steps(replica: Replica) -> Any:
    """Return an engine's facts and its steps since the last time; None if it does not tell them."""
    try:
        status, body = await fetch(replica.address, STEPS_PATH, _FETCH_TIMEOUT_S, method="POST")
        return json.loads(body) if status == 200 else None
    except (OSError, ValueError, RecursionError):
        return None
