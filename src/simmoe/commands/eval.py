"""``simmoe eval``: perplexity of a checkpoint at any routing budgets, or downstream tasks through lm-eval and vLLM."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from simmoe.errors import MissingDependency, UsageError


@click.command("eval")
@click.argument("model_dir", type=click.Path(path_type=Path))
@click.option("--text", type=click.Path(path_type=Path), help="Held-out plain text; gives perplexity.")
@click.option("--tasks", help="lm-eval tasks, by comma; 'paper' is winogrande,arc_challenge,sciq,boolq.")
@click.option(
    "--k", "budgets", help="Budgets: 'all', or numbers and ranges by comma (4,8,10-12); default: the checkpoint's own."
)
@click.option(
    "--context", type=click.IntRange(2), help="Window of the perplexity; default: what the model takes, at most 2048."
)
@click.option("--max-tokens", type=click.IntRange(2), help="Score no more than this many tokens of the text.")
@click.option("--include-path", type=click.Path(path_type=Path), help="Folder of further lm-eval task files.")
@click.option("--limit", type=click.IntRange(1), help="Examples a task.")
@click.option("--num-fewshot", type=click.IntRange(0), help="Examples in the prompt; default: the task's own.")
@click.option("--dtype", default="auto", show_default=True, help="float32, bfloat16, ...")
@click.option("--device", help="Of the perplexity: cuda or cpu; default: a GPU if there is one.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a line.")
def eval_(
    model_dir: Path, text: Path | None, tasks: str | None, budgets: str | None, context: int | None,
    max_tokens: int | None, include_path: Path | None, limit: int | None, num_fewshot: int | None, dtype: str,
    device: str | None, as_json: bool,
) -> None:  # fmt: skip
    """Measure MODEL_DIR: perplexity on --text, or --tasks in lm-eval with vLLM, at each budget of --k."""
    if (text is None) == (tasks is None):
        raise UsageError("give either --text FILE (perplexity) or --tasks NAMES (lm-eval), one of the two")
    try:
        from simmoe.live.refactor.checkpoint import Checkpoint
    except ModuleNotFoundError as error:
        raise MissingDependency(f"evaluation needs {error.name}; pip install 'simmoe[refactor]'") from error
    config = Checkpoint(model_dir).config
    chosen = _budgets(budgets, config)
    if text is not None:
        _perplexity(model_dir, text, chosen, context, max_tokens, dtype, device, as_json)
    else:
        assert tasks is not None
        _tasks(model_dir, tasks, chosen, include_path, limit, num_fewshot, dtype, as_json)


def _perplexity(
    model_dir: Path, text: Path, budgets: list[int | None], context: int | None,
    max_tokens: int | None, dtype: str, device: str | None, as_json: bool,
) -> None:  # fmt: skip
    import torch

    from simmoe.live.evaluate.perplexity import check_budget, perplexity, set_budget
    from simmoe.live.refactor.engine import load_model, load_tokenizer, read_text

    ids = load_tokenizer(model_dir)(read_text(text, "--text"), verbose=False)["input_ids"]
    tokens = torch.tensor(ids[:max_tokens], dtype=torch.int64)
    model = load_model(model_dir, device=device, dtype=dtype)
    positions: int | None = getattr(model.config, "max_position_embeddings", None)
    window = context or min(2048, positions or 2048)
    if positions is not None and window > positions:
        raise UsageError(f"--context {window}: the model takes {positions} tokens (max_position_embeddings)")
    for k in budgets:
        if k is not None:
            check_budget(model, k)
    if not as_json:
        click.echo(f"{model_dir}: {tokens.numel()} tokens of {text}, windows of {window}, no overlap")
        click.echo("    k  perplexity  nats/token")
    for k in budgets:
        if k is not None:
            set_budget(model, k)
        found = perplexity(model, tokens, context_tokens=window)
        if as_json:
            row = {"k": k, "perplexity": found.perplexity, "mean_nll": found.mean_nll, "num_tokens": found.num_tokens}
            click.echo(json.dumps(row))
        else:
            click.echo(f"{k or '-':>5}  {found.perplexity:10.4f}  {found.mean_nll:10.5f}")


def _tasks(
    model_dir: Path, tasks: str, budgets: list[int | None], include_path: Path | None, limit: int | None,
    num_fewshot: int | None, dtype: str, as_json: bool,
) -> None:  # fmt: skip
    from simmoe.live.evaluate.harness import PAPER_TASKS, run_tasks

    names = list(PAPER_TASKS) if tasks == "paper" else [name.strip() for name in tasks.split(",") if name.strip()]
    if len(budgets) > 1:
        raise UsageError("--k with --tasks takes one budget: each needs an engine of its own; call once a budget")
    results = run_tasks(
        model_dir, names, k=budgets[0], include_path=include_path, limit=limit, num_fewshot=num_fewshot, dtype=dtype
    )
    if as_json:
        click.echo(json.dumps({"k": budgets[0], "results": results}))
        return
    for task, scores in results.items():
        for name, value in scores.items():
            click.echo(f"{task:24} {name:28} {value:.4f}")


def _budgets(text: str | None, config: dict[str, Any]) -> list[int | None]:
    """The budgets asked for, ascending as written; [None] leaves the checkpoint's own."""
    if text is None:
        return [config.get("num_experts_per_tok")]
    if text == "all":
        own = config.get("num_experts_per_tok")
        if not isinstance(own, int):
            raise UsageError("--k all: the checkpoint has no num_experts_per_tok; it is no Mixture-of-Experts model")
        return list(range(1, own + 1))
    found: list[int | None] = []
    for part in text.split(","):
        low, dash, high = part.strip().partition("-")
        if not low.isdecimal() or (dash and not high.isdecimal()) or not 1 <= int(low) <= int(high or low):
            raise UsageError(f"--k {text}: '{part}' is no budget; write numbers and ranges such as 4,8,10-12, or 'all'")
        found += range(int(low), int(high or low) + 1)
    return found
