"""docs/policies.md: its example is a policy, conforms, and serves a workload; its lists are those of the code."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from simmoe.cli import run
from simmoe.policies.loading import GROUPS, installed, load_named
from simmoe.policies.parameters import parameters_of
from simmoe.policies.registry import parse_policy
from simmoe.profiles.shape import LinearStepCost
from simmoe.simulator.config import SimConfig
from simmoe.simulator.simulation import simulate
from simmoe.traces.workload import Workload

PAGE = (Path(__file__).parents[2] / "docs" / "policies.md").read_text(encoding="utf-8")


@pytest.fixture
def example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page's example, saved under the name the page gives it, in the current folder."""
    source = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)[0]
    path = tmp_path / "no_raise.py"
    path.write_text(source)
    monkeypatch.chdir(tmp_path)
    return path


def test_the_example_conforms_by_the_command_the_page_gives(example: Path) -> None:
    command = re.findall(r"^simmoe (policies check no_raise.*)$", PAGE, flags=re.MULTILINE)[0]
    assert run(command.split()) == 0


def test_the_example_serves_every_request_with_less_over_serving_than_fifo(example: Path) -> None:
    """20 requests/s on one rank, one in 20 of high budget: those that wait for each other share their steps."""
    n = 200
    gaps_s = np.random.default_rng(0).exponential(0.05, n)
    workload = Workload(
        request_id=[f"r{i}" for i in range(n)],
        arrival_s=np.cumsum(gaps_s, dtype=np.float64) - gaps_s[0],
        prompt_tokens=np.full(n, 200),
        output_tokens=np.full(n, 100),
        k_qos=np.where(np.arange(n) % 20 == 7, 32, 4),
    )
    routed = {}
    for text in (re.findall(r"--policy (no_raise\S+)", PAGE)[0].removesuffix("+lanes"), "fifo"):
        choice = parse_policy(text)
        result = simulate(workload, SimConfig(), LinearStepCost(), choice.batch, choice.route)
        assert (result.requests["status"] == "finished").all()
        routed[choice.batch_name] = sum(rank.routed_slots for rank in result.ranks)
    assert routed["no_raise.py:NoRaise"] < routed["fifo"]


@pytest.mark.parametrize("name", [name for kind in GROUPS for name in installed(kind)])
def test_the_page_describes_every_shipped_policy_and_its_parameters(name: str) -> None:
    assert f"**{name}**" in PAGE
    for parameter in parameters_of(load_named(name)[0], name).values():
        assert f"{parameter.name}=" in PAGE or f"`{parameter.name}`" in PAGE


def test_the_ablation_table_has_the_defaults_of_the_code() -> None:
    rows = [re.split(r"\s*\|\s*", line.strip("| \n")) for line in PAGE.splitlines() if line.startswith("| ")]
    parameters = parameters_of(load_named("lanes")[0], "lanes")
    seen = set()
    for row in rows:
        if len(row) != 5:
            continue
        names = [name for name in re.findall(r"`(\w+)`", row[1]) if name in parameters]
        seen |= set(names)
        if names:
            assert row[2].split(", ") == [shown(parameters[name].default) for name in names]
        if "=" in row[3]:
            off = parse_policy(f"lanes,{row[3].strip('`')}")
            assert off.parameters["route"] != parse_policy("lanes").parameters["route"]
    assert seen == set(parameters)


def shown(default: object) -> str:
    """A default as the table writes it."""
    if default is None:
        return "budgets dealt evenly"
    return str(default).lower() if isinstance(default, bool) else f"{default:g}"
