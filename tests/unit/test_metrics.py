"""Metrics of a run against a reading of their definitions request by request."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simmoe.analysis.metrics import METRICS, PERCENTILES, Slo, meets_slo, request_latencies, summarise
from simmoe.errors import UsageError
from simmoe.records import REQUEST_COLUMNS, STATUSES, Columns

RANK = {
    "busy_s": 3.0,
    "num_prefill_tokens": 70,
    "num_decode_tokens": 30,
    "routed_slots": 2400,
    "qos_slots": 1600,
    "num_preemptions": 2,
    "num_recomputed_tokens": 11,
    "num_cached_tokens": 5,
}

Row = tuple[float, float, float, float, int, str]  # arrival, wait, prefill, decode, output tokens, status
seconds = st.floats(0, 100)
rows = st.lists(st.tuples(seconds, seconds, seconds, seconds, st.integers(1, 5), st.sampled_from(STATUSES)), min_size=1)


def columns(rows: list[Row]) -> Columns:
    n = len(rows)
    out: dict[str, list[Any]] = {name: [0] * n for name in REQUEST_COLUMNS}
    for i, (arrival, wait, prefill, decode, tokens, status) in enumerate(rows):
        done = status == "finished"
        started = done or status == "running"
        out["arrival_s"][i] = out["dispatched_s"][i] = arrival
        out["scheduled_s"][i] = arrival + wait if started else math.nan
        out["first_token_s"][i] = arrival + wait + prefill if started else math.nan
        out["finished_s"][i] = arrival + wait + prefill + (decode if tokens > 1 else 0) if done else math.nan
        out["output_tokens"][i] = tokens
        out["status"][i] = status
    return {
        name: np.array(out[name], dtype=object if kind == "string" else kind) for name, kind in REQUEST_COLUMNS.items()
    }


def type_7(values: list[float], percent: float) -> float:
    """Hyndman and Fan's definition 7: linear between order statistics at 1 + (n - 1) p."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@given(rows, st.floats(0.1, 100), st.floats(0.1, 100))
def test_every_metric_by_brute_force(rows: list[Row], ttft_slo: float, tpot_slo: float) -> None:
    requests = columns(rows)
    end_s = 1000.0
    summary = summarise(requests, [RANK, RANK], end_s, Slo(ttft_slo, tpot_slo))
    finished = [i for i in range(len(rows)) if rows[i][5] == "finished"]

    at = {name: requests[name].tolist() for name in ("arrival_s", "scheduled_s", "first_token_s", "finished_s")}
    ttft = {i: at["first_token_s"][i] - at["arrival_s"][i] for i in finished}
    tpot = {i: (at["finished_s"][i] - at["first_token_s"][i]) / (rows[i][4] - 1) for i in finished if rows[i][4] > 1}
    e2e = {i: at["finished_s"][i] - at["arrival_s"][i] for i in finished}
    queueing = {i: at["scheduled_s"][i] - at["arrival_s"][i] for i in finished}
    for name, by_request in (("ttft", ttft), ("tpot", tpot), ("e2e", e2e), ("queueing", queueing)):
        values = list(by_request.values())
        if not values:
            assert math.isnan(summary[f"{name}_mean_s"]) and math.isnan(summary[f"{name}_p99_s"])
            continue
        assert summary[f"{name}_mean_s"] == pytest.approx(sum(values) / len(values))
        for p in PERCENTILES:
            assert summary[f"{name}_p{p}_s"] == pytest.approx(type_7(values, p), abs=1e-9)

    unfinished = any(row[5] in ("running", "queued", "aborted", "failed") for row in rows)
    makespan = end_s if unfinished or not finished else max(at["finished_s"][i] for i in finished)
    assert summary["makespan_s"] == makespan
    good = sum(1 for i in finished if ttft[i] <= ttft_slo and (i not in tpot or tpot[i] <= tpot_slo))
    assert summary["slo_attainment"] == pytest.approx(good / len(rows))
    if makespan > 0:
        assert summary["goodput_per_s"] == pytest.approx(good / makespan)
        assert summary["request_throughput_per_s"] == pytest.approx(len(finished) / makespan)
        assert summary["output_tokens_per_s"] == pytest.approx(sum(rows[i][4] for i in finished) / makespan)
        assert summary["utilisation"] == pytest.approx(6.0 / (2 * makespan))
    assert summary["injected"] == len(rows) == sum(summary[status] for status in STATUSES)
    assert list(summary) == list(METRICS)


def test_budgets_are_weighted_by_tokens_over_all_ranks() -> None:
    other = {**RANK, "num_prefill_tokens": 270, "routed_slots": 9600, "qos_slots": 2400}
    summary = summarise(columns([(0, 0, 1, 1, 2, "finished")]), [RANK, other], 5.0)
    assert summary["executed_k"] == 12000 / 400
    assert summary["requested_k"] == 4000 / 400
    assert summary["over_serving"] == 3.0
    assert (summary["num_preemptions"], summary["num_recomputed_tokens"], summary["num_cached_tokens"]) == (4, 22, 10)


def test_one_output_token_has_no_tpot_and_meets_any_tpot_objective() -> None:
    requests = columns([(0, 0, 1, 9, 1, "finished"), (0, 0, 1, 9, 10, "finished")])
    latencies = request_latencies(requests)
    assert math.isnan(latencies["tpot"][0]) and latencies["tpot"][1] == 1.0
    assert meets_slo(latencies, Slo(tpot_s=0.5)).tolist() == [True, False]
    assert summarise(requests, [RANK], 10.0)["tpot_mean_s"] == 1.0


def test_a_latency_equal_to_its_objective_meets_it() -> None:
    latencies = request_latencies(columns([(0, 0, 1, 2, 3, "finished")]))
    assert meets_slo(latencies, Slo(ttft_s=1.0, tpot_s=1.0)).tolist() == [True]


def test_without_objectives_goodput_is_throughput() -> None:
    summary = summarise(columns([(0, 0, 1, 2, 3, "finished"), (0, 0, 1, 2, 3, "rejected")]), [RANK], 10.0)
    assert summary["goodput_per_s"] == summary["request_throughput_per_s"] == 1 / 3


def test_steady_throughput_leaves_out_the_first_and_the_last_quarter() -> None:
    rows = [(0, 0, 1, finish, 9, "finished") for finish in (8, 1, 1.5, 2, 4, 6, 40, 50)]
    summary = summarise(columns([*rows, (0, 0, 1, 3, 9, "running")]), [RANK], 95.0)
    assert summary["steady_throughput_per_s"] == 4 / (40 - 2), "2, 4, 6 and 8 s are the middle half"


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_objectives_are_positive_and_finite(value: float) -> None:
    with pytest.raises(UsageError, match=r"--slo-tpot is .*above 0"):
        Slo(tpot_s=value)
