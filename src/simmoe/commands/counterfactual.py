"""A simulated run repeated with one thing of another record at a time: what each does to the latencies."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from simmoe.analysis.compare import Pairing
from simmoe.analysis.compare_causes import Causes, MeanLatency, StepRatios, mean_latency
from simmoe.commands.host import with_host
from simmoe.commands.recorded_config import require_k_max, simulated_config
from simmoe.errors import RecordError, SimmoeError
from simmoe.policies.registry import PolicyChoice, parse_policy
from simmoe.profiles.catalog import Profile, load_profile
from simmoe.profiles.shape import DecodeLine, StepCost, StepParts, StepShape
from simmoe.records import Columns, RunRecord
from simmoe.simulator.config import SimConfig
from simmoe.simulator.simulation import simulate
from simmoe.traces.workload import Workload


def find_causes(first: RunRecord, second: RunRecord, pairing: Pairing) -> tuple[Causes, StepRatios]:
    """Repeat the first run with the second's arrivals, then its dispatch times, then its step times.

    Returns:
        The causes, and how long the second's steps take over the first's, each weighed against its expected cost.
    Raises:
        RecordError: the first is no simulated run, or cannot be repeated; the message says why.
    """
    config, choice, cost, prefill_s = _deployment(first)
    if first.steps is None or second.steps is None:
        raise RecordError("both records need their steps (--record-steps)")
    rows = pairing.second
    arrival_s = second.requests["arrival_s"][rows]
    paired = {name: column[pairing.first] for name, column in first.requests.items()}
    as_it_was = mean_latency(first.requests, pairing.first, paired["arrival_s"])

    def repeat(begin_s: np.ndarray[Any, Any], config: SimConfig, cost: StepCost) -> MeanLatency:
        order = np.argsort(begin_s, kind="stable")
        start_s = float(begin_s[order[0]])
        workload = Workload(
            request_id=[str(name) for name in paired["request_id"][order]],
            arrival_s=begin_s[order] - start_s,
            prompt_tokens=paired["prompt_tokens"][order],
            output_tokens=paired["output_tokens"][order],
            k_qos=paired["k_qos"][order],
        )
        requests = simulate(workload, config, cost, choice.batch, choice.route, prefill_s=prefill_s).requests
        return mean_latency(requests, np.arange(len(order)), arrival_s[order] - start_s)

    at_dispatch = replace(config, front_end=replace(config.front_end, ingress_s=0.0, ingress_service_s=0.0))
    dispatched_s = second.requests["dispatched_s"][rows]
    if np.isnan(dispatched_s).any():
        raise RecordError("the second record does not say when each of its finished requests was dispatched")
    chain = [as_it_was, repeat(arrival_s, config, cost), repeat(dispatched_s, at_dispatch, cost)]
    ratios = _step_ratios(cost, first.steps, second.steps)
    chain.append(repeat(dispatched_s, replace(at_dispatch, fast_forward=False), _Scaled(cost, ratios)))
    chain.append(mean_latency(second.requests, rows, arrival_s))
    return Causes.of_chain(chain), ratios


def _step_ratios(cost: StepCost, first: Columns, second: Columns) -> StepRatios:
    """Compare steps by what each should cost.

    A record does not say how a step's prompt tokens divide into prompts; one prompt of them all is expected, in both.
    """

    def expected_s(steps: Columns) -> np.ndarray[Any, Any]:
        names = ("num_prefill_tokens", "num_decode_tokens", "kv_tokens", "k_exec")
        rows = zip(*(steps[name].tolist() for name in names), strict=True)
        shapes = (StepShape(n, n * (n + 1) // 2, min(n, 1), seqs, kv, k) for n, seqs, kv, k in rows)
        return np.array([cost.step_s(shape) for shape in shapes])

    return StepRatios(first, second, expected_s)


class _Scaled:
    """A step cost times the ratio of like steps."""

    def __init__(self, cost: StepCost, ratios: StepRatios) -> None:
        self._cost = cost
        self._ratios = ratios
        self.prefill_s = cost.prefill_s

    def step_s(self, shape: StepShape, /) -> float:
        """Return the seconds a like step takes in the other record."""
        return self._ratio(shape) * self._cost.step_s(shape)

    def parts_s(self, shape: StepShape, /) -> StepParts:
        """Return the parts of that, each scaled."""
        ratio = self._ratio(shape)
        return StepParts(*(ratio * part for part in self._cost.parts_s(shape)))

    def _ratio(self, shape: StepShape) -> float:
        return self._ratios.ratio(shape.num_prefill_tokens, shape.num_decode_seqs, shape.decode_kv_tokens, shape.k_exec)

    def decode_line(self, num_decode_seqs: int, k_exec: int, /) -> DecodeLine:
        """No line: its ratio changes along it; it is for runs that take every step."""
        raise NotImplementedError


def _deployment(record: RunRecord) -> tuple[SimConfig, PolicyChoice, StepCost, Callable[[int, int], float]]:
    """Return what a simulated run had, the last of it T(n, k) as its policies took it."""
    manifest = record.manifest
    if manifest.get("kind") != "run":
        raise RecordError("the first record is no simulated run")
    try:
        config = simulated_config(record)
        profile = with_host(_unchanged_profile(manifest["profile"]), manifest["profile"].get("host"))
        require_k_max(record, profile, "the engines simulated")
        believed = _unchanged_profile(manifest.get("policy_profile") or manifest["profile"])
        choice = parse_policy(manifest["policy"]["given"] or "")
    except SimmoeError as error:
        raise RecordError(f"the first run cannot be repeated: {error}") from error
    except (KeyError, TypeError) as error:
        raise RecordError(f"the first run cannot be repeated: its manifest lacks {error}") from error
    if config.engine.enable_prefix_caching:
        raise RecordError("the first run had a prefix cache, and a record does not keep prefixes")
    config = replace(config, record_steps=False, max_time_s=None)
    engine, sizes = config.engine, manifest["profile"].get("captured_sizes")
    cost = profile.captured_at(sizes).keyed_cost(engine.async_scheduling, engine.graph_ks)
    return config, choice, cost, believed.cost().prefill_s


def _unchanged_profile(told: Mapping[str, Any]) -> Profile:
    profile = load_profile(told["name"] or "")
    if profile.sha256 != told["sha256"]:
        raise RecordError(f"the profile '{profile.name}' has changed since")
    return profile
