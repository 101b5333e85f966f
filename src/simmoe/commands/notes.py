"""What a command says on stderr about its inputs: which trace, which profile, what was extrapolated."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from simmoe.profiles.catalog import Profile


def describe_trace(source: Mapping[str, Any]) -> str:
    """Say in one line which lengths were replayed: the original file's, or the shipped summary's."""
    kept = source["filter"]
    if source["lengths"] == "original":
        rows = f"{kept['rows_kept']:,} of {source['rows']:,} rows"
        return f"trace: '{source['trace']}', original file {source['file']} ({rows} kept)"
    return (
        f"trace: '{source['trace']}', lengths drawn from the shipped summary of {kept['rows_kept']:,} rows; "
        f"'simmoe traces fetch {source['trace']}' gets the original"
    )


def describe_profile(profile: Profile) -> str:
    """Say in one line whose step times are used."""
    return f"profile: {profile.label}"
