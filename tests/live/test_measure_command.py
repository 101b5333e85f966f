"""``simmoe profile measure`` where there is vLLM and no card to measure: it says so before anything is written."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from simmoe.cli import run
from simmoe.errors import LiveError, MissingDependency
from tests.support.nvidia_smi import stand_in

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: pip install 'simmoe[live-cpu]'"),
]


@pytest.mark.parametrize(
    ("said", "exit_code", "named"),
    [
        ("No devices were found\n", MissingDependency.exit_code, "nvidia-smi found no card"),
        ("70000, 99\n", LiveError.exit_code, "card 0 is busy"),
    ],
)
def test_no_card_or_a_busy_one_is_refused_before_anything_is_written(
    said: str,
    exit_code: int,
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    stand_in(tmp_path, monkeypatch, said)
    out = tmp_path / "out"
    out.mkdir()
    assert run(["profile", "measure", "--raw", str(out / "raw.jsonl"), "--out", str(out / "mine.json")]) == exit_code
    told = capsys.readouterr()
    assert named in told.err
    assert told.err.count("\n") == 1
    assert not list(out.iterdir())
    assert "vllm" not in sys.modules  # a minute on a small machine
