"""Hand a checkpoint to lm-eval, which runs it in vLLM at one routing budget.

The paper's downstream tasks (its Table II) are WinoGrande, ARC-Challenge, SciQ and BoolQ. lm-eval fetches their data
from the Hugging Face hub the first time, so this needs a network; a folder of local task files needs none.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from simmoe.errors import LiveError, MissingDependency, UsageError

PAPER_TASKS = ("winogrande", "arc_challenge", "sciq", "boolq")


def model_arguments(path: Path, k: int | None, **engine: Any) -> dict[str, Any]:
    """vLLM's arguments for ``path`` at budget ``k``: the engine is built with ``num_experts_per_tok`` = k.

    Prefix caching is off: keys and values computed at one budget are not those of another.
    """
    arguments: dict[str, Any] = {"pretrained": str(path), "enable_prefix_caching": False, **engine}
    if k is not None:
        arguments["hf_overrides"] = {"num_experts_per_tok": k}
    return arguments


def run_tasks(
    path: Path,
    tasks: Sequence[str],
    *,
    k: int | None = None,
    include_path: Path | None = None,
    limit: int | None = None,
    num_fewshot: int | None = None,
    **engine: Any,
) -> dict[str, dict[str, float]]:
    """Evaluate and return ``{task: {metric: value}}``.

    Args:
        tasks: lm-eval task names.
        include_path: folder with further task files.
        limit: examples a task, for a look.
        num_fewshot: examples in the prompt; None takes the task's own.
        engine: further arguments of ``vllm.LLM``.
    Raises:
        MissingDependency: lm-eval or vLLM is not installed.
        UsageError: a task is unknown.
        LiveError: lm-eval or the engine failed, for want of a network among other causes.
    """
    try:
        import lm_eval
        import vllm  # noqa: F401 (asked for here, so that its absence is named)
        from lm_eval.tasks import TaskManager
    except ImportError as error:
        raise MissingDependency(
            "downstream tasks need lm-eval and vLLM; pip install 'lm-eval>=0.4.9' and 'simmoe[live]'"
        ) from error
    from simmoe.live.refactor.vllm_complex_gate import register

    register()
    manager = TaskManager(include_path=str(include_path) if include_path else None)
    unknown = [task for task in tasks if task not in manager.all_tasks]
    if unknown:
        raise UsageError(f"--tasks: lm-eval knows no {', '.join(unknown)}; the paper's are {','.join(PAPER_TASKS)}")
    try:
        found = lm_eval.simple_evaluate(
            model="vllm", model_args=model_arguments(path, k, **engine), tasks=list(tasks), task_manager=manager,
            limit=limit, num_fewshot=num_fewshot, bootstrap_iters=0,
        )  # fmt: skip
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise LiveError(f"lm-eval could not run {', '.join(tasks)} on {path}: {reason}") from error
    return {
        task: {name: value for name, value in scores.items() if isinstance(value, float)}
        for task, scores in found["results"].items()
    }
