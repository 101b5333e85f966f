"""What cannot be written at the end, or never be served, is refused before an engine is started: that takes minutes."""

from __future__ import annotations

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from simmoe.cli import run as simmoe
from simmoe.profiles.catalog import load_profile
from simmoe.profiles.table_file import write_table

needs_server = pytest.mark.skipif(
    any(find_spec(name) is None for name in ("httptools", "uvloop", "prometheus_client")),
    reason="the server's packages are not installed: pip install 'simmoe[serve]'",
)
pytestmark = needs_server

K_MAX = 8
PROFILE = "olmoe-1b-7b-h200"
"""Of as many budgets."""


class Started(AssertionError):
    """An engine would have been started."""


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model's folder, on a machine where vLLM seems to be installed; whoever starts it has lost."""

    def start(*args: object, **kwargs: object) -> None:
        raise Started

    for command in ("serve", "live"):
        monkeypatch.setattr(f"simmoe.commands.{command}.require_server_packages", lambda **needs: None)
    monkeypatch.setattr("simmoe.live.driving.live_run.running_engines", start)
    monkeypatch.setattr("simmoe.live.server.replica.LocalReplica._live", start)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"num_experts_per_tok": K_MAX}))
    return folder


def refused(capsys: pytest.CaptureFixture[str], code: int, *arguments: str) -> str:
    """Run a command that is refused with an exit code, in one line, which is returned."""
    assert simmoe(list(arguments)) == code
    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("simmoe: ")
    return line


def test_an_engine_is_started_where_nothing_is_in_the_way(model: Path, tmp_path: Path) -> None:
    """The others would pass without this if nothing were ever started."""
    places = ["--record-decisions", str(tmp_path / "decisions"), "--log-dir", str(tmp_path)]
    with pytest.raises(Started):
        simmoe(["serve", "--model", str(model), "--port", "0", *places])
    with pytest.raises(Started):
        simmoe(["live", "run", "--model", str(model), "--rate", "9", "--mu", "4", "--out", str(tmp_path / "live")])


@pytest.mark.parametrize(
    "occupied", ["decisions-route.jsonl", "decisions-rank0.jsonl", "decisions-rank1.jsonl", "replica1.log"]
)
def test_serve_refuses_a_file_that_cannot_be_written(
    occupied: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "kept" / occupied).mkdir(parents=True)
    folder = str(tmp_path / "kept")
    arguments = ["--replicas", "2", "--port", "0", "--record-decisions", folder, "--log-dir", folder]
    line = refused(capsys, 5, "serve", "--model", str(model), *arguments)
    assert occupied in line and re.search("choose another (name|--log-dir)$", line)


@pytest.mark.parametrize("folder", ["/proc", "/proc/none", "file"])
def test_serve_refuses_a_folder_that_takes_no_recordings(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    # nobody answers at this URL: it would be waited for
    arguments = ["--url", "http://127.0.0.1:1", "--port", "0", "--record-decisions", str(tmp_path / folder)]
    line = refused(capsys, 5, "serve", *arguments)
    assert line.startswith(f"simmoe: cannot write decisions to '{tmp_path / folder}/decisions-route.jsonl': ")
    assert line.endswith("; choose another --record-decisions")


def test_serve_leaves_earlier_recordings_alone_until_engines_are_up(model: Path, tmp_path: Path) -> None:
    kept = tmp_path / "decisions-route.jsonl"
    kept.write_text("whole")
    with pytest.raises(Started):
        simmoe(["serve", "--model", str(model), "--port", "0", "--record-decisions", str(tmp_path)])
    assert kept.read_text() == "whole" and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize(
    "occupied", ["compare/compare.json", "compare/compare.png", "sim", "sim/manifest.json", "live"]
)
def test_validate_refuses_what_cannot_be_written(
    occupied: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    if occupied in ("sim", "live"):
        out.mkdir()
        (out / occupied).touch()
    else:
        (out / occupied).mkdir(parents=True)
    arguments = ["--model", str(model), "--profile", PROFILE, "--rate", "9", "--mu", "4", "--out", str(out)]
    before = sorted(tmp_path.rglob("*"))
    assert str(out / occupied.removesuffix("/manifest.json")) in refused(capsys, 5, "validate", *arguments)
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("command", [("live", "run"), ("validate", "--profile", PROFILE)], ids="-".join)
@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ("--k 9", 2, "k is 9; it must be in 1..k_max (8)"),
        ("--mix 4:1,9:1", 2, "mix is 9; it must be of budgets in 1..k_max (8)"),
        ("--trace TRACE", 3, "k_qos is 9"),
        ("--mu 4 --default-k 9", 2, "--default-k is 9; this model takes 1 to 8"),
        ("--mu 4 --policy POLICY", 4, "k_floor is 9"),
    ],
)
def test_a_budget_beyond_the_model_s_is_refused(
    options: str, code: int, message: str, command: tuple[str, ...], model: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (trace := tmp_path / "trace.csv").write_text("arrival_s,prompt_tokens,output_tokens,k_qos\n0,9,9,8\n1,9,9,9\n")
    (tmp_path / "mine.py").write_text("class Mine:\n    k_floor = 9\n    def plan(self, view, /): ...\n")
    given = options.replace("TRACE", str(trace)).replace("POLICY", f"{tmp_path}/mine.py:Mine").split()
    rate = [] if "TRACE" in options else ["--rate", "9"]
    out = tmp_path / "out"
    line = refused(capsys, code, *command, "--model", str(model), *rate, *given, "--out", str(out))
    assert message in line and not out.exists()


def test_validate_refuses_a_profile_of_another_model(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """In the words it has for a record of such engines."""
    arguments = ["--model", str(model), "--rate", "9", "--mu", "4", "--out", str(tmp_path / "out")]
    line = refused(capsys, 2, "validate", "--profile", "olmoe-1b-7b-split4-h200", *arguments)
    assert line.endswith("has k_max 32; the live engines have 8")
    assert not (tmp_path / "out").exists()


def test_validate_refuses_a_profile_without_graphs_for_engines_with_some(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And starts engines that will have none."""
    write_table(tmp_path / "eager.json", load_profile(PROFILE).table.without_graphs())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    out = tmp_path / "out"
    arguments = ["validate", "--model", str(model), "--profile", str(tmp_path / "eager.json"), "--rate", "9"]
    arguments += ["--mu", "4", "--out", str(out)]
    for graphs in ("keyed", "default"):
        line = refused(capsys, 2, *arguments, "--graphs", graphs)
        assert line.endswith("was measured without graphs; there are no times of any") and not out.exists()
    for without in (["--graphs", "none"], ["--", "--enforce-eager"]):
        with pytest.raises(Started):
            simmoe([*arguments, *without])


MEASURE, LAYER = ["profile", "measure", "--raw", "PLACE.jsonl"], ["profile", "layer", "--out", "PLACE-layer.json"]
TABLE = ["profile", "measure", "--raw", "ELSEWHERE.jsonl", "--out", "PLACE.json"]
SPLIT = ["refactor", "MODEL", "--calibration", "TEXT", "--out", "PLACE"]
INSPECT = ["refactor", "inspect", "MODEL", "--calibration", "TEXT", "--out", "PLACE.png"]
FINETUNE = ["refactor", "finetune", "MODEL", "--text", "TEXT", "--out", "PLACE"]
STATE = ["refactor", "finetune", "MODEL", "--text", "TEXT", "--out", "ELSEWHERE", "--state", "PLACE.pt"]
LIVE = ["live", "run", "--model", "MODEL", "--rate", "9", "--mu", "4", "--out", "PLACE"]
VALIDATE = ["validate", "--model", "MODEL", "--profile", PROFILE, "--rate", "9", "--mu", "4", "--out", "PLACE"]


FOLDERS = {"split": SPLIT, "finetune": FINETUNE, "live": LIVE, "validate": VALIDATE}
FILES = {"measure": MEASURE, "layer": LAYER, "table": TABLE, "inspect": INSPECT, "state": STATE}
PLACES = [
    *((name, place) for name in (*FOLDERS, *FILES) for place in ("/proc/none/a", "file/a")),
    *((name, "nowhere/a") for name in FOLDERS),  # a file's folders are made, wherever links lead
    *((name, "taken") for name in (*FOLDERS, *FILES) if name != "validate"),  # has folders of its own in there
]


@pytest.mark.parametrize(("name", "place"), PLACES)
def test_a_place_that_cannot_be_written_is_refused_before_any_work(
    name: str, place: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """A folder that takes no file, one that is a file, a link to nowhere, and something else in its place."""
    (tmp_path / "file").touch()
    (tmp_path / "nowhere").symlink_to(tmp_path / "none" / "whatever")
    (tmp_path / "text").write_text("words " * 99)
    words = {"MODEL": str(model), "TEXT": str(tmp_path / "text"), "ELSEWHERE": str(tmp_path / "elsewhere")}
    arguments = []
    for word in (command := {**FOLDERS, **FILES}[name]):
        for said, value in words.items():
            word = word.replace(said, value)
        if place == "taken" and "PLACE" in word:
            (tmp_path / word.replace("PLACE", "taken")).mkdir()
            (tmp_path / word.replace("PLACE", "taken") / "kept").touch()
        arguments.append(word.replace("PLACE", str(tmp_path / place)))
    monkeypatch.setattr("simmoe.commands.profile_layer.find_spec", lambda name: object())
    monkeypatch.setattr("simmoe.live.measure.card.refuse_busy", lambda *cards: None)
    if command[0] == "refactor" and find_spec("safetensors") is None:
        pytest.skip("refactoring is not installed: pip install 'simmoe[refactor]'")
    where = place.split("/a")[0] if place != "/proc/none/a" else "/proc"
    assert where in refused(capsys, 5, *arguments)
