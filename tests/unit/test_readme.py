"""Every command of the README runs, but those marked as needing the network or a GPU and those of make."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from simmoe.cli import run

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "README.md").read_text()
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FENCES = FENCE.findall(TEXT)
COMMANDS = [line for language, block in FENCES if language == "bash" for line in block.splitlines()]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder with the README's Python files in it, without the original traces."""
    for language, block in FENCES:
        if language == "python":
            name = block.splitlines()[0].removeprefix("# ")
            (tmp_path / name).write_text(block)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SIMMOE_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def test_there_are_commands_to_check() -> None:
    assert len(COMMANDS) >= 8


@pytest.mark.parametrize("line", COMMANDS)
def test_the_readmes_commands_run(line: str, folder: Path) -> None:
    command, _, comment = line.partition(" #")
    if "needs the network" in comment or "needs a GPU" in comment:
        return
    program, *arguments = shlex.split(command)
    if program == "make":
        assert re.search(rf"^{arguments[0]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
        return
    assert program == "simmoe"
    assert run(arguments) == 0


def test_the_readmes_links_lead_somewhere() -> None:
    for target in re.findall(r"\]\(([^)]+)\)", TEXT):
        if "://" not in target:
            assert (ROOT / target).exists(), target
