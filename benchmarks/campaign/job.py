"""A job of a campaign: a command line, what it makes, and what is known of how far it has come."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STATE = "job.json"
"""In a job's folder: its state and every slice of time it was given."""

LOG = "job.log"
"""In a job's folder: what its command printed, of all slices."""

DONE, STOPPED, UNFINISHED, FAILED = "done", "stopped", "unfinished", "failed"


@dataclass(frozen=True)
class Job:
    """One command, as data.

    Words of ``command`` may hold ``{python}``, ``{job}`` (its folder) and ``{left_s}`` (whole seconds it may take).
    """

    name: str
    """Of the job and of its folder."""
    command: tuple[str, ...]
    makes: tuple[str, ...]
    """Files below its folder. Done is a job whose command ended well and left all of them."""
    expected_s: float
    """Of the whole of it; a guess where nobody has timed it."""
    num_gpus: int = 1
    resumes: bool = False
    """The same command goes on where it was stopped; any other job needs all of its time at once."""
    least_s: float = 300.0
    """Of a job that resumes: what its start takes, and some more; in less time it is not started."""
    fast_host: bool = False
    """Its times are the host's as well as the card's."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables, where the caller's environment has none of that name."""

    @property
    def needs_s(self) -> float:
        """Seconds that must be left for it to be started."""
        return self.least_s if self.resumes else self.expected_s

    def variables(self) -> dict[str, str]:
        """Return the variables of the environment that are set for it."""
        return {name: value for name, value in self.environment.items() if name not in os.environ}

    def words(self, python: str, folder: Path, left_s: float) -> list[str]:
        """Return the command line."""
        values = {"python": python, "job": str(folder), "left_s": str(int(left_s))}
        return [word.format(**values) for word in self.command]


class Folder:
    """A job's folder: what it made, and its state."""

    def __init__(self, job: Job, out: Path) -> None:
        self.job = job
        self.path = out / job.name
        self._state = self.path / STATE

    @property
    def state(self) -> dict[str, Any]:
        """What is known of the job; a job that never ran has no ``state``, no slices."""
        if not self._state.exists():
            return {"job": self.job.name, "state": "", "slices": []}
        found: dict[str, Any] = json.loads(self._state.read_text(encoding="utf-8"))
        return found

    def begin(self, words: list[str], gpus: list[str], began: str) -> None:
        """Make the folder and note a slice: a campaign that is killed leaves it as stopped."""
        for name in self.job.makes:
            (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        self.path.mkdir(parents=True, exist_ok=True)
        state = self.state
        state["slices"].append({"began": began, "command": words, "gpus": gpus})
        self._write(state | {"state": STOPPED})

    def end(self, name: str, seconds: float, exit_code: int, pace: float | None) -> None:
        """Note how the slice ended."""
        state = self.state
        state["slices"][-1] |= {"seconds": round(seconds, 1), "exit_code": exit_code, "pace": pace}
        self._write(state | {"state": name})

    def missing(self) -> list[str]:
        """Return what it should make and has not."""
        return [name for name in self.job.makes if not (self.path / name).exists()]

    def is_done(self) -> bool:
        """Return whether its command ended well and what it made is there."""
        return self.state["state"] == DONE and not self.missing()

    def seconds(self) -> float:
        """Return what all slices took, as far as they were seen to end."""
        return sum(float(slice_.get("seconds", 0.0)) for slice_ in self.state["slices"])

    def _write(self, state: dict[str, Any]) -> None:
        part = self._state.with_suffix(".part")
        part.write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
        os.replace(part, self._state)
