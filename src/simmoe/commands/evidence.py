"""The view a policy failed on, saved where its author will find it."""

from __future__ import annotations

import json
from pathlib import Path

from simmoe.errors import OutputError, PolicyError
from simmoe.writing import write_whole

CALL_NAME = "policy_call.json"


def save_evidence(error: PolicyError, folder: Path | None) -> PolicyError:
    """Save the call a policy failed on and return the error with the file's name in its message.

    Args:
        error: as the simulator raised it; without evidence it is returned as it is.
        folder: where to save; None: the current folder.
    """
    if error.evidence is None:
        return error
    path = (folder or Path()) / CALL_NAME
    try:
        write_whole(path, (json.dumps(error.evidence, indent=2) + "\n").encode(), "its view")
    except OutputError as failure:
        return PolicyError(f"{error}; {failure}")
    return PolicyError(
        f"{error}; its view is saved in '{path}': 'simmoe policies check POLICY --replay {path}' asks again"
    )
