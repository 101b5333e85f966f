"""Quality curves as the study writes them, and what is wanted of them.

``python -m simmoe.live.training.curves CURVES`` says of ``CURVES/quality.jsonl`` where it holds. Wanted: at whole
experts a gate within 1% of the original; between them no worse than the straight line between its neighbours; the
learned partition better than the controls at every budget.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from pathlib import Path

#: {k: perplexity}; k counts whole experts for the original, sub-experts for the others.
Curve = dict[int, float]
#: (model, partition, allocation or recipe, dtype where it is not the model's own), absent parts left out.
Curves = dict[tuple[str, ...], Curve]

CONTROLS = ("random", "contiguous", "greedy")


def read_curves(path: Path) -> Curves:
    """The curves in a ``quality.jsonl``."""
    curves: Curves = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        parts = (row["model"], row.get("partition"), row.get("allocation") or row.get("recipe"), row.get("dtype"))
        curves.setdefault(tuple(part for part in parts if part), {})[row["k"]] = row["perplexity"]
    return curves


def whole_expert_line(original: Curve, k: int, splits: int = 4) -> float:
    """The original's perplexity at k sub-experts, straight between whole experts; at and above one whole expert."""
    low, part = divmod(k, splits)
    if not part:
        return original[low]
    return original[low] + (original[low + 1] - original[low]) * part / splits


def over_the_line(curve: Curve, original: Curve, splits: int = 4) -> Curve:
    """By how much, as a share, ``curve`` lies above the original's line at each budget of one expert or more."""
    return {k: curve[k] / whole_expert_line(original, k, splits) - 1 for k in sorted(curve) if k >= splits}


def over_the_best_control(curves: Curves, name: tuple[str, ...]) -> Curve:
    """By how much, as a share, the learned partition's curve ``name`` lies above the best control's at each budget.

    Args:
        name: its second part is ``annealed``.
    """
    controls = [curves[(name[0], control, *name[2:])] for control in CONTROLS]
    return {k: value / min(control[k] for control in controls) - 1 for k, value in sorted(curves[name].items())}


def _worst(excess: Curve, budgets: Iterable[int] | None = None) -> str:
    chosen = {k: v for k, v in excess.items() if budgets is None or k in set(budgets)}
    k = max(chosen, key=chosen.__getitem__)
    missed = [k for k, v in chosen.items() if v > 0]
    return f"worst {100 * chosen[k]:+z.2f}% at k={k}; above zero at {missed or 'no budget'}"


def report(curves: Curves, splits: int = 4) -> list[str]:
    """One line a curve and wish."""
    original = curves[("original",)]
    lines = []
    for name, curve in curves.items():
        if name[0] == "original" or len(curve) < splits * len(original):
            continue
        excess = over_the_line(curve, original, splits)
        whole = [splits * k for k in original]
        lines.append(f"{' '.join(name)}: whole experts, {_worst(excess, whole)}")
        lines.append(f"{' '.join(name)}: between them, {_worst(excess, excess.keys() - set(whole))}")
    for name in curves:
        if len(name) > 2 and name[1] == "annealed" and all((name[0], c, *name[2:]) in curves for c in CONTROLS):
            lines.append(f"{' '.join(name)} against the best control: {_worst(over_the_best_control(curves, name))}")
    return lines


if __name__ == "__main__":
    print("\n".join(report(read_curves(Path(sys.argv[1]) / "quality.jsonl"))))
