"""``simmoe refactor``: split a checkpoint's experts, look at its activations, fine-tune its gates."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from simmoe.commands.profile_plot import check_name
from simmoe.errors import MissingDependency, UsageError
from simmoe.writing import check_place, whole_file

if TYPE_CHECKING:
    from simmoe.live.refactor.anneal import Schedule


class _DefaultToSplit(click.Group):
    """``refactor MODEL_DIR`` is ``refactor split MODEL_DIR``."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["split", *args]
        return super().parse_args(ctx, args)


_MODEL = click.argument("model_dir", type=click.Path(path_type=Path))
_CALIBRATION = click.option(
    "--calibration", type=click.Path(path_type=Path), required=True, help="Plain text the activations are taken on."
)
_CALIBRATION_TOKENS = click.option(
    "--calibration-tokens", type=click.IntRange(1), default=131_072, show_default=True, help="Tokens of it to run."
)
_TOKENS_PER_EXPERT = click.option(
    "--tokens-per-expert", type=click.IntRange(1), default=2048, show_default=True, help="Activations kept an expert."
)
_DEVICE = click.option("--device", default=None, help="cuda or cpu; default: a GPU if there is one.")
_SEED = click.option("--seed", type=click.IntRange(0, 2**32 - 1), default=0, show_default=True)


@click.group(cls=_DefaultToSplit)
def refactor() -> None:
    """Split every expert of a Mixture-of-Experts checkpoint into sub-experts and rebuild its gate (MoE-Prism).

    simmoe refactor MODEL_DIR --gate complex --calibration TEXT --out DIR writes a checkpoint that transformers and
    vLLM load.
    """


@refactor.command()
@_MODEL
@click.option("--splits", type=int, default=4, show_default=True, help="Sub-experts an expert, N.")
@click.option(
    "--gate", type=click.Choice(["complex", "linear"]), default="complex", show_default=True,
    help="complex: training-free, needs the checkpoint's own code. linear: the published architecture.",
)  # fmt: skip
@_CALIBRATION
@click.option("--out", type=click.Path(path_type=Path), required=True, help="New directory of the checkpoint.")
@click.option(
    "--partition", type=click.Choice(["annealed", "greedy", "random", "contiguous"]), default="annealed",
    show_default=True, help="Solver; the last three are controls.",
)  # fmt: skip
@click.option("--k-drop", type=int, default=None, help="One K_drop of Eq. 4; default: the average over 1..N-1.")
@click.option("--iterations", type=click.IntRange(0), default=100_000, show_default=True, help="Swaps tried an expert.")
@click.option("--t0", type=click.FloatRange(0), default=100.0, show_default=True,
              help="First temperature, in millionths of the expert's activation mass.")  # fmt: skip
@click.option("--cooling", default="0.995", show_default=True,
              help="Factor an iteration, or 'spread': cool over all iterations down to 0.05.")  # fmt: skip
@click.option("--gate-neurons", type=int, default=4, show_default=True, help="r, proxy neurons a sub-expert (complex).")
@click.option(
    "--allocation", type=click.Choice(["energy", "marginal", "front-loaded", "proportional"]),
    default="energy", show_default=True, help="How a budget is shared among the ranked experts (complex).",
)  # fmt: skip
@_CALIBRATION_TOKENS
@_TOKENS_PER_EXPERT
@_SEED
@_DEVICE
def split(
    model_dir: Path, splits: int, gate: str, calibration: Path, out: Path, partition: str, k_drop: int | None,
    iterations: int, t0: float, cooling: str, gate_neurons: int, allocation: str, calibration_tokens: int,
    tokens_per_expert: int, seed: int, device: str | None,
) -> None:  # fmt: skip
    """Split MODEL_DIR's experts and write the new checkpoint."""
    engine = _engine()
    config = engine.RefactorConfig(
        splits=splits, gate=gate, partition=partition, schedule=_schedule(t0, cooling, iterations), k_drop=k_drop,
        gate_neurons=gate_neurons, allocation=allocation, calibration_tokens=calibration_tokens,
        tokens_per_expert=tokens_per_expert, seed=seed,
    )  # fmt: skip
    engine.refactor(model_dir, calibration, out, config, say=_say, device=device)


@refactor.command()
@_MODEL
@_CALIBRATION
@click.option("--out", type=click.Path(path_type=Path), default=None, help="Write the figure here, e.g. a PNG.")
@_CALIBRATION_TOKENS
@_TOKENS_PER_EXPERT
@_SEED
@_DEVICE
def inspect(
    model_dir: Path, calibration: Path, out: Path | None, calibration_tokens: int, tokens_per_expert: int, seed: int,
    device: str | None,
) -> None:  # fmt: skip
    """Show how concentrated MODEL_DIR's activations are, by layer and expert (the paper's Fig. 3)."""
    if out is not None:  # the model takes minutes to run
        check_name(out)
        check_place(out, "the figure")
    engine = _engine()
    from simmoe.live.refactor import concentration
    from simmoe.live.refactor.checkpoint import Checkpoint
    from simmoe.live.refactor.families import family_of

    family_of(Checkpoint(model_dir).config)
    config = engine.RefactorConfig(
        calibration_tokens=calibration_tokens, tokens_per_expert=tokens_per_expert, seed=seed
    )
    profiles = engine.profile_checkpoint(model_dir, calibration, config, _say, device)
    click.echo("layer  top 10%: median (p10-p90)   top 25%: median (p10-p90)   tokens an expert")
    for row in concentration.rows(profiles):
        click.echo(
            f"{row['layer']:5d}  {row['top10_median']:.3f} ({row['top10_p10']:.3f}-{row['top10_p90']:.3f})         "
            f"{row['top25_median']:.3f} ({row['top25_p10']:.3f}-{row['top25_p90']:.3f})         "
            f"{row['min_tokens']}-{row['max_tokens']}"
        )
    medians = [concentration.overall_median(profiles, fraction) for fraction in concentration.FRACTIONS]
    click.echo(f"median over layers and experts: top 10% carry {medians[0]:.1%}, top 25% carry {medians[1]:.1%}")
    if out is not None:
        with whole_file(out, "the figure") as partial:
            title = f"{model_dir.name}, {calibration_tokens} calibration tokens"
            concentration.plot(profiles, partial, title, out.suffix.lower()[1:])
        _say(f"figure: {out}")


@refactor.command()
@_MODEL
@click.option("--text", type=click.Path(path_type=Path), required=True, help="Plain text to train on.")
@click.option("--out", type=click.Path(path_type=Path), required=True, help="New directory of the checkpoint.")
@click.option("--steps", type=click.IntRange(1), default=500, show_default=True)
@click.option("--batch", type=click.IntRange(1), default=32, show_default=True, help="Windows an optimiser step.")
@click.option("--micro-batch", type=click.IntRange(1), default=8, show_default=True, help="Windows a forward pass.")
@click.option("--context", type=click.IntRange(2), default=512, show_default=True, help="Tokens a window.")
@click.option("--learning-rate", type=click.FloatRange(0, min_open=True), default=1e-5, show_default=True)
@click.option("--budgets", type=click.Choice(["anneal", "mixed", "sandwich"]), default="anneal", show_default=True,
              help="anneal: k rises from --k-start to --k-end. mixed: each pass draws k between them. "
              "sandwich: a step's first pass runs --k-end, the others draw.")  # fmt: skip
@click.option("--objective", type=click.Choice(["lm", "distil"]), default="lm", show_default=True,
              help="lm: the text's next token. distil: the original model's distribution of it.")  # fmt: skip
@click.option("--k-start", type=int, default=8, show_default=True)
@click.option("--k-end", type=int, default=32, show_default=True)
@click.option("--state", type=click.Path(path_type=Path), default=None,
              help="Where an interrupted run's state is; default: beside --out.")  # fmt: skip
@_SEED
@_DEVICE
def finetune(
    model_dir: Path, text: Path, out: Path, steps: int, batch: int, micro_batch: int, context: int,
    learning_rate: float, budgets: str, objective: str, k_start: int, k_end: int, state: Path | None, seed: int,
    device: str | None,
) -> None:  # fmt: skip
    """Train the gates alone of a linear-gate checkpoint; run again after an interruption, it goes on."""
    engine = _engine()
    import numpy as np

    from simmoe.live.refactor.finetune import FinetuneConfig, check_places
    from simmoe.live.refactor.finetune import finetune as run

    config = FinetuneConfig(
        steps=steps, sequences=batch, micro_sequences=micro_batch, context_tokens=context,
        learning_rate=learning_rate, budget_schedule=budgets, objective=objective, k_start=k_start, k_end=k_end,
        seed=seed,
    )  # fmt: skip
    check_places(out, state)
    content = engine.read_text(text, "--text")
    ids = engine.load_tokenizer(model_dir)(content, verbose=False)["input_ids"]
    run(
        model_dir, np.array(ids, dtype=np.int32), out, config,
        load=lambda path: engine.load_model(path, device=device), state_path=state, say=_say,
    )  # fmt: skip


def _schedule(t0: float, cooling: str, iterations: int) -> Schedule:
    from simmoe.live.refactor.anneal import Schedule

    if not math.isfinite(t0):
        raise UsageError(f"--t0 {t0}: give a finite temperature")
    if cooling == "spread":
        return Schedule.spread(t0, max(1, iterations)) if t0 > 0 else Schedule(0.0, 1.0, iterations)
    try:
        factor = float(cooling)
    except ValueError:
        factor = -1.0
    if not 0 < factor <= 1:
        raise UsageError(f"--cooling {cooling}: give a factor above 0 and at most 1, or 'spread'")
    return Schedule(t0, factor, iterations)


def _engine() -> Any:
    try:
        from simmoe.live.refactor import engine
    except ModuleNotFoundError as error:
        raise MissingDependency(f"refactoring needs {error.name}; pip install 'simmoe[refactor]'") from error
    return engine


def _say(line: str) -> None:
    click.echo(line, err=True)
