"""The hand-over to lm-eval: a local task, run by `simmoe eval` in vLLM, scores as transformers does at that budget."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="refactoring needs torch; run make test-live")
pytest.importorskip("transformers", reason="refactoring needs transformers; run make test-live")

pytestmark = [
    pytest.mark.live,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed: pip install 'simmoe[live-cpu]'"),
    pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm-eval is not installed: pip install 'lm-eval>=0.4.9'"),
    pytest.mark.filterwarnings("ignore"),  # transformers' on loading code from a checkpoint
]

from tests.support.small_moe import calibration_text, write_model  # noqa: E402

LOW, FULL = 2, 8
TASK = """
task: letters
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: multiple_choice
target_delimiter: ""
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{gold}}}}"
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""


def simmoe(*arguments: object, **environment: str) -> str:
    """Run the command in a process of its own, as vLLM wants it; what it prints."""
    command = [sys.executable, "-m", "simmoe", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def answers(checkpoint: Path, questions: list[dict[str, Any]], k: int) -> list[int]:
    """The likelier choice of each question by transformers at budget ``k``."""
    from simmoe.live.evaluate.perplexity import set_budget
    from simmoe.live.refactor.engine import load_model

    model = load_model(checkpoint, device="cpu", dtype="float32")
    set_budget(model, k)
    chosen = []
    for question in questions:
        scores = []
        for choice in question["choices"]:
            ids = [ord(letter) for letter in question["question"] + choice]
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids])).logits[0].log_softmax(dim=-1)
            scores.append(sum(float(logits[at - 1, ids[at]]) for at in range(len(question["question"]), len(ids))))
        chosen.append(max((0, 1), key=scores.__getitem__))
    return chosen


def test_a_local_task_scores_as_transformers_does_at_the_budget_asked_for(tmp_path: Path) -> None:
    model, checkpoint = write_model(tmp_path / "model", "olmoe"), tmp_path / "complex"
    text = calibration_text(tmp_path / "text", 3000)
    simmoe("refactor", model, "--calibration", text, "--iterations", 200, "--device", "cpu", "--out", checkpoint)
    letters = text.read_text()
    questions: list[dict[str, Any]] = [
        {"question": letters[at : at + 20], "choices": [letters[at + 20 : at + 22], letters[at + 22 : at + 24]]}
        for at in range(0, 1200, 24)
    ]
    wanted = {k: answers(checkpoint, questions, k) for k in (LOW, FULL)}
    # half the questions are answered right at the low budget; at the full one other answers, so another share
    for number, question in enumerate(questions):
        question["gold"] = wanted[LOW][number] if number % 2 else 1 - wanted[LOW][number]
    share = {k: sum(q["gold"] == a for q, a in zip(questions, wanted[k], strict=True)) / len(questions) for k in wanted}
    assert share[LOW] == 0.5 != share[FULL]

    tasks = tmp_path / "tasks"
    tasks.mkdir()
    (tasks / "letters.jsonl").write_text("".join(json.dumps(question) + "\n" for question in questions))
    (tasks / "letters.yaml").write_text(TASK.format(data=tasks / "letters.jsonl"))
    # lm-eval asks for the version of the package named vllm, which vLLM's CPU build is not; it looks for 'cpu' in it
    named = tmp_path / "named" / "vllm-0.32.0+cpu.dist-info"
    named.mkdir(parents=True)
    (named / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    path = os.pathsep.join(filter(None, [str(named.parent), os.environ.get("PYTHONPATH")]))
    out = simmoe(
        "eval", checkpoint, "--tasks", "letters", "--include-path", tasks, "--k", LOW, "--dtype", "float32", "--json",
        PYTHONPATH=path, HF_HOME=str(tmp_path / "hub"), HF_HUB_OFFLINE="1", VLLM_CPU_KVCACHE_SPACE="1",
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
    )  # fmt: skip
    found = json.loads(out.splitlines()[-1])
    assert found["k"] == LOW
    assert found["results"]["letters"]["acc,none"] == pytest.approx(share[LOW])
