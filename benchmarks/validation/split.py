"""Where live and simulated TTFT part: ``python benchmarks/validation/split.py docs/results/validation``.

Each online run is simulated on its own host, with the front end's times that ``front-end-load`` told, and the time to
the first token of each request, live and simulated, taken apart at the same four instants: the engine can take it
along, the step with its prompt begins on the device, ends there, and has been taken in.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import numpy.typing as npt
from analyse import policies_profile, told_front_end
from plan import EXPERIMENTS, FRONT_END, Experiment
from sensitivity import FloatArray
from tables import markdown, put_into

from simmoe.commands.front_end import read_clocks
from simmoe.commands.host import host_of
from simmoe.commands.validate import simulate_like
from simmoe.profiles.catalog import load_profile
from simmoe.records import MANIFEST, RunRecord, read_record

PARTS = ("front end, in", "until its step begins", "on the device", "until taken in", "front end, out", "in all")

_AT_ONCE_S = 1e-6


def main() -> None:
    """Print a table an experiment: milliseconds, live less simulated."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, help="folder of the experiments' folders")
    parser.add_argument("--page", type=Path, help="documentation to put the tables into")
    arguments = parser.parse_args()
    for name, experiment in EXPERIMENTS.items():
        text = split_table(arguments.records / name, experiment)
        print(f"{name}\n\n{text}\n")
        if arguments.page:
            put_into(arguments.page, {f"{name} split": text})


def split_table(folder: Path, experiment: Experiment) -> str:
    """Return the Markdown table of an experiment's online runs whose TTFT is reported: the mean of each part over
    requests, with its standard error.

    Args:
        folder: with a record a run.
        experiment: what they are of.
    """
    profile = load_profile(experiment.profile)
    believed = load_profile(policies_profile(folder, experiment.profile))
    front_end, reach_s = told_front_end(folder)
    rows = []
    for run in experiment.runs:
        if run.name.startswith(FRONT_END) or np.isinf(run.load) or not (folder / run.name / MANIFEST).exists():
            continue
        live, own_clocks = read_record(folder / run.name), read_clocks(folder / run.name)
        assert own_clocks is not None
        if not live.manifest["send_lag"]["ttft_reported"]:
            continue
        host = host_of(folder / run.name, profile)
        simulated, _ = simulate_like(live, profile, front_end, believed, host)
        reached_s = live.requests["dispatched_s"] + reach_s
        live_parts = _parts(live, reached_s, _steps(live), own_clocks["first_output_s"])
        step = _steps(simulated)
        assert simulated.steps is not None
        tokens = simulated.steps["num_decode_tokens"][step] + 1
        out_s = front_end.egress_s + front_end.egress_per_token_s * tokens
        taken_in_s = simulated.requests["first_token_s"] - out_s
        parts = live_parts - _parts(simulated, simulated.requests["dispatched_s"], step, taken_in_s)
        parts = 1e3 * parts[:, ~np.isnan(parts).any(axis=0)]
        errors = np.std(parts, axis=1) / parts.shape[1] ** 0.5
        cells = (f"{mean:+z.2f} ± {error:.2f}" for mean, error in zip(np.mean(parts, axis=1), errors, strict=True))
        rows.append((run.name, *cells))
    return markdown(("run", *PARTS), rows)


def _steps(record: RunRecord) -> npt.NDArray[np.int64]:
    """[num_requests] row of the step that computed the first of each request: of nearly all, its whole prompt."""
    steps, requests = record.steps, record.requests
    assert steps is not None
    found = np.zeros(len(requests["dp_rank"]), dtype=np.int64)
    for rank in np.unique(requests["dp_rank"]):
        theirs, mine = np.flatnonzero(steps["dp_rank"] == rank), requests["dp_rank"] == rank
        found[mine] = theirs[np.searchsorted(steps["start_s"][theirs], requests["scheduled_s"][mine] - _AT_ONCE_S)]
    return found


def _parts(record: RunRecord, reached_s: FloatArray, step: npt.NDArray[np.int64], taken_in_s: FloatArray) -> FloatArray:
    """[len(PARTS), num_requests] seconds of each part."""
    steps, requests = record.steps, record.requests
    assert steps is not None
    begun_s = steps["start_s"][step]
    instants = (
        requests["arrival_s"], reached_s, begun_s, begun_s + steps["duration_s"][step], taken_in_s,
        requests["first_token_s"],
    )  # fmt: skip
    return np.array([*np.diff(instants, axis=0), requests["first_token_s"] - requests["arrival_s"]])


if __name__ == "__main__":
    main()
