"""Times of the MoE layer alone: read as written, and never faster than what the card's ceilings allow by themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from simmoe.errors import OutputError, ProfileError
from simmoe.profiles.catalog import DEFAULT_PROFILE, profile_path
from simmoe.profiles.estimating.cards import card_named
from simmoe.profiles.layer_times import LayerTime, LayerTimes, read_layer_times, write_layer_times
from simmoe.profiles.models import deciding_values, read_model

ROOT = Path(__file__).parents[2]
RAW = profile_path(DEFAULT_PROFILE).parent / "raw"
CONFIG = read_model("olmoe-1b-7b").config
TIMES = LayerTimes(
    model="OLMoE",
    model_config=deciding_values(CONFIG),
    dtype="bfloat16",
    card="a card",
    date="2026-11-30",
    versions={"vllm": "0.32.0"},
    kernel="TritonExperts",
    matmul_flop_s=8e14,
    copy_byte_s=4e12,
    rows=(LayerTime(1, 1, 2e-5, 1.0), LayerTime(8192, 8, 2e-3, 64.0)),
)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "layer.json"
    write_layer_times(path, TIMES)
    assert read_layer_times(path) == TIMES
    assert "[8192, 8, 0.002, 64.0]\n" in path.read_text()  # a row a line


def test_the_roofline_is_arithmetic_for_many_tokens_and_weights_for_few() -> None:
    one, many = TIMES.rows
    pair_flop = 2 * 3 * 2048 * 1024  # gate, up and down projection of one expert, a multiplication and an addition each
    assert TIMES.flop(many) == pair_flop * 8192 * 8
    assert TIMES.bound_s(many) == TIMES.flop(many) / 8e14
    assert TIMES.bytes_moved(one) == 2 * (3 * 2048 * 1024 + 2 * 2048)
    assert TIMES.bound_s(one) == TIMES.bytes_moved(one) / 4e12


def test_cards_share_the_arithmetic_and_each_reads_its_share_of_the_experts_or_those_it_holds() -> None:
    row = LayerTime(64, 8, 1e-3, 32.0)
    whole, wide, apart = (
        replace(TIMES, num_cards=n, expert_parallel=ep) for n, ep in ((1, False), (2, False), (2, True))
    )
    assert wide.flop(row) == apart.flop(row) == whole.flop(row) / 2
    tokens = 2 * 2 * 64 * 2048
    assert whole.bytes_moved(row) - tokens == apart.bytes_moved(row) - tokens == 2 * (wide.bytes_moved(row) - tokens)


def test_few_tokens_may_all_have_gone_to_experts_of_another_card() -> None:
    rows = (LayerTime(1, 1, 1e-5, 0.0),)
    times = replace(TIMES, rows=rows, num_cards=2, expert_parallel=True)
    assert times.bytes_moved(rows[0]) == 2 * 2 * 2048  # the token, in and out
    with pytest.raises(ProfileError, match="distinct_experts at 1 tokens, k 1 is 0"):
        replace(times, expert_parallel=False)


def test_files_of_before_are_of_one_card_and_of_the_engine_that_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "layer.json"
    write_layer_times(path, TIMES)
    data = json.loads(path.read_text())
    assert (data.pop("num_layers"), data.pop("in_engine")) == (0, True)
    path.write_text(json.dumps(data | {"version": 2}))
    assert read_layer_times(path) == TIMES
    assert (data.pop("num_cards"), data.pop("expert_parallel")) == (1, False)
    path.write_text(json.dumps(data | {"version": 1}))
    assert read_layer_times(path) == TIMES


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "csv"}, "holds no layer times of version 3"),
        ({"version": 4}, "holds no layer times of version 3"),
        ({"columns": ["k"]}, "does not have the columns num_tokens, k"),
        ({"rows": [[1, 1, -1.0, 1.0]]}, "seconds at 1 tokens, k 1 is -1.0"),
        ({"rows": [[1, 1]]}, r"row 1 is \[1, 1\]; it must have 4 values"),
        ({"rows": []}, "has no rows"),
        ({"rows": 5}, "has no rows"),
        ({"rows": [[1, 1, "fast", 1.0]]}, "row 1: seconds is 'fast'"),
        ({"rows": [[1, 1, 1.0, float("nan")]]}, "distinct_experts at 1 tokens, k 1 is nan"),
        ({"rows": [[1, 0, 1.0, 1.0]]}, "k at 1 tokens, k 0 is 0"),
        ({"rows": [[1, 1, 1.0, 65.0]]}, "is 65.0; a layer has 64"),
        ({"rows": [[1, 1, 1.0, 1.0]] * 2}, "row 2: 1 tokens, k 1 are there twice"),
        ({"model_config": {"model_type": "llama"}}, "model_type 'llama' is not supported"),
        ({"versions": {"vllm": 1}}, "versions.vllm is 1; it must be str"),
        ({"matmul_flop_s": None}, "matmul_flop_s is None; it must be float"),
        ({"copy_byte_s": 0.0}, "copy_byte_s is 0.0"),
        ({"nonsense": 1}, "nonsense"),
    ],
)
def test_a_fault_is_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = tmp_path / "layer.json"
    write_layer_times(path, TIMES)
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(ProfileError, match=message) as error:
        read_layer_times(path)
    assert "layer.json" in str(error.value)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OutputError, match=r"file/layer\.json"):
        write_layer_times(tmp_path / "file/layer.json", replace(TIMES, rows=()))


# The rows docs/profiles.md shows of the layers timed alone.
SHOWN_TOKENS = (1, 16, 128, 1024, 8192)


def documented_rows() -> list[str]:
    """Return Markdown rows: a layout, k, then by tokens microseconds, TFLOP/s, GB/s and share of the datasheet's."""
    h200 = card_named("h200")
    lines = []
    for path in sorted(RAW.glob("*-layer.json")):
        times = read_layer_times(path)
        ks = {row.k for row in times.rows}
        for k in (min(ks, key=lambda k: abs(k - max(ks) / 4)), max(ks)):
            shown = []
            for row in times.rows:
                if row.k == k and row.num_tokens in SHOWN_TOKENS:
                    flop_s, byte_s = times.flop(row) / row.seconds, times.bytes_moved(row) / row.seconds
                    share = max(flop_s / h200.bf16_flop_s, byte_s / h200.memory_byte_s)
                    shown.append(f"{1e6 * row.seconds:,.0f}: {flop_s / 1e12:.0f}, {byte_s / 1e9:,.0f}, {share:.0%}")
            lines.append(f"| `{path.name.removesuffix('-layer.json')}` | {k} | {' | '.join(shown)} |")
    return lines


# Layouts timed both ways on one day, and the sizes that are compared together.
BOTH_WAYS = ("olmoe-1b-7b-split4-h200", "deepseek-v2-lite-split4-h200")
COMPARED_TOKENS = ((1, 32), (64, 512), (1024, 8192))


def alone_over_in_engine(name: str) -> dict[tuple[int, int], float]:
    """Return, by tokens and k, what a layer takes by itself over what it takes in its table's engine, less 1."""
    by_itself, in_engine = (read_layer_times(RAW / f"{name}-layer{which}.json") for which in ("-alone", ""))
    assert (by_itself.in_engine, in_engine.in_engine) == (False, True)
    assert replace(by_itself, rows=(), in_engine=True, kernel="", matmul_flop_s=1.0, copy_byte_s=1.0) == replace(
        in_engine, rows=(), kernel="", matmul_flop_s=1.0, copy_byte_s=1.0
    )
    seconds = {row[:2]: row.seconds for row in in_engine.rows}
    assert [row[:2] for row in by_itself.rows] == list(seconds)
    return {row[:2]: row.seconds / seconds[row[:2]] - 1 for row in by_itself.rows}


def documented_comparison() -> Iterator[str]:
    """Yield Markdown rows: a layout, tokens, points, then mean, median size and the largest of what alone is off by."""
    for name in BOTH_WAYS:
        off = alone_over_in_engine(name)
        for least, most in COMPARED_TOKENS:
            part = {at: value for at, value in off.items() if least <= at[0] <= most}
            values = np.array(list(part.values()))
            (tokens, k), worst = max(part.items(), key=lambda item: abs(item[1]))
            yield (
                f"| `{name}` | {least:,} to {most:,} | {len(part)} | {values.mean():+.1%} | "
                f"{np.median(np.abs(values)):.1%} | {worst:+.1%} (n = {tokens:,}, k = {k}) |"
            )


@pytest.mark.parametrize("name", BOTH_WAYS)
def test_a_layer_by_itself_takes_what_it_takes_in_the_engine(name: str) -> None:
    """Within what the engine's own times repeat to: 6% where the card's clock moves, 1% in the middle of many."""
    off = np.array([value for (tokens, _), value in alone_over_in_engine(name).items() if tokens >= 64])
    assert np.abs(off).max() < 0.06
    assert abs(off.mean()) < 0.01 and np.median(np.abs(off)) < 0.01


def test_the_documented_layer_times_are_those_of_the_files() -> None:
    page = (ROOT / "docs" / "profiles.md").read_text()
    assert [row for row in (*documented_rows(), *documented_comparison()) if row not in page] == []


if __name__ == "__main__":
    print("\n".join((*documented_rows(), "", *documented_comparison())))
