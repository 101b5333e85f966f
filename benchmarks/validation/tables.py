"""The tables that the documentation shows of compared runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

from compared import Compared
from sensitivity import executed_k

from simmoe.analysis.compare import differences
from simmoe.analysis.compare_causes import CAUSES
from simmoe.records import RunRecord

SHOWN = (("ttft", "mean"), ("ttft", "p99"), ("tpot", "mean"), ("request_throughput", "rate"))
_ERRORS = ("mean TTFT", "p99 TTFT", "mean TPOT", "requests/s")


def table(runs: Sequence[Compared]) -> str:
    """Return the Markdown table of simulated / live (error), what is beyond its limit in bold."""
    head = ("run", "load", "mean TTFT, ms", "p99 TTFT, ms", "mean TPOT, ms", "requests/s", "executed k")
    rows = []
    for run in runs:
        load = "burst" if run.offline else f"{run.cell.load:.0%}"
        ks = f"{executed_k(run.simulated):.1f} / {executed_k(run.live):.1f}"
        rows.append((run.cell.name, load, *(_shown(run, *what) for what in SHOWN), ks))
    return markdown(head, rows)


def host_table(runs: Sequence[Compared]) -> str:
    """Return the Markdown table of errors on the host that another run told / on this one's own, and of where live lies
    among the draws of :func:`sensitivity.spread`."""
    head = ("run", *_ERRORS, "drawn", "live")
    rows = []
    for run in runs:
        errors = _both(run, run.hosted, run.own_host)
        judged = SHOWN[3] if run.offline else SHOWN[1]
        low, high = run.spread[judged]
        drawn = f"{low:.2f} to {high:.2f}/s" if run.offline else f"{1e3 * low:.1f} to {1e3 * high:.1f} ms"
        rows.append((run.cell.name, *errors, drawn, _place(run.beyond(*judged))))
    return markdown(head, rows)


def believed_table(runs: Sequence[Compared]) -> str:
    """Return the Markdown table of errors with the step times that the live policies had been told, on the host that
    another run told / on this one's own."""
    return markdown(("run", *_ERRORS), [(run.cell.name, *_both(run, *run.as_believed)) for run in runs])


def moments_table(runs: Sequence[Compared]) -> str:
    """Return the Markdown table of errors with the host's faster and slower moments as this very run had them."""
    rows = []
    for run in runs:
        live = {d[:2]: d.second for d in differences(run.simulated, run.live)}
        drawn = ([value / live[what] - 1 for value in run.own_moments[what]] for what in SHOWN)
        cells = ("-" if math.isnan(low) else f"{low:+z.1%} to {high:+z.1%}" for low, high in drawn)
        rows.append((run.cell.name, *cells))
    return markdown(("run", *_ERRORS), rows)


def _both(run: Compared, on_told: RunRecord, on_own: RunRecord) -> list[str]:
    told, own = ({d[:2]: d.error for d in differences(record, run.live)} for record in (on_told, on_own))
    cells = []
    for what in SHOWN:
        text = f"{_marked(run, *what, f'{told[what]:+z.1%}', told[what])} / {own[what]:+z.1%}"
        cells.append("-" if math.isnan(told[what]) else text)
    return cells


def _place(beyond: float) -> str:
    if math.isnan(beyond):
        return "not reported"
    return f"{abs(beyond):.1%} {'above' if beyond > 0 else 'below'}" if beyond else "within"


def cause_table(runs: Sequence[Compared]) -> str:
    """Return the Markdown table of where the difference of mean TTFT comes from."""
    head = ("run", "like steps, live", "TPOT grows by", "send lag", *CAUSES)
    rows = [
        (
            run.cell.name,
            f"{run.step_ratio - 1:+z.1%}",
            f"{run.magnification['tpot']:.1f}",
            f"{1e3 * run.live.manifest['send_lag']['mean_s']:.2f}",
            *(f"{1e3 * run.causes.ttft_s[cause]:+z.1f}" for cause in CAUSES),
        )
        for run in runs
    ]
    return markdown(head, rows)


def repeat_table(runs: Sequence[Compared]) -> str:
    """Return the Markdown table of live runs of the same requests: how far a live run is from itself."""
    head = ("run", "mean TTFT, ms", "p99 TTFT, ms", "mean TPOT, ms", "requests/s")
    rows = []
    for run in runs:
        for other in runs:
            if other.cell.name == f"{run.cell.name}-again":
                found = {d[:2]: d for d in differences(other.live, run.live)}
                cells = []
                for what in SHOWN:
                    scale, digits = (1.0, 2) if what[1] == "rate" else (1e3, 1)
                    first, second, error = (getattr(found[what], name) for name in ("first", "second", "error"))
                    cells.append(f"{scale * second:.{digits}f}, {scale * first:.{digits}f} ({error:+z.1%})")
                rows.append((run.cell.name, *cells))
    return markdown(head, rows)


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _shown(run: Compared, metric: str, statistic: str) -> str:
    found = next(d for d in differences(run.simulated, run.live) if d[:2] == (metric, statistic))
    scale, digits = (1.0, 2) if statistic == "rate" else (1e3, 1)
    if math.isnan(found.second):
        return f"{scale * found.first:.{digits}f} / not reported"
    text = f"{scale * found.first:.{digits}f} / {scale * found.second:.{digits}f} ({found.error:+z.1%})"
    return _marked(run, metric, statistic, text, found.error)


def _marked(run: Compared, metric: str, statistic: str, text: str, error: float) -> str:
    counts = (statistic == "rate") == run.offline
    return f"**{text}**" if counts and abs(error) > run.limit(metric, statistic) else text


def put_into(path: Path, tables: Mapping[str, str]) -> None:
    """Replace, in a page, the table after each comment of such a name; names without a comment are left out."""
    page = path.read_text()
    for name, table in tables.items():
        before, comment, after = page.partition(f"<!-- table: {name} -->\n\n")
        if comment:
            page = f"{before}{comment}{table}\n\n{after.partition(chr(10) * 2)[2]}"
    path.write_text(page)
