"""Engines with CUDA graphs at some budgets alone, simulated: what runs at another, and what that costs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simmoe.commands.recorded_config import live_engine, simulated_config
from simmoe.commands.validate import simulate_like
from simmoe.errors import RecordError, UsageError
from simmoe.policies.registry import parse_policy
from simmoe.profiles.catalog import Profile, load_profile
from simmoe.profiles.keyed_cost import KeyedStepCost
from simmoe.profiles.shape import StepShape
from simmoe.records import RunRecord
from simmoe.simulator.config import EngineConfig, SimConfig
from simmoe.simulator.simulation import simulate
from simmoe.traces.workload import Workload
from tests.support.live_record import as_live

KS = (8, 20, 32)
PROFILE = load_profile("olmoe-1b-7b-split4-h200")


@st.composite
def shapes(draw: st.DrawFn) -> StepShape:
    prompts = draw(st.integers(0, 4))
    tokens = draw(st.integers(prompts, 9000)) if prompts else 0
    decodes = draw(st.integers(0 if prompts else 1, 600))
    k = draw(st.integers(1, 32))
    return StepShape(tokens, tokens * (tokens + 1) // 2, prompts, decodes, decodes * draw(st.integers(1, 900)), k)


@given(shapes(), st.booleans())
def test_a_step_costs_what_graphs_do_at_their_budgets_and_what_kernels_do_at_others(
    shape: StepShape, is_async: bool
) -> None:
    keyed = PROFILE.keyed_cost(is_async, KS)
    alike = (PROFILE if shape.k_exec in KS else PROFILE.captured_at(())).cost(is_async)
    assert keyed.parts_s(shape) == alike.parts_s(shape)
    assert keyed.step_s(shape) == alike.step_s(shape)
    assert keyed.decode_line(37, shape.k_exec) == alike.decode_line(37, shape.k_exec)
    assert keyed.prefill_s(700, shape.k_exec) == alike.prefill_s(700, shape.k_exec)
    assert keyed.extrapolated == alike.extrapolated


def test_extrapolated_steps_of_both_kinds_are_counted() -> None:
    keyed = PROFILE.keyed_cost(True, KS)
    for k in (*KS, 9):
        keyed.step_s(StepShape(0, 0, 0, 100_000, 1, k))
    assert keyed.extrapolated == {"decode_seqs": 4}


def test_graphs_at_every_budget_and_none_at_all_are_the_profiles_own_costs() -> None:
    assert not isinstance(PROFILE.keyed_cost(True, ()), KeyedStepCost)
    assert not isinstance(Profile(PROFILE.table.without_graphs()).keyed_cost(True, KS), KeyedStepCost)


def simulated(choice: str, *, fast_forward: bool = True, seed: int = 3, is_async: bool = True) -> RunRecord:
    """Return the record of mixed budgets on an engine with graphs at KS."""
    rng = np.random.default_rng(seed)
    workload = Workload(
        request_id=[f"r{i}" for i in range(60)],
        arrival_s=np.linspace(0, 3, 60),
        prompt_tokens=rng.integers(1, 900, 60),
        output_tokens=rng.integers(1, 60, 60),
        k_qos=rng.integers(1, 33, 60),
    )
    engine = EngineConfig(num_gpu_blocks=4000, captured_ks=KS, uncaptured_k=choice, async_scheduling=is_async)
    config = SimConfig(k_max=32, engine=engine, record_steps=True, fast_forward=fast_forward)
    policy = parse_policy("tiers")
    cost = PROFILE.keyed_cost(engine.async_scheduling, engine.graph_ks)
    result = simulate(workload, config, cost, policy.batch, policy.route)
    told = {"config": config.as_dict(), "policy": {"given": "tiers"}, "workload": None}
    return result.record({"kind": "run", **told})


def steps_of(record: RunRecord) -> dict[str, Any]:
    assert record.steps is not None
    return record.steps


def test_a_step_runs_at_its_own_budget_or_where_so_chosen_at_the_next() -> None:
    exact, rounding = steps_of(simulated("eager")), steps_of(simulated("next"))
    assert set(rounding["k_exec"]) <= set(KS) and len(set(rounding["k_exec"])) > 1
    assert not set(exact["k_exec"]) <= set(KS)
    # few sequences decode as fast as the device can, at whichever k, where the host launches one graph
    decodes = exact["num_prefill_tokens"] == 0
    without, within = decodes & ~np.isin(exact["k_exec"], KS), rounding["num_prefill_tokens"] == 0
    assert np.median(exact["duration_s"][without]) > 2 * np.median(rounding["duration_s"][within])


@pytest.mark.parametrize("is_async", [True, False])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("choice", ["eager", "next"])
def test_fast_forward_changes_nothing(choice: str, seed: int, is_async: bool) -> None:
    """A step at a budget without graphs takes the host longer than the one before it that had more sequences."""
    one, other = (simulated(choice, fast_forward=fast, seed=seed, is_async=is_async) for fast in (True, False))
    for name, column in one.requests.items():
        assert np.array_equal(column, other.requests[name], equal_nan=column.dtype.kind == "f"), name
    assert all(np.array_equal(column, steps_of(other)[name]) for name, column in steps_of(one).items())


@pytest.mark.parametrize("choice", ["eager", "next"])
def test_a_live_run_is_simulated_as_its_engines_say_they_run(choice: str) -> None:
    own = simulated(choice)
    live = as_live(own)
    assert live_engine(live).graph_ks == (KS if choice == "eager" else ())
    again, _ = simulate_like(live, PROFILE)
    assert np.array_equal(steps_of(again)["k_exec"], steps_of(own)["k_exec"])
    assert again.manifest["config"]["engine"]["uncaptured_k"] == choice


def test_engines_of_before_the_choice_ran_at_the_next_budget() -> None:
    record = simulated("next")
    del record.manifest["config"]["engine"]["uncaptured_k"]
    assert simulated_config(record).engine.uncaptured_k == "next"
    assert simulated_config(record).engine.next_ks == KS
    again, _ = simulate_like(as_live(record), PROFILE)
    assert np.array_equal(steps_of(again)["k_exec"], steps_of(record)["k_exec"])


def test_what_is_no_choice_is_refused() -> None:
    with pytest.raises(UsageError, match="uncaptured_k is above; it must be one of eager, next"):
        EngineConfig(uncaptured_k="above")
    record = as_live(simulated("eager"))
    for value, refusal in ((3, "uncaptured_k is 3; it must be text"), ("x", "uncaptured_k is x; it must be one of")):
        record.manifest["config"]["engine"]["uncaptured_k"] = value
        with pytest.raises(RecordError, match=refusal):
            simulate_like(record, PROFILE)
