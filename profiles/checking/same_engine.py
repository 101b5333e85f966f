"""Whether sample files are of one engine, and a recording of the engine that a table or a sample file is of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from simmoe.errors import ProfileError
from simmoe.profiles.samples import SampleHeader
from simmoe.profiles.weights import are_others, weights_of

#: Header fields that decide what an engine computes, how its steps are padded and what they cost.
_ENGINE = (
    "model",
    "model_config",
    "weights",
    "dtype",
    "k_max",
    "k_granularity",
    "card",
    "num_cards",
    "captured_sizes",
    "block_size",
)

#: What a recording must say of its engine; of _ENGINE it may say more.
_SAID = ("model", "card", "num_cards", "captured_sizes", "engine_flags")


def require_one_engine(headers: Sequence[SampleHeader]) -> None:
    """Refuse sample files of different engines.

    Raises:
        ProfileError: names the field in which they differ.
    """
    first, *others = headers
    for header in others:
        for field in _ENGINE:
            if getattr(header, field) != getattr(first, field):
                raise ProfileError(
                    f"sample files disagree on {field}: {getattr(first, field)} and {getattr(header, field)}; "
                    f"fit one engine at a time"
                )
        if _whole_experts(header.engine_flags) != _whole_experts(first.engine_flags):
            raise ProfileError("sample files disagree on enable_expert_parallel; fit one engine at a time")


def require_same_engine(header: Mapping[str, Any], run: Mapping[str, Any], name: str, whose: str, remedy: str) -> None:
    """Refuse a recording of another engine than a table's or a sample file's.

    Args:
        header: first line of the recording.
        run: header of the samples, as a table's provenance keeps it; an estimate's may lack fields.
        name: of the recording.
        whose: the run is, for errors.
        remedy: what to do.
    Raises:
        ProfileError: names what differs, or what the recording does not say of its engine.
    """
    missing = [field for field in _SAID if field not in header]
    if missing:
        raise ProfileError(
            f"'{name}' does not say its {', '.join(missing)}: it cannot be told whether {whose} is of it"
        )
    for field in _ENGINE:
        recorded, own = _value(header, field), _value(run, field)
        if field == "weights":
            differ, why = are_others(recorded, own), ", which route prompts otherwise"
        else:
            differ, why = None not in (recorded, own) and recorded != own, ""
        if differ:
            raise ProfileError(
                f"'{name}' was recorded with {field} {_short(recorded)}, {whose} is of {_short(own)}{why}; {remedy}"
            )
    recorded, own = _whole_experts(header["engine_flags"]), _whole_experts(run["engine_flags"])
    if recorded != own:
        how = {True: "whole experts on each card", False: "a share of every expert on each card"}
        raise ProfileError(f"'{name}' was recorded with {how[recorded]}, {whose} is of {how[own]}; {remedy}")


def _value(header: Mapping[str, Any], field: str) -> Any:
    """Return what a header says; None where it does not."""
    return weights_of(header) if field == "weights" else header.get(field)


def _whole_experts(engine_flags: Mapping[str, Any]) -> bool:
    return bool(engine_flags.get("enable_expert_parallel"))


def _short(value: Any) -> str:
    if isinstance(value, list):
        return f"{len(value)} sizes up to {value[-1]}" if value else "none"
    return f"'{value}'"
