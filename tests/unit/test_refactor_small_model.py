"""The committed model: its size, its log, and refactoring it."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from simmoe.live.training.curves import over_the_line, read_curves
from simmoe.live.training.recipe import TrainingConfig, flatness

FOLDER = Path(__file__).parents[2] / "checkpoints" / "small-olmoe"
TEXT = (
    "The function returns the number of bytes written to the file, or -1 if an error occurred. "
    "If the file does not exist, it is created with the permissions given by the mode argument. "
)


def test_checkpoint_and_record_stay_within_twenty_megabytes() -> None:
    assert sum(file.stat().st_size for file in FOLDER.glob("*.safetensors")) <= 20_000_000


def test_log_ends_where_the_settings_say_with_a_level_tail() -> None:
    """The tail by the training script's own criterion; the README says how the probe came out."""
    rows = [json.loads(line) for line in (FOLDER / "training_log.jsonl").read_text().splitlines()]
    settings = json.loads((FOLDER / "training.json").read_text())
    model = [row for row in rows if row["line"] == "model"]
    assert model[-1]["step"] == settings["steps"]
    assert model[-1]["tokens"] == settings["steps"] * settings["sequences"] * 512
    assert model[-1]["validation_perplexity"] == settings["validation_perplexity"]
    tail = [row["validation_perplexity"] for row in model if row["step"] >= 0.9 * settings["steps"]]
    assert len(tail) > 3 and max(tail) / min(tail) - 1 < 0.005
    recipe = TrainingConfig(**{field.name: settings[field.name] for field in fields(TrainingConfig)})
    assert {name: settings[name] for name in ("tail_change", "probe_distance", "flattened")}.items() <= flatness(
        rows, recipe
    ).items()


def test_committed_curves_keep_what_the_documentation_says_of_them() -> None:
    """At whole experts within 1% of the original; between them below its straight line."""
    curves = read_curves(FOLDER / "curves" / "quality.jsonl")
    original = curves[("original",)]
    for name in (("CG", "annealed", "energy"), ("LG fine-tuned", "annealed", "sandwich-distilled")):
        excess = over_the_line(curves[name], original)
        assert max(excess[4 * k] for k in original) < 0.01
        assert max(value for k, value in excess.items() if k % 4) < 0


def test_it_learned_and_the_refactored_model_equals_it(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch", reason="loading the model needs torch; run make test-live")
    pytest.importorskip("transformers", reason="loading the model needs transformers; run make test-live")
    from simmoe.live.evaluate.perplexity import perplexity, set_budget
    from simmoe.live.refactor.engine import RefactorConfig, load_model, load_tokenizer, refactor

    text = tmp_path / "text"
    text.write_text(TEXT * 40)
    ids = torch.tensor(load_tokenizer(FOLDER)(TEXT)["input_ids"])
    original = load_model(FOLDER, device="cpu", dtype="float32")
    found = {}
    for k in (1, 8):
        set_budget(original, k)
        found[k] = perplexity(original, ids, context_tokens=512).perplexity
    assert found[8] < found[1] < 4096
    assert found[8] < 60
    for gate in ("linear", "complex"):
        config = RefactorConfig(gate=gate, partition="random", calibration_tokens=1024)
        refactor(FOLDER, text, tmp_path / gate, config, device="cpu")
        model = load_model(tmp_path / gate, device="cpu", dtype="float32")
        with torch.no_grad():
            wanted, logits = (m(input_ids=ids[None]).logits.double() for m in (original, model))
        assert float((logits - wanted).norm() / wanted.norm()) < 1e-4
