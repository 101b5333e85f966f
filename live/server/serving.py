"""A deployment from start to stop: engines up, endpoint open, requests drained, engines down."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import resource
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from simmoe.errors import LiveError, OutputError, PolicyError
from simmoe.live.engine.decision_file import set_aside
from simmoe.live.engine.provenance import Provenance
from simmoe.live.server.budgets import Budgets
from simmoe.live.server.dispatch import Dispatcher
from simmoe.live.server.launch import DEFAULT_MAX_NUM_BATCHED_TOKENS, DEFAULT_MAX_NUM_SEQS, Launch
from simmoe.live.server.replica import UNRESPONSIVE_S, LocalReplica, Replica
from simmoe.live.server.route_decisions import FILE_NAME, RouteRecorder, open_recorder
from simmoe.live.server.router import Router, RouterOptions
from simmoe.live.server.stall import STALL_TIMEOUT_S
from simmoe.live.server.upstream import Address
from simmoe.policies.protocols import PolicyContext
from simmoe.policies.registry import PolicyChoice
from simmoe.writing import check_place

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Serving:
    """What to serve, and how."""

    choice: PolicyChoice
    prefill_s: Callable[[int, int], float]
    """T(n, k), for a route policy that asks."""
    options: RouterOptions
    profile: str = ""
    """Where that comes from."""
    decisions: Path | None = None
    """Folder to record the route policy's calls in; None: none."""
    launch: Launch | None = None
    """Engines to start; None: those at ``urls``."""
    urls: Sequence[str] = ()
    k_max: int | None = None
    """Largest budget, for engines at URLs that do not tell."""
    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free one."""
    log_dir: Path | None = None
    """Where the engines' output goes; None: a temporary folder, kept if one of them fails to start."""
    stall_timeout_s: float = STALL_TIMEOUT_S
    """How long an engine that has requests may make no step."""
    drain_timeout_s: float = 600.0
    """How long requests in progress may take after SIGTERM."""
    on_ready: Callable[[str], None] = lambda text: None
    """Called with one line once requests are taken."""
    on_policy_error: Callable[[PolicyError], None] = lambda error: None


def serve(serving: Serving) -> int:
    """Serve until SIGTERM or SIGINT; a second one ends what is still in progress. Return the exit code.

    Raises:
        LiveError: an engine does not start, or tells no budgets.
        OutputError: the address cannot be listened on, or a recording or a log not be written.
        UsageError, PolicyError: the policy cannot be built for the deployment.
    """
    import uvloop

    _check_recordings(serving)
    _raise_file_limit()
    with _runtime_folder(serving.log_dir) as (sockets, logs), asyncio.Runner(loop_factory=uvloop.new_event_loop) as run:
        return run.run(_serve(serving, sockets, logs))


async def _serve(serving: Serving, sockets: Path, logs: Path) -> int:
    stops: asyncio.Queue[str] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stops.put_nowait, number.name)
    with _bind(serving.host, serving.port) as listener, contextlib.ExitStack() as recording:
        return await _serve_at(listener, serving, sockets, logs, stops, recording)


async def _serve_at(
    listener: socket.socket,
    serving: Serving,
    sockets: Path,
    logs: Path,
    stops: asyncio.Queue[str],
    recording: contextlib.ExitStack,
) -> int:
    replicas = _make_replicas(serving, sockets, logs)
    watching = [asyncio.create_task(replica.run()) for replica in replicas]
    try:
        stopped = asyncio.create_task(stops.get())
        up = asyncio.create_task(_wait_until_up(replicas, needs_all=serving.launch is not None))
        await _first_of(stopped, up, watching)
        if stopped.done():
            up.cancel()
            return 0
        await up
        router = _make_router(serving, replicas, recording)
        server = await asyncio.get_running_loop().create_server(router.make_connection, sock=listener, backlog=2048)
        port = listener.getsockname()[1]
        where = f"[{serving.host}]" if ":" in serving.host else serving.host
        gc.freeze()  # what is here stays: a full collection of it would stop every stream for tens of milliseconds
        serving.on_ready(f"http://{where}:{port}")
        await _first_of(stopped, stopped, watching)
        return await _drain(serving, router, server, stops)
    finally:
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)
        await asyncio.gather(*(replica.stop() for replica in replicas))


async def _first_of(one: asyncio.Task[Any], other: asyncio.Task[Any], watching: Sequence[asyncio.Task[None]]) -> None:
    """Wait for one of two tasks, or for the failure of a watcher, which is raised."""
    await asyncio.wait({one, other, *watching}, return_when=asyncio.FIRST_COMPLETED)
    for task in watching:
        if task.done():
            task.result()


async def _wait_until_up(replicas: Sequence[Replica], *, needs_all: bool) -> None:
    """Wait for every engine, or for one and a moment longer: one of several hosts may be down for good.

    Raises:
        LiveError: an engine of ours does not start.
    """
    log.info("waiting for %s", ", ".join(f"replica {replica.rank} at {replica.address}" for replica in replicas))
    for replica in replicas:
        replica.on_change = _log_change
    futures = [replica.first_up for replica in replicas]
    if needs_all:
        await asyncio.gather(*futures)
    else:
        await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.wait(futures, timeout=UNRESPONSIVE_S)


def _log_change(replica: Replica, why: str) -> None:
    level = logging.WARNING if replica.state in ("down", "unresponsive") else logging.INFO
    log.log(level, "replica %d is %s: %s", replica.rank, replica.state, why)


async def _drain(serving: Serving, router: Router, server: asyncio.Server, stops: asyncio.Queue[str]) -> int:
    """Finish what is in progress; return 0, or 1 if some of it was cut off."""
    log.info("stopping: no new requests; those in progress are finished")
    drained = asyncio.create_task(router.drain())
    again = asyncio.create_task(stops.get())
    await asyncio.wait((drained, again), timeout=serving.drain_timeout_s, return_when=asyncio.FIRST_COMPLETED)
    is_drained = drained.done()
    if not is_drained:
        log.warning("requests in progress are cut off")
        for connection in list(router.connections):
            connection.abort()
    await drained
    again.cancel()
    server.close()
    return 0 if is_drained else 1


def _make_replicas(serving: Serving, sockets: Path, logs: Path) -> list[Replica]:
    launch = serving.launch
    if launch is None:
        return [Replica(rank, Address.parse(url), serving.stall_timeout_s) for rank, url in enumerate(serving.urls)]
    replicas: list[Replica] = []
    for rank in range(launch.num_ranks):
        uds = str(sockets / f"replica{rank}.sock")
        command, environment = launch.command(rank, uds), launch.environment(rank)
        log_path = logs / f"replica{rank}.log"
        try:
            log_path.open("ab").close()
        except OSError as error:
            raise OutputError(f"cannot write to '{log_path}': {error.strerror}; choose another --log-dir") from None
        replicas.append(
            LocalReplica(
                rank, Address("", uds=uds), command, environment, log_path, launch.warm_up, serving.stall_timeout_s
            )
        )
    return replicas


def _make_router(serving: Serving, replicas: Sequence[Replica], recording: contextlib.ExitStack) -> Router:
    facts = next((replica.facts for replica in replicas if replica.facts), {})
    k_max = _agreed_k_max(serving, replicas)
    context = _context(serving, facts, k_max, len(replicas))
    recorder = _open_recorder(serving, context)
    if recorder is not None:
        recording.callback(recorder.close)
    dispatcher = Dispatcher(serving.choice, context, recorder)
    budgets = Budgets(k_max=k_max, default_k=facts.get("default_k", k_max))
    described = serving.launch.described() if serving.launch else {}
    router = Router(replicas, dispatcher, budgets, serving.options, serving.on_policy_error, described)

    def on_change(replica: Replica, why: str) -> None:
        _log_change(replica, why)
        if replica.state == "down":
            router.metrics.deaths.labels(replica.rank).inc()
        if replica.state == "up" and not _takes(replica, k_max):
            told = replica.facts["k_max"]
            log.error("replica %d gets no requests: its largest budget is %d, not %d", replica.rank, told, k_max)
        fit = [other for other in replicas if _takes(other, k_max)]
        up = [other.rank for other in fit if other.state == "up"]
        slow = [other.rank for other in fit if other.state == "unresponsive"]
        dispatcher.set_up(up or slow)  # an engine that may be hung is better than none
        if dispatcher.fallback_reason:
            log.warning("least 4 W + R routes until more replicas are up: %s", dispatcher.fallback_reason)

    for replica in replicas:
        replica.dispatcher = dispatcher
        replica.on_change = on_change
    dispatcher.set_up([replica.rank for replica in replicas if replica.state == "up"])
    return router


def _check_recordings(serving: Serving) -> None:
    """Make sure that decisions can be recorded before engines are started, which takes minutes.

    Raises:
        OutputError: they cannot.
    """
    if serving.decisions is not None:
        engines = serving.launch.recordings() if serving.launch else []
        for path in (serving.decisions / FILE_NAME, *engines):
            check_place(path, "decisions", "choose another --record-decisions")


def _open_recorder(serving: Serving, context: PolicyContext) -> RouteRecorder | None:
    """Return what records the route policy's calls, if they are to be; what was recorded there before is kept.

    Raises:
        OutputError: it cannot be written.
    """
    folder = serving.decisions
    if folder is None:
        return None
    try:
        set_aside(folder / FILE_NAME)
    except OSError as error:
        raise OutputError(f"cannot keep the earlier '{folder / FILE_NAME}': {error.strerror}") from None
    return open_recorder(folder, Provenance.of(serving.choice.route_part, serving.profile), context)


def _takes(replica: Replica, k_max: int) -> bool:
    """Return whether an engine serves a model of this largest budget: another may come back at the same address."""
    return bool(replica.facts.get("k_max", k_max) == k_max)


def _agreed_k_max(serving: Serving, replicas: Sequence[Replica]) -> int:
    """Return the largest budget that every engine takes.

    Raises:
        LiveError: none tells it and --k-max does not, or two of these differ.
    """
    told = {f"replica {replica.rank}": replica.facts["k_max"] for replica in replicas if replica.facts}
    for replica in replicas:
        if replica.state == "up" and not replica.facts:
            log.warning("replica %d tells no budgets: it follows a request's only with simmoe inside", replica.rank)
    if serving.k_max is not None:
        told = {"--k-max": serving.k_max, **told}
    if not told:
        raise LiveError("the engines do not tell their largest budget; give --k-max")
    (one, k_max), *others = told.items()
    for other, its_k_max in others:
        if its_k_max != k_max:
            raise LiveError(f"the largest budget is {k_max} by {one}, {its_k_max} by {other}; serve one model")
    return int(k_max)


def _context(serving: Serving, facts: dict[str, Any], k_max: int, num_ranks: int) -> PolicyContext:
    return PolicyContext(
        prefill_s=serving.prefill_s,
        k_min=1,
        k_max=k_max,
        num_ranks=num_ranks,
        max_num_seqs=facts.get("max_num_seqs", DEFAULT_MAX_NUM_SEQS),
        max_num_batched_tokens=facts.get("max_num_batched_tokens", DEFAULT_MAX_NUM_BATCHED_TOKENS),
        enable_chunked_prefill=facts.get("enable_chunked_prefill", True),
    )


def _bind(host: str, port: int) -> socket.socket:
    """Return a socket with the address to listen on, taken before engines are started, which takes minutes.

    Raises:
        OutputError: there is no such address, or somebody has it.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:
        reason = error.strerror or error if isinstance(error, OSError) else error
        raise OutputError(f"cannot listen on {host}:{port}: {reason}; choose another --host or --port") from None
    return listener


@contextlib.contextmanager
def _runtime_folder(log_dir: Path | None) -> Iterator[tuple[Path, Path]]:
    """Yield a private folder for sockets, and the folder of the logs."""
    if log_dir is not None:
        try:
            log_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(f"cannot create --log-dir '{log_dir}': {error.strerror}") from None
    folder = Path(tempfile.mkdtemp(prefix="simmoe-serve-"))
    is_kept = False
    try:
        yield folder, log_dir or folder
    except LiveError:
        is_kept = log_dir is None
        raise
    finally:
        for path in folder.iterdir():
            if not (is_kept and path.suffix == ".log"):
                path.unlink(missing_ok=True)
        if not is_kept:
            folder.rmdir()


def _raise_file_limit() -> None:
    """Allow as many open connections as this process may have: a stream needs two."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = min(hard, 1 << 20) if hard != resource.RLIM_INFINITY else 1 << 20
    if soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
