"""Cells over a Ray cluster. Any node may run any cell, any number of times: what comes back is the same bytes."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from simmoe.commands.sweeping.cells import Cell
from simmoe.commands.sweeping.executor import Outcome, Outcomes, attempt
from simmoe.commands.sweeping.sources import cell_sources
from simmoe.errors import MissingDependency, SimmoeError
from simmoe.traces.catalog import DATA_VARIABLE

#: Times a cell is tried again after the process or the node that ran it died.
RETRIES = 3

#: Cells handed to the cluster at once, for each of its cores: enough to keep it busy, few enough to abandon quickly.
CELLS_A_CORE = 4

_ADDRESS = re.compile(r"(?:ray://)?(?P<host>[^:/]+):(?P<port>\d{1,5})")


class RayExecutor:
    """Cells over the workers of a Ray cluster: one that runs already, or one on this machine's cores.

    Nodes need simmoe and the trace, profile and policy files at the same paths, as on a shared file system; a node that
    finds other content there refuses its cells. A worker that dies costs the cell it was at, which is run again.

    Args:
        address: the cluster's, as ``ray.init`` takes it; None: start one here for as long as the cells run.
        jobs: cores of the cluster started here.
    Raises:
        MissingDependency: ray is not installed.
    """

    def __init__(self, address: str | None, jobs: int) -> None:
        try:
            import ray
        except ImportError:
            raise MissingDependency("--executor ray needs ray; pip install 'simmoe[ray]'") from None
        self._ray = ray
        self._address = address
        self._what = "a Ray cluster on this machine" if address is None else f"Ray at '{address}'"
        self._jobs = jobs

    def run(self, cells: Sequence[Cell]) -> Outcomes:
        """Yield outcomes as they come, and None five times a second.

        Raises:
            SimmoeError: the cluster cannot be reached, or is lost.
        """
        ray = self._ray
        if not ray.is_initialized():
            self._connect()  # once; Ray itself disconnects, and stops what was started here, when the process ends
        # A task is tried again by Ray itself when its worker or node dies; what it raises is not tried again.
        task = ray.remote(num_cpus=1, max_retries=RETRIES)(_attempt_there)
        place = _Place(os.getcwd(), os.environ.get(DATA_VARIABLE))
        waiting = list(enumerate(cells))[::-1]
        room = CELLS_A_CORE * max(1, int(ray.cluster_resources().get("CPU", 1)))
        pending: dict[Any, int] = {}
        try:
            while waiting or pending:
                while waiting and len(pending) < room:
                    index, cell = waiting.pop()
                    pending[task.remote(cell, cell_sources(cell), place)] = index
                done, _ = ray.wait(list(pending), num_returns=1, timeout=0.2)
                for reference in done:
                    index = pending.pop(reference)
                    yield index, self._outcome(reference)
                if not done:
                    yield None
        except ray.exceptions.RayTaskError:
            raise  # what a task raised is a fault of ours
        except ray.exceptions.RayError as error:
            pending.clear()  # there is nobody to ask
            raise SimmoeError(f"lost {self._what} ({type(error).__name__}); repeat the command to resume") from error
        finally:
            for reference in pending:
                ray.cancel(reference, force=True)

    def _connect(self) -> None:
        options: dict[str, Any] = {"address": self._address}
        if self._address is None:
            options = {"address": "local", "num_cpus": self._jobs, "include_dashboard": False}
        if self._address is not None and (where := _ADDRESS.fullmatch(self._address)):
            # Ray itself tries for minutes to reach what is not there, and twenty times where it is refused.
            try:
                socket.create_connection((where["host"], int(where["port"])), timeout=10).close()
            except (OSError, OverflowError) as error:
                raise SimmoeError(
                    f"cannot use {self._what}: {error}; give the address that 'ray start' prints"
                ) from error
            os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "1")
        try:
            self._ray.init(**options, log_to_driver=False, logging_level="ERROR")
        except (OSError, RuntimeError, ValueError, ImportError, self._ray.exceptions.RayError) as error:
            hint = f"; {_token_hint()}" if isinstance(error, ConnectionError) and self._address is not None else ""
            raise SimmoeError(f"cannot use {self._what}: {' '.join(str(error).split())}{hint}") from error

    def _outcome(self, reference: Any) -> Outcome:
        errors = self._ray.exceptions
        try:
            outcome: Outcome = self._ray.get(reference)
        except (errors.WorkerCrashedError, errors.OutOfMemoryError, errors.NodeDiedError) as error:
            return SimmoeError(f"its worker died {RETRIES + 1} times ({type(error).__name__}; out of memory?)")
        return outcome


def _token_hint() -> str:
    """Say what Ray does not: it never authenticates at an address that is given unless its mode says so."""
    if os.environ.get("RAY_AUTH_MODE", "").lower() == "token":
        return "RAY_AUTH_MODE is token: is the token here (RAY_AUTH_TOKEN, or ~/.ray/auth_token) that cluster's?"
    return "a cluster with token authentication needs RAY_AUTH_MODE=token, and its token, here too"


class _Place(NamedTuple):
    """Where this process looks for files."""

    folder: str
    data: str | None
    """The folder of original traces, where the user named one."""


def _attempt_there(cell: Cell, expected: Mapping[str, Any], place: _Place) -> Outcome:
    """Run a cell on a node, looking for files as in ``place``, if what it names has the same content there."""
    if os.path.isdir(place.folder):
        os.chdir(place.folder)
    if place.data is not None:
        os.environ[DATA_VARIABLE] = place.data
    try:
        found = cell_sources(cell)
    except SimmoeError as error:
        return SimmoeError(f"node '{socket.gethostname()}': {error}")
    for name, value in expected.items():
        if found.get(name) != value:
            return SimmoeError(
                f"node '{socket.gethostname()}' has another {name.removesuffix('_sha256')} than this machine "
                f"({found.get(name)}, not {value}); give every node the same files and the same simmoe"
            )
    return attempt(cell)
