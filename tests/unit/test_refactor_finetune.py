"""Gate-only fine-tuning: what it may change, how it resumes, what it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="fine-tuning needs torch; run make test-live")
pytest.importorskip("transformers", reason="fine-tuning needs transformers; run make test-live")
pytest.importorskip("numba", reason="annealing on a CPU needs numba; run make test-live")

import numpy as np  # noqa: E402

from simmoe.errors import OutputError, RefactorError  # noqa: E402
from simmoe.live.refactor import finetune as module  # noqa: E402
from simmoe.live.refactor.anneal import Schedule  # noqa: E402
from simmoe.live.refactor.checkpoint import Checkpoint  # noqa: E402
from simmoe.live.refactor.engine import RefactorConfig, load_model, refactor  # noqa: E402
from simmoe.live.refactor.families import GATE_TENSOR  # noqa: E402
from simmoe.live.refactor.finetune import FinetuneConfig, finetune  # noqa: E402
from tests.support.small_moe import calibration_text, write_model  # noqa: E402

QUICK = FinetuneConfig(
    steps=6, sequences=4, micro_sequences=2, context_tokens=16, learning_rate=1e-2, k_start=2, k_end=8, save_every=2
)


@pytest.fixture(scope="module")
def linear(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("linear")
    original = write_model(folder / "model", "olmoe", dtype=torch.bfloat16)
    config = RefactorConfig(gate="linear", schedule=Schedule(iterations=20))
    refactor(original, calibration_text(folder / "text", 1000), folder / "linear", config, device="cpu")
    return folder / "linear"


def tokens() -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(2, 256, 2000)


def load(path: Path) -> Any:
    return load_model(path, device="cpu")


def gates(path: Path) -> dict[str, list[Any]]:
    return {n: t.float().flatten().tolist() for n, t in Checkpoint(path).tensors() if GATE_TENSOR.match(n)}


def test_only_the_gates_change_and_the_loss_falls(linear: Path, tmp_path: Path) -> None:
    losses = []
    # every sub-expert runs, so the loss is smooth in the rows; one window over and over, so it must fall
    config = replace(QUICK, steps=12, learning_rate=2e-3, k_start=32, k_end=32)
    text = np.tile(np.arange(2, 18), 100)
    out = tmp_path / "tuned"
    real = module._accumulate

    def noted(*arguments: Any) -> float:
        losses.append(real(*arguments))
        return losses[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_accumulate", noted)
        finetune(linear, text, out, config, load=load)
    assert sum(losses[-4:]) < sum(losses[:4])
    before, after = Checkpoint(linear), Checkpoint(out)
    for name in before.shard_of:
        same = torch.equal(before.tensor(name), after.tensor(name))
        assert same != bool(GATE_TENSOR.match(name)), name
    assert after.config["simmoe_refactor"]["finetuned"]["steps"] == 12
    assert [p.name for p in tmp_path.iterdir()] == ["tuned"]


@pytest.mark.parametrize(("schedule", "objective"), [("anneal", "lm"), ("mixed", "lm"), ("sandwich", "distil")])
def test_an_interrupted_run_ends_as_an_unbroken_one(
    schedule: str, objective: str, linear: Path, tmp_path: Path
) -> None:
    config = replace(QUICK, budget_schedule=schedule, objective=objective)
    finetune(linear, tokens(), tmp_path / "whole", config, load=load)
    calls = 0
    real = module._accumulate

    def broken(*arguments: Any) -> float:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise KeyboardInterrupt
        return real(*arguments)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(module, "_accumulate", broken)
        finetune(linear, tokens(), tmp_path / "resumed", config, load=load)
    said: list[str] = []
    finetune(linear, tokens(), tmp_path / "resumed", config, load=load, say=said.append)
    assert "resumed at step 4" in said[0]
    assert gates(tmp_path / "resumed") == gates(tmp_path / "whole")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["resumed", "whole"]


def test_accumulated_gradients_are_those_of_the_whole_batch(linear: Path, tmp_path: Path) -> None:
    one = replace(QUICK, steps=1, k_start=8, micro_sequences=4)
    for micro in (1, 4):
        finetune(
            linear, tokens(), tmp_path / str(micro), replace(one, micro_sequences=micro), load=lambda p: load(p).float()
        )
    for first, second in zip(gates(tmp_path / "1").values(), gates(tmp_path / "4").values(), strict=True):
        assert np.allclose(first, second, atol=0.02)


def test_distilling_at_the_full_budget_has_nothing_to_learn(linear: Path, tmp_path: Path) -> None:
    """The checkpoint at its full budget is its own teacher; below it, the teacher stays what it was."""
    losses: dict[int, list[float]] = {}
    real = module._accumulate

    def noted(*arguments: Any) -> float:
        losses[k].append(real(*arguments))
        return losses[k][-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_accumulate", noted)
        for k in (8, 4):
            losses[k] = []
            config = replace(QUICK, k_start=k, k_end=k, objective="distil", learning_rate=1e-3)
            finetune(linear, np.tile(np.arange(2, 18), 100), tmp_path / str(k), config, load=lambda p: load(p).float())
    assert abs(losses[8][0]) < 1e-6 and losses[4][0] > 1e-3
    assert losses[4][-1] < losses[4][0]


def test_the_sandwich_holds_one_micro_batch_at_the_top() -> None:
    config = FinetuneConfig(budget_schedule="sandwich", k_start=3, k_end=32)
    assert {config.budget(step, 0) for step in range(50)} == {32}
    drawn = {config.budget(step, micro) for step in range(200) for micro in (1, 2, 3)}
    assert drawn == set(range(3, 33))


def test_budget_rises_evenly_to_its_end() -> None:
    config = FinetuneConfig(steps=100, k_start=8, k_end=32)
    budgets = [config.budget(step, 0) for step in range(100)]
    assert budgets == sorted(budgets)
    assert budgets[0] == 8 and budgets[-1] == 32
    assert {budgets.count(k) for k in range(8, 33)} == {4}


def test_refusals(linear: Path, tmp_path: Path) -> None:
    with pytest.raises(RefactorError, match="no linear-gate checkpoint"):
        finetune(linear.parent / "model", tokens(), tmp_path / "out", QUICK, load=load)
    with pytest.raises(RefactorError, match="1 <= start <= end <= 32"):
        finetune(linear, tokens(), tmp_path / "out", replace(QUICK, k_end=33), load=load)
    with pytest.raises(RefactorError, match="context 129: the model takes 128 tokens"):
        finetune(linear, tokens(), tmp_path / "out", replace(QUICK, context_tokens=129), load=load)
    with pytest.raises(RefactorError, match="not a multiple of micro-batch"):
        finetune(linear, tokens(), tmp_path / "out", replace(QUICK, micro_sequences=3), load=load)
    (tmp_path / "there").mkdir()
    with pytest.raises(OutputError, match="exists already"):
        finetune(linear, tokens(), tmp_path / "there", QUICK, load=load)


def other_text() -> np.ndarray[Any, Any]:
    return np.random.default_rng(1).integers(2, 256, 2000)


def test_a_state_of_another_run_is_refused(linear: Path, tmp_path: Path) -> None:
    """Other settings, another text, another checkpoint: going on would mix two runs in silence."""
    state = tmp_path / "state.pt"
    rows = [torch.tensor(row).view(32, 64) for row in gates(linear).values()]
    run = module._identity(QUICK, tokens(), rows)
    cases = [
        (run, replace(QUICK, learning_rate=1.0), tokens(), r"other settings \(learning_rate\)"),
        (run, QUICK, other_text(), r"other settings \(text\)"),
        (module._identity(QUICK, tokens(), [row + 1 for row in rows]), QUICK, tokens(), r"\(gates of the checkpoint\)"),
    ]
    for saved, config, text, message in cases:
        module._save(state, saved, 2, [], torch.optim.AdamW([torch.zeros(1)]))
        with pytest.raises(RefactorError, match=message):
            finetune(linear, text, tmp_path / "out", config, load=load, state_path=state)


@pytest.mark.parametrize("content", [b"", b"junk", b"PK\x03\x04 half a zip file"])
def test_a_file_that_is_no_state_is_refused(content: bytes, linear: Path, tmp_path: Path) -> None:
    state = tmp_path / "state.pt"
    state.write_bytes(content)
    with pytest.raises(RefactorError, match="no state of a fine-tuning run; remove it"):
        finetune(linear, tokens(), tmp_path / "out", QUICK, load=load, state_path=state)
