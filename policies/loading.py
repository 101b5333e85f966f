"""Policy classes by name (entry points) and by file (``path/to/file.py:Class``)."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import importlib.util
import signal
import sys
import traceback
from pathlib import Path
from types import ModuleType
from typing import Literal

from simmoe.errors import PolicyError, SimmoeError, UsageError, did_you_mean
from simmoe.interrupts import RAISING

Kind = Literal["batch", "route"]

#: Entry-point group of each kind of policy.
GROUPS: dict[Kind, str] = {"batch": "simmoe.batch_policies", "route": "simmoe.route_policies"}

#: The method that makes a class a policy of each kind.
METHODS: dict[Kind, str] = {"batch": "plan", "route": "route"}


def pass_ctrl_c(error: BaseException) -> None:
    """Raise again what the user did while a policy's code ran; whatever else comes out of it is the policy's failure.

    That is Ctrl-C, where Python hears it. A server hears SIGINT otherwise: what is raised like it there is no user's.
    """
    if isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) in RAISING:
        raise error


@functools.cache
def installed(kind: Kind) -> dict[str, importlib.metadata.EntryPoint]:
    """Return the installed policies of one kind by name.

    Raises:
        PolicyError: two packages offer different policies under one name.
    """
    found: dict[str, importlib.metadata.EntryPoint] = {}
    for point in sorted(importlib.metadata.entry_points(group=GROUPS[kind]), key=lambda point: point.name):
        other = found.setdefault(point.name, point)
        if other.value != point.value:
            raise PolicyError(
                f"two installed packages offer a {kind} policy '{point.name}': {other.value} and {point.value}; "
                f"uninstall one, or name it by file"
            )
    return found


def load_named(name: str) -> tuple[type, Kind]:
    """Return the class installed under ``name`` and its kind.

    Raises:
        UsageError: no policy has that name.
        PolicyError: it cannot be imported.
    """
    by_kind = {kind: installed(kind) for kind in GROUPS}
    kinds = [kind for kind, points in by_kind.items() if name in points]
    if not kinds:
        known = [known for points in by_kind.values() for known in points]
        raise UsageError(f"no policy '{name}'{did_you_mean(name, known)}; 'simmoe policies list' shows all")
    if len(kinds) > 1:
        raise PolicyError(f"'{name}' names a batch policy and a route policy; rename one of them")
    point = by_kind[kinds[0]][name]
    try:
        cls = point.load()
    except BaseException as error:
        pass_ctrl_c(error)
        raise PolicyError(f"policy '{name}' cannot be loaded from {point.value}: {describe(error)}") from error
    kind = kind_of(cls, name)
    if kind != kinds[0]:
        raise PolicyError(f"policy '{name}' is registered as a {kinds[0]} policy but is a {kind} policy")
    return cls, kind


def load_file(path: Path, class_name: str) -> tuple[type, Kind, str]:
    """Return a class defined in a Python file, its kind, and the file's SHA-256.

    The file is run once a process for each content, as a module of its own; the import path stays as it is.

    Raises:
        PolicyError: no such file or class, or the file raises; the message has the line.
    """
    try:
        source = path.read_bytes()
    except OSError as error:
        raise PolicyError(f"cannot read the policy file '{path}': {error.strerror}") from None
    sha256 = hashlib.sha256(source).hexdigest()
    module = _run(path, sha256)
    cls = getattr(module, class_name, None)
    if not isinstance(cls, type):
        classes = [
            name
            for name, value in vars(module).items()
            if isinstance(value, type) and value.__module__ == module.__name__
        ]
        raise PolicyError(f"'{path}' has no class '{class_name}'{did_you_mean(class_name, classes)}")
    return cls, kind_of(cls, f"{path}:{class_name}"), sha256


def kind_of(cls: object, policy: str) -> Kind:
    """Return which kind of policy a class is.

    Raises:
        PolicyError: it is no class, or has neither or both of ``plan`` and ``route``.
    """
    try:
        kinds = [kind for kind, method in METHODS.items() if callable(getattr(cls, method, None))]
    except BaseException as error:
        pass_ctrl_c(error)
        raise PolicyError(f"'{policy}' cannot be looked at: {describe(error)}") from error
    if not isinstance(cls, type) or not kinds:
        raise PolicyError(f"'{policy}' is no policy; it needs a class with plan(view) or route(request, ranks, now_s)")
    if len(kinds) > 1:
        raise PolicyError(f"'{policy}' has both plan and route; make it two classes, one a kind")
    return kinds[0]


def message_of(error: BaseException) -> str:
    """Return what an exception says, whatever its ``__str__`` does."""
    try:
        return str(error)
    except BaseException as failure:
        pass_ctrl_c(failure)
        return f"its message cannot be shown ({type(failure).__name__})"


def describe(error: BaseException, path: Path | None = None) -> str:
    """Return one line for an exception: where it was raised (in ``path``, if it passed through there), and what.

    A failure reported on purpose speaks for itself.
    """
    if isinstance(error, SimmoeError):
        return message_of(error)
    what = f"{type(error).__name__}: {message_of(error)}".splitlines()[0].rstrip(": ")
    frames = traceback.extract_tb(error.__traceback__)
    inside = [frame for frame in frames if path is None or frame.filename == str(path)]
    if isinstance(error, SyntaxError) and error.filename and (path is None or error.filename == str(path)):
        return f"{error.filename}:{error.lineno}: SyntaxError: {error.msg}"
    return f"{inside[-1].filename}:{inside[-1].lineno}: {what}" if inside else what


def _run(path: Path, sha256: str) -> ModuleType:
    path = path.resolve()
    digest = hashlib.sha256(f"{path}\n{sha256}".encode()).hexdigest()
    name = f"simmoe_policy_{path.stem}_{digest[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise PolicyError(f"'{path}' is no Python file; name it path/to/file.py:Class")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look their module up while and after it runs
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]  # even of one that Ctrl-C cut short
        pass_ctrl_c(error)
        raise PolicyError(f"cannot load the policy file: {describe(error, path)}") from error
    return module
