"""A step taken apart: what of its seconds the dense layers, the routed experts, attention, head and sampler, exchanges
between cards and the host are.

The table holds a step's tokens and experts as one number, since nothing it is asked for changes their sum. Attention
and the host are the table's own terms; routed experts are the layer timed alone, times the layers, where it was timed
around that size and budget, else counted work at efficiencies learned from measured tables, as the other parts are.
``rest`` is what these leave of the step, of either sign: how far the parts are from adding up by themselves.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import NamedTuple

from simmoe.errors import ProfileError, UsageError
from simmoe.profiles.estimating.learned import MeasuredModel, learn_from, measured_models
from simmoe.profiles.estimating.roofline import DeviceParts, Efficiencies, device_parts
from simmoe.profiles.estimating.scaling import CardRooflines, rooflines_of
from simmoe.profiles.grid import Grid
from simmoe.profiles.layer_times import LayerTimes
from simmoe.profiles.shape import StepShape
from simmoe.profiles.step_cost import ProfileStepCost, Surfaces
from simmoe.profiles.table import StepTable


class StepSeconds(NamedTuple):
    """The parts of one step's seconds; they add up to the step."""

    dense_s: float
    experts_s: float
    attention_s: float
    head_s: float
    """The language-model head and the sampler."""
    exchanges_s: float
    host_s: float
    """The host beyond the device: what of its share lies behind no device time, of this step or of others."""
    rest_s: float
    """What the parts leave of the step; below 0 where together they are longer."""

    @property
    def step_s(self) -> float:
        """The step."""
        return math.fsum(self)


class StepTakenApart:
    """Takes the steps of one table apart.

    Args:
        table: names a model and a card with a known datasheet.
        efficiencies: of :func:`efficiencies_of`.
        layer_times: of the routed experts of one layer alone, where they were taken.
        async_scheduling: whether the host composes a step while the device runs the one before.
    Raises:
        UsageError: the table does not say what model on what card it is of.
    """

    def __init__(
        self,
        table: StepTable,
        efficiencies: Efficiencies,
        layer_times: LayerTimes | None = None,
        async_scheduling: bool = True,
    ) -> None:
        rooflines = rooflines_of(table, decode=False)
        if rooflines is None:
            raise UsageError(
                f"profile '{table.name}' names no model on a card with a known datasheet, so the parts of its steps "
                "cannot be told; 'profile show' without --parts has their times"
            )
        self._rooflines: CardRooflines = rooflines
        self._efficiencies = efficiencies
        self._surfaces = Surfaces.of(table)
        self._cost = ProfileStepCost(self._surfaces, async_scheduling)
        self._layer = _layer_grid(layer_times, rooflines)

    def seconds(self, shape: StepShape) -> StepSeconds:
        """Return the parts of a step."""
        step_s, device_s = self._cost.step_s(shape), self._cost.parts_s(shape).device_s
        decode = not shape.num_prefill_tokens
        grid = self._surfaces.decode if decode else self._surfaces.prefill
        size = grid.runs_at(shape.num_tokens)
        dense_s, experts_s, blocks_s, head_s, exchanges_s = (
            float(part[0]) for part in self._parts(size, shape.k_exec, decode, self._rooflines.roofline.routed_alike)
        )
        timed_s = self._experts_alone_s(size, shape.k_exec, decode)
        experts_s = experts_s if timed_s is None else timed_s
        attention_s = device_s - grid.seconds(shape.num_tokens, shape.k_exec) + blocks_s
        known = dense_s, experts_s, attention_s, head_s, exchanges_s, step_s - device_s
        return StepSeconds(*known, rest_s=math.fsum((step_s, *(-part for part in known))))

    def is_timed(self, size: int, k: int) -> bool:
        """Return whether the experts' part at a size that runs is the layer timed alone."""
        layer = self._layer
        return layer is not None and layer.sizes[0] <= size <= layer.sizes[-1] and layer.ks[0] <= k <= layer.ks[-1]

    def _experts_alone_s(self, size: int, k: int, decode: bool) -> float | None:
        """Return the routed experts of all layers as timed alone; None where they were not, at that size and budget.

        There tokens were routed independently. Where those of one prompt are routed alike, and touch fewer experts, the
        time is taken in proportion to what that makes of the counted work.
        """
        if self._layer is None or not self.is_timed(size, k):
            return None
        seconds = self._layer.seconds(size, k) * self._rooflines.roofline.model.num_moe_layers
        if not decode and self._rooflines.roofline.routed_alike:
            alike, apart = (self._parts(size, k, decode, how).experts_s[0] for how in (True, False))
            seconds *= float(alike / apart)
        return seconds

    def _parts(self, size: int, k: int, decode: bool, routed_alike: bool) -> DeviceParts:
        roofline, card, _ = self._rooflines
        return device_parts(
            roofline.model,
            card,
            self._efficiencies,
            [size],
            [k / roofline.k_granularity],
            decode=decode,
            parallel=roofline.parallel,
            routed_alike=routed_alike,
        )


def efficiencies_of(
    table: StepTable, layer_times: LayerTimes | None, others: Iterable[tuple[StepTable, LayerTimes | None]]
) -> tuple[Efficiencies, Sequence[str]]:
    """Return what a table's card reaches of its datasheet, and the names of the tables that tell.

    An estimate rests on efficiencies of its own. Else the table itself tells, where steps on one card were measured
    with graphs; of several cards, it and those of its model on one; and the other tables where it tells nothing.

    Args:
        table: the table.
        layer_times: measured with it.
        others: measured tables, each with its layer's times.
    Raises:
        ProfileError: nothing to learn from, or an estimate keeps what is no efficiency.
    """
    estimate = table.provenance.get("estimate")
    if estimate:
        kept, names = estimate["learned"]["device"], {field.name for field in fields(Efficiencies)}
        for name, value in kept.items():
            if name not in names or not 0 < value < math.inf:
                raise ProfileError(f"profile '{table.name}' keeps an efficiency {name} of {value:g}, which is none")
        return Efficiencies(**kept), estimate["learned"]["tables"]
    own = measured_models([(table, layer_times)])
    sources: list[MeasuredModel] = own
    if not own or own[0].parallel.num_cards > 1:
        of_one = [other for other in measured_models(others) if other.parallel.num_cards == 1]
        sources = [*([other for other in of_one if own and other.base == own[0].base] or of_one), *own]
    learned = learn_from(sources)
    return learned.device, learned.tables


def _layer_grid(times: LayerTimes | None, rooflines: CardRooflines) -> Grid | None:
    """Return the layer's times by size and the table's k; None where they are not on a full grid, or of other cards."""
    parallel = rooflines.roofline.parallel
    if times is None or (times.num_cards, times.expert_parallel) != tuple(parallel):
        return None
    at = {(row.num_tokens, row.k): row.seconds for row in times.rows}
    sizes, ks = sorted({n for n, _ in at}), sorted({k for _, k in at})
    if len(at) < len(sizes) * len(ks):
        return None
    units = [k * rooflines.roofline.k_granularity for k in ks]
    return Grid(sizes, units, [[at[n, k] for k in ks] for n in sizes], [])
