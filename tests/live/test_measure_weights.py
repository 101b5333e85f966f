"""Files begun with other weights, or by another engine, are refused before an engine is started for them."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from simmoe.errors import ProfileError
from simmoe.live.measure import MeasuredModel, Measuring, measure
from simmoe.live.measure import run as measure_run
from simmoe.live.measure.engine import EngineSetup
from simmoe.live.measure.header import known_of
from simmoe.live.measure.plan import Plan
from simmoe.profiles.samples import PER_RUN_FIELDS, SampleHeader, SampleWriter
from simmoe.profiles.synthetic import SyntheticEngine
from simmoe.profiles.weights import REVISION_1, WEIGHTS
from tests.live.tiny import TINY_OLMOE

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: pip install 'simmoe[live-cpu]'"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own, at import
]


class Started(Exception):
    """An engine would have been started."""


def begun_by(run: Measuring, **unlike: Any) -> SampleHeader:
    """Return the header that a run begins a file with, but for some fields."""
    graphs: dict[str, Any] = {"captured_sizes": [], "captured_ks": []}
    known = known_of(run)
    known["engine_flags"] |= {"OMP_NUM_THREADS": "99"}  # which vLLM may set when it starts
    return replace(SyntheticEngine().header(), **{**graphs, **known, **unlike})


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measuring:
    """What is to be measured, by an engine whose start raises."""

    def start(setup: EngineSetup) -> Any:
        raise Started

    monkeypatch.setattr(measure_run, "running", start)
    setup = EngineSetup(tmp_path, captured_sizes=())
    return Measuring(MeasuredModel("tiny", TINY_OLMOE), setup, Plan((8,)), tmp_path / "s.jsonl")


@pytest.mark.parametrize(
    ("samples", "recording", "refused"),
    [
        (REVISION_1, None, "s.jsonl"),
        (None, {"weights": REVISION_1}, "s-recording.jsonl"),
        (WEIGHTS, {}, "s-recording.jsonl"),  # recorded when there was one revision, which was not named
        (WEIGHTS, {"weights": WEIGHTS}, None),
        (None, None, None),
    ],
)
def test_what_was_begun_with_other_weights_is_left_as_it_is(
    samples: str | None,
    recording: dict[str, str] | None,
    refused: str | None,
    run: Measuring,
    tmp_path: Path,
) -> None:
    if samples is not None:
        SampleWriter(run.out, begun_by(run, weights=samples)).close()
    if recording is not None:
        run.recording_path.write_text(json.dumps({"format": "simmoe-recording", "version": 1, **recording}) + "\n")
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    if refused is None:
        with pytest.raises(Started):
            measure(run)
    else:
        with pytest.raises(ProfileError) as error:
            measure(run)
        assert f"{refused}' was begun with the weights '{REVISION_1}', engines now have '{WEIGHTS}'" in str(error.value)
        assert "\n" not in str(error.value)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize(
    "unlike",
    [
        {"model": "another"}, {"model_config": {}}, {"dtype": "float64"}, {"k_max": 7}, {"k_granularity": 3},
        {"card": "B300"}, {"num_cards": 4}, {"driver": "1.2"}, {"versions": {}}, {"graphs": "banks"},
        {"engine_flags": {}}, {"async_scheduling": False}, {"date": "1999-01-01"}, {"command": "another"},
    ],
    ids=lambda unlike: next(iter(unlike)),
)  # fmt: skip
def test_what_another_engine_began_is_left_as_it_is(unlike: dict[str, Any], run: Measuring) -> None:
    SampleWriter(run.out, begun_by(run, **unlike)).close()
    before = run.out.read_bytes()
    if unlike.keys() <= set(PER_RUN_FIELDS):  # which differ from run to run
        with pytest.raises(Started):
            measure(run)
    else:
        (name,) = unlike
        with pytest.raises(ProfileError, match=rf"s.jsonl' was measured with {name} .*; write to another file"):
            measure(run)
    assert run.out.read_bytes() == before
