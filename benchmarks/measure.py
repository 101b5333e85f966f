"""One command measured as a whole process, in turns with a loop that says how fast the machine is just then."""

from __future__ import annotations

import heapq
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

_FOLDER = Path(__file__).resolve().parent.parent

#: The command runs this long between two calibrations; a long one longer, up to the share of its age below. What else
#: the machine does comes and goes within tenths of a second, and a calibration before and after would miss it.
SLICE_S = 0.04
SLICE_SHARE = 0.02

#: Turns of the calibration loop in one calibration, about 13 ms.
CALIBRATION_TURNS = 24_000


class Measurement(NamedTuple):
    """One run of one command."""

    cpu_s: float
    """User and system time of the process and of those it waited for."""
    wall_s: float
    """Time from start to end, calibrations left out; up to a slice too long."""
    peak_mb: float
    """Largest resident set of one process."""
    calibration_s: float
    """CPU time of one calibration, mean of those in between."""

    @property
    def ratio(self) -> float:
        """CPU time in units of the calibration: what can be compared between machines and between hours."""
        return self.cpu_s / self.calibration_s


def measure(arguments: str, environment: Mapping[str, str]) -> Measurement:
    """Run ``simmoe`` once with these arguments; what it writes goes to a folder that is thrown away.

    Every now and then it is stopped for the length of a calibration, so that both see the same machine.

    Raises:
        SystemExit: it failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "simmoe", *arguments.split()]
        if "--help" not in command:
            command += ["--out", str(Path(folder) / "out")]
        with open(os.devnull, "wb") as nothing, open(Path(folder) / "stderr", "w+b") as errors:
            process = subprocess.Popen(
                command, stdout=nothing, stderr=errors, env=dict(environment), cwd=_FOLDER, process_group=0
            )
            try:
                measurement = _watch(process)
            except BaseException:  # Ctrl-C does not reach another process group
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                raise
            errors.seek(0)
            said = errors.read().decode(errors="replace").strip()
    if process.returncode:
        sys.exit(f"simmoe {arguments} ended with {process.returncode}: {said}")
    return measurement


def _watch(process: subprocess.Popen[bytes]) -> Measurement:
    """Wait for the leader of a process group to end, calibrating in between."""
    began = time.perf_counter()
    calibrations = [calibrate()]
    stopped_s = time.perf_counter() - began
    while True:
        time.sleep(max(SLICE_S, SLICE_SHARE * (time.perf_counter() - began)))
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        if pid:
            break
        stopped_at = time.perf_counter()
        os.killpg(process.pid, signal.SIGSTOP)
        calibrations.append(calibrate())
        os.killpg(process.pid, signal.SIGCONT)
        stopped_s += time.perf_counter() - stopped_at
    wall_s = time.perf_counter() - began - stopped_s
    process.returncode = os.waitstatus_to_exitcode(status)
    cpu_s = usage.ru_utime + usage.ru_stime
    return Measurement(cpu_s, wall_s, usage.ru_maxrss / 1024, sum(calibrations) / len(calibrations))


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
    for index in range(CALIBRATION_TURNS):
        item = items[index & 63]
        item.count += 1
        item.total += now
        heapq.heappush(heap, (now + (index * 7919 % 1000) * 1e-3, index))
        if len(heap) > 512:
            now, due = heapq.heappop(heap)
            seen[due & 4095] = now
    return time.process_time() - began
