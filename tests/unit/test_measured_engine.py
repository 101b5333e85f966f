"""What an engine that is to be measured is told, before there is one."""

from __future__ import annotations

from pathlib import Path

import pytest

from simmoe.live.engine.transport import CONFIG_KEY
from simmoe.live.measure.engine import EngineSetup


@pytest.mark.parametrize("sizes", [None, (1, 8)])
def test_a_step_between_the_captured_budgets_runs_at_the_next(sizes: tuple[int, ...] | None) -> None:
    """Else a recording of mixed budgets would be of kernels launched one by one, and of no graph in the table."""
    told = EngineSetup(Path("model"), captured_sizes=sizes, captured_ks=(2, 8)).engine_args()["additional_config"]
    assert told[CONFIG_KEY]["uncaptured_k"] == "next"
    assert told[CONFIG_KEY]["captured_ks"] == [2, 8]


def test_an_engine_without_graphs_runs_every_budget_as_it_is() -> None:
    told = EngineSetup(Path("model"), captured_sizes=()).engine_args()
    assert told["enforce_eager"]
    assert told["additional_config"][CONFIG_KEY].keys() == {"record_steps"}
