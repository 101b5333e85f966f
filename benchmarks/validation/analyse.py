"""Hold the simulator against the live records: ``python benchmarks/validation/analyse.py docs/results/validation``.

Each record's requests are simulated within its engines' limits under its policy (as ``simmoe validate`` does) and the
two compared. Writes a row a run to ``--csv``, pictures to ``--figures``, and prints the table the documentation shows.
"""

from __future__ import annotations

import argparse
import csv
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from compared import Compared
from front_end import front_end_times
from pictures import draw_distributions, draw_loads
from plan import EXPERIMENTS, FRONT_END
from sensitivity import magnification, spread

from simmoe.analysis.compare import STATISTICS, Pairing, differences
from simmoe.analysis.compare_causes import CAUSES
from simmoe.commands.counterfactual import find_causes
from simmoe.commands.validate import simulate_like
from simmoe.profiles.catalog import DEFAULT_PROFILE, load_profile
from simmoe.records import MANIFEST, RunRecord, read_record


def main() -> None:
    """Compare every record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, help="folder of record.py's --out folders")
    parser.add_argument("--profile", default=DEFAULT_PROFILE, help="of graphs keyed by k")
    parser.add_argument("--default-graphs-profile", help="of vLLM's default graphs  [default: leave those runs out]")
    parser.add_argument("--csv", type=Path, help="table to write")
    parser.add_argument("--figures", type=Path, help="folder for the pictures")
    parser.add_argument("--only", help="runs whose name starts so")
    arguments = parser.parse_args()
    profiles = {"keyed": arguments.profile}
    if arguments.default_graphs_profile:
        profiles["default-graphs"] = arguments.default_graphs_profile
    runs = list(_compared(arguments.records, profiles, arguments.only or ""))
    print(table(runs), cause_table(runs), sep="\n\n")
    if arguments.csv:
        _write_csv(arguments.csv, runs)
    if arguments.figures:
        online = [run for run in runs if not run.offline and run.cell.num_ranks > 1]
        draw_loads(arguments.figures / "validation-loads.png", online)
        draw_distributions(arguments.figures / "validation-distributions.png", online)


def _compared(records: Path, names: dict[str, str], only: str) -> Iterable[Compared]:
    burst, load = (read_record(records / "keyed" / cell.name) for cell in FRONT_END)
    front_end = front_end_times(burst, load)
    print(
        "front end, ms:", {name: round(1e3 * value, 4) for name, value in asdict(front_end).items() if "gress" in name}
    )
    for experiment, name in names.items():
        profile = load_profile(name)
        for cell in EXPERIMENTS[experiment]:
            folder = records / experiment / cell.name
            if cell not in FRONT_END and cell.name.startswith(only) and (folder / MANIFEST).exists():
                live = read_record(folder)
                simulated, _ = simulate_like(live, profile, front_end)
                simulated.manifest["profile"]["name"] = name
                causes, ratios = find_causes(simulated, live, Pairing.of(simulated, live))
                growth = magnification(live, simulated, profile, front_end)
                apart = spread(live, profile, front_end)
                yield Compared(cell, live, simulated, causes, ratios.overall, growth, apart)


def executed_k(record: RunRecord) -> float:
    """Return the token-weighted mean executed budget."""
    steps = record.steps
    assert steps is not None
    return float(steps["routed_slots"].sum() / (steps["num_prefill_tokens"] + steps["num_decode_tokens"]).sum())


def table(runs: Sequence[Compared]) -> str:
    """Return the Markdown table of simulated / live (error); a figure beyond its limit is in bold."""
    head = ("run", "load", "mean TTFT, ms", "p99 TTFT, ms", "mean TPOT, ms", "requests/s", "executed k")
    rows = []
    for run in runs:
        load = "burst" if run.offline else f"{run.cell.load:.0%}"
        ks = f"{executed_k(run.simulated):.1f} / {executed_k(run.live):.1f}"
        shown = (("ttft", "mean"), ("ttft", "p99"), ("tpot", "mean"), ("request_throughput", "rate"))
        rows.append((run.cell.name, load, *(_shown(run, *what) for what in shown), ks))
    return _markdown(head, rows)


def cause_table(runs: Sequence[Compared]) -> str:
    """Return the Markdown table of where the difference of mean TTFT comes from."""
    head = ("run", "like steps, live", "TPOT grows by", "send lag", *CAUSES)
    rows = [
        (
            run.cell.name,
            f"{run.step_ratio - 1:+.1%}",
            f"{run.magnification['tpot']:.1f}",
            f"{1e3 * run.live.manifest['send_lag']['mean_s']:.2f}",
            *(f"{1e3 * run.causes.ttft_s[cause]:+.1f}" for cause in CAUSES),
        )
        for run in runs
    ]
    return _markdown(head, rows)


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _shown(run: Compared, metric: str, statistic: str) -> str:
    found = next(d for d in differences(run.simulated, run.live) if d[:2] == (metric, statistic))
    scale, digits = (1.0, 2) if statistic == "rate" else (1e3, 1)
    if math.isnan(found.second):
        return f"{scale * found.first:.{digits}f} / not reported"
    apart = f" ± {run.spread[metric, statistic]:.1%}" if statistic == "p99" else ""
    text = f"{scale * found.first:.{digits}f} / {scale * found.second:.{digits}f} ({found.error:+.1%}{apart})"
    counts = (statistic == "rate") == run.offline
    return f"**{text}**" if counts and abs(found.error) > run.limit(statistic) else text


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
    row |= {"load": round(cell.load, 3), "requests": cell.requests, "seed": cell.seed}
    for difference in differences(run.simulated, run.live):
        if difference.statistic in (*STATISTICS, "rate"):
            name = f"{difference.metric}_{difference.statistic}"
            row |= {f"{name}_simulated": f"{difference.first:.6g}", f"{name}_live": f"{difference.second:.6g}"}
            row[f"{name}_error"] = f"{difference.error:.5f}"
            row[f"{name}_spread"] = f"{run.spread[difference[:2]]:.5f}"
    row |= {"k_simulated": f"{executed_k(run.simulated):.3f}", "k_live": f"{executed_k(run.live):.3f}"}
    row |= {f"{metric}_magnification": f"{value:.3f}" for metric, value in run.magnification.items()}
    row |= {"step_ratio": f"{run.step_ratio:.4f}"}
    row |= {f"ttft_{cause.replace(' ', '_')}_s": f"{run.causes.ttft_s[cause]:.6f}" for cause in CAUSES}
    lag = run.live.manifest["send_lag"]
    row |= {"send_lag_mean_s": f"{lag['mean_s']:.6f}", "send_lag_max_s": f"{lag['max_s']:.6f}"}
    return row


if __name__ == "__main__":
    main()
