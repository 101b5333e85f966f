"""Whether a recording is of the engine that a table or a sample file is of."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simmoe.errors import ProfileError
from simmoe.profiles.weights import are_others, weights_of

#: Fields that decide what an engine computes and how its steps are padded.
_SAME = ("model", "card", "num_cards", "captured_sizes")


def require_same_engine(header: Mapping[str, Any], run: Mapping[str, Any], name: str, whose: str, remedy: str) -> None:
    """Refuse a recording of another engine than a table's or a sample file's.

    Args:
        header: first line of the recording.
        run: header of the samples, as a table's provenance keeps it; an estimate's may lack the captured sizes.
        name: of the recording.
        whose: the run is, for errors.
        remedy: what to do.
    Raises:
        ProfileError: names what differs, or what the recording does not say of its engine.
    """
    missing = [field for field in (*_SAME, "engine_flags") if field not in header]
    if missing:
        raise ProfileError(
            f"'{name}' does not say its {', '.join(missing)}: it cannot be told whether {whose} is of it"
        )
    for field in _SAME:
        if header[field] != run.get(field, header[field]):
            raise ProfileError(
                f"'{name}' was recorded with {field} {_short(header[field])}, {whose} is of {_short(run[field])}; "
                f"{remedy}"
            )
    recorded_with, fitted_with = weights_of(header), weights_of(run)
    if are_others(recorded_with, fitted_with):
        raise ProfileError(
            f"'{name}' was recorded with weights '{recorded_with}', {whose} is of '{fitted_with}', which route prompts "
            f"otherwise; {remedy}"
        )
    if _whole_experts(header) != _whole_experts(run):
        how = ("whole experts on each card", "a share of every expert on each card")
        recorded, fitted = how if _whole_experts(header) else reversed(how)
        raise ProfileError(f"'{name}' was recorded with {recorded}, {whose} is of {fitted}; {remedy}")


def _whole_experts(header: Mapping[str, Any]) -> bool:
    return bool(header["engine_flags"].get("enable_expert_parallel"))


def _short(value: Any) -> str:
    if isinstance(value, list):
        return f"{len(value)} sizes up to {value[-1]}" if value else "none"
    return f"'{value}'"
