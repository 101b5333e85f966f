"""A step taken apart adds up to the step, and its parts are what they are called."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table

from simmoe.cli import run as simmoe
from simmoe.commands.profile_parts import part_tables
from simmoe.errors import ProfileError
from simmoe.profiles.catalog import (
    DEFAULT_PROFILE,
    Profile,
    layer_times_of,
    load_profile,
    profile_names,
    profile_path,
)
from simmoe.profiles.estimating.parts import StepSeconds, StepTakenApart, efficiencies_of
from simmoe.profiles.estimating.roofline import Efficiencies
from simmoe.profiles.estimating.step_work import ROUTE_ALIKE
from simmoe.profiles.models import model_shape
from simmoe.profiles.shape import StepShape
from simmoe.profiles.step_cost import prompt_shape

MEASURED = [name for name in profile_names() if load_profile(name).status == "measured"]
OF_ONE_CARD = [name for name in MEASURED if "-tp2" not in name]
TIMED = [name for name in MEASURED if layer_times_of(name, load_profile(name).table)]

#: What the parts leave of a step that the device decides, over the cells of a table: its mean and the mean of its size,
#: as shares of the step. Prompts of up to 2,048 tokens are held to nothing: in some tables the host hides the device
#: there, and the grid holds a bound.
MOST_BIAS, MOST_SIZE = 0.08, 0.1


@cache
def apart(name: str, async_scheduling: bool = True, with_layer: bool = True) -> StepTakenApart:
    table = load_profile(name).table
    layer = layer_times_of(name, table)
    tables = ((load_profile(other).table, layer_times_of(other, load_profile(other).table)) for other in MEASURED)
    efficiencies, _ = efficiencies_of(table, layer, tables)
    return StepTakenApart(table, efficiencies, layer if with_layer else None, async_scheduling)


@st.composite
def shapes(draw: st.DrawFn) -> StepShape:
    tokens = draw(st.one_of(st.just(0), st.integers(1, 10_000)))
    decodes = draw(st.integers(0 if tokens else 1, 1500))
    kv_tokens = decodes * draw(st.integers(1, 4000))
    prompts = draw(st.integers(1, min(tokens, 8))) if tokens else 0
    return StepShape(tokens, tokens * draw(st.integers(1, 3000)), prompts, decodes, kv_tokens, draw(st.integers(1, 40)))


@given(st.sampled_from(MEASURED), st.booleans(), shapes())
def test_parts_add_up_to_the_step_and_only_the_rest_has_a_sign(
    name: str, async_scheduling: bool, shape: StepShape
) -> None:
    parts = apart(name, async_scheduling).seconds(shape)
    cost = load_profile(name).cost(async_scheduling)
    assert parts.step_s == pytest.approx(cost.step_s(shape), rel=1e-14)
    assert all(seconds >= 0 for seconds in parts._replace(rest_s=0.0))
    taken = load_profile(name).cost(True).parts_s(shape)
    launches_apart = load_profile(name).table.launches_apart  # and takes outputs in meanwhile
    host_s = max(0.0, (taken.launch_s if launches_apart else taken.host_s) - taken.device_s)
    if not async_scheduling:  # what is not hidden behind the same step's device: to prepare it, and to take it in
        host_s = cost.parts_s(shape).alone_s - taken.device_s
        assert taken.update_s - 1e-12 <= host_s <= taken.host_s + 1e-12
    assert parts.host_s == pytest.approx(host_s, abs=1e-12)


@pytest.mark.parametrize("name", MEASURED)
def test_little_is_left_of_steps_that_the_device_decides(name: str) -> None:
    table = load_profile(name).table
    for sizes, shape_of in (
        (table.decode.sizes, lambda n, k: StepShape(0, 0, 0, n, n * 1024, k)),
        ([n for n in table.prefill.sizes if n > 2048], prompt_shape),
    ):
        found = [apart(name).seconds(shape_of(n, k)) for n in sizes for k in table.decode.ks]
        left = np.array([parts.rest_s / parts.step_s for parts in found if not parts.host_s])
        assert abs(left.mean()) < MOST_BIAS and np.abs(left).mean() < MOST_SIZE, (
            name,
            left.mean(),
            np.abs(left).mean(),
        )


@pytest.mark.parametrize("name", MEASURED)
def test_only_routed_experts_and_the_rest_change_with_k(name: str) -> None:
    ks = load_profile(name).table.decode.ks
    for shape in (StepShape(0, 0, 0, 64, 64 * 1024), prompt_shape(2048, 1)):
        least, most = (apart(name).seconds(shape._replace(k_exec=k)) for k in (ks[0], ks[-1]))
        assert least.experts_s < most.experts_s
        assert least._replace(experts_s=0, rest_s=0, host_s=0) == pytest.approx(
            most._replace(experts_s=0, rest_s=0, host_s=0)
        )


@pytest.mark.parametrize("name", TIMED)
def test_experts_timed_alone_are_the_layers_times(name: str) -> None:
    """Of decoding sequences; a prompt's tokens touch fewer experts where the weights route them alike."""
    table = load_profile(name).table
    times = layer_times_of(name, table)
    assert times is not None
    alike = table.provenance["runs"][0]["weights"] in ROUTE_ALIKE
    most = max(row.distinct_experts for row in times.rows)
    layers = model_shape(times.model_config).num_moe_layers
    for row in times.rows:
        if row.num_tokens in table.decode.sizes:
            k = row.k * table.k_granularity
            parts = apart(name).seconds(StepShape(0, 0, 0, row.num_tokens, row.num_tokens, k))
            assert parts.experts_s == pytest.approx(layers * row.seconds)
            assert apart(name).is_timed(row.num_tokens, k)
            prompt = apart(name).seconds(prompt_shape(row.num_tokens, k))
            if not alike:
                assert prompt.experts_s == pytest.approx(layers * row.seconds)
            elif row.num_tokens > 8 and row.distinct_experts < most:
                assert prompt.experts_s < parts.experts_s
    assert not apart(name).is_timed(64, 2 * table.k_max) and not apart(name, with_layer=False).is_timed(64, table.k_max)


@pytest.mark.parametrize("name", TIMED)
def test_learned_experts_are_near_those_timed_alone(name: str) -> None:
    """Two ways to the same part."""
    table = load_profile(name).table
    for n in (16, 64, 256, 1024):
        shape = StepShape(0, 0, 0, n, n, table.k_max)
        learned, timed = (apart(name, with_layer=with_layer).seconds(shape) for with_layer in (False, True))
        assert learned.experts_s == pytest.approx(timed.experts_s, rel=0.3)


@pytest.mark.parametrize("name", MEASURED)
def test_cards_exchange_where_there_are_several(name: str) -> None:
    parts = apart(name).seconds(prompt_shape(1024, 4))
    assert (parts.exchanges_s > 0) == (name not in OF_ONE_CARD)


def test_nothing_is_left_of_an_estimate(tmp_path: Path) -> None:
    """An estimate is the sum of its parts, at efficiencies that it keeps."""
    out = tmp_path / "estimate.json"
    assert simmoe(["profile", "roofline", "--gpu", "a100-80gb", "--model", "qwen3-30b-a3b", "--out", str(out)]) == 0
    table = load_profile(str(out)).table
    efficiencies, tables = efficiencies_of(table, None, [])
    assert efficiencies != Efficiencies() and set(tables) <= set(MEASURED)
    taken = StepTakenApart(table, efficiencies)
    for n in table.prefill.sizes:
        for k in table.prefill.ks:
            # above 512 tokens, where tiles of the experts' kernel are all one size, nothing is lifted to be monotone
            if n > 512:
                parts = taken.seconds(prompt_shape(n, k))
                assert parts.rest_s == pytest.approx(0, abs=1e-6 * parts.step_s)


@pytest.mark.parametrize(("name", "value"), [("no_such", 1.0), ("link", 0.0), ("alike", math.nan)])
def test_what_an_estimate_keeps_and_is_no_efficiency_is_refused(name: str, value: float) -> None:
    table = load_profile("olmoe-1b-7b-h200").table
    kept = {"learned": {"device": {name: value}, "tables": ["a"]}}
    with pytest.raises(ProfileError, match=f"keeps an efficiency {name} of {value:g}"):
        efficiencies_of(replace(table, provenance={"estimate": kept}), None, [])


def test_a_table_that_names_no_card_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert simmoe(["profile", "show", "synthetic-olmoe-split4", "--parts"]) == 2
    error = capsys.readouterr().err
    assert "names no model on a card with a known datasheet" in error and error.count("\n") == 1


def test_steps_are_shown_at_budgets_of_their_own_grid() -> None:
    table = load_profile("olmoe-1b-7b-h200").table
    cells = tuple(row[1:2] for row in table.decode.cells)
    profile = Profile(replace(table, decode=replace(table.decode, ks=table.decode.ks[1:2], cells=cells)))
    _, prompts, decode = part_tables(profile, None, async_scheduling=True)
    assert isinstance(prompts, Table) and isinstance(decode, Table)
    least, most = table.prefill.ks[0], table.prefill.ks[-1]
    assert {str(least), str(most)} < set(prompts.columns[1].cells)
    assert set(decode.columns[1].cells) == {str(table.decode.ks[1])}


def test_a_table_without_graphs_takes_what_others_learned() -> None:
    table = load_profile("olmoe-1b-7b-h200").table.without_graphs()
    shipped = [(load_profile(name).table, None) for name in OF_ONE_CARD]
    efficiencies, tables = efficiencies_of(table, None, shipped)
    assert set(tables) == set(OF_ONE_CARD)
    parts = StepTakenApart(table, efficiencies).seconds(prompt_shape(3000, 8))
    assert isinstance(parts, StepSeconds)
    assert parts.step_s == pytest.approx(Profile(table).cost().step_s(prompt_shape(3000, 8)))


def test_the_docs_print_the_parts_as_the_command_does(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "docs" / "profiles.md").read_text(encoding="utf-8")
    command = r"^\$ simmoe profile show (\S+) --parts\n(.*?)^```$"
    ((name, block),) = re.findall(command, page, flags=re.MULTILINE | re.DOTALL)
    assert simmoe(["profile", "show", name, "--parts"]) == 0
    printed = {line.rstrip() for line in capsys.readouterr().out.splitlines()}
    assert {line.rstrip() for line in block.splitlines() if line != "..."} <= printed


@pytest.mark.parametrize("timed", [True, False])
def test_the_mark_of_a_timed_layer_is_explained_where_it_stands(
    timed: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = DEFAULT_PROFILE
    if not timed:
        name = str(tmp_path / "mine.json")  # with no layer's times beside it
        Path(name).write_bytes(profile_path(DEFAULT_PROFILE).read_bytes())
    assert simmoe(["profile", "show", name, "--parts"]) == 0
    shown = capsys.readouterr().out
    assert ("experts marked t" in " ".join(shown.split())) == timed
    assert any(" t " in line for line in shown.splitlines() if line[:1] in " 123456789") == timed
