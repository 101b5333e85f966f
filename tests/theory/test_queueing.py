"""Queueing theory as oracle: with constant service and one request a step, a rank is an M/D/1, ranks are M/D/1s side by
side."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from simmoe.policies.registry import parse_policy
from simmoe.profiles.shape import ConstantStepCost
from simmoe.simulator.config import EngineConfig, FrontEndConfig, SimConfig
from simmoe.simulator.result import SimResult
from simmoe.simulator.simulation import simulate
from simmoe.traces.workload import Workload

SERVICE_S = 1.0


def poisson_workload(num_requests: int, rate: float, seed: int) -> Workload:
    rng = np.random.default_rng(seed)
    arrival_s = np.cumsum(rng.exponential(1 / rate, num_requests))
    ones = np.ones(num_requests, dtype=np.int64)
    return Workload([str(row) for row in range(num_requests)], arrival_s - arrival_s[0], ones, ones, ones)


def serve(workload: Workload, num_ranks: int, policy: str, async_scheduling: bool) -> SimResult:
    choice = parse_policy(policy)
    engine = EngineConfig(max_num_seqs=1, max_num_batched_tokens=1, async_scheduling=async_scheduling)
    front_end = FrontEndConfig(publish_interval_s=0.0)
    config = SimConfig(num_ranks=num_ranks, engine=engine, front_end=front_end)
    return simulate(workload, config, ConstantStepCost(SERVICE_S), choice.batch, choice.route)


def md1_mean_wait_s(utilisation: float) -> float:
    """Pollaczek-Khinchine with deterministic service."""
    return SERVICE_S * utilisation / (2 * (1 - utilisation))


def assert_mean_within_99(batches: list[float], expected: float) -> None:
    """Check ``expected`` against the 99% confidence interval of the mean of independent replications."""
    mean, sem = float(np.mean(batches)), float(stats.sem(batches))
    half = float(stats.t.ppf(0.995, len(batches) - 1)) * sem
    assert half < 0.2 * expected, "the interval must be able to tell"
    assert abs(mean - expected) <= half, (mean, half, expected)


def mean_wait_s(result: SimResult, warm_up: int) -> float:
    requests = result.requests
    return float(np.mean((requests["scheduled_s"] - requests["arrival_s"])[warm_up:]))


@pytest.mark.parametrize("utilisation", [0.3, 0.6, 0.9])
@pytest.mark.parametrize("async_scheduling", [False, True])
def test_one_rank_is_an_md1(utilisation: float, async_scheduling: bool) -> None:
    waits = [
        mean_wait_s(serve(poisson_workload(10_000, utilisation, seed), 1, "fifo+round-robin", async_scheduling), 1_000)
        for seed in range(10)
    ]
    assert_mean_within_99(waits, md1_mean_wait_s(utilisation))


@pytest.mark.parametrize("utilisation", [0.3, 0.6, 0.9])
def test_round_robin_over_constant_service_ranks_waits_like_an_mdc(utilisation: float) -> None:
    """With deterministic service, dealing arrivals in turn to c servers is first come first served over c servers."""
    num_ranks = 3
    result = serve(poisson_workload(10_000, num_ranks * utilisation, 5), num_ranks, "fifo+round-robin", False)
    waits = result.requests["scheduled_s"] - result.requests["arrival_s"]
    np.testing.assert_allclose(waits, mdc_waits_s(result.requests["arrival_s"], num_ranks), atol=1e-6)
    means = [
        mean_wait_s(
            serve(poisson_workload(10_000, num_ranks * utilisation, seed), num_ranks, "fifo+round-robin", False), 1_000
        )
        for seed in range(10)
    ]
    assert_mean_within_99(means, mdc_mean_wait_s(utilisation, num_ranks))


def mdc_waits_s(arrival_s: npt.NDArray[np.float64], num_servers: int) -> npt.NDArray[np.float64]:
    """Each wait in an M/D/c, by the Kiefer-Wolfowitz recursion: the workload vector of the servers, kept sorted."""
    free_at = [0.0] * num_servers
    waits = []
    for arrival in arrival_s.tolist():
        free_at.sort()
        start = max(arrival, free_at[0])
        waits.append(start - arrival)
        free_at[0] = start + SERVICE_S
    return np.array(waits)


def mdc_mean_wait_s(utilisation: float, num_servers: int) -> float:
    """The mean wait of an M/D/c (Crommelin), from the stationary numbers in system at multiples of the service time.

    In one service time everybody in service leaves and Poisson(c * utilisation) arrive, whatever the state:
    q' = max(q - c, 0) + arrivals. Its stationary law gives the mean number in system, and Little's law the wait.
    """
    size = 400
    load = num_servers * utilisation
    arrivals = [math.exp(-load + n * math.log(load) - math.lgamma(n + 1)) for n in range(size)]
    matrix = np.zeros((size, size))
    for number in range(size):
        left = max(number - num_servers, 0)
        matrix[number, left:] = arrivals[: size - left]
    matrix /= matrix.sum(axis=1, keepdims=True)
    system = np.vstack([matrix.T - np.eye(size), np.ones(size)])
    law = np.linalg.lstsq(system, np.r_[np.zeros(size), 1.0], rcond=None)[0]
    mean_in_system = float(law @ np.arange(size))
    return mean_in_system / load * SERVICE_S - SERVICE_S


def test_one_server_fed_at_its_rate_never_waits() -> None:
    """A D/D/1 below saturation: the oracle that needs no statistics."""
    size = 100
    ones = np.ones(size, dtype=np.int64)
    workload = Workload([str(row) for row in range(size)], np.arange(size, dtype=np.float64), ones, ones, ones)
    requests = serve(workload, 1, "fifo+round-robin", True).requests
    np.testing.assert_array_equal(requests["scheduled_s"], requests["arrival_s"])
