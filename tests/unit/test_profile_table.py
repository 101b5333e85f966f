"""Table files and the catalog: a fault is named with file, table, row and value."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from simmoe.errors import OutputError, ProfileError, UsageError
from simmoe.profiles.catalog import load_profile, profile_names, profile_path
from simmoe.profiles.diff import diff_tables
from simmoe.profiles.shape import StepCost, StepShape
from simmoe.profiles.table import NO_SHARE, HostShare, MixedHost
from simmoe.profiles.table_file import dump_table, parse_table, read_table, write_table

SYNTHETIC = "synthetic-olmoe-split4"
PATH = profile_path(SYNTHETIC)


def broken(tmp_path: Path, **change: Any) -> Path:
    path = tmp_path / "broken.json"
    path.write_text(json.dumps({**json.loads(PATH.read_text()), **change}))
    return path


def with_rows(table: str, rows: Any, columns: Any = None) -> dict[str, Any]:
    content = json.loads(PATH.read_text())[table]
    return {table: {"columns": columns or content["columns"], "rows": rows}}


def run_on(num_cards: int) -> dict[str, Any]:
    (header,) = load_profile().provenance["runs"]
    return {"provenance": {"runs": [{**header, "num_cards": num_cards}]}}


def estimate_from(tables: list[Any]) -> dict[str, Any]:
    card = {"name": "c", "driver_name": "C", "bf16_flop_s": 1.0, "memory_byte_s": 1.0, "num_sms": 1, "source": "s"}
    learned = {"tables": tables, "device": {}, "pair_compute": 1.0, "kv_memory": 1.0}
    of = {"model": "m", "model_config": {}, "weights": "w", "num_cards": 1, "engine_flags": {}, "held_out": []}
    return {"status": "estimated", "provenance": {"estimate": {**of, "card": card, "learned": learned}}}


def test_a_table_is_written_as_it_was_read(tmp_path: Path) -> None:
    copy = tmp_path / "copy.json"
    write_table(copy, read_table(PATH))
    assert copy.read_bytes() == PATH.read_bytes()


def test_one_row_a_line() -> None:
    lines = PATH.read_text().splitlines()
    rows = json.loads(PATH.read_text())["prefill"]["rows"]
    assert sum(line.rstrip(",").strip() in {json.dumps(row) for row in rows} for line in lines) >= len(rows)


def test_a_changed_cell_changes_one_line_and_order_of_provenance_none() -> None:
    table = read_table(PATH)
    first = table.prefill.cells[0][0]
    cells = ((first._replace(spread_s=1.0), *table.prefill.cells[0][1:]), *table.prefill.cells[1:])
    before, after = dump_table(table), dump_table(replace(table, prefill=replace(table.prefill, cells=cells)))
    changed = [pair for pair in zip(before.splitlines(), after.splitlines(), strict=True) if pair[0] != pair[1]]
    assert len(changed) == 1
    turned = dict(reversed([*table.provenance.items()]))
    assert dump_table(replace(table, provenance=turned)) == before


GRID = [["num_tokens", "tokens"], ["k", "experts"], ["device_s", "s"], ["spread_s", "s"], ["repetitions", "count"]]
UPDATE = [["base_s", "s"], ["per_seq_s", "s/sequence"]]
KV = [["num_seqs", "sequences"], ["per_kv_token_s", "s/token"]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 7}, "version 7"),
        ({"format": "parquet"}, "is no profile"),
        ({"status": "guessed"}, "status 'guessed'"),
        ({"k_max": 0}, "k_max 0"),
        ({"ingress_s": -0.1}, "ingress_s -0.1"),
        ({"captured_sizes": [8, 4]}, "captured_sizes [8, 4]"),
        ({"colour": "red"}, "unknown colour"),
        ({"provenance": "trust me"}, "provenance"),
        ({"provenance": {"runs": 5}}, "provenance whose runs is 5, no list"),
        ({"provenance": {"runs": [{}]}}, "provenance whose runs[0] has no model"),
        ({"provenance": {"fit": {"residuals": [{"kind": 1}]}}}, "fit.residuals[0].kind is 1"),
        ({"provenance": {"estimate": {"card": {}}}}, "provenance whose estimate has no model"),
        (run_on(num_cards=0), "provenance whose runs[0].num_cards is 0, no number of cards"),
        (estimate_from([1]), "provenance whose estimate.learned.tables is [1], no names"),
        ({"status": "measured", "provenance": {}}, "status 'measured' and no provenance.runs"),
        ({"status": "estimated", "provenance": {}}, "status 'estimated' and no provenance.estimate"),
        ({"k_max": 8}, "has k_max 8, and k 12 in captured_ks"),
        ({"captured_ks": [64]}, "has k_max 32, and k 64 in captured_ks"),
        ({"k_max": 31, "captured_ks": []}, "has k_max 31, and k 32 in table 'prefill'"),
        ({"k_granularity": 3}, "k_granularity 3, which does not divide k 32 in k_max"),
        ({"k_granularity": 4}, "k_granularity 4, which does not divide k 1 in captured_ks"),
        ({"k_max": 10**400}, "has the number 100000000… of 401 digits"),
        ({"ingress_s": 1e6}, "ingress_s 1000000.0; it must be seconds of at least 0, and less than a day"),
        (with_rows("prefill", [[8, 1, 1e5, 0.0, 1]]), "device_s is 100000.0 s; no step takes a day"),
        (with_rows("decode_kv", [[1, 1e300]]), "per_kv_token_s is 1e+300 s/token; no step takes a day"),
        (
            {"prefill": {"columns": GRID, "rows": [[8, 1, 1e-3, 0.0, 1]], "note": ""}},
            "table 'prefill' has unknown note",
        ),
        ({"name": "two\nlines"}, "name 'two\\nlines'; it must be one line of text"),
        ({"summary": "  "}, "summary '  '; it must be one line of text"),
        (with_rows("prefill", [[8, 1, 1e-3, 0.0, 1]], GRID[:2] + GRID[3:]), "no column 'device_s'"),
        (
            with_rows("prefill", [[8, 1, 1.0, 0.0, 1]], [*GRID[:2], ["device_s", "ms"], *GRID[3:]]),
            "column 'device_s' is in 'ms'; it must be 's'",
        ),
        (with_rows("prefill", []), "table 'prefill' needs columns and rows"),
        (with_rows("prefill", [[8, 1, float("nan"), 0.0, 1]]), "table 'prefill' row 1: device_s is nan"),
        (with_rows("prefill", [[8, 1, -1e-3, 0.0, 1]]), "row 1: device_s is -0.001"),
        (with_rows("prefill", [[8, 1, 0.0, 0.0, 1]]), "row 1 (num_tokens 8, k 1): device_s is 0.0"),
        (with_rows("prefill", [[8.5, 1, 1e-3, 0.0, 1]]), "num_tokens is 8.5"),
        (with_rows("prefill", [[8, 1, 1e-3, 0.0]]), "must have 5 values"),
        (with_rows("prefill", [[8, 1, 1e-3, 0.0, 1]] * 2), "is there twice"),
        (with_rows("prefill", [[8, 1, 1e-3, 0.0, 1], [16, 2, 2e-3, 0.0, 1]]), "(num_tokens 8, k 2) is missing"),
        (
            with_rows("decode", [[8, 1, 2e-3, 0.0, 1], [8, 2, 1e-3, 0.0, 1]]),
            "(num_seqs 8, k 2): device_s 0.001 is below the 0.002 of (num_seqs 8, k 1)",
        ),
        (with_rows("decode_kv", [[1, 2e-8], [2, 1e-8]], KV), "table 'decode_kv' row 2"),
        (with_rows("attention", [[0.0, 0.0, 0.0, 1.0, 0.0, 0.0]] * 2), "has 2 rows"),
        (with_rows("attention", [[0.0, 0.0, 0.0, 1.0, 0.0, 1.1]]), "mixed_decode_share is 1.1; it must be at most 1"),
        ({"version": 2}, "table 'attention' has columns"),
        (with_rows("real_share", [["prefill", 1, 0.5]]), "'real_share' has no row of decode"),
        (
            with_rows("real_share", [["prefill", 1, 1.5], ["decode", 1, 0.5]]),
            "row 1: share is 1.5; it must be at most 1",
        ),
        (with_rows("real_share", [["prefill", 1, 0.5], ["mixed", 1, 0.5]]), "row 2: kind is 'mixed'"),
        (with_rows("real_share", [["decode", 8, 0.5], ["decode", 4, 0.5]]), "row 2: size 4 after 8"),
        ({"update": {"columns": UPDATE, "rows": [[1.0, 0.0]] * 2}}, "table 'update' has 2 rows"),
        ({"update": {"columns": UPDATE[:1], "rows": [[1.0]]}}, "table 'update' has no column 'per_seq_s'"),
        (with_rows("host", [["full", 1.0, 0.0]]), "it must have ['full', 'piecewise', 'eager']"),
        (
            with_rows("host", [["full", 1.0, 0.0], ["piecewise", 0.5, 0.0], ["eager", 2.0, 0.0]]),
            "row 2 (piecewise): base_s 0.5 is below the 1.0 of 'full'",
        ),
    ],
)
def test_a_fault_is_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ProfileError) as error:
        read_table(broken(tmp_path, **change))
    assert message in str(error.value)
    assert "broken.json" in str(error.value)
    assert "\n" not in str(error.value)


def test_what_the_host_takes_to_take_a_step_in_may_be_absent() -> None:
    table = read_table(PATH)
    assert "update" not in json.loads(PATH.read_text())
    assert table.update == NO_SHARE
    known = replace(table, update=HostShare(2.7e-4, 9e-6))
    assert parse_table(dump_table(known).encode(), "x").update == known.update
    changed = diff_tables(table, known)
    assert [change.name for change in changed.terms] == ["update base_s", "update per_seq_s"]


def test_prompts_launched_apart_from_decodes_are_optional_and_new_in_version_4(tmp_path: Path) -> None:
    table = read_table(PATH)
    assert table.mixed_host is None and '"version": 3' in dump_table(table)
    known = replace(table, mixed_host=MixedHost(512, HostShare(20e-3, 3e-5)))
    assert parse_table(dump_table(known).encode(), "x").mixed_host == known.mixed_host
    changed = diff_tables(table, known)
    names = ["mixed_host above_tokens", "mixed_host base_s", "mixed_host per_seq_s"]
    assert [change.name for change in changed.terms] == names
    row = {"columns": json.loads(dump_table(known))["mixed_host"]["columns"], "rows": [[512, 20e-3, 3e-5]]}
    for problem, fields in (
        ("table 'mixed_host', which version 4 brought", {"version": 3, "mixed_host": row}),
        ("table 'mixed_host' has 2 rows", {"mixed_host": {**row, "rows": row["rows"] * 2}}),
        ("base_s 1e-09 is below the", {"mixed_host": {**row, "rows": [[512, 1e-9, 3e-5]]}}),
        ("table 'mixed_host' row 1: above_tokens is 0.5", {"mixed_host": {**row, "rows": [[0.5, 20e-3, 3e-5]]}}),
    ):
        with pytest.raises(ProfileError, match=re.escape(problem)):
            read_table(broken(tmp_path, **{"version": 4, **fields}))


def test_when_a_graph_can_begin_is_optional_and_new_in_version_4(tmp_path: Path) -> None:
    table = read_table(PATH)
    assert table.graph_tail_s is None and '"graph_tail"' not in dump_table(table)
    for tail_s in (0.0, 9e-4):
        known = replace(table, graph_tail_s=tail_s)
        assert '"version": 4' in dump_table(known)
        assert parse_table(dump_table(known).encode(), "x").graph_tail_s == tail_s
        assert [change.name for change in diff_tables(table, known).terms] == ["graph_tail tail_s"]
        assert known.without_graphs().graph_tail_s is None
    row: dict[str, list[Any]] = {"columns": [["tail_s", "s"]], "rows": [[9e-4]]}
    for problem, fields in (
        ("table 'graph_tail', which version 4 brought", {"version": 3, "graph_tail": row}),
        ("table 'graph_tail' has 2 rows", {"graph_tail": {**row, "rows": row["rows"] * 2}}),
        ("table 'graph_tail' row 1: tail_s is -0.1, no s value", {"graph_tail": {**row, "rows": [[-0.1]]}}),
        (
            "table 'graph_tail' without captured sizes",
            {"captured_sizes": [], "graph_tail": row, **with_rows("host", [["eager", 2.5e-3, 4e-6]])},
        ),
    ):
        with pytest.raises(ProfileError, match=re.escape(problem)):
            read_table(broken(tmp_path, **{"version": 4, **fields}))


def test_version_2_had_no_share_of_what_decodes_take_alone(tmp_path: Path) -> None:
    attention = json.loads(PATH.read_text())["attention"]
    old = {"columns": attention["columns"][:-1], "rows": [row[:-1] for row in attention["rows"]]}
    table = read_table(broken(tmp_path, version=2, attention=old))
    assert replace(table, sha256="") == replace(read_table(PATH), sha256="")
    assert table.attention.mixed_decode_share == 0.0


def test_a_missing_table_or_file_is_named(tmp_path: Path) -> None:
    content = json.loads(PATH.read_text())
    del content["host"]
    (tmp_path / "t.json").write_text(json.dumps(content))
    with pytest.raises(ProfileError, match="has no 'host'"):
        read_table(tmp_path / "t.json")
    (tmp_path / "t.json").write_text("{")
    with pytest.raises(ProfileError, match="is not JSON"):
        read_table(tmp_path / "t.json")
    with pytest.raises(ProfileError, match="cannot read the profile"):
        load_profile(str(tmp_path / "absent.json"))


def test_a_name_given_twice_is_named(tmp_path: Path) -> None:
    text = PATH.read_text()
    (tmp_path / "t.json").write_text(text.replace('"k_max": 32,', '"k_max": 32,\n"k_max": 64,'))
    with pytest.raises(ProfileError, match=r"t\.json' has 'k_max' twice"):
        read_table(tmp_path / "t.json")


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"[" * 100_000, b'{"a":' * 100_000, b"", b"[]", b"null"])
def test_what_is_no_table_is_said_in_a_line(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "t.json").write_bytes(content)
    with pytest.raises(ProfileError) as error:
        read_table(tmp_path / "t.json")
    assert "t.json" in str(error.value) and "\n" not in str(error.value)


def test_an_unwritable_place_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot write the table"):
        write_table(tmp_path / "file" / "t.json", read_table(PATH))


def test_names_load_and_unknown_ones_suggest() -> None:
    for name in profile_names():
        profile = load_profile(name)
        assert profile.name == name
        assert len(dump_table(profile.table)) < 200_000
    with pytest.raises(UsageError, match=f"did you mean '{SYNTHETIC}'"):
        load_profile("synthetic-olmoe-split")


def test_what_is_not_measured_says_so() -> None:
    profile = load_profile(SYNTHETIC)
    assert profile.status == "synthetic"
    assert profile.label == f"{SYNTHETIC} (synthetic)"


def test_a_profile_gives_fresh_costs_that_meet_the_protocol() -> None:
    profile = load_profile(SYNTHETIC)
    cost: StepCost = profile.cost()
    assert cost.step_s(StepShape(0, 0, 0, 8, 800, 99)) > 0
    assert profile.cost().extrapolated == {}
    assert profile.cost(async_scheduling=False).step_s(StepShape(8, 36, 1)) > profile.cost().step_s(StepShape(8, 36, 1))


def test_loading_needs_no_heavy_library() -> None:
    import subprocess

    script = (
        "import sys; from simmoe.profiles.catalog import load_profile; "
        f"load_profile('{SYNTHETIC}').cost().prefill_s(512, 8); "
        "print([m for m in ('scipy', 'pandas', 'matplotlib', 'pyarrow') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
