"""Whether a card may be measured, by what ``nvidia-smi`` says of it: a script of that name stands on the PATH."""

from __future__ import annotations

from pathlib import Path

import pytest

from simmoe.errors import LiveError, MissingDependency
from simmoe.live.measure import card
from tests.support.nvidia_smi import stand_in


@pytest.fixture(autouse=True)
def _all_cards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.mark.parametrize(
    ("said", "num_cards"), [("0, 0\n", 1), ("1024, 5\n", 1), ("3, 0\n9, 1\n", 2), ("3, 0\n80000, 97\n", 1)]
)
def test_a_card_that_nobody_uses_is_measured(
    said: str, num_cards: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, said)
    card.refuse_busy(num_cards)


@pytest.mark.parametrize(
    ("said", "num_cards", "named"),
    [
        ("80123, 0\n", 1, "card 0 is busy (80123 MiB in use, 0% utilised)"),
        ("4, 63\n", 1, "card 0 is busy (4 MiB in use, 63% utilised)"),
        ("4, 0\n2000, 0\n", 2, "card 1 is busy"),
        ("4, 0\n", 2, "2 cards are needed, this process may use 1"),
        ("[N/A], [N/A]\n", 1, "nvidia-smi says [N/A] MiB are in use and [N/A]% of it"),
        ("4, [N/A]\n", 1, "whether card 0 is busy is not known"),
    ],
)
def test_a_card_that_is_not_free_or_does_not_say_is_refused(
    said: str, num_cards: int, named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, said)
    with pytest.raises(LiveError) as refused:
        card.refuse_busy(num_cards)
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("said", "code"),
    [
        ("No devices were found\n", 0),
        ("No devices were found\n", 6),
        ("", 0),
        ("", 9),
        ("NVIDIA-SMI has failed\nmake sure\n", 9),
    ],
)
def test_a_machine_without_a_card_is_told_so_in_one_line(
    said: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, said, code)
    with pytest.raises(MissingDependency, match=r"^nvidia-smi found no card: ") as refused:
        card.refuse_busy()
    assert "\n" not in str(refused.value)
    assert all(word in str(refused.value) for word in said.split())


def test_there_may_be_no_nvidia_smi_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingDependency, match="not on the PATH"):
        card.refuse_busy()


@pytest.mark.parametrize("visible", ["", "-1"])
def test_a_process_that_may_use_no_card_is_told_so(
    visible: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(tmp_path, monkeypatch, "0, 0\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with pytest.raises(MissingDependency, match="CUDA_VISIBLE_DEVICES"):
        card.refuse_busy()


def test_only_cards_this_process_may_use_are_asked_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = stand_in(tmp_path, monkeypatch, "0, 0\n")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    card.refuse_busy()
    assert asked.read_text().split()[-2:] == ["-i", "3"]


def test_clocks_are_those_the_driver_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(tmp_path, monkeypatch, "1980, 3201, 112.5, [N/A]\n")
    assert card.clocks() == {"sm_mhz": 1980.0, "mem_mhz": 3201.0, "power_w": 112.5}
