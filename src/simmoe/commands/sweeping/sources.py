"""Content hashes: what a cell's inputs only name, and the address that gives it."""

from __future__ import annotations

import hashlib
import json
import sys
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

import simmoe
from simmoe.commands.sweeping.cells import Cell
from simmoe.commands.sweeping.imports import imported_hashes
from simmoe.policies.registry import PolicyChoice, parse_policy
from simmoe.profiles.catalog import load_profile
from simmoe.traces.build import build_workload
from simmoe.traces.spec import WorkloadSpec

#: What decides a cell's numbers, below the package's folder.
_DECIDING = ("analysis/metrics.py", "policies", "profiles", "simulator", "traces", "records.py")


def digest(data: Any) -> str:
    """Return the SHA-256, in hex, of plain data in canonical JSON."""
    return hashlib.sha256(json.dumps(data, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


@lru_cache(maxsize=1)
def code_sources() -> dict[str, str]:
    """Return the versions and the hash of the code that decides a cell's numbers."""
    package = Path(simmoe.__file__).parent
    hashes = {
        file.relative_to(package).as_posix(): hashlib.sha256(file.read_bytes()).hexdigest()
        for name in _DECIDING
        for file in sorted((package / name).rglob("*.py") if (package / name).is_dir() else [package / name])
    }
    return {"simmoe": simmoe.__version__, "code_sha256": digest(hashes), "numpy": np.__version__}


def policy_sources(choice: PolicyChoice) -> dict[str, str]:
    """Return the hash of each file that decides a policy's answers.

    By a part's name that of its own file, and by ``module NAME`` those of the user's modules that it imports.
    """
    hashes = {}
    for part in (choice.batch_part, choice.route_part):
        module = sys.modules[part.load().__module__]
        file = getattr(module, "__file__", None)
        hashes[part.name] = hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else "built in"
        hashes |= {f"module {name}": sha256 for name, sha256 in imported_hashes(module.__name__).items()}
    return hashes


def cell_sources(cell: Cell) -> dict[str, Any]:
    """Return the hashes of everything a cell's inputs only name, as found on this machine.

    Raises:
        SimmoeError: the trace, the profile or the policy cannot be read here.
    """
    return {
        **code_sources(),
        "profile_sha256": _profile_sha256(cell.profile),
        "trace_sha256": _trace_sha256(replace(cell.workload, rate=1.0, seed=0)),
        "policy": policy_sources(parse_policy(cell.policy)),
    }


def cell_key(cell: Cell) -> str:
    """Return a cell's content address: equal for equal inputs and sources, whoever computes it."""
    return digest({"inputs": cell.inputs(), "sources": cell_sources(cell)})[:32]


@lru_cache(maxsize=4)
def _profile_sha256(name: str) -> str:
    return load_profile(name).sha256


@lru_cache(maxsize=4)
def _trace_sha256(spec: WorkloadSpec) -> object:
    return build_workload(spec).source["sha256"]
