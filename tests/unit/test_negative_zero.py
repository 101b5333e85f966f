"""No table, caption or summary shows a zero with a minus: what rounds to nothing is neither better nor worse."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from simmoe.analysis.grid import SweepGrid
from simmoe.analysis.metrics import METRICS, Slo
from simmoe.analysis.plots import plot_sweep
from simmoe.cli import run as cli
from simmoe.commands.run_summary import format_summary
from simmoe.commands.sweeping.tables import print_tables
from simmoe.records import STATUSES, read_record, write_record

ROOT = Path(__file__).parents[2]

#: What shows a signed number to people.
SHOWN = [
    path
    for room in ("analysis", "benchmarks", "live", "policies", "profiles", "simulator", "src/simmoe/commands", "traces")
    for path in sorted((ROOT / room).rglob("*.py"))
]

NEGATIVE_ZERO = re.compile(r"(?<![\w.])-0(\.0+)?(?![\d.])")


def signed_formats(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of every format of a module that shows a sign, of f-strings and of ``str.format``."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FormattedValue) and node.format_spec is not None:
            spec = "".join(str(part.value) for part in ast.walk(node.format_spec) if isinstance(part, ast.Constant))
            if "+" in spec:
                yield node.lineno, spec
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from ((node.lineno, spec) for spec in re.findall(r"\{\w*:([^{}]*\+[^{}]*[efg%])\}", node.value))


def test_every_format_with_a_sign_shows_zero_as_zero() -> None:
    """Format's 'z' (PEP 682) drops the sign of what rounds to zero."""
    formats = [(path, line, spec) for path in SHOWN for line, spec in signed_formats(path)]
    assert len(formats) > 15, "the formats of tables and captions are found"
    missing = [f"{path.relative_to(ROOT)}:{line}: {spec}" for path, line, spec in formats if "z" not in spec]
    assert not missing


def grid(change: float) -> SweepGrid:
    """Return a sweep whose second policy has of everything 1 + ``change`` times what the first has."""
    policies = ("first", "second")
    cells = [
        (rate, policy, seed, dict.fromkeys(METRICS, (1 + change * (policy == "second")) * (rate + 0.01 * seed)))
        for rate in (5.0, 10.0, 20.0)
        for policy in policies
        for seed in range(2)
    ]
    return SweepGrid.build(cells, policies, "first", dict.fromkeys(policies, 15.0))


@pytest.mark.parametrize("change", [-1e-9, 1e-9, -3e-4, 3e-4])
def test_a_sweeps_tables_and_caption(
    change: float, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[str] = []
    monkeypatch.setattr(
        "matplotlib.figure.Figure.suptitle", lambda self, text, **style: shown.append(text), raising=True
    )
    plot_sweep(tmp_path / "sweep.png", grid(change), "a sweep")
    print_tables(grid(change), {"injected": 1, **dict.fromkeys(STATUSES, 0)}, goodput=True)
    text = capsys.readouterr().out + "".join(shown)
    assert "Least mean TTFT" in text and "0.0" in text
    assert not NEGATIVE_ZERO.search(text), text
    if change < 0:
        assert "second at 5 to 20/s, 0 % against first" in text.replace("\n", " ")


def test_a_comparisons_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--rate", "20", "--requests", "50", "--policy", "fifo", "--record-steps"]
    assert cli(["run", *options, "--out", str(tmp_path / "first")]) == 0
    record = read_record(tmp_path / "first")
    for name in ("scheduled_s", "first_token_s", "finished_s"):
        record.requests[name] = record.requests[name] + 1e-8
    write_record(tmp_path / "second", record)
    for pair in (("first", "second"), ("second", "first")):
        capsys.readouterr()
        assert cli(["compare", *(str(tmp_path / name) for name in pair)]) == 0
        text = capsys.readouterr().out
        assert "+0.00 %" in text and not NEGATIVE_ZERO.search(text), text


def test_a_summarys_figures() -> None:
    """A request taken up as it came has waited for -0.0 s where its times were subtracted the other way round."""
    figures = {name: 0.0 if name in STATUSES or name == "injected" else -0.0 for name in METRICS}
    counts = [name for name in METRICS if name.startswith("num_")]
    text = format_summary("nothing", figures | dict.fromkeys(counts, 0.0), [], Slo())
    assert text.count(" 0 ") > 10 and not NEGATIVE_ZERO.search(text), text
