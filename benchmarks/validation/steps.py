"""Hold tables against live steps: ``python benchmarks/validation/steps.py docs/results/validation/repeated``.

Every step that followed another without a pause, with the time that the engine's loop gives it: on the table's host
and with what the host took for each step as recorded. What is off then is not the host. How long each prompt of a step
was is not recorded; they are taken to be alike.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from analyse import POLICY_PROFILE
from plan import EXPERIMENTS, FRONT_END
from sensitivity import FloatArray
from tables import markdown, put_into

from simmoe.commands.record_times import read_times
from simmoe.commands.recorded_config import captured_sizes, live_engine
from simmoe.live.driving.recording import HOST_COLUMNS, HOST_FILE
from simmoe.profiles.catalog import Profile, load_profile
from simmoe.profiles.loop import paces
from simmoe.profiles.shape import StepShape
from simmoe.profiles.weights import weights_of_table
from simmoe.records import MANIFEST, read_record

#: Upper ends of the classes of size: tokens of steps with prompts, sequences of decode-only ones.
PROMPT_SIZES, DECODE_SIZES = (1024, 1280, 2048, 8192), (8, 64, 256, 1024)


class LiveSteps(NamedTuple):
    """Steps that followed another without a pause, [num_steps] each."""

    num_prefill_tokens: FloatArray
    num_tokens: FloatArray
    launch_s: FloatArray
    """What the host took to compose and launch it."""
    live_s: FloatArray
    """From the device's end of the step before to its own."""
    on_table_s: FloatArray
    """That as the loop has it with the table's host."""
    on_own_s: FloatArray
    """And with the host's recorded times."""


def main() -> None:
    """Print the table of an experiment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, help="record.py's --out, of the experiment's name")
    parser.add_argument("--page", type=Path, help="documentation to put the table into")
    arguments = parser.parse_args()
    folder = arguments.records
    runs = [folder / run.name for run in EXPERIMENTS[folder.name].runs if run.name != f"{FRONT_END}-burst"]
    runs = [run for run in runs if (run / MANIFEST).exists()]
    profiles = [load_profile(name) for name in (EXPERIMENTS[folder.name].profile, str(folder / POLICY_PROFILE))]
    if len({weights_of_table(profile.provenance) for profile in profiles}) == 1:
        del profiles[1]  # an earlier fit of the same samples
    text = steps_table([live_steps(runs, profile) for profile in profiles])
    print(text)
    if arguments.page:
        put_into(arguments.page, {f"{folder.name} steps": text})


def live_steps(runs: Sequence[Path], profile: Profile) -> LiveSteps:
    """Return the steps of live records.

    Args:
        runs: the records' folders.
        profile: what gives the steps their times.
    """
    columns = zip(*(row for run in runs for row in _followed(run, profile)), strict=True)
    return LiveSteps(*(np.array(column, dtype=np.float64) for column in columns))


def _followed(folder: Path, profile: Profile) -> Iterator[tuple[float, ...]]:
    """Yield LiveSteps' columns of each step of a record that followed another, both with their host's times known."""
    record = read_record(folder)
    steps, engine = record.steps, live_engine(record)
    assert steps is not None
    host = read_times(folder / HOST_FILE, HOST_COLUMNS, "steps", len(steps["start_s"]))
    cost = profile.captured_at(captured_sizes(record)).keyed_cost(engine.async_scheduling, engine.graph_ks)
    end_s = steps["start_s"] + steps["duration_s"]
    for rank in np.unique(steps["dp_rank"]):
        mine = np.flatnonzero(steps["dp_rank"] == rank)
        # a step begins at the end of the one before, to the bit, or later
        follows = np.concatenate([[False], steps["start_s"][mine[1:]] - end_s[mine[:-1]] < 1e-6])
        parts, own = [], []
        for i in mine.tolist():
            tokens, prompts = int(steps["num_prefill_tokens"][i]), int(host["num_prefill_seqs"][i])
            each = tokens / max(prompts, 1)
            shape = StepShape(
                tokens, int(prompts * each * (each + 1) / 2), prompts, int(steps["num_decode_tokens"][i]),
                int(steps["kv_tokens"][i]), int(steps["k_exec"][i]),
            )  # fmt: skip
            parts.append(cost.parts_s(shape))
            known = not np.isnan(host["launch_s"][i] + host["update_s"][i])
            own.append(parts[-1].on_host(host["launch_s"][i], host["update_s"][i]) if known else parts[-1])
        on_table = paces(zip(follows, parts, strict=True))
        on_own = paces(zip(follows, own, strict=True))
        live_s = np.diff(end_s[mine], prepend=np.nan)
        for i, followed, seconds in zip(
            mine.tolist(), follows, zip(live_s, on_table, on_own, strict=True), strict=True
        ):
            launch_s, tokens = host["launch_s"][i], steps["num_prefill_tokens"][i]
            if followed and not np.isnan(launch_s):
                yield tokens, tokens + steps["num_decode_tokens"][i], launch_s, *seconds


def steps_table(by_profile: Sequence[LiveSteps]) -> str:
    """Return the Markdown table of all time predicted over all time live, less 1, by kind and size.

    Args:
        by_profile: the same steps by the experiment's profile, and by its policies' if that is of other weights.
    """
    predicted = ("shipped", "own host", "policies', own host")[: 1 + len(by_profile)]
    head = ("steps", "number", "live, ms", "launch, ms: p5 / p50 / p95", *predicted)
    rows = []
    for name, steps_of_kind, sizes in (("with prompts", True, PROMPT_SIZES), ("decode-only", False, DECODE_SIZES)):
        for least, most in zip((0, 0, *sizes), (sizes[-1], *sizes), strict=False):
            first = by_profile[0]
            mine = (first.num_prefill_tokens > 0) == steps_of_kind
            mine &= (first.num_tokens > least) & (first.num_tokens <= most)
            if not mine.any():
                continue
            launch = " / ".join(f"{1e3 * value:.1f}" for value in np.percentile(first.launch_s[mine], (5, 50, 95)))
            errors = [steps.on_own_s[mine].sum() / steps.live_s[mine].sum() - 1 for steps in by_profile]
            on_table = first.on_table_s[mine].sum() / first.live_s[mine].sum() - 1
            size = name if (least, most) == (0, sizes[-1]) else f"{least + 1:,} to {most:,}"
            cells = (f"{error:+z.1%}" for error in (on_table, *errors))
            rows.append((size, f"{mine.sum():,}", f"{1e3 * first.live_s[mine].mean():.1f}", launch, *cells))
    return markdown(head, rows)


if __name__ == "__main__":
    main()
