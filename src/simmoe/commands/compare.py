"""``simmoe compare``: two run records of one workload, how far apart, and why."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import click

from simmoe.analysis.compare import COMPARED, STATISTICS, THROUGHPUTS, Difference, Pairing, differences, ttft_refusal
from simmoe.analysis.compare_causes import CAUSES, Causes, StepRatios, direct_causes
from simmoe.commands.counterfactual import find_causes
from simmoe.commands.front_end import at_engine, handover, read_clocks
from simmoe.commands.joining import read_loop
from simmoe.commands.out_folder import claim_folder, refuse_empty
from simmoe.errors import LiveError, RecordError
from simmoe.record_checks import read_checked
from simmoe.records import RunRecord
from simmoe.writing import write_whole

FILES = ("compare.json", "compare.png")

_SHOWN = {"ttft": "TTFT", "tpot": "TPOT", "e2e": "end to end"}
_RATES = {"request_throughput": "requests/s", "output_throughput": "output tokens/s"}


@click.command()
@click.argument("first", metavar="SIM")
@click.argument("second", metavar="LIVE")
@click.option(
    "--out",
    metavar="DIR",
    callback=refuse_empty,
    help=f"Folder for {' and '.join(FILES)}.  [default: print alone]",
)
def compare(first: str, second: str, out: str | None) -> None:
    """Compare two run records of one workload.

    SIM and LIVE are folders that 'simmoe run' or 'simmoe live run' wrote; any two records of the same requests will do.
    Errors are SIM's, relative to LIVE. Where SIM is simulated and both keep their steps, it is run again with LIVE's
    arrivals, its dispatch times and its step times in turn, which shows what each contributes.

    A live run whose requests were sent too late has no TTFT to compare: all else is shown, and the exit code is 8.
    """
    with claim_folder(out, "comparison") if out else nullcontext() as folder:
        refusals = _compare(first, second, folder)
    for name, refusal in zip((first, second), refusals, strict=True):
        if refusal:
            raise LiveError(f"TTFT of '{name}' is not compared: {refusal}; record a run that sends in time")


def _compare(first: str, second: str, out: Path | None) -> list[str]:
    """Print the comparison and write its files; return why either record's TTFT is not to be reported, or nothing."""
    records = _read(Path(first)), _read(Path(second))
    pairing = Pairing.of(*records)
    rows = differences(*records)
    causes, ratios, why_direct = _causes(*records, pairing)
    direct = direct_causes(*records, pairing)
    names = _marked(first, records[0]), _marked(second, records[1])
    click.echo(_table(rows, names))
    click.echo("")
    refusals = [ttft_refusal(record) for record in records]
    click.echo(_explain(causes, direct, ratios, is_ttft_known=not any(refusals)))
    if pairing.num_other:
        click.echo(f"note: {pairing.num_other} requests are left out of the causes: not finished in both", err=True)
    if why_direct:
        click.echo(f"note: causes by the requests' own intervals alone: {why_direct}", err=True)
    if out:
        _write(out, records, names, rows, causes, pairing)
        click.echo(f"comparison: {out}", err=True)
    return refusals


def _read(folder: Path) -> RunRecord:
    """Return a record, its clock of dispatch at the engine where its further clocks can tell."""
    record, clocks = read_checked(folder), read_clocks(folder)
    if clocks is None:
        return record
    return at_engine(record, clocks, handover(record, clocks, read_loop(folder, record)).reach_s)


def _marked(name: str, record: RunRecord) -> str:
    """Return a record's name, marked where its step times were not measured."""
    profile = record.manifest.get("profile")
    if not isinstance(profile, dict) or profile.get("status", "measured") == "measured":
        return name
    return f"{name} (profile {profile.get('name')}, {profile['status']})"


def _causes(first: RunRecord, second: RunRecord, pairing: Pairing) -> tuple[Causes, StepRatios | None, str]:
    """Return the causes, how long like steps take, and why the causes are direct where the first cannot be repeated."""
    try:
        return *find_causes(first, second, pairing), ""
    except RecordError as error:
        both = first.steps is not None and second.steps is not None
        ratios = StepRatios(first.steps, second.steps) if both else None  # type: ignore[arg-type]
        return direct_causes(first, second, pairing), ratios, str(error)


def _table(rows: list[Difference], names: tuple[str, str]) -> str:
    found = {(row.metric, row.statistic): row for row in rows}
    lines = [f"first   {names[0]}", f"second  {names[1]}", ""]
    lines.append(f"{'ms':<20}" + "".join(f"{statistic:>11}" for statistic in STATISTICS))
    for metric in COMPARED:
        group = [found[metric, statistic] for statistic in STATISTICS]
        lines.append(f"{_SHOWN[metric]:<12}{'first':<8}" + "".join(f"{_number(1e3 * row.first):>11}" for row in group))
        lines.append(f"{'':<12}{'second':<8}" + "".join(f"{_number(1e3 * row.second):>11}" for row in group))
        lines.append(f"{'':<12}{'error':<8}" + "".join(f"{_percent(row.error):>11}" for row in group))
    lines.append("")
    for metric in THROUGHPUTS:
        row = found[metric, "rate"]
        lines.append(
            f"{_RATES[metric]:<20}{_number(row.first):>11} against {_number(row.second)}, error {_percent(row.error)}"
        )
    return "\n".join(lines)


def _explain(causes: Causes, direct: Causes, ratios: StepRatios | None, *, is_ttft_known: bool) -> str:
    how = "by running the first again" if causes.counterfactual else "by the requests' own intervals"
    lines = [f"{'second less first':<20}" + "".join(f"{cause:>11}" for cause in CAUSES) + f"{'sum':>11}  ({how})"]
    explained = [("mean TTFT, ms", causes.ttft_s)] if is_ttft_known else []
    for name, parts in (*explained, ("mean e2e, ms", causes.e2e_s)):
        values = [1e3 * parts[cause] for cause in CAUSES]
        lines.append(f"{name:<20}" + "".join(f"{_signed(value):>11}" for value in (*values, sum(values))))
    if ratios is not None:
        share = _percent(ratios.compared_share).lstrip("+")
        lines.append(f"{'step time':<20}{ratios.overall:>11.4f} of the first's for like steps; {share} of it compared")
    own_s, total_s = direct.ttft_s["step time"], causes.ttft_s["step time"]
    is_largest = total_s == max(causes.ttft_s.values(), key=abs)
    if is_ttft_known and causes.counterfactual and is_largest and own_s * total_s > 0:
        own = _signed(1e3 * own_s)
        lines.append(f"{'magnified':<20}{total_s / own_s:>11.1f} times by the queue: requests' own steps give {own} ms")
    return "\n".join(lines)


def _write(
    out: Path,
    records: tuple[RunRecord, RunRecord],
    names: tuple[str, str],
    rows: list[Difference],
    causes: Causes,
    pairing: Pairing,
) -> None:
    from simmoe.analysis.compare_plot import plot_comparison

    refused = [ttft_refusal(record) for record in records]
    content = {
        "first": names[0],
        "second": names[1],
        "num_paired": len(pairing.first),
        "num_other": pairing.num_other,
        "ttft_refused": refused,
        "differences": [_known({**row._asdict(), "error": row.error}) for row in rows],
        "causes": {
            "counterfactual": causes.counterfactual,
            "ttft_s": None if any(refused) else _known(causes.ttft_s),
            "e2e_s": _known(causes.e2e_s),
        },
    }
    text = json.dumps(content, indent=2, sort_keys=True, allow_nan=False) + "\n"
    table, drawing = (out / name for name in FILES)
    write_whole(table, text.encode(), "the comparison", "choose another --out")
    plot_comparison(drawing, records, names, causes)


def _known(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with null for those that are not known."""
    return {name: None if value != value else value for name, value in values.items()}


def _number(value: float) -> str:
    """Show a value to four significant digits, whole from a thousand up."""
    if math.isnan(value):
        return "-"
    if value >= 1000 or value == 0:
        return f"{value:z,.0f}"
    return f"{value:.{max(0, 3 - math.floor(math.log10(abs(value))))}f}"


def _signed(value: float) -> str:
    """Show milliseconds to a hundredth; no sign where that is 0."""
    if math.isnan(value):
        return "-"
    return f"{value:+z,.2f}" if abs(value) >= 0.005 else "0.00"


def _percent(share: float) -> str:
    return "-" if math.isnan(share) else f"{100 * share:+z.2f} %"
