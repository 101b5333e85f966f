"""Take every measurement that simmoe ships again: ``python benchmarks/campaign --limit-s 1500``.

On a machine with one or more NVIDIA GPUs and simmoe[live]; nothing is fetched. What is done is skipped, what is stopped
goes on in the next call, on this machine or, from the archives in OUT/packed unpacked into OUT, on another one.
``--list`` says what there is, in order. Variables of the environment go before the plan's own.
"""

from __future__ import annotations

import argparse
import math
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from job import FAILED, Folder, Job
from pace import Pace
from pack import pack
from plan import jobs
from runner import Campaign

from simmoe.errors import MissingDependency, SimmoeError, did_you_mean
from simmoe.live.measure import card
from simmoe.live.measure.pinning import physical_cores

LOG, PACE = "campaign.log", "pace.csv"


def main(plan: Sequence[Job], argv: Sequence[str] | None = None) -> int:
    """Run a plan; return the exit code: 0 if no job failed, 1 if one did, 2 for a wrong call, 130 interrupted."""
    parser = argparse.ArgumentParser(
        prog="campaign", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("runs/campaign"), help="folder of results; default: runs/campaign"
    )
    parser.add_argument("--limit-s", type=float, default=math.inf, help="seconds to be done in")
    parser.add_argument("--only", type=lambda text: text.split(","), help="names of jobs, a,b,...; in the plan's order")
    parser.add_argument("--gpus", type=lambda text: text.split(","), help="as CUDA_VISIBLE_DEVICES; default: all")
    parser.add_argument("--min-pace", type=float, default=0.0, help="million turns a second that tables want of a host")
    parser.add_argument("--pack", type=Path, help="folder of the archives; default: OUT/packed")
    parser.add_argument("--list", action="store_true", help="print the jobs, and how far they have come")
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the command lines, with the variables of the environment that are set for them",
    )
    arguments = parser.parse_args(argv)
    names = [job.name for job in plan]
    for name in arguments.only or ():
        if name not in names:
            parser.error(f"no job '{name}'{did_you_mean(name, names)}; see --list")
    chosen = [job for job in plan if not arguments.only or job.name in arguments.only]
    if arguments.list:
        for line in listed(chosen, arguments.out):
            print(line)
        return 0
    if arguments.dry_run:
        for job in chosen:
            left_s = min(arguments.limit_s, job.expected_s)
            variables = [f"{name}={shlex.quote(value)}" for name, value in job.variables().items()]
            words = job.words(sys.executable, arguments.out.resolve() / job.name, left_s)
            print(*variables, shlex.join(words))
        return 0
    try:
        gpus = arguments.gpus or visible_gpus()
    except SimmoeError as error:
        parser.error(str(error))
    return run(chosen, gpus, arguments)


def listed(plan: Sequence[Job], out: Path) -> list[str]:
    """Return a line a job: GPUs, seconds expected, what it wants, and how far it has come."""
    lines = [f"{'job':<34} {'GPUs':>4} {'expected':>9}  wants        state"]
    for job in plan:
        folder = Folder(job, out)
        state = "done" if folder.is_done() else folder.state["state"] or "-"
        wants = "a fast host" if job.fast_host else ""
        lines.append(f"{job.name:<34} {job.num_gpus:>4} {job.expected_s:>7.0f} s  {wants:<12} {state}")
    return lines


def visible_gpus() -> list[str]:
    """Return the names of the GPUs this process may use.

    Raises:
        MissingDependency: there is none, or no vLLM.
    """
    if find_spec("vllm") is None:
        raise MissingDependency("a campaign needs vLLM and NVIDIA GPUs: pip install 'simmoe[live]'")
    rows = card.query("index")
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named else [row[0] for row in rows]


def shares(gpus: Sequence[str]) -> dict[str, set[int]]:
    """Return the CPUs of each GPU's jobs: whole physical cores in equal shares, whether the others have jobs or not."""
    cores = physical_cores(os.sched_getaffinity(0))
    each = len(cores) // len(gpus)
    return {gpu: {cpu for core in cores[i * each : (i + 1) * each] for cpu in core} for i, gpu in enumerate(gpus)}


def run(chosen: Sequence[Job], gpus: Sequence[str], arguments: argparse.Namespace, pace: Pace | None = None) -> int:
    """Run the jobs, keep log and pace, and print the table."""
    out: Path = arguments.out
    packed = arguments.pack or out / "packed"
    out.mkdir(parents=True, exist_ok=True)
    began_s = time.monotonic()
    pace = pace or Pace()

    def say(text: str) -> None:
        note(f"[{time.monotonic() - began_s:7.1f} s] {text}")

    def note(line: str) -> None:
        print(line, flush=True)
        with (out / LOG).open("a", encoding="utf-8") as log:
            print(line, file=log)

    seen = 0

    def leave(folders: dict[str, list[Path]]) -> None:
        nonlocal seen
        with (out / PACE).open("a", encoding="utf-8") as file:
            new = pace.samples[seen:]
            seen += len(new)
            file.writelines(f"{at_s:.3f},{found:.2f}\n" for at_s, found in new)
        pack(out.resolve(), folders, packed)
        for name in (LOG, PACE):
            shutil.copyfile(out / name, packed / name)

    say(f"{time.strftime('%Y-%m-%d %H:%M:%S UTC', time.gmtime())}, GPUs {','.join(gpus)}, jobs {len(chosen)}")
    campaign = Campaign(
        chosen,
        gpus,
        out,
        say,
        limit_s=arguments.limit_s,
        min_pace=arguments.min_pace,
        pace=pace,
        cpus=shares(gpus),
        packed=leave,
    )
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # by nohup, or in the background
            signal.signal(number, campaign.interrupt)
    campaign.run()
    if campaign.is_interrupted:
        say("interrupted")
    rows = [("job", "state", "seconds", "made"), *campaign.table()]
    widths = [max(len(row[i]) for row in rows) for i in range(3)]
    found = pace.since(began_s)
    if found is not None:
        say(f"the host made {found} million turns a second at the median")
    for name, state, seconds, made in rows:
        note(f"{name:<{widths[0]}}  {state:<{widths[1]}}  {seconds:>{widths[2]}}  {made}".rstrip())
    sizes = [path.stat().st_size for path in packed.glob("*.tar.gz")]
    note(f"{len(sizes)} archives, {sum(sizes) / 1e6:.1f} MB in all, in {packed}")
    shutil.copyfile(out / LOG, packed / LOG)
    return 130 if campaign.is_interrupted else int(FAILED in campaign.told.values())


if __name__ == "__main__":
    sys.exit(main(tuple(jobs())))
