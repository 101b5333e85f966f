"""MoE-Prism's Table III: executed budgets within 5% of the paper's in the five cells that agree with one another."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from simmoe.profiles.catalog import load_profile

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "paper_table3.py"
PROFILE = load_profile("olmoe-1b-7b-split4-h200")


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("paper_table3", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


table3 = load()
CELLS = [
    (mu, sigma, unsplit, papers[unsplit])
    for (mu, sigma), papers in table3.PAPER.items()
    for unsplit in (False, True)
    if (mu, sigma, unsplit) != (16, 8, True)  # docs/table3.md: 17% above the rounding-up mean, where the rest are 5%
]


def executed_k(mu: float, sigma: float, unsplit: bool, policy: str) -> float:
    runs = [
        table3.executed(mu, sigma, policy, unsplit, seed, table3.MAX_NUM_SEQS, table3.KV_TOKENS, PROFILE)
        for seed in range(2)
    ]
    return float(sum(run["executed_k"] for run in runs) / len(runs))


@pytest.mark.parametrize(("mu", "sigma", "unsplit", "paper"), CELLS)
def test_tiers_execute_the_papers_budget(mu: float, sigma: float, unsplit: bool, paper: float) -> None:
    assert executed_k(mu, sigma, unsplit, "tiers") == pytest.approx(paper, rel=0.05)


def test_doing_nothing_does_not_pass() -> None:
    assert executed_k(16, 6, False, "fifo") > 1.5 * 16.76
