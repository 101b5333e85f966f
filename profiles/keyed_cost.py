"""The cost of a step on an engine that has CUDA graphs at some budgets alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from simmoe.profiles.shape import DecodeLine, StepParts, StepShape
from simmoe.profiles.step_cost import ProfileStepCost


class KeyedStepCost:
    """A step at a budget with graphs costs what it does with them, one at any other what it does without.

    Make one a run: it counts which questions lay outside the measured grid.

    Args:
        graphs: of an engine that has graphs at every budget.
        eager: of the same engine without any: its host launches each kernel, and no step is padded.
        graph_ks: budgets with graphs.
    """

    def __init__(self, graphs: ProfileStepCost, eager: ProfileStepCost, graph_ks: Collection[int]) -> None:
        self._graphs = graphs
        self._eager = eager
        self._graph_ks = frozenset(graph_ks)

    def step_s(self, shape: StepShape, /) -> float:
        """Return the time from the start of a step to the start of the next; > 0."""
        return self._at(shape.k_exec).step_s(shape)

    def parts_s(self, shape: StepShape, /) -> StepParts:
        """Return the device's and the host's part of a step."""
        return self._at(shape.k_exec).parts_s(shape)

    def decode_line(self, num_decode_seqs: int, k_exec: int, /) -> DecodeLine:
        """Return the line a decode-only step of this many sequences follows as its KV grows."""
        return self._at(k_exec).decode_line(num_decode_seqs, k_exec)

    def prefill_s(self, num_tokens: int, k_exec: int, /) -> float:
        """Return T(n, k): a step of n prompt tokens."""
        return self._at(k_exec).prefill_s(num_tokens, k_exec)

    @property
    def extrapolated(self) -> Mapping[str, int]:
        """How many distinct (size, k) were asked for outside the measured grid, see ``ProfileStepCost``."""
        return dict(sorted((Counter(self._graphs.extrapolated) + Counter(self._eager.extrapolated)).items()))

    def _at(self, k: int) -> ProfileStepCost:
        return self._graphs if k in self._graph_ks else self._eager
