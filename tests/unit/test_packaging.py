"""The package as it is installed: one name, quick to start, nothing heavy pulled in by accident."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import simmoe
from simmoe import errors
from simmoe.cli import COMMANDS

ROOMS = ("analysis", "live", "policies", "profiles", "simulator", "traces")


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_has_one_name(room: str) -> None:
    """Rooms are folders at the root, but importable as simmoe.<room> only: the root is never on sys.path."""
    assert importlib.util.find_spec(f"simmoe.{room}") is not None
    assert importlib.util.find_spec(room) is None


def test_the_version_is_written_once_and_again() -> None:
    assert importlib.metadata.version("simmoe") == simmoe.__version__


def test_every_error_is_drawn_in_the_tree_with_its_exit_code() -> None:
    tree = errors.__doc__ or ""
    for name, kind in inspect.getmembers(errors, inspect.isclass):
        if issubclass(kind, errors.SimmoeError):
            (line,) = [line for line in tree.splitlines() if name in line.split()]
            own_code = "exit_code" in vars(kind)
            assert (str(kind.exit_code) in line.split()) == own_code, line


def imported_by(*arguments: str) -> set[str]:
    program = (
        "import sys; from simmoe.cli import run; code = run(sys.argv[1:]); "
        "print(*sorted({name.split('.')[0] for name in sys.modules}), file=sys.stderr); sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", program, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.splitlines()[-1].split())


@pytest.mark.parametrize("command", COMMANDS)
def test_help_needs_neither_torch_nor_vllm_nor_pandas(command: str) -> None:
    assert not imported_by(command, "--help") & {"torch", "vllm", "pandas", "scipy", "matplotlib", "pyarrow"}


def test_a_run_needs_neither_torch_nor_vllm_nor_pandas(tmp_path: Path) -> None:
    run = ("run", "--requests", "16", "--rate", "5", "--out", str(tmp_path / "record"))
    assert not imported_by(*run) & {"torch", "vllm", "pandas", "scipy", "matplotlib"}


def test_what_a_command_imports_is_never_searched_for_garbage() -> None:
    program = (
        "import click, gc; from simmoe.cli import cli; seen = []; gc.callbacks.append(lambda *_: seen.append(1)); "
        "cli.get_command(click.Context(cli), 'run'); print(len(seen), gc.isenabled(), gc.get_freeze_count() > 10_000)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "True", "True"]


def test_help_starts_in_under_three_tenths_of_a_second() -> None:
    def cpu_s() -> float:
        with open(os.devnull, "wb") as nothing:
            process = subprocess.Popen([sys.executable, "-m", "simmoe", "--help"], stdout=nothing)
            _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        assert process.returncode == 0
        return usage.ru_utime + usage.ru_stime

    assert min(cpu_s() for _ in range(5)) < 0.3
