"""Damaged configurations, tables and recordings: either read, or refused in one line; never anything else."""

from __future__ import annotations

import copy
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from simmoe.commands.profile_view import facts, time_tables
from simmoe.errors import SimmoeError
from simmoe.profiles.catalog import DEFAULT_PROFILE, Profile, profile_path
from simmoe.profiles.checking.checked_steps import checked_steps
from simmoe.profiles.diff import diff_tables
from simmoe.profiles.estimating.binding import roofline_of
from simmoe.profiles.estimating.cards import CARDS
from simmoe.profiles.estimating.held_out import HeldOut
from simmoe.profiles.estimating.learned import Learned
from simmoe.profiles.estimating.roofline import Efficiencies
from simmoe.profiles.models import deciding_values, model_shape, published_models, read_model, split_config
from simmoe.profiles.table import NO_SHARE, HostShare, RealShare
from simmoe.profiles.table_file import parse_table

values = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 10**6) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=4,
)
SYNTHETIC = json.loads(profile_path("synthetic-olmoe-split4").read_bytes())


def estimate_like(table: dict[str, Any]) -> dict[str, Any]:
    """Return a table whose provenance is an estimate's."""
    held_out = HeldOut("a", "model", "decode", "above 32", "device", 5, 0.1, 0.1, 0.2)
    card = CARDS["h100"]
    host = {"full": (HostShare(1e-3, 0.0), 0.0)}
    learned = Learned(
        ("b",), Efficiencies(), 0.6, 0.9, 1.0, 1e-5, 1e-5, 0.0, 0.1, RealShare(), host, NO_SHARE, 1e9, 0.0, 0.0
    )
    estimate = {
        "model": "allenai/OLMoE-1B-7B-0924",
        "model_config": read_model("olmoe-1b-7b").config,
        "weights": "dummy",
        "card": asdict(card),
        "num_cards": 1,
        "engine_flags": {},
        "learned": asdict(learned),
        "held_out": [held_out._asdict()],
    }
    text = json.dumps({**table, "status": "estimated", "provenance": {"estimate": estimate}})
    return dict(json.loads(text))


TABLES = [SYNTHETIC, estimate_like(SYNTHETIC), json.loads(profile_path(DEFAULT_PROFILE).read_bytes())]


def places(value: Any, depth: int = 6) -> list[tuple[Any, ...]]:
    """Return the paths of everything inside a JSON value."""
    if not depth or not isinstance(value, dict | list):
        return []
    keys = list(value) if isinstance(value, dict) else list(range(len(value)))
    return [path for key in keys for path in [(key,), *((key, *rest) for rest in places(value[key], depth - 1))]]


def put(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    changed = copy.deepcopy(value)
    at = changed
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = new
    return changed


def one_line(error: SimmoeError) -> bool:
    return bool(str(error)) and "\n" not in str(error)


@given(st.sampled_from(published_models()), st.data())
def test_any_configuration_is_read_or_refused(name: str, data: st.DataObject) -> None:
    config = dict(read_model(name).config)
    for key in data.draw(st.lists(st.sampled_from(sorted(config)), min_size=1, max_size=3)):
        config[key] = data.draw(values)
    try:
        shape = model_shape(config)
    except SimmoeError as error:
        assert one_line(error)
        return
    assert model_shape(deciding_values(config)) == shape
    assert model_shape(split_config(config, 1)) == shape


@settings(suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(st.data())
def test_any_table_is_read_or_refused_and_what_is_read_shows(data: st.DataObject) -> None:
    original = data.draw(st.sampled_from(TABLES))
    # half the time a place in the provenance, which is small beside the grids
    where = places(original["provenance"]) if data.draw(st.booleans()) else []
    path = data.draw(st.sampled_from([("provenance", *inner) for inner in where] or places(original)))
    content = json.dumps(put(original, path, data.draw(values))).encode()
    try:
        table = parse_table(content, "damaged.json")
    except SimmoeError as error:
        assert one_line(error) and "damaged.json" in str(error)
        return
    console = Console(file=None, quiet=True, markup=False)
    profile = Profile(table)
    console.print(facts(profile))
    for shown in time_tables(profile, async_scheduling=True):
        console.print(shown)
    roofline_of(table)
    diff_tables(table, parse_table(json.dumps(original).encode(), "original.json"))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.data())
def test_any_recording_is_read_or_refused(tmp_path: Path, data: st.DataObject) -> None:
    columns = ["start_s", "output_s", "num_prefill_tokens", "prefill_kv_pairs", "num_prefill_seqs", "num_decode_seqs"]
    columns += ["decode_kv_tokens", "k_exec"]
    run = SYNTHETIC["provenance"]["runs"][0]
    head = {"format": "simmoe-recording", "version": 1, "steps": columns, "async_scheduling": True, "k_max": 32}
    head |= {field: run[field] for field in ("model", "card", "num_cards", "captured_sizes", "engine_flags")}
    lines: list[Any] = [head, {"recording": "burst"}]
    lines += [["step", 0.1 * i, 0.1 * i + 0.15, 0, 0, 0, 4, 400, 8] for i in range(4)]
    path = data.draw(st.sampled_from([*((i,) for i in range(len(lines))), *places(lines, 3)]))
    damaged = put(lines, path, data.draw(values))
    file = tmp_path / "damaged.jsonl"
    file.write_text("\n".join(json.dumps(line) for line in damaged))
    table = parse_table(json.dumps(TABLES[0]).encode(), "synthetic.json")
    try:
        checked_steps(table, [file])
    except SimmoeError as error:
        assert one_line(error) and "damaged.jsonl" in str(error)
