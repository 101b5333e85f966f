"""One command measured as a whole process, beside a loop that says how fast the machine is just then."""

from __future__ import annotations

import heapq
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

_FOLDER = Path(__file__).resolve().parent.parent


class Measurement(NamedTuple):
    """One run of one command."""

    cpu_s: float
    """User and system time of the process and of those it waited for."""
    wall_s: float
    peak_mb: float
    """Largest resident set of one process."""
    calibration_s: float
    """Time of the calibration loop, mean of before and after."""

    @property
    def ratio(self) -> float:
        """CPU time in units of the calibration loop: what can be compared between machines and between hours."""
        return self.cpu_s / self.calibration_s


def measure(arguments: str, environment: Mapping[str, str]) -> Measurement:
    """Run ``simmoe`` once with these arguments; what it writes goes to a folder that is thrown away.

    Raises:
        SystemExit: it failed.
    """
    before = calibrate()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "simmoe", *arguments.split()]
        if "--help" not in command:
            command += ["--out", str(Path(folder) / "out")]
        with open(os.devnull, "wb") as nothing, open(Path(folder) / "stderr", "w+b") as errors:
            began = time.perf_counter()
            process = subprocess.Popen(command, stdout=nothing, stderr=errors, env=dict(environment), cwd=_FOLDER)
            _, status, usage = os.wait4(process.pid, 0)
            wall_s = time.perf_counter() - began
            process.returncode = os.waitstatus_to_exitcode(status)
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip()
    if process.returncode:
        sys.exit(f"simmoe {arguments} ended with {process.returncode}: {said}")
    cpu_s = usage.ru_utime + usage.ru_stime
    return Measurement(cpu_s, wall_s, usage.ru_maxrss / 1024, (before + calibrate()) / 2)


class _Item:
    __slots__ = ("count", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0


def calibrate() -> float:
    """Return the CPU seconds of a fixed amount of work of the simulator's kind: objects, a heap, floats, a dict."""
    began = time.process_time()
    items = [_Item() for _ in range(64)]
    heap: list[tuple[float, int]] = []
    seen: dict[int, float] = {}
    now = 0.0
    for index in range(120_000):
        item = items[index & 63]
        item.count += 1
        item.total += now
        heapq.heappush(heap, (now + (index * 7919 % 1000) * 1e-3, index))
        if len(heap) > 512:
            now, due = heapq.heappop(heap)
            seen[due & 4095] = now
    return time.process_time() - began
