"""How far estimates are from measured tables that took no part in learning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

import numpy as np

from simmoe.profiles.estimating.estimate import estimated_table
from simmoe.profiles.estimating.learned import Learned, MeasuredModel, learn_from
from simmoe.profiles.residuals import Predictor
from simmoe.profiles.shape import StepShape
from simmoe.profiles.step_cost import prompt_shape
from simmoe.profiles.table import StepTable

#: KV tokens a sequence at which decode steps are compared.
CONTEXT_TOKENS = 1024

#: Steps -> the largest size that counts as small, in prompt tokens or decoding sequences.
SMALL = {"prefill": 512, "decode": 32}

#: What stands for a table's name where all those of so many cards are taken together: one, or several.
ALL_TABLES = {False: "all tables of one card", True: "all tables of several cards"}


class HeldOut(NamedTuple):
    """How far step times are from tables that took no part in learning, over their grids."""

    table: str
    held_out: str
    """'model': every table of the model; 'layout': this way of splitting it; 'budgets': in turn the upper and the lower
    half of its budgets."""
    steps: str
    """'prefill' or 'decode'."""
    sizes: str
    """'up to 32', 'above 32': of so many tokens or sequences."""
    bound_by: str
    """'device or host': every cell; 'device': those whose measured step is longer than the host's share."""
    number: int
    bias: float
    """Mean of predicted / measured - 1."""
    median: float
    """Of its absolute value."""
    p95: float


class _Group(NamedTuple):
    """Steps whose errors are taken together; fields of HeldOut."""

    steps: str
    sizes: str
    bound_by: str


_Errors = dict[_Group, list[float]]


def held_out_errors(measured: Sequence[MeasuredModel]) -> list[HeldOut]:
    """Return how far estimates are from each measured table held out, and from all such tables together.

    First every table of a table's model is held out, then the table alone, where others are left to learn from. Else
    the upper and the lower half of each table's budgets are, in turn, the host and attention being its own.
    """
    learned: dict[tuple[str, ...], Learned] = {}
    rows: list[HeldOut] = []
    for held_out, others_of in (("model", _of_other_models), ("layout", _with_other_layouts)):
        errors = []
        for one in measured:
            others = others_of(one, measured)
            if any(other.parallel.num_cards == 1 for other in others):
                names = tuple(other.table.name for other in others)
                if names not in learned:
                    learned[names] = learn_from(others)
                errors.append((one, _errors(one, [(learned[names], one.table.prefill.ks)])))
        rows += _rows(held_out, errors)
    of_one = [one for one in measured if one.parallel.num_cards == 1]
    return rows or _rows("budgets", [(one, _errors(one, list(_by_halves(one)))) for one in of_one])


def over_all_tables(rows: Sequence[HeldOut], num_cards: int = 1) -> list[HeldOut]:
    """Return the rows of all tables of one card, or of several, together, with as much held out as could be.

    Where there is but one such table, its rows.
    """
    of_most = [row for row in rows if row.held_out == rows[0].held_out]
    together = [row for row in of_most if row.table == ALL_TABLES[num_cards > 1]]
    return together or [row for row in of_most if row.table == of_most[0].table]


def _of_other_models(one: MeasuredModel, measured: Sequence[MeasuredModel]) -> list[MeasuredModel]:
    return [other for other in measured if other.base != one.base]


def _with_other_layouts(one: MeasuredModel, measured: Sequence[MeasuredModel]) -> list[MeasuredModel]:
    """Return all other tables; none where the model has no other."""
    others = [other for other in measured if other is not one]
    return others if any(other.base == one.base for other in others) else []


def _by_halves(one: MeasuredModel) -> Iterator[tuple[Learned, Sequence[int]]]:
    """Yield what half of a table's budgets teaches, with the other half."""
    ks = one.table.prefill.ks
    middle = (len(ks) + 1) // 2
    for seen, rest in ((ks[:middle], ks[middle:]), (ks[middle:], ks[:middle])):
        if seen and rest:
            yield learn_from([one], set(seen)), rest


def _errors(one: MeasuredModel, learned: Sequence[tuple[Learned, Sequence[int]]]) -> _Errors:
    """Compare step times over the table's grid; each ``learned`` predicts the budgets beside it."""
    truth = Predictor(one.table, async_scheduling=True)
    errors: _Errors = {}
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
            parallel=one.parallel,
            weights=one.weights,
        )
        predictor = Predictor(table, async_scheduling=True)
        for steps, shape in _shapes(one.table, ks):
            small = SMALL[steps]
            sizes = f"{'up to' if shape.num_tokens <= small else 'above'} {small}"
            measured_s = truth.step_s(shape)
            error = predictor.step_s(shape) / measured_s - 1
            errors.setdefault(_Group(steps, sizes, "device or host"), []).append(error)
            if truth.device_s(shape) == measured_s:
                errors.setdefault(_Group(steps, sizes, "device"), []).append(error)
    return errors


def _rows(held_out: str, errors: Sequence[tuple[MeasuredModel, _Errors]]) -> list[HeldOut]:
    """Return the rows of each table, then those of all together where there are several."""
    shown = [(one.table.name, of_table) for one, of_table in errors]
    for several, name in ALL_TABLES.items():
        alike = [of_table for one, of_table in errors if (one.parallel.num_cards > 1) == several]
        together: _Errors = {}
        for group, values in (item for of_table in alike for item in of_table.items()):
            together.setdefault(group, []).extend(values)
        if len(alike) > 1:
            shown.append((name, together))
    return [
        HeldOut(name, held_out, *group, len(values), *(round(value, 4) for value in _statistics(values)))
        for name, of_table in shown
        for group, values in of_table.items()
    ]


def _statistics(errors: Sequence[float]) -> tuple[float, float, float]:
    """Return bias, median and 95th percentile of the size."""
    return float(np.mean(errors)), float(np.median(np.abs(errors))), float(np.quantile(np.abs(errors), 0.95))


def _shapes(table: StepTable, ks: Sequence[int]) -> Iterator[tuple[str, StepShape]]:
    for size, k in product(table.prefill.sizes, ks):
        yield "prefill", prompt_shape(size, k)
    for size, k in product(table.decode.sizes, ks):
        yield "decode", StepShape(0, 0, 0, size, size * CONTEXT_TOKENS, k)
