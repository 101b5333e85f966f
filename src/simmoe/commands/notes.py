"""What a command says about its inputs: which trace, which profile, what was extrapolated, which versions."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from typing import Any

import numpy as np
import simpy

from simmoe import __version__
from simmoe.profiles.catalog import Profile
from simmoe.simulator.config import EngineConfig
from simmoe.traces.describe import source_line


def describe_trace(source: Mapping[str, Any]) -> str:
    """Say in one line which lengths were replayed, the original's or the summary's, and what was altered."""
    line = f"trace: {source_line(source)}"
    if source["lengths"] == "original":
        return line
    return f"{line}; 'simmoe traces fetch {source['trace']}' gets the original"


def describe_profile(profile: Profile) -> str:
    """Say in one line whose step times are used."""
    return f"profile: {profile.label}"


def describe_caching(engine: EngineConfig, source: Mapping[str, Any]) -> str:
    """Say in one line that prefix caching was asked for and the trace gives it nothing to find; empty otherwise."""
    if not engine.enable_prefix_caching or source["prefix_block_tokens"] is not None:
        return ""
    return f"note: '{source['trace']}' has no hash ids of its prompts' blocks, so the prefix cache will find nothing"


def describe_extrapolation(extrapolated: Mapping[str, int]) -> str:
    """Say in one line what was asked of the profile outside its measured grid; empty if nothing was."""
    if not extrapolated:
        return ""
    points = ", ".join(f"{name}: {count} points" for name, count in extrapolated.items())
    return f"note: the profile was asked outside its measured grid and extrapolated ({points})"


def describe_extrapolated_cells(cells: Mapping[str, int]) -> str:
    """Say in one line in how many of a command's simulations that was so, by what lay outside; empty if in none."""
    if not cells:
        return ""
    numbers = ", ".join(f"{name} in {count} cells" for name, count in cells.items())
    return f"note: the profile was asked outside its measured grid and extrapolated: {numbers}"


def versions() -> dict[str, str]:
    """Return the versions that decide a simulation's numbers, for the manifest."""
    return {
        "simmoe": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "simpy": simpy.__version__,
    }
