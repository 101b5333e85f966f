"""Reading quality curves and saying where what is wanted of them holds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from simmoe.live.training.curves import (
    over_the_best_control,
    over_the_line,
    read_curves,
    report,
    whole_expert_line,
)

ORIGINAL = {1: 20.0, 2: 16.0}


def test_the_line_runs_straight_between_whole_experts() -> None:
    assert [whole_expert_line(ORIGINAL, k) for k in (4, 5, 6, 8)] == [20.0, 19.0, 18.0, 16.0]
    excess = over_the_line({3: 50.0, 4: 20.0, 6: 17.1, 8: 16.8}, ORIGINAL)
    assert excess == pytest.approx({4: 0.0, 6: -0.05, 8: 0.05})


def test_rows_become_curves_by_what_describes_them(tmp_path: Path) -> None:
    about = [
        {"model": "original"},
        {"model": "CG", "partition": "annealed", "allocation": "marginal"},
        {"model": "CG", "partition": "annealed", "allocation": "marginal", "dtype": "float32"},
        {"model": "LG fine-tuned", "partition": "random", "recipe": "mixed"},
    ]
    file = tmp_path / "quality.jsonl"
    file.write_text("".join(json.dumps({**row, "k": 4, "perplexity": n}) + "\n" for n, row in enumerate(about)))
    assert read_curves(file) == {
        ("original",): {4: 0},
        ("CG", "annealed", "marginal"): {4: 1},
        ("CG", "annealed", "marginal", "float32"): {4: 2},
        ("LG fine-tuned", "random", "mixed"): {4: 3},
    }


def test_the_report_names_the_worst_budget_and_every_miss() -> None:
    learned = {k: 100.0 - k for k in range(1, 9)} | {4: 20.0, 5: 18.0, 6: 18.9, 7: 16.0, 8: 16.16}
    curves = {("original",): ORIGINAL, ("CG", "annealed", "marginal"): learned}
    for control, factor in (("random", 1.1), ("contiguous", 1.2), ("greedy", 1.0)):
        curves["CG", control, "marginal"] = {k: value * factor for k, value in learned.items()}
    curves["CG", "greedy", "marginal"][7] = 15.0
    lines = report(curves)
    assert "CG annealed marginal: whole experts, worst +1.00% at k=8; above zero at [8]" in lines
    assert "CG annealed marginal: between them, worst +5.00% at k=6; above zero at [6]" in lines
    assert lines[-1] == "CG annealed marginal against the best control: worst +6.67% at k=7; above zero at [7]"
    assert over_the_best_control(curves, ("CG", "annealed", "marginal"))[6] == 0
