"""`simmoe refactor` and `simmoe eval` as a user types them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="refactoring needs torch; run make test-live")
pytest.importorskip("transformers", reason="refactoring needs transformers; run make test-live")
pytest.importorskip("numba", reason="annealing on a CPU needs numba; run make test-live")

from simmoe import cli  # noqa: E402
from simmoe.live.evaluate.perplexity import perplexity  # noqa: E402
from simmoe.live.refactor.engine import load_model  # noqa: E402
from tests.support.small_moe import calibration_text, write_model  # noqa: E402


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workspace")
    write_model(folder / "model", "olmoe")
    (folder / "model" / "README.md").write_text("8 experts of width 32")
    calibration_text(folder / "text", 2000)
    for gate in ("complex", "linear"):
        command = ["refactor", f"{folder}/model", "--splits", "4", "--gate", gate, "--calibration", f"{folder}/text"]
        assert cli.run([*command, "--out", f"{folder}/{gate}", "--iterations", "30", "--device", "cpu"]) == 0
    return folder


def test_refactor_records_what_it_did(workspace: Path) -> None:
    record = json.loads((workspace / "complex" / "config.json").read_text())["simmoe_refactor"]
    assert record["splits"] == 4 and record["gate"] == "complex" and record["gate_neurons"] == 4
    assert record["original"] == {"num_experts": 8, "top_k": 2, "width": 32}
    assert [sum(kappa) for kappa in record["kappa"]] == list(range(1, 9))
    assert len(record["calibration"]["sha256"]) == 64
    linear = json.loads((workspace / "linear" / "config.json").read_text())
    assert linear["model_type"] == "olmoe" and "kappa" not in linear["simmoe_refactor"]


@pytest.mark.parametrize("gate", ["linear", "complex"])
def test_the_model_card_is_of_the_new_checkpoint(gate: str, workspace: Path) -> None:
    card = (workspace / gate / "README.md").read_text()
    assert "8 routed experts of a layer was split into 4 sub-experts of width\n8 by" in card
    assert ("trust_remote_code" in card) == (gate == "complex")


@pytest.mark.parametrize("folder", ["model", "linear", "complex"])
def test_eval_prints_the_perplexity_of_each_budget(
    folder: str, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["eval", f"{workspace}/{folder}", "--text", f"{workspace}/text", "--device", "cpu", "--json"]
    assert cli.run([*command, "--k", "all", "--max-tokens", "300"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["k"] for row in rows] == list(range(1, (2 if folder == "model" else 8) + 1))
    assert {row["num_tokens"] for row in rows} == {297}  # two windows of 128 and one of 44, a token less each


def test_matched_budgets_agree_across_checkpoints(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = {}
    for folder, k in (("model", 2), ("linear", 8), ("complex", 8)):
        command = ["eval", f"{workspace}/{folder}", "--text", f"{workspace}/text", "--device", "cpu", "--json"]
        assert cli.run([*command, "--k", str(k), "--max-tokens", "200"]) == 0
        found[folder] = json.loads(capsys.readouterr().out)["mean_nll"]
    assert found["linear"] == pytest.approx(found["model"], rel=1e-5)
    assert found["complex"] == pytest.approx(found["model"], rel=1e-5)


def test_perplexity_is_the_exponential_of_the_mean_loss(workspace: Path) -> None:
    model = load_model(workspace / "model", device="cpu")
    ids = torch.randint(2, 256, (150,), generator=torch.Generator().manual_seed(0))
    losses = []
    for window in ids.split(64):
        with torch.no_grad():
            logits = model(input_ids=window[None]).logits[0].double()
        losses += [-logits[t].log_softmax(0)[window[t + 1]] for t in range(len(window) - 1)]
    found = perplexity(model, ids, context_tokens=64)
    assert found.num_tokens == len(losses)
    assert found.mean_nll == pytest.approx(float(torch.stack(losses).mean()), rel=1e-5)


def test_inspect_prints_a_table_and_draws_a_figure(workspace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figure = workspace / "figure.png"
    command = ["refactor", "inspect", f"{workspace}/model", "--calibration", f"{workspace}/text", "--device", "cpu"]
    assert cli.run([*command, "--out", str(figure)]) == 0
    out = capsys.readouterr().out
    assert "median over layers and experts" in out
    assert figure.read_bytes().startswith(b"\x89PNG")


def test_finetune_writes_a_checkpoint_that_eval_reads(workspace: Path, tmp_path: Path) -> None:
    tuned = tmp_path / "tuned"
    command = ["refactor", "finetune", f"{workspace}/linear", "--text", f"{workspace}/text", "--out", str(tuned)]
    sizes = ["--steps", "2", "--batch", "2", "--micro-batch", "1", "--context", "16", "--k-start", "2", "--k-end", "8"]
    assert cli.run([*command, *sizes, "--device", "cpu"]) == 0
    assert cli.run(["eval", str(tuned), "--text", f"{workspace}/text", "--k", "3", "--max-tokens", "50"]) == 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        ([], 2, "give either --text FILE"),
        (["--text", "{}/text", "--tasks", "sciq"], 2, "one of the two"),
        (["--text", "{}/text", "--k", "9"], 2, "budget k=9 is outside 1..8"),
        (["--text", "{}/text", "--k", "4,9"], 2, "budget k=9 is outside 1..8"),
        (["--text", "{}/text", "--context", "129"], 2, "--context 129: the model takes 128 tokens"),
        (["--text", "{}/text", "--k", "2,x"], 2, "'x' is no budget"),
        (["--text", "{}/text", "--k", "5-3"], 2, "'5-3' is no budget"),
        (["--text", "{}/text", "--k", "\u00b2"], 2, "is no budget"),
        (["--text", "{}/text", "--device", "abacus"], 6, "--device abacus"),
        (["--text", "{}/nowhere"], 7, "cannot be read as UTF-8 text"),
        (["--tasks", "sciq", "--k", "1,2"], 2, "takes one budget"),
    ],
)
def test_eval_refusals(
    arguments: list[str], code: int, message: str, workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["eval", f"{workspace}/complex", *(argument.format(workspace) for argument in arguments)]
    assert cli.run(command) == code
    out, said = capsys.readouterr()
    assert message in said and said.count("\n") == 1
    assert out == ""
