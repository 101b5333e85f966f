"""The card that is measured: its name, driver and clocks, and whether anybody else is using it."""

from __future__ import annotations

import shutil
import subprocess

from simmoe.errors import LiveError, MissingDependency

_CLOCKS = {
    "clocks.sm": "sm_mhz",
    "clocks.mem": "mem_mhz",
    "power.draw": "power_w",
    "temperature.gpu": "temperature_c",
}


def query(*fields: str) -> list[str]:
    """Return ``nvidia-smi``'s values of the first card.

    Raises:
        MissingDependency: there is no nvidia-smi, or no card.
    """
    if shutil.which("nvidia-smi") is None:
        raise MissingDependency("measuring needs an NVIDIA card: nvidia-smi is not on the PATH")
    command = ["nvidia-smi", "-i", "0", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise MissingDependency(f"nvidia-smi found no card: {(done.stdout + done.stderr).strip()}")
    return [value.strip() for value in done.stdout.strip().split(",")]


def clocks() -> dict[str, float]:
    """Return the card's clocks, power and temperature now; what the driver does not report is left out."""
    values = dict(zip(_CLOCKS.values(), query(*_CLOCKS), strict=True))
    return {name: float(value) for name, value in values.items() if value.replace(".", "", 1).isdigit()}


def refuse_busy() -> None:
    """Raise when another program uses the card.

    Raises:
        LiveError: memory or processors in use, and how much.
    """
    used_mib, busy_percent = (float(value) for value in query("memory.used", "utilization.gpu"))
    if used_mib > 1024 or busy_percent > 5:
        raise LiveError(
            f"the card is busy ({used_mib:.0f} MiB in use, {busy_percent:.0f}% utilised): times measured beside "
            "another program are worthless; stop that program first"
        )
