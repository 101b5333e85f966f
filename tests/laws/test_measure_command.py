"""The command line a sample file's header names asks for what was asked for."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from simmoe.cli import cli
from simmoe.commands import profile_measure
from simmoe.commands.profile_measure import MeasureOptions

RAW = Path("samples.jsonl")

OPTIONS = st.builds(
    MeasureOptions,
    model=st.just("olmoe-1b-7b"),
    split=st.sampled_from([1, 2, 4]),
    raw=st.just(RAW),
    graphs=st.sampled_from(["banks", "default", "none"]),
    sync=st.booleans(),
    budgets=st.sets(st.integers(1, 8)).map(lambda ks: tuple(sorted(ks))),
    max_tokens=st.integers(16, 16384),
    tensor_parallel=st.sampled_from([2, 4]),
    expert_parallel=st.booleans(),
    passes=st.integers(1, 5),
    recording_s=st.sampled_from([6.0, 30.0, 48.0, 60.5]),
    pin=st.booleans(),
    memory_utilization=st.sampled_from([0.5, 0.85, 0.9]),
)


@given(options=OPTIONS)
def test_the_command_named_asks_for_the_same(options: MeasureOptions) -> None:
    line = options.command(options.model).split()[1:]
    with patch.object(profile_measure, "measure_samples", return_value=[]) as measure_samples:
        cli.main([*line, "--raw", str(RAW)], standalone_mode=False)
    measure_samples.assert_called_once_with(options)
