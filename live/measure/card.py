"""The cards that are measured: name, driver and clocks, and whether anybody else is using them."""

from __future__ import annotations

import os
import shutil
import subprocess

from simmoe.errors import LiveError, MissingDependency

_CLOCKS = {
    "clocks.sm": "sm_mhz",
    "clocks.mem": "mem_mhz",
    "power.draw": "power_w",
    "temperature.gpu": "temperature_c",
}


def query(*fields: str) -> list[list[str]]:
    """Return ``nvidia-smi``'s values, a row for each card this process may use.

    Raises:
        MissingDependency: there is no nvidia-smi, or no card.
    """
    if shutil.which("nvidia-smi") is None:
        raise MissingDependency("measuring needs an NVIDIA card: nvidia-smi is not on the PATH")
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    if visible := os.environ.get("CUDA_VISIBLE_DEVICES"):
        command += ["-i", visible]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode or not done.stdout.strip():
        raise MissingDependency(f"nvidia-smi found no card: {(done.stdout + done.stderr).strip()}")
    return [[value.strip() for value in line.split(",")] for line in done.stdout.strip().splitlines()]


def clocks() -> dict[str, float]:
    """Return the first card's clocks, power and temperature now; what the driver does not report is left out."""
    values = dict(zip(_CLOCKS.values(), query(*_CLOCKS)[0], strict=True))
    return {name: float(value) for name, value in values.items() if value.replace(".", "", 1).isdigit()}


def refuse_busy(num_cards: int = 1) -> None:
    """Raise when another program uses one of the first cards this process may use.

    Raises:
        LiveError: memory or processors in use, and how much; or fewer cards.
    """
    cards = query("memory.used", "utilization.gpu")
    if len(cards) < num_cards:
        raise LiveError(f"{num_cards} cards are needed, this process may use {len(cards)}; see CUDA_VISIBLE_DEVICES")
    for i, (used_mib, busy_percent) in enumerate((float(a), float(b)) for a, b in cards[:num_cards]):
        if used_mib > 1024 or busy_percent > 5:
            raise LiveError(
                f"card {i} is busy ({used_mib:.0f} MiB in use, {busy_percent:.0f}% utilised): times measured beside "
                "another program are worthless; stop that program, or name another card in CUDA_VISIBLE_DEVICES"
            )
