"""``simmoe profile`` as a user types it."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from simmoe.cli import run
from simmoe.profiles.catalog import DEFAULT_PROFILE, load_profile, profile_path
from simmoe.profiles.layer_times import LayerTime, LayerTimes, write_layer_times
from simmoe.profiles.models import read_model, split_config
from simmoe.profiles.samples import SampleWriter
from simmoe.profiles.synthetic import SyntheticEngine
from simmoe.profiles.table_file import write_table

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
    (tmp_path / "no").write_text("a file")
    assert run(["profile", "plot", SYNTHETIC, "--out", str(tmp_path / "no" / "p.png")]) == 5
    assert "cannot write the picture" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["no"]


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


def test_fit_takes_when_a_graph_begins_from_another_table_where_no_recording_tells(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = SyntheticEngine()
    with SampleWriter(tmp_path / "raw.jsonl", engine.header()) as writer:
        for sample in engine.samples():
            writer.write(sample)
    like, plain, out = tmp_path / "like.json", tmp_path / "plain.json", tmp_path / "mine.json"
    write_table(like, replace(load_profile(SYNTHETIC).table, graph_tail_s=9e-4))
    write_table(plain, load_profile(SYNTHETIC).table)
    fit = ["profile", "fit", str(tmp_path / "raw.jsonl"), "--synthetic", "--out", str(out), "--graph-tail-of"]
    assert run([*fit, str(plain)]) == 2
    assert f"--graph-tail-of {plain}: that profile has no graph_tail" in capsys.readouterr().err
    assert not out.exists()
    assert run([*fit, str(like)]) == 0
    table = load_profile(str(out)).table
    assert (table.graph_tail_s, table.provenance["fit"]["graph_tail_of"]) == (9e-4, SYNTHETIC)
    capsys.readouterr()
    assert run(["profile", "show", str(out)]) == 0
    assert f"0.900 ms, of {SYNTHETIC}" in capsys.readouterr().out


def test_fit_takes_and_notes_the_kv_blocks_of_an_engine_that_has_its_card_to_itself(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = SyntheticEngine()
    with SampleWriter(tmp_path / "raw.jsonl", engine.header()) as writer:
        for sample in engine.samples():
            writer.write(sample)
    fit = ["profile", "fit", str(tmp_path / "raw.jsonl"), "--synthetic", "--name", "mine", "--out"]
    assert run([*fit, str(tmp_path / "as-measured.json")]) == 0
    assert run([*fit, str(tmp_path / "alone.json"), "--num-gpu-blocks", "90000"]) == 0
    measured, alone = (load_profile(str(tmp_path / name)).table for name in ("as-measured.json", "alone.json"))
    assert measured.num_gpu_blocks == alone.provenance["runs"][0]["num_gpu_blocks"] == engine.header().num_gpu_blocks
    assert alone.num_gpu_blocks == alone.provenance["fit"]["num_gpu_blocks"] == 90000
    noted = {**measured.provenance["fit"], "num_gpu_blocks": 90000}
    assert alone.provenance == {**measured.provenance, "fit": noted}
    as_measured = replace(alone, num_gpu_blocks=measured.num_gpu_blocks, provenance=measured.provenance, sha256="")
    assert as_measured == replace(measured, sha256="")
    capsys.readouterr()
    for name, shown in (("as-measured.json", ""), ("alone.json", "; given, not measured")):
        assert run(["profile", "show", str(tmp_path / name)]) == 0
        (row,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("KV cache"))
        assert row.rstrip().endswith(f" blocks of 16 tokens{shown}")


@pytest.mark.parametrize("budgets", ["", "8,,32", "0", "²", "9" * 5000])
def test_measure_refuses_budgets_that_are_none(
    budgets: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["profile", "measure", "--budgets", budgets, "--raw", str(tmp_path / "raw.jsonl")]) == 2
    assert capsys.readouterr().err == f"simmoe: --budgets is '{budgets}'; give budgets as in 8,16,32\n"
    assert not list(tmp_path.iterdir())


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


def test_show_and_plot_take_the_moe_layer_s_times_beside_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "mine.json"
    table.write_bytes(profile_path(DEFAULT_PROFILE).read_bytes())
    (run_of,) = load_profile(str(table)).provenance["runs"]
    config = split_config(read_model("olmoe-1b-7b").config, 4)
    rows = (LayerTime(1, 8, 2e-5, 8.0), LayerTime(8192, 8, 1e-3, 256.0), LayerTime(8192, 32, 4e-3, 256.0))
    times = LayerTimes(
        run_of["model"], config, "bfloat16", run_of["card"], "2026-01-01", {}, "TritonExperts", 8e14, 4e12, rows
    )
    write_layer_times(tmp_path / "mine-layer.json", times)
    assert run(["profile", "show", str(table)]) == 0
    out = capsys.readouterr().out
    # 8,192 tokens to 32 experts of 3 x 2048 x 256 weights, a multiplication and an addition each, in 4 ms
    assert f"{2 * 8192 * 32 * 3 * 2048 * 256 / 4e-3 / 1e12:.1f}" in out.split("achieved TFLOP/s")[1]
    assert "800 TFLOP/s and 4.00 TB/s measured" in out and "did not reach it" not in out
    assert "by itself" not in out
    write_layer_times(tmp_path / "mine-layer.json", replace(times, in_engine=False, num_layers=8))
    assert run(["profile", "show", str(table)]) == 0
    assert "timed on 2026-01-01 by itself ('profile layer'), not in the engine of the table: 8 layers" in (
        capsys.readouterr().out
    )
    assert run(["profile", "plot", str(table), "--out", str(tmp_path / "p.svg")]) == 0
    assert "measured ceilings" in (tmp_path / "p.svg").read_text()
    write_layer_times(tmp_path / "mine-layer.json", replace(times, matmul_flop_s=1e13))
    assert run(["profile", "show", str(table)]) == 0
    assert "did not reach it" in capsys.readouterr().out
    assert run(["profile", "plot", str(table), "--out", str(tmp_path / "p.svg")]) == 0
    assert "datasheet rates" in (tmp_path / "p.svg").read_text()
    write_layer_times(tmp_path / "mine-layer.json", replace(times, card="NVIDIA H100"))
    assert run(["profile", "show", str(table)]) == 3
    assert "on NVIDIA H100, the table beside it" in capsys.readouterr().err


@pytest.mark.parametrize(("name", "has_share"), [(SYNTHETIC, False), (DEFAULT_PROFILE, True)])
def test_the_share_of_the_roofline_is_drawn_where_the_card_is_known(name: str, has_share: bool, tmp_path: Path) -> None:
    assert run(["profile", "plot", name, "--out", str(tmp_path / "p.svg")]) == 0
    assert ("% of the binding roofline" in (tmp_path / "p.svg").read_text()) == has_share


def test_equal_pictures_are_equal_bytes(tmp_path: Path) -> None:
    for suffix in (".png", ".svg", ".pdf"):
        for name in ("a", "b"):
            assert run(["profile", "plot", SYNTHETIC, "--out", str(tmp_path / f"{name}{suffix}")]) == 0
        assert (tmp_path / f"a{suffix}").read_bytes() == (tmp_path / f"b{suffix}").read_bytes()


def test_fit_takes_each_file_once_of_one_engine_and_writes_what_a_name_finds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = profile_path("olmoe-1b-7b-tp2-h200").parent / "raw"
    samples, out = str(raw / "olmoe-1b-7b-tp2-h200.jsonl.gz"), str(tmp_path / "mine.json")
    for other, message in (
        ("qwen3-30b-a3b-h200", "was recorded with model 'Qwen/Qwen3-30B-A3B', the sample file is of"),
        ("olmoe-1b-7b-h200", "was recorded with num_cards '1', the sample file is of '2'; fit one engine at a time"),
        ("olmoe-1b-7b-tp2-ep-h200", "was recorded with whole experts on each card"),
    ):
        assert run(["profile", "fit", samples, str(raw / f"{other}-recording.jsonl.gz"), "--out", out]) == 3
        assert message in capsys.readouterr().err
    assert run(["profile", "fit", samples, samples, "--out", out]) == 2
    assert "is named twice" in capsys.readouterr().err
    for name in ("mine", "mine.txt", ""):
        assert run(["profile", "fit", samples, "--out", name]) == 2
        assert "names no table; end it in .json" in capsys.readouterr().err
    for option in ("--name", "--summary", "--graph-tail-of"):
        for blank in ("", " "):
            assert run(["profile", "fit", samples, "--out", out, option, blank]) == 2
            assert f"{option} is empty; give a value, or leave the option out" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
