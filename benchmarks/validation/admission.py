"""When live requests join a step: ``python benchmarks/validation/admission.py docs/results/validation/repeated``.

A simulated engine composes a step of what has reached it by then; ``ingress_s`` ends with the least time from a front
end to the engine's queue. Here that least is held against what the live engine took along: the time after which a
request, once dispatched, is in the next step composed, as explains most of what the record shows.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from analyse import POLICY_PROFILE
from plan import EXPERIMENTS, FRONT_END
from sensitivity import FloatArray
from tables import markdown, put_into

from simmoe.analysis.compare import differences
from simmoe.commands.front_end import front_end_times, handover_time, read_clocks, service_time
from simmoe.commands.host import host_of
from simmoe.commands.record_times import read_times
from simmoe.commands.validate import simulate_like
from simmoe.live.driving.recording import HOST_COLUMNS, HOST_FILE
from simmoe.profiles.catalog import load_profile
from simmoe.records import MANIFEST, RunRecord, read_record

_CUTS_S = np.arange(0.0, 2e-3, 2e-5)
_AT_ONCE_S = 1e-6
"""A step that follows another begins at its end, to the bit."""


class Cut(NamedTuple):
    """From dispatch until the next step composed takes a request along."""

    seconds: float
    wrong: float
    """Share of joined steps, and of those before them, that this explains wrongly."""
    wrong_at_least: float
    """Likewise of the least time to the engine's queue."""


def main() -> None:
    """Print the cut of an experiment's front-end run, and errors of mean TTFT with the least time and with the cut."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, help="record.py's --out, of the experiment's name")
    parser.add_argument("--page", type=Path, help="documentation to put the table into")
    arguments = parser.parse_args()
    folder = arguments.records
    experiment = EXPERIMENTS[folder.name]
    profile, believed = load_profile(experiment.profile), load_profile(str(folder / POLICY_PROFILE))
    told, clocks = read_record(folder / f"{FRONT_END}-load"), read_clocks(folder / f"{FRONT_END}-load")
    assert clocks is not None
    least_s = handover_time(told, clocks)
    cut = admission_cut(told, folder / f"{FRONT_END}-load", least_s)
    front_end = front_end_times(told, clocks, service_time(read_record(folder / f"{FRONT_END}-burst")))
    sooner = replace(front_end, ingress_s=front_end.ingress_s - least_s + cut.seconds)
    print(
        f"least {1e3 * least_s:.2f} ms, wrong for {cut.wrong_at_least:.1%}; "
        f"cut {1e3 * cut.seconds:.2f} ms, wrong for {cut.wrong:.1%}"
    )
    rows = []
    for run in experiment.runs:
        if run.name.startswith(FRONT_END) or np.isinf(run.load) or not (folder / run.name / MANIFEST).exists():
            continue
        live, own = read_record(folder / run.name), host_of(folder / run.name, profile)
        errors = []
        for host in (None, own):
            for times in (front_end, sooner):
                simulated, _ = simulate_like(live, profile, times, believed, host)
                error = next(d.error for d in differences(simulated, live) if d[:2] == ("ttft", "mean"))
                errors.append("-" if np.isnan(error) else f"{error:+z.1%}")
        rows.append((run.name, *errors))
    head = ("run", "mean TTFT", "joining sooner", "own host", "own host, joining sooner")
    text = markdown(head, rows)
    print(text)
    if arguments.page:
        put_into(arguments.page, {f"{folder.name} admission": text})


def admission_cut(record: RunRecord, folder: Path, least_s: float) -> Cut:
    """Return after how long a dispatched request was taken along by the next step composed, as most of them show.

    A step is composed once the one before last is taken in, as the engine's loop has it, with its recorded host.

    Args:
        record: of a live run.
        folder: of it.
        least_s: the least seconds from the front end to the engine's queue.
    """
    composed_s, joined = zip(*_offered(record, folder), strict=True)
    before_s, was_joined = np.array(composed_s), np.array(joined)
    wrong = [float(np.mean((before_s >= cut) != was_joined)) for cut in (*_CUTS_S, least_s)]
    best = int(np.argmin(wrong[:-1]))
    return Cut(float(_CUTS_S[best]), wrong[best], wrong[-1])


def _offered(record: RunRecord, folder: Path) -> list[tuple[float, bool]]:
    """Return, of each request, the step that it joined and the one before: how long it had been dispatched when that
    was composed, and whether it joined it."""
    steps, requests = record.steps, record.requests
    assert steps is not None
    host = read_times(folder / HOST_FILE, HOST_COLUMNS, "steps", len(steps["start_s"]))
    offered = []
    for rank in np.unique(steps["dp_rank"]):
        mine = steps["dp_rank"] == rank
        start_s, duration_s = steps["start_s"][mine], steps["duration_s"][mine]
        composed_s = _composed_s(start_s, start_s + duration_s, host["launch_s"][mine], host["update_s"][mine])
        for request in np.flatnonzero(requests["dp_rank"] == rank):
            step = int(np.searchsorted(start_s, requests["scheduled_s"][request] - _AT_ONCE_S))
            for offering in (step - 1, step):
                if 0 <= offering < len(start_s) and not np.isnan(composed_s[offering]):
                    waited_s = float(composed_s[offering] - requests["dispatched_s"][request])
                    offered.append((waited_s, offering == step))
    return offered


def _composed_s(start_s: FloatArray, end_s: FloatArray, launch_s: FloatArray, update_s: FloatArray) -> FloatArray:
    """[num_steps] when each step of a rank began to be composed; NaN where it did not follow two others at once."""
    composed_s = np.full(len(start_s), np.nan)
    follows = np.concatenate([[False], start_s[1:] - end_s[:-1] < _AT_ONCE_S])
    for i in range(2, len(start_s)):
        if follows[i] and follows[i - 1]:
            launched_s = composed_s[i - 1] + launch_s[i - 1]
            composed_s[i] = np.fmax(end_s[i - 2], launched_s) + update_s[i - 2]
    return composed_s


if __name__ == "__main__":
    main()
