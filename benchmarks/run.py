"""Time simmoe as whole processes: start-up, simulation and the written record, on the CPU clock of the process.

    python benchmarks/run.py [--runs 5] [--data DIR] [NAME ...]

Prints, per case, the median CPU seconds with their spread, requests a CPU-second, and the median peak memory. Needs the
original Azure conversation trace in DIR, $SIMMOE_DATA or the user cache (`simmoe traces fetch azure-conv`).
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Case:
    """One command to time."""

    name: str
    num_requests: int
    arguments: str


COMMON = "run --trace azure-conv --clip-total-tokens 4096"
CASES = [
    Case("common: 10,000 requests, Poisson 3/s, one rank", 10_000, f"{COMMON} --requests 10000 --rate 3"),
    Case("two ranks, lanes, 6/s", 10_000, f"{COMMON} --requests 10000 --rate 6 --ranks 2 --policy lanes"),
    Case("offline, tiers, 10,000 waiting", 10_000, f"{COMMON} --requests 10000 --rate inf --policy tiers"),
    Case("step by step: the common case", 10_000, f"{COMMON} --requests 10000 --rate 3 --step-by-step"),
    Case("start-up: simmoe --help", 1, "--help"),
]


def measure(arguments: str, environment: dict[str, str]) -> tuple[float, float]:
    """Run simmoe once; return its CPU seconds and peak resident MB."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "simmoe", *arguments.split()]
        if arguments.startswith("run"):
            command += ["--out", str(Path(folder) / "record")]
        with open(os.devnull, "wb") as nothing:
            process = subprocess.Popen(command, stdout=nothing, stderr=subprocess.PIPE, env=environment)
            assert process.stderr is not None
            said = process.stderr.read()
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"simmoe {arguments} ended with {process.returncode}: {said.decode().strip()}")
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="cases whose name contains this; default: all")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--data", help="folder of the original traces; default: $SIMMOE_DATA")
    options = parser.parse_args()
    environment = {**os.environ, **({"SIMMOE_DATA": options.data} if options.data else {})}
    print(f"{'case':<48} {'CPU s':>8} {'min..max':>14} {'requests/CPU-s':>15} {'peak MB':>8}")
    for case in CASES:
        if options.names and not any(name in case.name for name in options.names):
            continue
        measure(case.arguments, environment)  # warm the page cache and the bytecode
        runs = [measure(case.arguments, environment) for _ in range(options.runs)]
        seconds = [cpu for cpu, _ in runs]
        median = statistics.median(seconds)
        spread = f"{min(seconds):.2f}..{max(seconds):.2f}"
        rate = f"{case.num_requests / median:,.0f}" if case.num_requests > 1 else ""
        memory = statistics.median(peak for _, peak in runs)
        print(f"{case.name:<48} {median:>8.2f} {spread:>14} {rate:>15} {memory:>8.0f}", flush=True)


if __name__ == "__main__":
    main()
