"""The shipped profile is what its raw samples give, and predicts the run that took no part in it."""

from __future__ import annotations

import numpy as np
import pytest

from simmoe.profiles.catalog import DEFAULT_PROFILE, load_profile, profile_path
from simmoe.profiles.fit import fit_table
from simmoe.profiles.recorded_steps import read_recorded_steps, read_updates
from simmoe.profiles.residuals import residuals
from simmoe.profiles.samples import read_samples
from simmoe.profiles.shape import StepShape

RAW = profile_path(DEFAULT_PROFILE).parent / "raw"


def test_the_default_profile_is_measured_and_complete() -> None:
    profile = load_profile()
    (run,) = profile.provenance["runs"]
    assert (profile.name, profile.status, profile.label) == (DEFAULT_PROFILE, "measured", DEFAULT_PROFILE)
    assert (profile.k_max, profile.block_size) == (32, 16)
    assert profile.num_gpu_blocks == run["num_gpu_blocks"]
    assert run["card"] == "NVIDIA H200" and run["versions"]["vllm"] == "0.32.0"
    assert "nearest to the eager logits of the k named" in run["k_check"]
    cost = profile.cost()
    for n in (16, 512, 8192):
        for k in (1, 32):
            cost.prefill_s(n, k)
    cost.step_s(StepShape(num_decode_seqs=1024, decode_kv_tokens=10**6, k_exec=16))
    assert cost.extrapolated == {}
    cost.prefill_s(8193, 32)
    assert cost.extrapolated == {"prefill_tokens": 1}


def test_the_shipped_table_is_the_fit_of_its_raw_samples() -> None:
    shipped = load_profile().table
    run = read_samples(RAW / f"{DEFAULT_PROFILE}.jsonl.gz")
    steps = read_recorded_steps(RAW / f"{DEFAULT_PROFILE}-recording.jsonl.gz", shipped.captured_sizes)
    updates = read_updates(RAW / f"{DEFAULT_PROFILE}-recording.jsonl.gz")
    again = fit_table([run], DEFAULT_PROFILE, "measured", "again", steps, updates)
    assert again.captured_sizes == shipped.captured_sizes
    for grid, other in ((again.prefill, shipped.prefill), (again.decode, shipped.decode)):
        assert (grid.sizes, grid.ks) == (other.sizes, other.ks)
        assert np.array(grid.seconds) == pytest.approx(np.array(other.seconds), rel=1e-3)
    assert tuple(again.attention) == pytest.approx(tuple(shipped.attention), rel=1e-2)
    for path, share in again.host.items():
        assert tuple(share) == pytest.approx(tuple(shipped.host[path]), rel=1e-2)
    assert tuple(again.update) == pytest.approx(tuple(shipped.update), rel=1e-2)


def test_it_predicts_the_recorded_run() -> None:
    table = load_profile().table
    recorded = read_recorded_steps(RAW / f"{DEFAULT_PROFILE}-recording.jsonl.gz", table.captured_sizes)
    steps = [step for step in recorded if step.held_out]  # those of the calibration recording took part in the fit
    rows = residuals(table, steps, async_scheduling=True, source="recorded")
    assert sum(row.num_samples for row in rows) == len(steps) >= 3000
    for row in rows:
        assert abs(row.bias) < 0.01, row
        assert row.median < 0.03, row
    cost = load_profile().cost()
    predicted_s, measured_s = sum(cost.step_s(s.shape) for s in steps), sum(s.median_s for s in steps)
    assert predicted_s == pytest.approx(measured_s, rel=0.01)
