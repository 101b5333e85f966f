"""A deployment's configuration from a record's manifest, each value of its type and within its bounds."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Mapping
from dataclasses import fields
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

from simmoe.errors import RecordError, UsageError
from simmoe.profiles.catalog import Profile
from simmoe.records import RunRecord
from simmoe.simulator.config import EngineConfig, FrontEndConfig, SimConfig

Config = TypeVar("Config", EngineConfig, FrontEndConfig, SimConfig)

_ENGINE, _FRONT_END = "config.engine", "config.front_end"

#: What live engines do not report; the simulator's default is taken.
_UNREPORTED = ("watermark",)


def simulated_config(record: RunRecord) -> SimConfig:
    """Return a simulated run's configuration.

    Raises:
        RecordError: names what is missing, of another type or out of bounds.
    """
    given = _config(record)
    parts = {
        "engine": _built(EngineConfig, _engine(record), _ENGINE),
        "front_end": _built(FrontEndConfig, _front_end(record), _FRONT_END),
    }
    return _built(SimConfig, {**given, **parts}, "config")


def live_engine(record: RunRecord) -> EngineConfig:
    """Return the configuration of a live run's engines, as they reported it; as :func:`simulated_config`."""
    return _built(EngineConfig, _engine(record), _ENGINE, _UNREPORTED)


def composes_ahead(record: RunRecord) -> bool:
    """Return whether a run's engines say that they composed a step while another ran, and launched it themselves."""
    engine = _engine(record)
    return engine.get("async_scheduling") is True and engine["distributed_executor_backend"] == "uni"


def whole_number(record: RunRecord, name: str) -> int:
    """Return a number of a run's configuration, such as 'num_ranks'; as :func:`simulated_config`."""
    return int(_checked(_config(record), name, int, "config"))


def captured_sizes(record: RunRecord) -> tuple[int, ...] | None:
    """Return the sizes that a live run's engines captured graphs at, where they reported them.

    Raises:
        RecordError: they are no ascending sizes.
    """
    sizes = _engine(record).get("captured_sizes")
    if sizes is None:
        return None
    _require_kind(sizes, tuple[int, ...], "captured_sizes", _ENGINE)
    if any(b <= a for a, b in zip([0, *sizes], sizes, strict=False)):
        raise RecordError(f"{_ENGINE}.captured_sizes is {reprlib.repr(sizes)}; it must ascend from at least 1")
    return tuple(sizes)


def require_k_max(record: RunRecord, profile: Profile, whose: str) -> None:
    """Refuse a profile of another largest budget than a run's engines had.

    Raises:
        UsageError: it is.
    """
    require_same_k_max(profile, whole_number(record, "k_max"), whose)


def require_same_k_max(profile: Profile, k_max: int, whose: str) -> None:
    """Refuse a profile of another largest budget than ``k_max``; as :func:`require_k_max`."""
    if profile.k_max != k_max:
        raise UsageError(f"profile '{profile.name}' has k_max {profile.k_max}; {whose} have {k_max}")


def _config(record: RunRecord) -> Mapping[str, Any]:
    given = record.manifest.get("config") or {}
    assert isinstance(given, Mapping), "of a checked record"
    return given


def _engine(record: RunRecord) -> Mapping[str, Any]:
    """Return a manifest's engine; before it could tell, steps ran at the next captured budget, launched by itself."""
    before = {"uncaptured_k": "next", "distributed_executor_backend": "uni"}
    return {**before, **(_config(record).get("engine") or {})}


def _front_end(record: RunRecord) -> Mapping[str, Any]:
    """Return a manifest's front end; before it could tell, an idle rank began to compose at once."""
    return {"wakeup_s": 0.0, **(_config(record).get("front_end") or {})}


def _built(cls: type[Config], given: Mapping[str, Any], where: str, optional: Collection[str] = ()) -> Config:
    hints = get_type_hints(cls)
    values = {
        field.name: _checked(given, field.name, hints[field.name], where)
        for field in fields(cls)
        if field.name in given or field.name not in optional
    }
    try:
        return cls(**values)
    except UsageError as error:
        raise RecordError(f"{where}: {error}") from None


def _checked(given: Mapping[str, Any], name: str, kind: Any, where: str) -> Any:
    if name not in given:
        raise RecordError(f"its manifest lacks {where}.{name}")
    _require_kind(given[name], kind, name, where)
    return given[name]


def _require_kind(value: Any, kind: Any, name: str, where: str) -> None:
    """Refuse a value that a type hint does not name; whole numbers are beside others."""
    if not _is(value, kind):
        raise RecordError(f"{where}.{name} is {reprlib.repr(value)}; it must be {_said(kind)}")


def _is(value: Any, kind: Any) -> bool:
    if kind == tuple[int, ...]:
        return isinstance(value, list | tuple) and all(_is(item, int) for item in value)
    if alternatives := get_args(kind):
        return any(_is(value, one) for one in alternatives)
    if kind in (int, float):
        return isinstance(value, (int, kind)) and not isinstance(value, bool)
    return isinstance(value, kind)


def _said(kind: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text", NoneType: "null"}
    if kind == tuple[int, ...]:
        return "a list of whole numbers"
    return " or ".join(names[one] for one in get_args(kind)) if get_args(kind) else names[kind]
