"""Training the small model: the step's forward pass, the schedule, resuming, and what counts as flattened."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="training needs torch; run make test-live")
pytest.importorskip("transformers", reason="training needs transformers; run make test-live")

import numpy as np  # noqa: E402

from simmoe.live.refactor.anneal import Schedule  # noqa: E402
from simmoe.live.training import train as module  # noqa: E402
from simmoe.live.training.architecture import small_olmoe_config  # noqa: E402
from simmoe.live.training.forward import make_losses  # noqa: E402
from simmoe.live.training.recipe import TrainingConfig, flatness, learning_rate  # noqa: E402
from simmoe.live.training.solver_time import measure  # noqa: E402
from simmoe.live.training.train import Run, train  # noqa: E402
from tests.support.small_moe import write_tokenizer  # noqa: E402

CONFIG = TrainingConfig(steps=10, sequences=2, warmup_steps=2, evaluate_every=2, save_every=2)


def model_config(top_k: int = 2) -> Any:
    return small_olmoe_config(
        vocab_size=256, hidden_size=32, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, num_experts=8, num_experts_per_tok=top_k, max_position_embeddings=16,
    )  # fmt: skip


@pytest.fixture(scope="module")
def tokens() -> dict[str, Any]:
    draw = np.random.default_rng(0)
    return {"train": draw.integers(0, 256, 400).astype(np.uint16), "validation": draw.integers(0, 256, 40)}


def new_run(tokens: dict[str, Any], out: Path, config: TrainingConfig = CONFIG, top_k: int = 2) -> Run:
    return Run(tokens, out, config, device="cpu", model_config=model_config(top_k))


@pytest.mark.parametrize("top_k", [2, 8])
def test_losses_and_gradients_are_those_of_transformers(top_k: int, tokens: dict[str, Any], tmp_path: Path) -> None:
    """Within bf16 rounding: float32 by transformers against the step's own pass."""
    model = new_run(tokens, tmp_path, top_k=top_k).model
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.mul_(5)  # routing and activations that vary
    batch = torch.from_numpy(tokens["train"][:64].astype(np.int64)).view(4, 16)
    found, balance = make_losses(compiled=False)(model, batch)
    found.backward()
    gradients = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
    model.zero_grad()
    output = model(input_ids=batch, output_router_logits=True, use_cache=False)
    wanted = torch.nn.functional.cross_entropy(output.logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
    wanted.backward()
    assert float(found.detach()) == pytest.approx(float(wanted.detach()), rel=0.01)
    shares = []
    for logits in output.router_logits:
        probability = logits.detach().softmax(dim=-1)
        chosen = torch.nn.functional.one_hot(probability.topk(top_k).indices, 8).sum(dim=1).float()
        shares.append(8 * (chosen.mean(dim=0) * probability.mean(dim=0)).sum())
    assert float(balance.detach()) == pytest.approx(float(torch.stack(shares).mean()), rel=0.02)
    if top_k == 8:  # below that, rounding that decides a near-tie sends a token, and its gradient, elsewhere
        for name, parameter in model.named_parameters():
            error = float((gradients[name] - parameter.grad).norm() / parameter.grad.norm())
            assert error < 0.05, (name, error)


def test_the_rate_warms_up_holds_and_falls_to_zero() -> None:
    config = TrainingConfig(steps=1000, warmup_steps=100)
    rates = [learning_rate(step, 600, config) / config.learning_rate for step in range(1000)]
    assert rates[0] == pytest.approx(0.01) and rates[99:601] == [1.0] * 502
    assert all(a > b for a, b in pairwise(rates[600:]))
    assert 0 < rates[900] < 0.02 and rates[-1] < 1e-6


def test_an_interrupted_run_ends_where_an_uninterrupted_one_does(
    tokens: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tokenizer(tmp_path)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    whole = train(new_run(tokens, tmp_path / "whole"), tokenizer)

    real, calls = Run.step, []

    def stop_at(run: Run, step: int, decay_from: int) -> Any:
        calls.append(step)
        if len(calls) in (6, 15):  # in the model's steps, and in the probe's
            raise KeyboardInterrupt
        return real(run, step, decay_from)

    monkeypatch.setattr(module.Run, "step", stop_at)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            train(new_run(tokens, tmp_path / "cut"), tokenizer)
    assert train(new_run(tokens, tmp_path / "cut"), tokenizer) == whole
    for line in ("model", "probe"):
        one, other = ((tmp_path / f / line / "model.safetensors").read_bytes() for f in ("whole", "cut"))
        assert one == other
    rows = [json.loads(row) for row in (tmp_path / "whole" / "log.jsonl").read_text().splitlines()]
    assert [(r["line"], r["step"]) for r in rows] == [("model", s) for s in (2, 4, 6, 8, 10)] + [
        ("probe", s) for s in (4, 6, 7)
    ]


def test_fitting_the_steps_to_the_time_changes_no_weight(tokens: dict[str, Any], tmp_path: Path) -> None:
    run = new_run(tokens, tmp_path, replace(CONFIG, steps=1000))
    before = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    measured = run.fit(1e-3)
    assert measured["eager_step_s"] > 0 and run.config.steps == CONFIG.evaluate_every
    assert all(torch.equal(tensor, before[name]) for name, tensor in run.model.state_dict().items())
    assert not run.optimizer.state


@pytest.mark.parametrize(
    ("tail", "probe", "flattened"),
    [(15.05, 15.2, True), (15.2, 15.2, False), (15.05, 15.4, False), (15.05, 14.5, False)],
)
def test_flattened_needs_a_level_tail_and_a_near_probe(tail: float, probe: float, flattened: bool) -> None:
    config = TrainingConfig(steps=1000)
    rows = [("model", 800, 16.0), ("model", 900, tail), ("model", 1000, 15.0), ("probe", 700, probe)]
    log = [{"line": line, "step": step, "validation_perplexity": value} for line, step, value in rows]
    assert flatness(log, config)["flattened"] is flattened


def test_the_solver_is_timed_layer_by_layer() -> None:
    pytest.importorskip("numba", reason="annealing on a CPU needs numba; run make test-live")
    row = measure((2, 4, 32, 16), Schedule(iterations=200))
    assert row["loss_annealed"] < row["loss_greedy"] and len(row["load_average"]) == 2
    assert row["anneal_s"] >= 0 and row["iterations"] == 200
