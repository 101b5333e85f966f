"""Policies by name: ``tiers,max_wait_s=20+lanes`` turned into factories.

The text has one or two parts joined by ``+``: a batch policy, a route policy, or one of each in either order. A part is
an installed name (``simmoe policies list``) or ``path/to/file.py:Class``, followed by ``,key=value`` parameters. The
kind that is not named is the default, ``fifo`` or ``queue-aware``. A comma always ends a path or a value, and a ``+``
before a name begins the second part.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from simmoe.errors import PolicyError, SimmoeError, UsageError
from simmoe.policies.loading import Kind, describe, load_file, load_named, pass_ctrl_c
from simmoe.policies.parameters import CONTEXT, Value, format_value, parameters_of, parse_parameters, takes_context
from simmoe.policies.protocols import BatchPolicy, PolicyContext, RoutePolicy

DEFAULTS: Mapping[Kind, str] = {"batch": "fifo", "route": "queue-aware"}

_HEAD = r"(?:[A-Za-z][\w.-]*|[^,]*?\.py:[A-Za-z_]\w*)"
_PART = rf"\s*{_HEAD}\s*(?:,[^,]*?)*?"
_CHOICE = re.compile(rf"({_PART})(?:\+({_PART}))?")


@dataclass(frozen=True, slots=True)
class PolicyPart:
    """One policy with its parameters; picklable, the class is looked up again where it is built."""

    kind: Kind
    name: str
    """As installed, or ``path/to/file.py:Class`` as given."""
    given: tuple[tuple[str, Value], ...] = ()
    """Parameters as given, in the constructor's order."""
    path: Path | None = None
    """The policy's file, absolute; None for an installed one."""
    sha256: str | None = None
    """Hash of that file."""

    @property
    def text(self) -> str:
        """The part's canonical text."""
        return ",".join([self.name, *(f"{key}={format_value(value)}" for key, value in self.given)])

    def load(self) -> type:
        """Return the class.

        Raises:
            PolicyError: it cannot be loaded, or its file is no longer the one that was named.
        """
        if self.path is None:
            return load_named(self.name)[0]
        cls, _, sha256 = load_file(self.path, self.name.rpartition(":")[2])
        if sha256 != self.sha256:
            raise PolicyError(f"'{self.path}' changed while it was in use; start again")
        return cls

    def build(self, context: PolicyContext) -> Any:
        """Return a new instance.

        Raises:
            UsageError: a shipped policy refuses a parameter.
            PolicyError: the constructor raised.
        """
        cls = self.load()
        arguments: dict[str, Any] = dict(self.given)
        if takes_context(cls):
            arguments[CONTEXT] = replace(context)  # of its own: what it writes there is nobody else's
        try:
            return cls(**arguments)
        except SimmoeError:
            raise
        except BaseException as error:
            pass_ctrl_c(error)
            raise PolicyError(f"policy '{self.text}' cannot be built: {describe(error, self.path)}") from error


@dataclass(frozen=True, slots=True)
class PolicyChoice:
    """A batch policy and a route policy with their parameters. Picklable."""

    batch_part: PolicyPart
    route_part: PolicyPart

    @property
    def text(self) -> str:
        """The canonical text, both kinds named: equal for equal choices, and parsed back to the same choice."""
        return f"{self.batch_part.text}+{self.route_part.text}"

    @property
    def batch_name(self) -> str:
        """The batch policy's name."""
        return self.batch_part.name

    @property
    def route_name(self) -> str:
        """The route policy's name."""
        return self.route_part.name

    @property
    def parameters(self) -> dict[str, dict[str, Value]]:
        """Every parameter of both, defaults included, by kind: for the manifest."""
        resolved: dict[str, dict[str, Value]] = {}
        for part in (self.batch_part, self.route_part):
            declared = parameters_of(part.load(), part.name)
            resolved[part.kind] = {name: parameter.default for name, parameter in declared.items()} | dict(part.given)
        return resolved

    @property
    def files(self) -> dict[str, str]:
        """SHA-256 of each policy file in use, by the name it was given: for the manifest."""
        return {part.name: part.sha256 for part in (self.batch_part, self.route_part) if part.sha256 is not None}

    @property
    def clairvoyant(self) -> bool:
        """Whether a class says ``clairvoyant = True``: it knows output lengths, and is barred from live serving."""
        return any(_is_clairvoyant(part) for part in (self.batch_part, self.route_part))

    def batch(self, context: PolicyContext) -> BatchPolicy:
        """Return a new batch policy, for one rank."""
        return cast(BatchPolicy, self.batch_part.build(context))

    def route(self, context: PolicyContext) -> RoutePolicy:
        """Return a new route policy, for one front end."""
        return cast(RoutePolicy, self.route_part.build(context))


def _is_clairvoyant(part: PolicyPart) -> bool:
    try:
        return bool(getattr(part.load(), "clairvoyant", False))
    except BaseException as error:
        pass_ctrl_c(error)
        raise PolicyError(f"policy '{part.text}' cannot be looked at: {describe(error, part.path)}") from error


def parse_policy(text: str) -> PolicyChoice:
    """Return the choice a text names; see the module's docstring for its grammar.

    Raises:
        UsageError: unknown names, unusable parameters, two policies of one kind.
        PolicyError: a class that cannot be loaded or is no policy.

    >>> parse_policy("lanes,window=0").text
    'fifo+lanes,window=0'
    """
    parts = {part.kind: part for part in parse_parts(text)}
    return PolicyChoice(
        batch_part=parts.get("batch") or parse_part(DEFAULTS["batch"]),
        route_part=parts.get("route") or parse_part(DEFAULTS["route"]),
    )


def parse_parts(text: str) -> list[PolicyPart]:
    """Return the one or two policies a text names, defaults not added.

    Raises:
        UsageError, PolicyError: as :func:`parse_policy`.
    """
    match = _CHOICE.fullmatch(text)
    if match is None:
        raise UsageError(
            f"'{text}' names no policy; write NAME[,key=value...], or BATCH+ROUTE, where a name may be "
            f"path/to/file.py:Class"
        )
    parts = [parse_part(part_text) for part_text in match.groups() if part_text]
    if len(parts) == 2 and parts[0].kind == parts[1].kind:
        raise UsageError(
            f"'{parts[0].name}' and '{parts[1].name}' are both {parts[0].kind} policies; "
            f"name one batch policy and one route policy"
        )
    return parts


def parse_part(text: str) -> PolicyPart:
    """Return the policy one part names: ``NAME[,key=value...]``.

    Raises:
        UsageError, PolicyError: as :func:`parse_policy`.
    """
    name, *parameters = (word.strip() for word in text.split(","))
    path: Path | None = None
    sha256: str | None = None
    if ".py:" in name:
        file_name, _, class_name = name.rpartition(":")
        path = Path(file_name).expanduser().absolute()
        cls, kind, sha256 = load_file(path, class_name)
    else:
        cls, kind = load_named(name)
    given = parse_parameters(parameters, parameters_of(cls, name), name)
    return PolicyPart(kind=kind, name=name, given=tuple(given.items()), path=path, sha256=sha256)
