"""Draw the quality curves of the small model: ``python -m simmoe.live.training.plots CURVES OUT``.

``CURVES/quality.jsonl`` is what :mod:`simmoe.live.training.study` wrote; ``OUT`` receives ``quality.png``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

Curve = dict[int, float]


def read_curves(path: Path) -> dict[tuple[str, ...], Curve]:
    """(model, partition, allocation or recipe) -> {k: perplexity}."""
    curves: dict[tuple[str, ...], Curve] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        variant = row.get("allocation") or row.get("recipe")
        name = tuple(part for part in (row["model"], row.get("partition"), variant) if part)
        curves.setdefault(name, {})[row["k"]] = row["perplexity"]
    return curves


def whole_expert_line(original: Curve, k: int, splits: int = 4) -> float:
    """The original's perplexity at k sub-experts, straight between whole experts; at and above one whole expert."""
    low, part = divmod(k, splits)
    if not part:
        return original[low]
    return original[low] + (original[low + 1] - original[low]) * part / splits


def plot(curves: dict[tuple[str, ...], Curve], out: Path, splits: int = 4) -> None:
    """Left: gates on the learned partition. Right: partitions under CG, as perplexity over the original's line."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    original = curves[("original",)]
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4.6), constrained_layout=True)
    shown: list[tuple[tuple[str, ...], str, dict[str, Any]]] = [
        (("CG", "annealed", "marginal"), "CG", {"color": "tab:blue"}),
        (("CG", "annealed", "proportional"), "CG, proportional shares", {"color": "tab:blue", "ls": ":"}),
        (("LG", "annealed"), "LG before fine-tuning", {"color": "tab:orange", "ls": "--"}),
        (("LG fine-tuned", "annealed", "published"), "LG fine-tuned, as published", {"color": "tab:orange"}),
        (("LG fine-tuned", "annealed", "mixed"), "LG fine-tuned, all budgets", {"color": "tab:green"}),
    ]
    for name, label, style in shown:
        left.plot(*zip(*sorted(curves[name].items()), strict=True), label=label, lw=1.4, **style)
    whole = [splits * k for k in sorted(original)]
    left.plot(whole, [original[k] for k in sorted(original)], "ko-", ms=4, lw=1, label="original, whole experts")
    left.set(xlabel="k, sub-experts a token", ylabel="held-out perplexity", yscale="log", title="gates")
    left.set_yticks([14, 16, 20, 25, 30, 40, 60, 100], [14, 16, 20, 25, 30, 40, 60, 100])
    left.minorticks_off()
    left.legend(fontsize=8)
    budgets = range(splits, whole[-1] + 1)
    for partition, colour in (
        ("random", "tab:gray"),
        ("contiguous", "tab:red"),
        ("greedy", "tab:olive"),
        ("annealed", "tab:blue"),
    ):
        curve = curves["CG", partition, "marginal"]
        over = [100 * (curve[k] / whole_expert_line(original, k, splits) - 1) for k in budgets]
        right.plot(budgets, over, color=colour, lw=1.4, label=partition)
    right.axhline(0, color="k", lw=0.8)
    right.set(
        xlabel="k, sub-experts a token", ylabel="% over the original's straight line", title="partitions, under CG"
    )
    right.legend(fontsize=8)
    figure.savefig(out / "quality.png", dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    plot(read_curves(Path(sys.argv[1]) / "quality.jsonl"), Path(sys.argv[2]))
