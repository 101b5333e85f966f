"""How sure a latency is: what a bias in step times does to it, and what a millisecond and a wandering host do."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from simmoe.analysis.compare import differences
from simmoe.commands.host import read_host_times
from simmoe.commands.validate import simulate_like
from simmoe.profiles.catalog import Profile
from simmoe.profiles.fitting.evidence import LAUNCH_WAITED
from simmoe.profiles.shape import DecodeLine, StepCost, StepParts, StepShape
from simmoe.profiles.step_cost import ProfileStepCost
from simmoe.records import RunRecord, read_record
from simmoe.simulator.config import FrontEndConfig

FloatArray = npt.NDArray[np.float64]

Drawn = dict[tuple[str, str], tuple[float, float]]
"""(metric, statistic) -> 5th and 95th percentile of simulations; also of ("k", "mean"), the executed budget."""

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
    slower = _with_cost(profile, live, lambda cost: Slower(cost, 1 + BIAS))
    repeated, _ = simulate_like(live, slower, front_end, believed)
    grown = {d[:2]: d.error for d in differences(repeated, simulated)}
    return {metric: grown[metric, "mean"] / BIAS for metric in ("ttft", "tpot")}


class Wandering:
    """A step cost whose host is at times slower and at times faster, as another run's was, one step after the other.

    Args:
        cost: what it is on average.
        ratios: [num_steps] of each step of that run, the host's time over the average for such a step.
        first: the step to begin at.
        num_ranks: engines that share the cost; each goes through the run at its own pace.
    """

    def __init__(self, cost: ProfileStepCost, ratios: FloatArray, first: int, num_ranks: int) -> None:
        self._cost = cost
        self._ratios = ratios
        self._num_ranks = num_ranks
        self._num_asked = first * num_ranks
        self.prefill_s = cost.prefill_s
        self.decode_line = cost.decode_line
        self.extrapolated = cost.extrapolated

    def step_s(self, shape: StepShape, /) -> float:
        """Return the seconds of the next step, if it is of this shape."""
        device_s, host_s, *_ = self.parts_s(shape)
        return max(device_s, host_s)

    def parts_s(self, shape: StepShape, /) -> StepParts:
        """Return the parts of the next step."""
        ratio = self._ratios[self._num_asked // self._num_ranks % len(self._ratios)]
        self._num_asked += 1
        parts = self._cost.parts_s(shape)
        return parts.on_host(ratio * parts.launch_s, ratio * parts.update_s)


def host_ratios(folder: Path, hosted: Profile) -> FloatArray:
    """Return how long the host took for each step of a record over what a profile says; stalls left out.

    Args:
        folder: of the record.
        hosted: a profile with that record's host.
    """
    record = read_record(folder)
    cost = hosted.captured_at(record.manifest["config"]["engine"].get("captured_sizes")).cost()
    ratios = []
    for time in read_host_times(folder, record):
        decodes = time.num_tokens - time.num_prefill_tokens
        shape = StepShape(time.num_prefill_tokens, time.num_prefill_tokens, time.num_seqs - decodes, decodes, decodes)
        ratios.append((time.launch_s + time.update_s) / cost.parts_s(shape).host_s)
    found = np.array(ratios)
    return found[found <= LAUNCH_WAITED]


def spread(live: RunRecord, hosted: Profile, front_end: FrontEndConfig, believed: Profile, ratios: FloatArray) -> Drawn:
    """Return where simulations lie that differ in what no two live runs have in common.

    Each request arrives up to JITTER_S later, drawn anew in each of REPETITIONS: who shares a step with whom changes,
    and with it which way a lane's boundary moves; of a burst, the order. And the host goes through its faster and
    slower moments from another one on. A live run is one such draw.

    Args:
        live: the run's record.
        hosted: step times on the machine's own host.
        front_end: delays of the front end.
        believed: what the live policies took T(n, k) from.
        ratios: from :func:`host_ratios`.
    """
    rng = np.random.default_rng(0)
    num_ranks = live.manifest["config"]["num_ranks"]
    values: dict[tuple[str, str], list[float]] = {}
    for _ in range(REPETITIONS):
        jittered = live.requests["arrival_s"] + rng.uniform(0.0, JITTER_S, len(live.requests["arrival_s"]))
        order = np.argsort(jittered)
        requests = {name: column[order] for name, column in live.requests.items()}
        requests["arrival_s"] = jittered[order] - jittered.min()
        first = int(rng.integers(len(ratios)))
        wandering = _with_cost(hosted, live, lambda cost, first=first: Wandering(cost, ratios, first, num_ranks))
        like = replace(live, requests=requests)
        simulated, _ = simulate_like(like, wandering, front_end, believed, fast_forward=False)
        values.setdefault(("k", "mean"), []).append(executed_k(simulated))
        for difference in differences(simulated, simulated):
            values.setdefault(difference[:2], []).append(difference.first)
    return {name: (float(np.percentile(found, 5)), float(np.percentile(found, 95))) for name, found in values.items()}


def _with_cost(profile: Profile, live: RunRecord, changed: Callable[[ProfileStepCost], Any]) -> Profile:
    """Return the profile of the live engines with another cost in place of its own."""
    own = profile.captured_at(live.manifest["config"]["engine"].get("captured_sizes"))
    other, cost = copy.copy(own), own.cost
    other.cost = lambda async_scheduling=True: changed(cost(async_scheduling))  # type: ignore[method-assign]
    return other


def executed_k(record: RunRecord) -> float:
    """Return the token-weighted mean executed budget."""
    steps = record.steps
    assert steps is not None
    return float(steps["routed_slots"].sum() / (steps["num_prefill_tokens"] + steps["num_decode_tokens"]).sum())
