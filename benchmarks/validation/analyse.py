"""Hold the simulator against live records: ``python benchmarks/validation/analyse.py docs/results/validation/keyed``.

Each record's requests are simulated within its engines' limits under its policy (as ``simmoe validate`` does) and the
two compared. Writes a row a run to ``--csv``, pictures to ``--figures``, and prints the tables the documentation shows.
"""

from __future__ import annotations

import argparse
import csv
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from compared import Compared, disagreements
from pictures import draw_distributions, draw_loads
from plan import EXPERIMENTS, FRONT_END, Cell, Experiment
from sensitivity import executed_k, host_ratios, magnification, spread
from tables import believed_table, cause_table, host_table, moments_table, put_into, repeat_table, table

from simmoe.analysis.compare import STATISTICS, Pairing, differences
from simmoe.analysis.compare_causes import CAUSES
from simmoe.commands.counterfactual import find_causes
from simmoe.commands.front_end import at_engine, front_end_times, handover, read_clocks, service_time
from simmoe.commands.host import host_of, with_host
from simmoe.commands.joining import read_loop
from simmoe.commands.validate import doubts, simulate_like
from simmoe.profiles.catalog import load_profile
from simmoe.records import MANIFEST, RunRecord, read_record
from simmoe.simulator.config import FrontEndConfig
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
        "believed": believed_table(runs),
        "moments": moments_table(runs),
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
    told = policies_profile(folder, name)
    front_end, reach_s = told_front_end(folder)
    host = host_of(folder / f"{FRONT_END}-load", profile)
    hosted = with_host(profile, host)
    ratios = host_ratios(folder / f"{FRONT_END}-load", hosted)
    times = {
        field: round(1e3 * value, 4)
        for field, value in asdict(front_end).items()
        if field.endswith("_s") and "publish" not in field
    }
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
        at_queue = at_engine(live, own_clocks, reach_s)
        causes, step_ratios = find_causes(simulated, at_queue, Pairing.of(simulated, at_queue))
        growth = magnification(live, simulated, profile, front_end, believed)
        on_host, _ = simulate_like(live, profile, front_end, believed, host)
        own_host = host_of(folder / run, profile)
        on_own, _ = simulate_like(live, profile, front_end, believed, own_host)
        told_of = [host_of(folder / other, believed) for other in (f"{FRONT_END}-load", run)]
        as_believed = [simulate_like(live, believed, front_end, believed, told_of_host)[0] for told_of_host in told_of]
        apart = spread(live, hosted, front_end, believed, ratios)
        on_own_table = with_host(profile, own_host)
        own_moments = spread(live, on_own_table, front_end, believed, host_ratios(folder / run, on_own_table))
        compared.append(
            Compared(
                cell=_recorded(live, experiment),
                live=live,
                simulated=simulated,
                hosted=on_host,
                own_host=on_own,
                as_believed=(as_believed[0], as_believed[1]),
                causes=causes,
                step_ratio=step_ratios.overall,
                magnification=growth,
                spread=apart,
                own_moments=own_moments,
            )
        )
    return disagreements(compared)


def policies_profile(folder: Path, name: str) -> str:
    """Return the path of the profile that an experiment's live policies asked; its name where they asked that one."""
    path = folder / POLICY_PROFILE
    return str(path) if path.exists() else name


def told_front_end(folder: Path) -> tuple[FrontEndConfig, float]:
    """Return the front end's times as an experiment's runs for that told them, and when a busy engine is in reach."""
    load = folder / f"{FRONT_END}-load"
    told_by, clocks = read_record(load), read_clocks(load)
    assert clocks is not None, "no record without them is made here"
    loop = read_loop(load, told_by)
    service_s = service_time(read_record(folder / f"{FRONT_END}-burst"))
    return front_end_times(told_by, clocks, loop, service_s), handover(told_by, clocks, loop).reach_s


def _recorded(live: RunRecord, experiment: Experiment) -> Cell:
    """Return the run as it was made."""
    told, given = live.manifest["experiment"], live.manifest["workload"]["spec"]
    names = ("trace", "requests", "mu", "sigma", "k_max", "seed")
    spec = WorkloadSpec(**{name: given[name] for name in names}, rate=float(given["rate"]))
    system, rate, num_ranks = told["system"], float(given["rate"]), live.manifest["config"]["num_ranks"]
    saturation = (experiment.saturation or {}).get(system, 0.0) * num_ranks
    load = rate / saturation if saturation else told["load"] or math.inf
    return Cell(told["cell"], system, rate, load, given["requests"], num_ranks, spec)


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
    hosted, own, told, told_own = (
        {d[:2]: d.error for d in differences(record, run.live)}
        for record in (run.hosted, run.own_host, *run.as_believed)
    )
    for difference in differences(run.simulated, run.live):
        if difference.statistic in (*STATISTICS, "rate"):
            name = f"{difference.metric}_{difference.statistic}"
            row |= {f"{name}_simulated": f"{difference.first:.6g}", f"{name}_live": f"{difference.second:.6g}"}
            row[f"{name}_error"] = f"{difference.error:.5f}"
            what = difference[:2]
            row |= {f"{name}_host_error": f"{hosted[what]:.5f}", f"{name}_own_host_error": f"{own[what]:.5f}"}
            row |= {f"{name}_believed_host_error": f"{told[what]:.5f}"}
            row |= {f"{name}_believed_own_host_error": f"{told_own[what]:.5f}"}
            for beside, drawn in (("", run.spread), ("_own_moments", run.own_moments)):
                low, high = drawn[what]
                row |= {f"{name}{beside}_low": f"{low:.6g}", f"{name}{beside}_high": f"{high:.6g}"}
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
