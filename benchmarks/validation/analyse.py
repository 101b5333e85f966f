"""Hold the simulator against live records: ``python benchmarks/validation/analyse.py docs/results/validation/keyed``.

Each record's requests are simulated within its engines' limits under its policy (as ``simmoe validate`` does) and the
two compared. Writes a row a run to ``--csv``, pictures to ``--figures``, and prints the tables the documentation shows.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from compared import Compared, disagreements
from pictures import draw_distributions, draw_loads
from plan import EXPERIMENTS, FRONT_END, Cell, Experiment
from sensitivity import executed_k, host_ratios, magnification, spread

from simmoe.analysis.compare import STATISTICS, Pairing, differences
from simmoe.analysis.compare_causes import CAUSES
from simmoe.commands.counterfactual import find_causes
from simmoe.commands.front_end import at_engine, front_end_times, handover_time, read_clocks, service_time
from simmoe.commands.host import host_of, with_host
from simmoe.commands.validate import doubts, simulate_like
from simmoe.profiles.catalog import load_profile
from simmoe.records import MANIFEST, RunRecord, read_record
from simmoe.traces.spec import WorkloadSpec

POLICY_PROFILE = "policy-profile.json"
"""In an experiment's folder: what the live policies took T(n, k) from, where the profile has changed since."""


def main() -> None:
    """Compare every record of an experiment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, help="record.py's --out, of the experiment's name")
    parser.add_argument("--profile", help="profile of the step times  [default: the experiment's]")
    parser.add_argument("--csv", type=Path, help="table to write")
    parser.add_argument("--figures", type=Path, help="folder for the pictures")
    parser.add_argument("--page", type=Path, help="documentation to put the tables into")
    parser.add_argument("--only", default="", help="runs whose name starts so")
    arguments = parser.parse_args()
    experiment = EXPERIMENTS[arguments.records.name]
    runs = compare_all(arguments.records, experiment, arguments.profile or experiment.profile, arguments.only)
    tables = {
        "results": table(runs),
        "host": host_table(runs),
        "causes": cause_table(runs),
        "twice": repeat_table(runs),
    }
    print(*tables.values(), sep="\n\n")
    if arguments.page:
        put_into(arguments.page, {f"{arguments.records.name} {name}": text for name, text in tables.items()})
    if arguments.csv:
        _write_csv(arguments.csv, runs)
    if arguments.figures:
        arguments.figures.mkdir(parents=True, exist_ok=True)
        online = [run for run in runs if not run.offline]
        name = f"validation-{arguments.records.name}"
        draw_loads(arguments.figures / f"{name}-loads.png", online)
        draw_distributions(arguments.figures / f"{name}-distributions.png", online)


def compare_all(folder: Path, experiment: Experiment, name: str, only: str = "") -> list[Compared]:
    """Simulate and compare the records of a folder, in the plan's order.

    Args:
        folder: with a record a run.
        experiment: what they are of.
        name: of the profile with the step times.
        only: what the names of the runs begin with.
    """
    records = {
        run.name: read_record(folder / run.name) for run in experiment.runs if (folder / run.name / MANIFEST).exists()
    }
    profile = load_profile(name)
    told = str(folder / POLICY_PROFILE) if (folder / POLICY_PROFILE).exists() else name
    clocks = read_clocks(folder / f"{FRONT_END}-load")
    assert clocks is not None, "no record without them is made here"
    service_s = service_time(records[f"{FRONT_END}-burst"])
    front_end = front_end_times(records[f"{FRONT_END}-load"], clocks, service_s)
    host = host_of(folder / f"{FRONT_END}-load", profile)
    hosted = with_host(profile, host)
    ratios = host_ratios(folder / f"{FRONT_END}-load", hosted)
    handover_s = handover_time(records[f"{FRONT_END}-load"], clocks)
    times = {field: round(1e3 * value, 4) for field, value in asdict(front_end).items() if "gress" in field}
    shares_us = {name: [round(1e6 * value, 1) for value in share.values()] for name, share in host["shares"].items()}
    print("front end, ms:", times, "host, us and us a sequence:", shares_us, file=sys.stderr)
    compared = []
    for run in records:
        if run.startswith(FRONT_END) or not run.startswith(only):
            continue
        live, believed = records[run], load_profile(told)
        for doubt in doubts(live, profile, believed):
            print(f"{run}: {doubt}", file=sys.stderr)
        simulated, note = simulate_like(live, profile, front_end, believed)
        simulated.manifest["profile"]["name"], simulated.manifest["policy_profile"]["name"] = name, told
        if note:
            print(f"{run}: {note}", file=sys.stderr)
        own_clocks = read_clocks(folder / run)
        assert own_clocks is not None
        at_queue = at_engine(live, own_clocks, handover_s)
        causes, step_ratios = find_causes(simulated, at_queue, Pairing.of(simulated, at_queue))
        growth = magnification(live, simulated, profile, front_end, believed)
        on_host, _ = simulate_like(live, profile, front_end, believed, host)
        on_own, _ = simulate_like(live, profile, front_end, believed, host_of(folder / run, profile))
        apart = spread(live, hosted, front_end, believed, ratios)
        cell = _recorded(live, experiment)
        compared.append(Compared(cell, live, simulated, on_host, on_own, causes, step_ratios.overall, growth, apart))
    return disagreements(compared)


def _recorded(live: RunRecord, experiment: Experiment) -> Cell:
    """Return the run as it was made."""
    told, given = live.manifest["experiment"], live.manifest["workload"]["spec"]
    names = ("trace", "requests", "mu", "sigma", "k_max", "seed")
    spec = WorkloadSpec(**{name: given[name] for name in names}, rate=float(given["rate"]))
    system, rate, num_ranks = told["system"], float(given["rate"]), live.manifest["config"]["num_ranks"]
    saturation = (experiment.saturation or {}).get(system, 0.0) * num_ranks
    load = rate / saturation if saturation else told["load"] or math.inf
    return Cell(told["cell"], system, rate, load, given["requests"], num_ranks, spec)


def table(runs: Sequence[Compared]) -> str:
    """Return the Markdown table of simulated / live (error), what is beyond its limit in bold."""
    head = ("run", "load", "mean TTFT, ms", "p99 TTFT, ms", "mean TPOT, ms", "requests/s", "executed k")
    rows = []
    for run in runs:
        load = "burst" if run.offline else f"{run.cell.load:.0%}"
        ks = f"{executed_k(run.simulated):.1f} / {executed_k(run.live):.1f}"
        shown = (("ttft", "mean"), ("ttft", "p99"), ("tpot", "mean"), ("request_throughput", "rate"))
        rows.append((run.cell.name, load, *(_shown(run, *what) for what in shown), ks))
    return markdown(head, rows)


def host_table(runs: Sequence[Compared]) -> str:
    """Return the Markdown table of errors on the host that another run told / on this one's own, and of where live lies
    among the draws of :func:`sensitivity.spread`."""
    head = ("run", "mean TTFT", "p99 TTFT", "mean TPOT", "requests/s", "drawn", "live")
    shown = (("ttft", "mean"), ("ttft", "p99"), ("tpot", "mean"), ("request_throughput", "rate"))
    rows = []
    for run in runs:
        told, own = ({d[:2]: d.error for d in differences(record, run.live)} for record in (run.hosted, run.own_host))
        errors = (_both(run, *what, told[what], own[what]) for what in shown)
        judged = shown[3] if run.offline else shown[1]
        low, high = run.spread[judged]
        drawn = f"{low:.2f} to {high:.2f}/s" if run.offline else f"{1e3 * low:.1f} to {1e3 * high:.1f} ms"
        rows.append((run.cell.name, *errors, drawn, _place(run.beyond(*judged))))
    return markdown(head, rows)


def _both(run: Compared, metric: str, statistic: str, told: float, own: float) -> str:
    if math.isnan(told):
        return "-"
    return f"{_marked(run, metric, statistic, f'{told:+z.1%}', told)} / {own:+z.1%}"


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
    shown = (("ttft", "mean"), ("ttft", "p99"), ("tpot", "mean"), ("request_throughput", "rate"))
    rows = []
    for run in runs:
        for other in runs:
            if other.cell.name == f"{run.cell.name}-again":
                found = {d[:2]: d for d in differences(other.live, run.live)}
                cells = []
                for what in shown:
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


def _write_csv(path: Path, runs: Sequence[Compared]) -> None:
    rows = [_row(run) for run in runs]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def _row(run: Compared) -> dict[str, Any]:
    cell, row = run.cell, dict[str, Any]()
    row |= {
        "run": cell.name,
        "policy": run.live.manifest["policy"]["given"],
        "rate": cell.rate,
        "ranks": cell.num_ranks,
    }
    row |= {"load": round(cell.load, 3), "requests": cell.requests, "seed": cell.spec.seed}
    hosted, own = ({d[:2]: d.error for d in differences(record, run.live)} for record in (run.hosted, run.own_host))
    for difference in differences(run.simulated, run.live):
        if difference.statistic in (*STATISTICS, "rate"):
            name = f"{difference.metric}_{difference.statistic}"
            row |= {f"{name}_simulated": f"{difference.first:.6g}", f"{name}_live": f"{difference.second:.6g}"}
            row[f"{name}_error"] = f"{difference.error:.5f}"
            low, high = run.spread[difference[:2]]
            row |= {f"{name}_host_error": f"{hosted[difference[:2]]:.5f}"}
            row |= {f"{name}_own_host_error": f"{own[difference[:2]]:.5f}"}
            row |= {f"{name}_low": f"{low:.6g}", f"{name}_high": f"{high:.6g}"}
    row |= {"k_simulated": f"{executed_k(run.simulated):.3f}", "k_live": f"{executed_k(run.live):.3f}"}
    row |= {"k_low": f"{run.spread['k', 'mean'][0]:.3f}", "k_high": f"{run.spread['k', 'mean'][1]:.3f}"}
    row |= {f"{metric}_magnification": f"{value:.3f}" for metric, value in run.magnification.items()}
    row |= {"step_ratio": f"{run.step_ratio:.4f}"}
    row |= {f"ttft_{cause.replace(' ', '_')}_s": f"{run.causes.ttft_s[cause]:.6f}" for cause in CAUSES}
    lag = run.live.manifest["send_lag"]
    row |= {"send_lag_mean_s": f"{lag['mean_s']:.6f}", "send_lag_max_s": f"{lag['max_s']:.6f}"}
    return row


if __name__ == "__main__":
    main()
