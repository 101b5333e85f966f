"""The file that decisions are recorded in: a header that says what decided, then one JSON value a line.

Calls of a batch policy (:mod:`simmoe.live.engine.decisions`) and of a route policy
(:mod:`simmoe.live.server.route_decisions`) are recordings of this one kind. A header::

    {"decisions": 2, "call": "plan" or "route", "simmoe": version, "policy": text, "policy_sha256": ...,
     "profile": name, "profile_sha256": ..., "async_scheduling": bool, "deployment": {...}, "view": {...}}

``deployment`` has the numbers of a ``PolicyContext``, ``view`` those of a view that never change.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path
from typing import IO, Any, ClassVar, NoReturn

from simmoe.errors import DataError
from simmoe.live.engine.provenance import Provenance
from simmoe.policies.loading import METHODS, Kind
from simmoe.policies.protocols import PolicyContext
from simmoe.reading import what_is_no_file

VERSION = 2
MAX_BYTES = 1 << 30
"""A recording ends at this size: what it has can be replayed, what came later cannot without it."""

_LINE_BYTES = 1 << 26
_MOST_RANKS = _MOST_BUDGETS = 1 << 16
_SHOWN = 200

log = logging.getLogger(__name__)


class DecisionWriter:
    """Writes a recording as its host runs: the line that is wanted most is the last one before it was killed.

    Args:
        path: the file, replaced if it exists.
        kind: of the policy.
        provenance: what decides.
        async_scheduling: of the engines, which the profile's times depend on.
        context: the deployment.
        view: the numbers of a view that never change.
    Raises:
        OSError: it cannot be written.
    """

    def __init__(
        self,
        path: Path,
        kind: Kind,
        provenance: Provenance,
        async_scheduling: bool,
        context: PolicyContext,
        view: Mapping[str, int],
    ) -> None:
        header = {
            "decisions": VERSION,
            "call": METHODS[kind],
            **asdict(provenance),
            "async_scheduling": async_scheduling,
            "deployment": {name: getattr(context, name) for name in _DEPLOYMENT},
            "view": dict(view),
        }
        text = _line(header)
        self._file: IO[str] = path.open("w", buffering=1, encoding="utf-8")
        self._is_open = True
        self._size = len(text)
        self._file.write(text)

    def close(self) -> None:
        """Finish the file; harmless to call again."""
        self._is_open = False
        with suppress(OSError):  # what could not be written before cannot be now
            self._file.close()

    def write(self, value: Any) -> None:
        """Write a line. A disk or a file that is full ends the recording, which is good so far, and not the host."""
        if not self._is_open:
            return
        text = _line(value)
        try:
            if self._size + len(text) > MAX_BYTES:
                raise OSError(0, f"it has its {MAX_BYTES} bytes")
            self._file.write(text)
            self._size += len(text)
        except OSError as error:
            self.close()
            log.error("the recording of decisions in '%s' ends here: %s", self._file.name, error.strerror)


def set_aside(path: Path) -> None:
    """Keep what was recorded there before: ``a.jsonl`` becomes ``a.1.jsonl``, or the next number that is free.

    Raises:
        OSError: it cannot be renamed.
    """
    if path.is_file():
        names = (path.with_suffix(f".{number}{path.suffix}") for number in itertools.count(1))
        path.rename(next(name for name in names if not name.exists()))


class DecisionReader:
    """A recording on disk, of calls of ``kind``.

    Raises:
        DataError: the file is none, or is damaged; a last line cut short by a kill is left out.
    """

    kind: ClassVar[Kind]
    view_numbers: ClassVar[tuple[str, ...]]
    """What the header's ``view`` has."""

    def __init__(self, path: Path) -> None:
        self.path = path
        header = next(self._values(), (1, None))[1]
        if not isinstance(header, dict) or "decisions" not in header:
            raise DataError(f"'{path}' is no recording of decisions")
        if header["decisions"] != VERSION:
            raise DataError(
                f"'{path}' is a recording of version {_shown(header['decisions'])}; this simmoe reads {VERSION}"
            )
        try:
            if as_text(header["call"]) != METHODS[self.kind]:
                raise ValueError(f"it holds calls of '{header['call']}', not of {METHODS[self.kind]}")
            self.provenance = Provenance(**{field.name: as_text(header[field.name]) for field in fields(Provenance)})
            self.async_scheduling = as_flag(header["async_scheduling"])
            """Whether the engines composed steps ahead, which the profile's times depend on."""
            self.deployment = _deployment(header["deployment"])
            """The numbers of the PolicyContext."""
            self.view = {name: as_count(header["view"][name]) for name in self.view_numbers}
        except (LookupError, TypeError, ValueError) as error:
            raise DataError(f"'{path}' has a header that cannot be: {_told(error)}") from None

    @staticmethod
    def kind_in(path: Path) -> Kind | None:
        """Return whose calls a recording holds; None if the file is none.

        Raises:
            DataError: it looks like one and its header cannot be read.
        """
        try:
            if what_is_no_file(path) is not None:
                return None
            with path.open("rb") as file:
                if file.read(13) != b'{"decisions":':
                    return None
                file.seek(0)
                header = _parsed(file.readline(_LINE_BYTES))
        except OSError:
            return None
        except ValueError as error:
            raise DataError(f"'{path}' line 1 {error}") from None
        return "route" if isinstance(header, dict) and header.get("call") == METHODS["route"] else "batch"

    @property
    def policy(self) -> str:
        """The policy as its host was given it."""
        return self.provenance.policy

    @property
    def profile(self) -> str:
        """Where T(n, k) came from; empty: nowhere."""
        return self.provenance.profile

    def context(self, prefill_s: Callable[[int, int], float]) -> PolicyContext:
        """Return the deployment, with T(n, k)."""
        return PolicyContext(prefill_s=prefill_s, **self.deployment)

    def differs(self, count: int, now_s: float, live: object, replayed: object, now: Provenance | None) -> str:
        """Return the message about a call that was answered otherwise, with what ``now`` says of why."""
        why = f"; {self.provenance.against(now)}" if now else ""
        return f"'{self.path}' call {count} at {now_s} s: live {_shown(live)}, replayed {_shown(replayed)}{why}"

    def lines(self) -> Iterator[tuple[int, list[Any]]]:
        """Yield the lines after the header with their numbers."""
        for number, value in self._values():
            if number > 1:
                if not isinstance(value, list) or not value:
                    self.refuse(number, ValueError(f"it is {_shown(value)}"))
                yield number, value

    def refuse(self, number: int, error: Exception) -> NoReturn:
        """Say that a line cannot be.

        Raises:
            DataError: always.
        """
        raise DataError(f"'{self.path}' line {number} does not follow from those before: {_told(error)}") from None

    def _values(self) -> Iterator[tuple[int, Any]]:
        try:
            if what := what_is_no_file(self.path):
                raise DataError(f"'{self.path}' is {what}; give a file that a live engine recorded")
            with self.path.open("rb") as file:
                for number in itertools.count(1):
                    content = file.readline(_LINE_BYTES)
                    if not content:
                        return
                    try:
                        value = _parsed(content)
                    except ValueError as error:
                        if content.endswith(b"\n") or len(content) == _LINE_BYTES:
                            raise DataError(f"'{self.path}' line {number} {error}") from None
                    else:
                        yield number, value
        except OSError as error:
            raise DataError(f"cannot read the recording '{self.path}': {error.strerror}") from None


# ------------------------------------------------------------------------------------------------- what a line may hold


def as_text(value: Any) -> str:
    """Return a text; ValueError if it is none."""
    if not isinstance(value, str):
        raise ValueError(f"{_shown(value)} is no text")
    return value


def as_count(value: Any) -> int:
    """Return an integer from 0; ValueError if it is none."""
    if type(value) is not int or value < 0:
        raise ValueError(f"{_shown(value)} is no count")
    return value


def as_number(value: Any) -> float:
    """Return a finite number; ValueError if it is none."""
    if type(value) not in (int, float) or not -math.inf < value < math.inf:
        raise ValueError(f"{_shown(value)} is no number")
    result: float = value
    return result


def as_flag(value: Any) -> bool:
    """Return a truth value; ValueError if it is none."""
    if not isinstance(value, bool):
        raise ValueError(f"{_shown(value)} is neither true nor false")
    return value


_DEPLOYMENT = {
    field.name: as_flag if field.name == "enable_chunked_prefill" else as_count
    for field in fields(PolicyContext)
    if field.name != "prefill_s"
}
"""Numbers of a PolicyContext, each with what reads it."""


def _deployment(given: Any) -> dict[str, Any]:
    deployment = {name: read(given[name]) for name, read in _DEPLOYMENT.items()}
    has_budgets = 1 <= deployment["k_min"] <= deployment["k_max"] <= _MOST_BUDGETS
    if not has_budgets or not 1 <= deployment["num_ranks"] <= _MOST_RANKS:
        raise ValueError(f"no deployment is {_shown(deployment)}")
    return deployment


def _line(value: Any) -> str:
    return json.dumps(value, separators=(",", ":")) + "\n"


def _parsed(content: bytes) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError):
        raise ValueError("is not JSON") from None


def _told(error: Exception) -> str:
    return f"it has no {error}" if isinstance(error, KeyError) else str(error)


def _shown(value: object) -> str:
    try:
        shown = value if isinstance(value, str) else repr(value)
    except RecursionError:
        shown = f"a {type(value).__name__}"
    return shown if len(shown) <= _SHOWN else f"{shown[: _SHOWN - 3]}..."
