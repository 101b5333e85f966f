"""Content hashes: what a cell's inputs only name, and the address they give it."""

from __future__ import annotations

import hashlib
import json
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

import simmoe
from simmoe.policies.registry import PolicyChoice

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
    """Return the hash of each file that defines a part of a policy, by the part's name."""
    hashes = {}
    for part in (choice.batch_part, choice.route_part):
        file = getattr(sys.modules[part.load().__module__], "__file__", None)
        hashes[part.name] = hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else "built in"
    return hashes
