"""How a table's steps grow beyond its grid: the rooflines that bind their parts, at what cards usually reach."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from simmoe.profiles.estimating.binding import Roofline, roofline_of, table_card
from simmoe.profiles.estimating.cards import Card
from simmoe.profiles.estimating.roofline import Efficiencies, device_s
from simmoe.profiles.shape import StepShape
from simmoe.profiles.table import StepTable

#: What cards usually reach, nothing learned: only how much longer one step is than another is asked of them.
USUAL = Efficiencies()


class CardRooflines(NamedTuple):
    """The rooflines of one kind of steps on one card, or each of several (see simmoe.profiles.beyond.Rooflines)."""

    roofline: Roofline
    card: Card
    decode: bool

    def binding_s(self, sizes: Sequence[int], ks: Sequence[int]) -> list[float]:
        """Return the seconds of steps: the sum of their parts, products as long as arithmetic or traffic binds them.

        Args:
            sizes: [num_steps] tokens or sequences.
            ks: [num_steps] budgets.
        """
        model, of = self.roofline.model, self.roofline
        seconds = device_s(
            model,
            self.card,
            USUAL,
            sizes,
            [k / of.k_granularity for k in ks],
            decode=self.decode,
            parallel=of.parallel,
            routed_alike=of.routed_alike,
        )
        return [float(s) for s in seconds]

    def bound_s(self, size: int, k: int) -> float:
        """Return the seconds no such step can go below: all its arithmetic, or all its bytes, at the full rate."""
        tokens, sequences = (0, size) if self.decode else (size, 0)
        return self.roofline.bound_s(StepShape(tokens, 0, 0, sequences, 0, k))


def rooflines_of(table: StepTable, *, decode: bool) -> CardRooflines | None:
    """Return the rooflines of a table's decode-only steps, or of the others; None where it names no known card."""
    roofline, card = roofline_of(table), table_card(table)
    return None if roofline is None or card is None else CardRooflines(roofline, card, decode)
