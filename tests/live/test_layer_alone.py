"""A layer's experts timed without an engine, as far as a CPU goes: the shapes of an engine's, and what is written.

Kernels and clocks are stood in for: a product of matrices in place of Triton's, and a graph that runs once.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from simmoe.cli import run
from simmoe.errors import LiveError, OutputError, UsageError
from simmoe.live.measure import MeasuredModel
from simmoe.live.measure.moe_layer import SIZES, timed_ks
from simmoe.profiles.layer_times import LayerTimes, read_layer_times
from simmoe.profiles.models import model_shape
from tests.live.tiny import TINY_DEEPSEEK_V2, TINY_OLMOE, TINY_QWEN3_MOE, split
from tests.support.nvidia_smi import stand_in

pytestmark = [
    pytest.mark.live,
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: pip install 'simmoe[live-cpu]'"),
    pytest.mark.filterwarnings("ignore"),  # vLLM's own, at import
]

SECONDS = 0.004


def experts(hidden: Any, w13: Any, w2: Any, weights: Any, chosen: Any, expert_map: Any) -> Any:
    """Return what the experts held here make of tokens, expert by expert."""
    import torch

    out = torch.zeros_like(hidden)
    for expert in chosen.unique().tolist():
        held = expert if expert_map is None else int(expert_map[expert])
        share = (weights * (chosen == expert)).sum(1, keepdim=True)
        if held >= 0:
            gate, up = (hidden @ w13[held].T).chunk(2, dim=1)
            out += share * (torch.nn.functional.silu(gate) * up @ w2[held].T)
    return out


@pytest.fixture
def on_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Stand in for the card; yields what was run, a result a layer and point."""
    from vllm.model_executor.layers.fused_moe.experts.triton_moe import TritonExperts

    from simmoe.live.measure import layer_alone, moe_layer

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    stand_in(tmp_path, monkeypatch, "NVIDIA H200\n")
    results: list[Any] = []

    def graph_s(launched: Callable[[], None]) -> float:
        launched()
        return SECONDS

    def apply(
        self: Any, out: Any, hidden: Any, w13: Any, w2: Any, weights: Any, chosen: Any, activation: Any,
        num_experts: int, expert_map: Any, **spaces: Any,
    ) -> None:  # fmt: skip
        assert activation.value == "silu" and int(chosen.max()) < num_experts
        results.append(experts(hidden, w13, w2, weights, chosen, expert_map))

    monkeypatch.setattr(TritonExperts, "apply", apply)
    monkeypatch.setattr(moe_layer, "_graph_s", graph_s)
    monkeypatch.setattr(moe_layer, "_matmul_flop_s", lambda: 7e14)
    monkeypatch.setattr(moe_layer, "_copy_byte_s", lambda: 4e12)
    monkeypatch.setattr(layer_alone, "DEVICE", "cpu")
    yield results


@pytest.mark.parametrize(
    ("config", "num_cards", "expert_parallel"),
    [(TINY_OLMOE, 1, False), (split(TINY_QWEN3_MOE), 2, False), (split(TINY_DEEPSEEK_V2), 2, True)],
    ids=["olmoe", "qwen3-split-tp2", "deepseek-split-whole-experts"],
)
def test_times_are_of_the_layers_the_model_has(
    config: dict[str, Any], num_cards: int, expert_parallel: bool, on_a_cpu: list[Any]
) -> None:
    from simmoe.live.measure.layer_alone import time_layer_alone

    shape = model_shape(config)
    ks = (1, 2, shape.top_k)
    times = time_layer_alone(MeasuredModel("tiny", config), ks, num_cards=num_cards, expert_parallel=expert_parallel)
    assert (times.num_layers, times.in_engine) == (shape.num_moe_layers, False)
    assert (times.num_cards, times.expert_parallel) == (num_cards, expert_parallel)
    assert {(row.num_tokens, row.k) for row in times.rows} == {(n, k) for n in SIZES for k in timed_ks(ks, shape.top_k)}
    assert {row.seconds for row in times.rows} == {SECONDS / shape.num_moe_layers}
    # at many tokens every expert held is touched, and no other
    held = shape.num_experts // num_cards if expert_parallel else shape.num_experts
    assert max(row.distinct_experts for row in times.rows) == held
    assert len(on_a_cpu) == len(times.rows) * shape.num_moe_layers
    assert all(result.shape[1] == shape.hidden_size and bool(result.isfinite().all()) for result in on_a_cpu)
    assert all(float(result.abs().sum()) > 0 for result in on_a_cpu if len(result) > 64)


def test_the_command_writes_what_show_reads(
    tmp_path: Path, on_a_cpu: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    from simmoe.live.measure import card, moe_layer

    monkeypatch.setattr(card, "refuse_busy", lambda: None)
    monkeypatch.setattr(moe_layer, "SIZES", (1, 4))
    (tmp_path / "config.json").write_text(json.dumps(TINY_OLMOE))
    out = tmp_path / "mine-layer.json"
    asked = ["profile", "layer", "--model", str(tmp_path / "config.json"), "--split", "4", "--budgets", "8,1"]
    assert run([*asked, "--tensor-parallel", "2", "--out", str(out)]) == 0
    times = read_layer_times(out)
    assert times.model.endswith(" split by 4") and times.card == "NVIDIA H200"
    assert {row.k for row in times.rows} == {1, 8, 32}  # the largest is always among them


@pytest.mark.parametrize(
    ("options", "exit_code", "named"),
    [
        (["--tensor-parallel", "3"], UsageError.exit_code, "cannot share experts of width 256 out over 3 cards evenly"),
        (["--tensor-parallel", "257", "--expert-parallel"], UsageError.exit_code, "cannot spread 256 experts over 257"),
        (["--expert-parallel"], UsageError.exit_code, "say how many with --tensor-parallel"),
        (["--budgets", "33"], UsageError.exit_code, "--budgets has 33; this model runs k from 1 to 32"),
        (["--out", "times.json"], UsageError.exit_code, "'times.json' belongs to no table"),
        ([], LiveError.exit_code, "card 0 is busy"),
    ],
)
def test_what_cannot_be_timed_is_refused(
    options: list[str],
    exit_code: int,
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    stand_in(tmp_path, monkeypatch, "70000, 99\n")
    out = tmp_path / "mine-layer.json"
    assert run(["profile", "layer", "--out", str(out), *options]) == exit_code
    told = capsys.readouterr().err
    assert named in told and told.count("\n") == 1
    assert not out.exists()


def test_a_file_that_cannot_be_written_is_refused_before_anything_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from simmoe.live.measure import card

    monkeypatch.setattr(card, "refuse_busy", lambda: None)
    (out := tmp_path / "mine-layer.json").mkdir()  # nor is there a card to time on, which would be said otherwise
    assert run(["profile", "layer", "--out", str(out)]) == OutputError.exit_code
    told = capsys.readouterr().err
    assert f"the layer's times to '{out}'" in told and told.count("\n") == 1


@pytest.mark.parametrize("whole_experts", [False, True])
def test_pairs_that_went_to_another_card_cost_nothing(whole_experts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's own code between its launches: what nobody wrote, here not a number, reaches no result."""
    import torch
    from vllm.config import VllmConfig
    from vllm.model_executor.layers.fused_moe.experts import triton_moe

    from simmoe.live.measure import layer_alone, moe_layer

    seen: dict[str, Any] = {}

    def assign(chosen: Any, config: Any, tokens: int, k: int, experts: int, expert_map: Any, **options: Any) -> Any:
        assert options["ignore_invalid_experts"] == whole_experts
        # here[token, place] is the expert among those held, -1 for another card's
        seen.update(chosen=chosen, here=chosen.long() if expert_map is None else expert_map[chosen.long()])
        return None, None, None

    def product(rows: Any, matrices: Any, out: Any, _: Any, __: Any, weights: Any, *___: Any, **____: Any) -> None:
        first = weights is None  # of the two: of tokens, not of pairs, and not weighted yet
        if first:
            seen["hidden"] = rows
        for token, place in (seen["here"] >= 0).nonzero().tolist():
            row = rows[token] if first else weights[token, place] * rows[token * out.shape[1] + place]
            out[token, place] = row @ matrices[seen["here"][token, place]].T

    def add_up(rows: Any, out: Any, chosen: Any = None, expert_map: Any = None) -> None:
        assert (expert_map is not None) == bool(rows.isnan().any()) == whole_experts
        seen["out"] = torch.where(seen["here"][..., None] >= 0, rows, 0.0).sum(1)

    def launched(run: Callable[[], None]) -> float:
        run()
        return SECONDS

    monkeypatch.setattr(triton_moe, "tl", SimpleNamespace(float32="float32"))  # a CPU's vLLM has none
    monkeypatch.setattr(triton_moe, "_prepare_expert_assignment", assign)
    monkeypatch.setattr(triton_moe, "invoke_fused_moe_triton_kernel", product)
    monkeypatch.setattr(triton_moe.ops, "moe_sum", add_up)
    monkeypatch.setattr(moe_layer, "_graph_s", launched)
    monkeypatch.setattr(moe_layer, "_matmul_flop_s", lambda: 7e14)
    monkeypatch.setattr(moe_layer, "_copy_byte_s", lambda: 4e12)
    held = layer_alone.held_experts(TINY_QWEN3_MOE, 1 + whole_experts, whole_experts, "cpu", torch.float32)
    torch.use_deterministic_algorithms(True)  # memory that nobody wrote is not a number
    try:
        moe_layer.time_layers(VllmConfig(), [held], [16], [4])
    finally:
        torch.use_deterministic_algorithms(False)
    weights = torch.full(seen["chosen"].shape, 1 / 4)
    expected = experts(seen["hidden"], held.w13, held.w2, weights, seen["chosen"], held.expert_map)
    torch.testing.assert_close(seen["out"], expected)


def test_shares_are_of_the_largest_budget() -> None:
    assert timed_ks((1, 2, 4, 8), 8) == [1, 2, 4, 8]
    assert timed_ks((4, 8), 8) == [4, 8]
    assert timed_ks((1, 8, 16, 24, 32), 32) == [1, 8, 16, 24, 32]


def test_a_layer_of_another_layout_is_refused_beside_a_table(tmp_path: Path) -> None:
    from simmoe.errors import ProfileError
    from simmoe.profiles.catalog import DEFAULT_PROFILE, layer_times_of, load_profile, profile_path
    from simmoe.profiles.layer_times import write_layer_times

    table = tmp_path / "mine.json"
    table.write_bytes(profile_path(DEFAULT_PROFILE).read_bytes())
    loaded = load_profile(str(table)).table
    times = layer_times_of(DEFAULT_PROFILE, loaded)
    assert isinstance(times, LayerTimes)
    write_layer_times(tmp_path / "mine-layer.json", replace(times, num_cards=2, expert_parallel=True))
    with pytest.raises(ProfileError, match="on 2 NVIDIA H200, whole experts on each, the table beside it of"):
        layer_times_of(str(table), loaded)
