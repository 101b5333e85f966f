"""When live requests join steps: ``python benchmarks/validation/joining.py docs/results/validation``.

Of each experiment the least time from the front end to the engine's queue, and the time after which a request, once
dispatched, is in the next step composed, as explains most of what a record shows; and how many steps joined, and just
before those, each explains wrongly.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
from plan import EXPERIMENTS, FRONT_END
from tables import markdown, put_into

from simmoe.commands.front_end import handover_time, read_clocks
from simmoe.commands.joining import Cut, joining_cut, read_loop
from simmoe.records import MANIFEST, read_record


def main() -> None:
    """Print a row an experiment: by its front-end run, and over all its online runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, help="folder of the experiments' folders")
    parser.add_argument("--page", type=Path, help="documentation to put the table into")
    arguments = parser.parse_args()
    rows = []
    for name, experiment in EXPERIMENTS.items():
        least_s, told = told_by(arguments.records / name / f"{FRONT_END}-load")
        online = [run.name for run in experiment.runs if not (run.name.startswith(FRONT_END) or np.isinf(run.load))]
        folders = [arguments.records / name / run for run in online]
        cuts = [told_by(folder)[1] for folder in folders if (folder / MANIFEST).exists()]
        lowest_s, highest_s = (bound(cut.seconds for cut in cuts) for bound in (min, max))
        rows.append(
            (
                name,
                f"{1e3 * least_s:.2f} ms, {told.wrong_at_least:.1%}",
                f"{1e3 * told.seconds:.2f} ms, {told.wrong:.1%}",
                f"{1e3 * lowest_s:.2f} to {1e3 * highest_s:.2f} ms",
                f"{sum(cut.wrong < cut.wrong_at_least for cut in cuts)} of {len(cuts)}",
            )
        )
    head = ("experiment", "least to the queue", "told best", "of each run", "fewer told wrongly")
    text = markdown(head, rows)
    print(text)
    if arguments.page:
        put_into(arguments.page, {"joining": text})


def told_by(folder: Path) -> tuple[float, Cut]:
    """Return the least seconds from a run's front end to its engine's queue, and the cut of its requests."""
    record, clocks = read_record(folder), read_clocks(folder)
    assert clocks is not None
    least_s = handover_time(record, clocks)
    cut = joining_cut(record, read_loop(folder, record), least_s)
    assert cut is not None
    return least_s, cut


if __name__ == "__main__":
    main()
