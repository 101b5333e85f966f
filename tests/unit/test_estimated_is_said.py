"""Whatever takes a profile says when that profile is an estimate, and so does what it writes."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest

from simmoe.cli import COMMANDS
from simmoe.cli import run as simmoe
from simmoe.errors import LiveError
from simmoe.live.server.launch import EngineLaunch
from simmoe.policies.registry import parse_policy
from simmoe.profiles.catalog import load_profile
from simmoe.records import read_record, write_record
from tests.support.live_record import as_live

#: The command as typed -> its options beside the profile; {folder}, {out} and {live} are filled in.
WITH_PROFILE = {
    "run": "--trace azure --requests 20 --rate 5 --out {out}",
    "sweep": "--trace azure --requests 20 --rates 5 --seeds 1 --jobs 1 --policy fifo --out {out}",
    "search": "--trace azure --requests 20 --seeds 1 --jobs 1 --tolerance 0.5 --slo-ttft 9 --policy fifo --out {out}",
    "validate": "--live {live} --out {out}",
    "policies check": "fifo",
    "serve": "--url http://127.0.0.1:9 --policy lanes",
    "live run": "--model {folder} --trace azure --requests 2 --rate 5",
}

#: Those that take a profile as their argument.
OF_PROFILES = {
    "profile show": "{table}",
    "profile diff": "{table} olmoe-1b-7b-h200",
    "profile plot": "{table} --out {out}.svg",
}


def commands() -> Iterator[tuple[str, click.Command]]:
    """Yield every command of simmoe with its path."""
    for name, (where, _) in COMMANDS.items():
        module, _, attribute = where.partition(":")
        yield from below(name, getattr(importlib.import_module(module), attribute))


def below(path: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    if isinstance(command, click.Group):
        for name, inner in command.commands.items():
            yield from below(f"{path} {name}", inner)
    else:
        yield path, command


def test_every_command_that_takes_a_profile_is_tried_here() -> None:
    taking = {path for path, command in commands() if any("--profile" in option.opts for option in command.params)}
    assert taking == set(WITH_PROFILE)


@pytest.fixture(scope="module")
def table(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An estimate, as the command makes it."""
    path = tmp_path_factory.mktemp("estimate") / "guessed.json"
    assert simmoe(["profile", "roofline", "--gpu", "h100", "--model", "olmoe-1b-7b", "--out", str(path)]) == 0
    return path


@pytest.fixture
def fill(tmp_path: Path, table: Path) -> Callable[[str], list[str]]:
    def words(text: str) -> list[str]:
        if "{live}" in text:
            of = ["--trace", "azure", "--requests", "20", "--rate", "5", "--record-steps", "--profile", str(table)]
            assert simmoe(["run", *of, "--out", str(tmp_path / "was")]) == 0
            write_record(tmp_path / "live", as_live(read_record(tmp_path / "was")))
        config = Path(__file__).parents[2] / "profiles" / "data" / "models" / "olmoe-1b-7b.json"
        (tmp_path / "model").mkdir()
        (tmp_path / "model" / "config.json").write_bytes(config.read_bytes())
        places = {"out": tmp_path / "out", "live": tmp_path / "live", "folder": tmp_path / "model", "table": table}
        return text.format(**places).split()

    return words


@pytest.fixture
def no_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine on which everything is installed, and nothing starts."""

    def stop(*_: Any, **__: Any) -> Any:
        raise LiveError("nothing starts here")

    for module in ("simmoe.commands.live", "simmoe.commands.serve"):
        monkeypatch.setattr(f"{module}.require_server_packages", lambda **_: None)
    monkeypatch.setattr("simmoe.live.driving.live_run.run_live", stop)
    monkeypatch.setattr("simmoe.live.server.serving.serve", stop)
    monkeypatch.setattr("simmoe.live.server.launch.live_versions", lambda: {})


@pytest.mark.usefixtures("no_engines")
@pytest.mark.parametrize("command", WITH_PROFILE)
def test_an_estimate_is_told_on_stderr(
    command: str, fill: Callable[[str], list[str]], table: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = fill(WITH_PROFILE[command])
    capsys.readouterr()
    code = simmoe([*command.split(), *options, "--profile", str(table)])
    told = capsys.readouterr().err
    assert [line for line in told.splitlines() if "profile:" in line] == [
        "profile: olmoe-1b-7b-split4-h100 (estimated)"
    ], told
    assert code == (LiveError.exit_code if command in ("serve", "live run") else 0), told


@pytest.mark.parametrize("command", OF_PROFILES)
def test_an_estimate_is_told_where_it_is_shown(
    command: str, fill: Callable[[str], list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    differs = 1 if command == "profile diff" else 0
    assert simmoe([*command.split(), *fill(OF_PROFILES[command])]) == differs
    shown = (tmp_path / "out.svg").read_text() if "out" in OF_PROFILES[command] else capsys.readouterr().out
    assert "olmoe-1b-7b-split4-h100 (estimated)" in shown


def test_a_live_manifest_holds_what_t_n_k_was_taken_from(
    tmp_path: Path, table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("simmoe.live.server.launch.live_versions", lambda: {})
    launch = EngineLaunch(model=tmp_path, choice=parse_policy("tiers"), k_max=8, profile=str(table))
    assert launch.described()["profile"] == {
        "name": str(table),
        "status": "estimated",
        "sha256": load_profile(str(table)).sha256,
    }


@pytest.mark.parametrize("command", ["run", "validate", "sweep", "search"])
def test_an_estimate_is_told_in_the_manifest(
    command: str, fill: Callable[[str], list[str]], table: Path, tmp_path: Path
) -> None:
    assert simmoe([command, *fill(WITH_PROFILE[command]), "--profile", str(table)]) == 0
    where = tmp_path / "out" / ("sim" if command == "validate" else "") / "manifest.json"
    manifest = json.loads(where.read_text())
    assert manifest["profile"]["status"] == "estimated"
    assert manifest.get("policy_profile", manifest["profile"])["status"] == "estimated"
