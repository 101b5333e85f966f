"""A program named ``nvidia-smi`` that says what a test has it say."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest


def stand_in(folder: Path, monkeypatch: pytest.MonkeyPatch, said: str, code: int = 0) -> Path:
    """Put it on the PATH, before all else.

    Args:
        folder: kept in it, in a folder of its own.
        said: to its standard output.
        code: it exits with.
    Returns:
        The file that has the arguments it was last asked with.
    """
    programs = folder / "nvidia-smi"
    programs.mkdir()
    asked = programs / "asked"
    program = programs / "nvidia-smi"
    program.write_text(
        f'#!/bin/sh\necho "$@" > {shlex.quote(str(asked))}\nprintf %s {shlex.quote(said)}\nexit {code}\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    return asked
