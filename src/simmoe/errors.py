"""Every failure simmoe reports, and the process exit code each class carries.

::

    SimmoeError              1   anything below
    ├── UsageError           2   an option, a name or a value the user typed
    ├── DataError            3   a file's content
    │   ├── TraceError           a trace row, column or file
    │   ├── ProfileError         a step-cost table
    │   └── RecordError          a run record
    ├── PolicyError          4   a policy raised, returned nonsense, or cannot be loaded
    ├── OutputError          5   a place to write that cannot be written
    ├── MissingDependency    6   an extra (torch, vllm, ray, a GPU) this command needs
    ├── RefactorError        7   a checkpoint that cannot be transformed
    ├── LiveError            8   the engine, or a server, failed
    ├── LimitError           9   a check whose limits are exceeded
    └── Interrupted        130   Ctrl-C, and what it leaves behind

A message is one line: what is wrong, where (file, row, option), the value found, what to do. Broken invariants of our
own are ``assert``; only the command line exits.
"""

from __future__ import annotations

from collections.abc import Iterable


class SimmoeError(Exception):
    """Base of every failure simmoe reports on purpose."""

    exit_code = 1

    def __str__(self) -> str:
        """The message in one line, whatever stood in a file's name or content: what is not printable is escaped."""
        return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in super().__str__())


class UsageError(SimmoeError):
    """An option, name or value given by the user is unusable."""

    exit_code = 2


class DataError(SimmoeError):
    """The content of an input file is unusable."""

    exit_code = 3


class TraceError(DataError):
    """A trace file, row or column is unusable."""


class ProfileError(DataError):
    """A step-cost table is unusable."""


class RecordError(DataError):
    """A run record is unusable."""


class PolicyError(SimmoeError):
    """A policy raised, returned nonsense, or cannot be loaded."""

    exit_code = 4
    evidence: object = None
    """The view the policy was shown, as plain data, where it was shown one: whoever reports the error saves it."""


class OutputError(SimmoeError):
    """Output cannot be written where it was asked for."""

    exit_code = 5


class MissingDependency(SimmoeError):
    """The command needs an extra or a device that is not here."""

    exit_code = 6


class RefactorError(SimmoeError):
    """A checkpoint cannot be transformed as asked."""

    exit_code = 7


class LiveError(SimmoeError):
    """The engine or a server failed."""

    exit_code = 8


class LimitError(SimmoeError):
    """What was checked is further off than its limits allow."""

    exit_code = 9


class Interrupted(SimmoeError):
    """Ctrl-C, or SIGTERM to a live run, ended it early."""

    exit_code = 130


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return ``" (did you mean 'x'?)"`` for the nearest known name, or the list of what is known."""
    import difflib

    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    if near:
        return f" (did you mean '{near[0]}'?)"
    return f" (known: {', '.join(names)})" if names else ""
