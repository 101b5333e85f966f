"""How sure a latency is: what a bias in step times does to it, and what a millisecond in the arrivals does."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from simmoe.analysis.compare import differences
from simmoe.commands.validate import simulate_like
from simmoe.profiles.catalog import Profile
from simmoe.profiles.shape import DecodeLine, StepCost, StepParts, StepShape
from simmoe.profiles.step_cost import ProfileStepCost
from simmoe.records import RunRecord
from simmoe.simulator.config import FrontEndConfig

BIAS = 0.01
JITTER_S = 0.001
REPETITIONS = 20


class Slower:
    """A step cost times a factor; what a policy believes does not change."""

    def __init__(self, cost: ProfileStepCost, factor: float) -> None:
        self._cost: StepCost = cost
        self._factor = factor
        self.prefill_s = cost.prefill_s
        self.extrapolated: Mapping[str, int] = cost.extrapolated

    def step_s(self, shape: StepShape, /) -> float:
        """Return the seconds of a step."""
        return self._factor * self._cost.step_s(shape)

    def parts_s(self, shape: StepShape, /) -> StepParts:
        """Return the parts of a step."""
        return StepParts(*(self._factor * part for part in self._cost.parts_s(shape)))

    def decode_line(self, num_decode_seqs: int, k_exec: int, /) -> DecodeLine:
        """Return the line a decode-only step follows as its KV grows."""
        return DecodeLine(*(self._factor * value for value in self._cost.decode_line(num_decode_seqs, k_exec)))


def magnification(
    live: RunRecord, simulated: RunRecord, profile: Profile, front_end: FrontEndConfig, believed: Profile
) -> dict[str, float]:
    """Return by how many per cent mean TTFT and mean TPOT grow when every step takes one per cent longer."""
    slower = profile.captured_at(live.manifest["config"]["engine"].get("captured_sizes"))
    cost = slower.cost
    slower = copy.copy(slower)
    slower.cost = lambda async_scheduling=True: Slower(cost(async_scheduling), 1 + BIAS)  # type: ignore[assignment,return-value]
    repeated, _ = simulate_like(live, slower, front_end, believed)
    grown = {d[:2]: d.error for d in differences(repeated, simulated)}
    return {metric: grown[metric, "mean"] / BIAS for metric in ("ttft", "tpot")}


def spread(
    live: RunRecord, profile: Profile, front_end: FrontEndConfig, believed: Profile
) -> dict[tuple[str, str], tuple[float, float]]:
    """Return where simulations lie whose arrivals differ by less than any clock or network holds still.

    Each request arrives up to JITTER_S later, drawn anew in each of REPETITIONS: who shares a step with whom changes,
    and with it which way a lane's boundary moves; of a burst, the order. A live run is one such draw.

    Returns:
        (metric, statistic) -> 5th and 95th percentile; also of ("k", "mean"), the executed budget.
    """
    rng = np.random.default_rng(0)
    values: dict[tuple[str, str], list[float]] = {}
    for _ in range(REPETITIONS):
        jittered = live.requests["arrival_s"] + rng.uniform(0.0, JITTER_S, len(live.requests["arrival_s"]))
        order = np.argsort(jittered)
        requests = {name: column[order] for name, column in live.requests.items()}
        requests["arrival_s"] = jittered[order] - jittered.min()
        simulated, _ = simulate_like(replace(live, requests=requests), profile, front_end, believed)
        values.setdefault(("k", "mean"), []).append(executed_k(simulated))
        for difference in differences(simulated, simulated):
            values.setdefault(difference[:2], []).append(difference.first)
    return {name: (float(np.percentile(found, 5)), float(np.percentile(found, 95))) for name, found in values.items()}


def executed_k(record: RunRecord) -> float:
    """Return the token-weighted mean executed budget."""
    steps = record.steps
    assert steps is not None
    return float(steps["routed_slots"].sum() / (steps["num_prefill_tokens"] + steps["num_decode_tokens"]).sum())
