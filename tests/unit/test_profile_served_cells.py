"""Cells of prompt tokens that no point shows, from served steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from simmoe.profiles.catalog import load_profile
from simmoe.profiles.fitting.served_cells import with_served_cells
from simmoe.profiles.fitting.serving_terms import device_seconds
from simmoe.profiles.samples import Sample
from simmoe.profiles.shape import StepShape
from simmoe.profiles.step_cost import prompt_shape
from simmoe.profiles.synthetic import make_sample
from simmoe.profiles.table import StepTable

HIDDEN = (1024, 32)


def steps_of(table: StepTable, shapes: Sequence[StepShape]) -> list[Sample]:
    return [
        make_sample(shape, "step", "graphs", [seconds])
        for shape, seconds in zip(shapes, device_seconds(table, shapes).tolist(), strict=True)
    ]


@pytest.mark.parametrize("points", [[], [3000, 5000]], ids=["no points", "points elsewhere"])
def test_served_steps_that_their_decodes_decide_tell_nothing_of_a_cell(points: list[int]) -> None:
    """KV tokens take a step with prompts no time here, so such steps last as long as their decodes alone."""
    table = load_profile("synthetic-olmoe-split4").table
    table = replace(table, attention=table.attention._replace(mixed_kv_token_s=0.0))
    shown = {(size, k) for size in table.prefill.sizes for k in table.prefill.ks} - {HIDDEN}
    served = steps_of(table, [StepShape(16, 136, 1, 1000, 1000 * (4000 + i), 32) for i in range(20)])
    found = with_served_cells(table, shown, steps_of(table, [prompt_shape(n, 32) for n in points]), [], served)
    assert found.prefill == table.prefill
