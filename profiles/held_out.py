"""How far estimates are from measured tables that took no part in learning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from simmoe.profiles.estimate import estimated_table
from simmoe.profiles.learned import Learned, MeasuredModel, learn_from
from simmoe.profiles.residuals import Predictor
from simmoe.profiles.shape import StepShape
from simmoe.profiles.step_cost import prompt_shape
from simmoe.profiles.table import StepTable

#: KV tokens a sequence at which decode steps are compared.
CONTEXT_TOKENS = 1024


class HeldOut(NamedTuple):
    """How far step times are from a table that took no part in learning, over the table's grid."""

    table: str
    held_out: str
    """'model': every table of the model; 'split': this way of splitting it; 'budgets': in turn the upper and the lower
    half of its budgets."""
    learned_from: str
    steps: str
    """'prefill' or 'decode'."""
    bound_by: str
    """'device or host': every cell; 'device': those whose measured step is longer than the host's share."""
    number: int
    bias: float
    """Mean of predicted / measured - 1."""
    median: float
    """Of its absolute value."""
    p95: float


def held_out_errors(measured: Sequence[MeasuredModel]) -> list[HeldOut]:
    """Return how far estimates are from each measured table when it is held out as far as the others allow.

    With tables of another model, all tables of this model are held out; else with another way of splitting it, this
    one; else the upper and the lower half of its budgets in turn, the host and attention being its own.
    """
    rows: list[HeldOut] = []
    for one in measured:
        other_models = [other for other in measured if other.base != one.base]
        other_splits = [other for other in measured if other.table.name != one.table.name]
        others = other_models or other_splits
        if others:
            learned = [(learn_from(others), one.table.prefill.ks)]
            rows += _errors(one, "model" if other_models else "split", learned, others)
        else:
            rows += _errors(one, "budgets", list(_by_halves(one)), [one])
    return rows


def _by_halves(one: MeasuredModel) -> Iterator[tuple[Learned, Sequence[int]]]:
    """Yield what half of a table's budgets teaches, with the other half."""
    ks = one.table.prefill.ks
    middle = (len(ks) + 1) // 2
    for seen, rest in ((ks[:middle], ks[middle:]), (ks[middle:], ks[:middle])):
        if seen and rest:
            yield learn_from([one], set(seen)), rest


def _errors(
    one: MeasuredModel,
    held_out: str,
    learned: Sequence[tuple[Learned, Sequence[int]]],
    others: Sequence[MeasuredModel],
) -> list[HeldOut]:
    """Compare step times over the table's grid; each ``learned`` predicts the budgets beside it."""
    truth = Predictor(one.table, async_scheduling=True)
    errors: dict[tuple[str, str], list[float]] = {}
    for source, ks in learned:
        table = estimated_table(
            source,
            one.table,
            one.card,
            one.shape,
            name=one.table.name,
            summary="",
            provenance={},
            k_granularity=one.table.k_granularity,
        )
        predictor = Predictor(table, async_scheduling=True)
        for steps, shape in _shapes(one.table, ks):
            measured_s = truth.step_s(shape)
            error = predictor.step_s(shape) / measured_s - 1
            errors.setdefault((steps, "device or host"), []).append(error)
            if truth.device_s(shape) == measured_s:
                errors.setdefault((steps, "device"), []).append(error)
    names = ", ".join(other.table.name for other in others)
    return [
        HeldOut(
            one.table.name,
            held_out,
            names,
            steps,
            bound_by,
            len(values),
            *(
                round(float(value), 4)
                for value in (np.mean(values), np.median(np.abs(values)), np.quantile(np.abs(values), 0.95))
            ),
        )
        for (steps, bound_by), values in errors.items()
    ]


def _shapes(table: StepTable, ks: Sequence[int]) -> Iterator[tuple[str, StepShape]]:
    for size, k in product(table.prefill.sizes, ks):
        yield "prefill", prompt_shape(size, k)
    for size, k in product(table.decode.sizes, ks):
        yield "decode", StepShape(0, 0, 0, size, size * CONTEXT_TOKENS, k)
