"""Activation concentration: the share of a token's L1 mass in its most active neurons (the paper's Fig. 3)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from simmoe.live.refactor.profiler import LayerProfile

FRACTIONS = (0.10, 0.25)


def top_mass(profile: LayerProfile, fraction: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Mean share of each expert's token mass that its largest ``fraction`` of neurons carries.

    Args:
        fraction: of the width; rounded to whole neurons, at least one.
    Returns:
        [num_experts]; NaN where no token was kept. Tokens without any mass are left out of the mean.
    """
    count = max(1, round(fraction * profile.activations.shape[2]))
    shares = []
    for expert, kept in enumerate(profile.kept.tolist()):
        magnitude = profile.activations[expert, :kept].float().abs()
        total = magnitude.sum(dim=1)
        top = magnitude.topk(count, dim=1).values.sum(dim=1)
        counted = total > 0
        share = (top[counted] / total[counted]).double()
        shares.append(float(share.mean()) if share.numel() else float("nan"))
    return np.array(shares)


def concentration(profiles: Sequence[LayerProfile]) -> dict[float, np.ndarray[Any, np.dtype[np.float64]]]:
    """``{fraction: [layers, experts]}`` for both fractions of the figure."""
    return {fraction: np.stack([top_mass(profile, fraction) for profile in profiles]) for fraction in FRACTIONS}


def rows(profiles: Sequence[LayerProfile]) -> list[dict[str, Any]]:
    """One line a layer: median, 10th and 90th percentile over experts of both shares, tokens seen."""
    table = []
    for profile in profiles:
        line: dict[str, Any] = {"layer": profile.layer}
        for fraction in FRACTIONS:
            share = top_mass(profile, fraction)
            share = share[~np.isnan(share)]
            low, median, high = np.percentile(share, [10, 50, 90]) if share.size else (np.nan,) * 3
            name = f"top{round(fraction * 100)}"
            line |= {f"{name}_median": median, f"{name}_p10": low, f"{name}_p90": high}
        line |= {"min_tokens": int(profile.seen.min()), "max_tokens": int(profile.seen.max())}
        table.append(line)
    return table


def plot(profiles: Sequence[LayerProfile], out: Path, title: str, kind: str) -> None:
    """Draw the figure (png, svg or pdf).

    Left, top-25% share by layer and expert; right, both shares by depth with a 10-90% band.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    shares = concentration(profiles)
    layers = [profile.layer for profile in profiles]
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), constrained_layout=True)
    image = left.imshow(shares[0.25], aspect="auto", interpolation="nearest", cmap="viridis")
    left.set(xlabel="expert", ylabel="layer", title="mass in the top 25% of neurons")
    left.set_yticks(range(len(layers)), [str(layer) for layer in layers])
    figure.colorbar(image, ax=left)
    for fraction, colour in zip(FRACTIONS, ("tab:orange", "tab:blue"), strict=True):
        low, median, high = np.nanpercentile(shares[fraction], [10, 50, 90], axis=1)
        right.plot(layers, median, color=colour, marker="o", markersize=3, label=f"top {fraction:.0%}")
        right.fill_between(layers, low, high, color=colour, alpha=0.2)
    right.set(xlabel="layer", ylabel="share of a token's L1 activation mass", ylim=(0, 1), xticks=layers)
    right.legend()
    figure.suptitle(title)
    figure.savefig(out, dpi=130, format=kind)
    plt.close(figure)


def overall_median(profiles: Sequence[LayerProfile], fraction: float) -> float:
    """Median over all layer-expert pairs that kept a token."""
    values = np.concatenate([top_mass(profile, fraction) for profile in profiles])
    return float(torch.tensor(values[~np.isnan(values)]).median())
