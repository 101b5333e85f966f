"""The shipped profiles are what their raw samples give, and predict the runs that took no part in them."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from simmoe.cli import run
from simmoe.profiles.catalog import DEFAULT_PROFILE, layer_times_of, load_profile, profile_names, profile_path
from simmoe.profiles.fitting.fit import fit_table
from simmoe.profiles.recorded_steps import read_recorded_steps, read_recording
from simmoe.profiles.residuals import Predictor, residuals
from simmoe.profiles.samples import read_samples
from simmoe.profiles.shape import StepShape

RAW = profile_path(DEFAULT_PROFILE).parent / "raw"
MEASURED = [name for name in profile_names() if load_profile(name).status == "measured"]
PAGE = Path(__file__).parents[2] / "docs" / "profiles.md"


def test_the_default_profile_is_measured() -> None:
    profile = load_profile()
    assert (profile.name, profile.status, profile.label) == (DEFAULT_PROFILE, "measured", DEFAULT_PROFILE)
    assert (profile.k_max, profile.block_size) == (32, 16)


@pytest.mark.parametrize("name", MEASURED)
def test_a_measured_profile_is_complete(name: str) -> None:
    profile = load_profile(name)
    (header,) = profile.provenance["runs"]
    if "kv_cache_memory_bytes" in header["engine_flags"]:  # two engines on the cards; the table says what one alone has
        assert profile.num_gpu_blocks > header["num_gpu_blocks"]
    else:
        assert profile.num_gpu_blocks == header["num_gpu_blocks"]
    assert header["card"] == "NVIDIA H200" and header["versions"]["vllm"] == "0.32.0"
    assert "nearest to the eager logits of the k named" in header["k_check"] and "NOT PROVED" not in header["k_check"]
    cost = profile.cost()
    most, seqs = header["engine_flags"]["max_num_batched_tokens"], header["engine_flags"]["max_num_seqs"]
    for n in (16, 512, most):
        for k in profile.table.prefill.ks:  # of a table of several cards the larger budgets alone were captured
            cost.prefill_s(n, k)
    cost.step_s(StepShape(num_decode_seqs=seqs, decode_kv_tokens=10**6, k_exec=profile.table.decode.ks[0]))
    assert cost.extrapolated == {}
    assert profile.table.prefill.ks[-1] == profile.table.decode.ks[-1] == profile.k_max
    cost.prefill_s(most + 1, profile.k_max)
    assert cost.extrapolated == {"prefill_tokens": 1}


@pytest.mark.parametrize("name", MEASURED)
def test_a_step_never_gets_cheaper_by_getting_more_to_do(name: str) -> None:
    """On the table as it ships: neighbours along every coordinate, within the grid and beyond."""
    table = load_profile(name).table
    cost = load_profile(name).cost()
    rng = np.random.default_rng(0)
    largest = table.prefill.sizes[-1]
    for _ in range(2000):
        tokens, decodes = (int(n) for n in np.exp(rng.uniform(0, np.log(1.3 * largest), 2)))
        prefill = int(rng.integers(2)) * tokens
        prompts = int(rng.integers(1, prefill + 1)) if prefill else 0
        shape = StepShape(
            prefill,
            prefill * int(rng.integers(1, 3000)) if prefill else 0,
            prompts,
            decodes if rng.integers(2) or not prefill else 0,
            0,
            int(rng.integers(1, table.k_max + 3)),
        )
        shape = shape._replace(decode_kv_tokens=shape.num_decode_seqs * int(rng.integers(1, 5000)))
        step_s = cost.step_s(shape)
        for field, value in zip(shape._fields, shape, strict=True):
            if value or field == "num_decode_seqs":
                assert cost.step_s(shape._replace(**{field: value + 1})) >= step_s * (1 - 1e-12), (shape, field)


@pytest.mark.parametrize("name", MEASURED)
def test_a_shipped_table_is_the_fit_of_its_raw_samples(name: str) -> None:
    shipped = load_profile(name).table
    samples = read_samples(RAW / f"{name}.jsonl.gz")
    engine = shipped.captured_sizes, shipped.captured_ks, shipped.distributed_executor_backend
    steps = read_recording(RAW / f"{name}-recording.jsonl.gz", *engine)
    fitted = shipped.provenance["fit"]
    tail_of = load_profile(fitted["graph_tail_of"]).table if "graph_tail_of" in fitted else None
    again = fit_table([samples], name, "measured", "again", steps, tail_of, fitted.get("num_gpu_blocks"))
    assert again.num_gpu_blocks == shipped.num_gpu_blocks
    assert again.captured_sizes == shipped.captured_sizes
    for grid, other in ((again.prefill, shipped.prefill), (again.decode, shipped.decode)):
        assert (grid.sizes, grid.ks) == (other.sizes, other.ks)
        assert np.array(grid.seconds) == pytest.approx(np.array(other.seconds), rel=1e-3)
    assert tuple(again.attention) == pytest.approx(tuple(shipped.attention), rel=1e-2)
    for path, share in again.host.items():
        assert tuple(share) == pytest.approx(tuple(shipped.host[path]), rel=1e-2)
    assert tuple(again.update) == pytest.approx(tuple(shipped.update), rel=1e-2)
    assert (again.graph_tail_s is None) == (shipped.graph_tail_s is None)
    if again.graph_tail_s is not None and shipped.graph_tail_s is not None:
        assert again.graph_tail_s == pytest.approx(shipped.graph_tail_s, rel=1e-2)
    assert (again.mixed_host is None) == (shipped.mixed_host is None)
    if again.mixed_host and shipped.mixed_host:
        assert again.mixed_host.above_tokens == shipped.mixed_host.above_tokens
        assert tuple(again.mixed_host.share) == pytest.approx(tuple(shipped.mixed_host.share), rel=1e-2)


@pytest.mark.parametrize("name", MEASURED)
def test_the_layer_alone_is_of_the_same_model(name: str) -> None:
    times = layer_times_of(name, load_profile(name).table)
    if times is None:
        pytest.skip("the MoE layer alone was not timed")
    assert times.rows


def test_the_default_profile_predicts_the_recorded_run() -> None:
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


def test_a_short_prompt_of_revision_2_costs_what_as_many_decodes_do() -> None:
    """Its tokens are routed independently; those of revision 1 crowd on few experts (docs/profiles.md)."""
    revision_1 = load_profile("deepseek-v2-lite-split4-h200")
    header, samples = read_samples(RAW / "deepseek-v2-lite-split4-revision2-h200.jsonl.gz")
    assert (header.weights, header.model) == ("simmoe-dummy 2", revision_1.provenance["runs"][0]["model"])
    held = [s for s in samples if s.kind == "prefill" and s.clock == "held" and s.shape.num_tokens <= 128]
    predictor = Predictor(revision_1.table, async_scheduling=True)
    assert len(held) > 15
    for s in held:
        n = s.shape.num_tokens
        assert s.median_s == pytest.approx(predictor.device_s(StepShape(0, 0, 0, n, n, s.k)), rel=0.1)
        if s.k > 1:
            assert s.median_s > 1.2 * predictor.device_s(s.shape)


@pytest.mark.parametrize("name", MEASURED)
def test_the_docs_print_the_check_as_the_command_does(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    run(["profile", "check", name])
    printed = "\n".join(line.rstrip() for line in capsys.readouterr().out.splitlines())
    page = PAGE.read_text(encoding="utf-8")
    assert f"\n## {name}\n" in page
    (block,) = re.findall(
        rf"^```console\n\$ simmoe profile check {re.escape(name)}\n(.*?)\n```$", page, flags=re.MULTILINE | re.DOTALL
    )
    assert block.strip() == printed.strip(), "put what 'simmoe profile check' prints into docs/profiles.md"
    for picture in (f"profile-{name}.png", f"check-{name}.png"):
        assert (PAGE.parent / picture).exists() and f"({picture})" in page
