"""Draw the small model's training and its quality curves: ``python -m simmoe.live.training.plots MODEL``.

Reads ``MODEL/training_log.jsonl`` and ``MODEL/curves/quality.jsonl``, writes ``MODEL/curves/{training,quality}.png``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from simmoe.live.training.curves import Curves, over_the_line, read_curves

_PARTITIONS = {"random": "tab:gray", "contiguous": "tab:red", "greedy": "tab:olive", "annealed": "tab:blue"}


def plot_training(log: list[dict[str, Any]], out: Path) -> None:
    """Validation perplexity of both lines by tokens, and the learning rate."""
    plt = _pyplot()
    figure, axis = plt.subplots(figsize=(7, 4.2), constrained_layout=True)
    rates = axis.twinx()
    for line, style in (("model", {"color": "tab:blue"}), ("probe", {"color": "tab:orange"})):
        rows = [row for row in log if row["line"] == line]
        tokens = [row["tokens"] / 1e6 for row in rows]
        perplexity = [row["validation_perplexity"] for row in rows]
        axis.plot(tokens, perplexity, label=f"{line}, {perplexity[-1]:.2f} at the end", **style)
        rates.plot(tokens, [row["learning_rate"] for row in rows], lw=0.8, ls=":", **style)
    low = min(row["validation_perplexity"] for row in log)
    axis.set(xlabel="million tokens", ylabel="validation perplexity", ylim=(0.97 * low, 2 * low))
    rates.set(ylabel="learning rate (dotted)", ylim=(0, None))
    axis.legend(fontsize=8)
    figure.savefig(out, dpi=130)
    plt.close(figure)


def plot_quality(curves: Curves, out: Path, recipe: str, allocation: str, splits: int = 4) -> None:
    """Left: gates on the learned partition. Middle and right: partitions, as perplexity over the original's line.

    Args:
        recipe: the fine-tuning that the controls had too.
        allocation: CG's default.
    """
    plt = _pyplot()
    original = curves[("original",)]
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(16, 4.6), constrained_layout=True)
    shown: list[tuple[tuple[str, ...], str, dict[str, Any]]] = [
        (("CG", "annealed", allocation), "CG", {"color": "tab:blue"}),
        (("LG", "annealed"), "LG before fine-tuning", {"color": "tab:orange", "ls": "--"}),
        (("LG fine-tuned", "annealed", "published"), "LG fine-tuned, as published", {"color": "tab:orange"}),
        (("LG fine-tuned", "annealed", recipe), f"LG fine-tuned, {recipe}", {"color": "tab:green"}),
    ]
    for name, label, style in shown:
        left.plot(*zip(*sorted(curves[name].items()), strict=True), label=label, lw=1.4, **style)
    whole = [splits * k for k in sorted(original)]
    left.plot(whole, [original[k] for k in sorted(original)], "ko-", ms=4, lw=1, label="original, whole experts")
    left.set(xlabel="k, sub-experts a token", ylabel="held-out perplexity", yscale="log", title="gates")
    floor = min(original.values())
    ticks = [t for t in (8, 10, 12, 14, 16, 20, 25, 30, 40, 60, 100) if t > 0.9 * floor]
    left.set_yticks(ticks, [str(t) for t in ticks])
    left.minorticks_off()
    left.legend(fontsize=8)
    for axis, model, variant in ((middle, "CG", allocation), (right, "LG fine-tuned", recipe)):
        for partition, colour in _PARTITIONS.items():
            curve = over_the_line(curves[model, partition, variant], original, splits)
            axis.plot(list(curve), [100 * value for value in curve.values()], color=colour, lw=1.4, label=partition)
        axis.axhline(0, color="k", lw=0.8)
        title = f"partitions, {model} ({variant})"
        axis.set(xlabel="k, sub-experts a token", ylabel="% over the original's straight line", title=title)
        axis.legend(fontsize=8)
    figure.savefig(out, dpi=110)
    plt.close(figure)


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt


def main(model: Path) -> None:
    """Both pictures of one model folder."""
    log = [json.loads(line) for line in (model / "training_log.jsonl").read_text().splitlines()]
    plot_training(log, model / "curves" / "training.png")
    curves = read_curves(model / "curves" / "quality.jsonl")
    plot_quality(curves, model / "curves" / "quality.png", "sandwich-distilled", "energy")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
