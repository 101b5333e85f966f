"""``simmoe profile`` as a user types it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from simmoe.cli import run
from simmoe.profiles.catalog import load_profile
from simmoe.profiles.samples import SampleWriter
from simmoe.profiles.synthetic import SyntheticEngine

SYNTHETIC = "synthetic-olmoe-split4"


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")


def test_list_names_each_profile_with_its_status(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profile", "list"]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if SYNTHETIC in line)
    assert "synthetic" in line.replace(SYNTHETIC, "")


def test_show_prints_provenance_and_times(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profile", "show", SYNTHETIC]) == 0
    out = capsys.readouterr().out
    profile = load_profile(SYNTHETIC)
    assert profile.sha256 in out
    assert "no card" in out
    assert out.count("(synthetic)") >= 4
    assert f"{profile.cost().prefill_s(8192, 32) * 1e3:.2f}" in out


def test_show_sync_adds_the_host(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profile", "show", SYNTHETIC, "--sync"]) == 0
    out = capsys.readouterr().out
    assert "synchronous scheduling" in out and "asynchronous scheduling)" not in out
    assert f"{load_profile(SYNTHETIC).cost(async_scheduling=False).prefill_s(8192, 32) * 1e3:.2f}" in out


def test_plot_writes_a_picture(tmp_path: Path) -> None:
    assert run(["profile", "plot", SYNTHETIC, "--out", str(tmp_path / "p.png")]) == 0
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_plot_names_a_place_it_cannot_write(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profile", "plot", SYNTHETIC, "--out", str(tmp_path / "no" / "p.png")]) == 5
    assert "cannot write the picture" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["p.gif", "p.xyz", "p", "p.png.gz", ".png"])
def test_a_picture_of_another_kind_is_refused(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profile", "plot", SYNTHETIC, "--out", str(tmp_path / name)]) == 2
    assert f"{name}' names no picture; end it in one of .png, .svg, .pdf" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("name", "start"), [("p.svg", b"<?xml"), ("p.PDF", b"%PDF"), ("p.png", b"\x89PNG")])
def test_a_picture_is_what_its_name_says(name: str, start: bytes, tmp_path: Path) -> None:
    assert run(["profile", "plot", SYNTHETIC, "--out", str(tmp_path / name)]) == 0
    assert (tmp_path / name).read_bytes().startswith(start)


def test_an_unknown_name_suggests(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["profile", "show", "synthetic-olmoe"]) == 2
    assert f"did you mean '{SYNTHETIC}'" in capsys.readouterr().err


def test_fit_writes_a_table_that_loads(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = SyntheticEngine()
    with SampleWriter(tmp_path / "raw.jsonl", engine.header()) as writer:
        for sample in engine.samples():
            writer.write(sample)
    out = tmp_path / "mine.json"
    assert run(["profile", "fit", str(tmp_path / "raw.jsonl"), "--synthetic", "--out", str(out)]) == 0
    assert "predicted / measured" in capsys.readouterr().out
    profile = load_profile(str(out))
    assert (profile.name, profile.status) == ("mine", "synthetic")
    assert profile.cost().prefill_s(512, 8) == pytest.approx(load_profile(SYNTHETIC).cost().prefill_s(512, 8))


def test_fit_leaves_nothing_behind_when_samples_are_bad(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "raw.jsonl").write_text("{}\n")
    assert run(["profile", "fit", str(tmp_path / "raw.jsonl"), "--out", str(tmp_path / "mine.json")]) == 3
    assert "raw.jsonl" in capsys.readouterr().err
    assert not (tmp_path / "mine.json").exists()


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
def test_measure_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--raw", str(tmp_path / "raw.jsonl"), "--out", str(tmp_path / "mine.json")]
    assert run(["profile", "measure", *options]) == 6
    assert "simmoe[live]" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
