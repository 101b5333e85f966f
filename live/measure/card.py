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
        MissingDependency: there is no nvidia-smi, no card, or no answer that has a value a field.
    """
    if shutil.which("nvidia-smi") is None:
        raise MissingDependency("measuring needs an NVIDIA card: nvidia-smi is not on the PATH")
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        if visible.strip() in ("", "-1"):
            raise MissingDependency(f"measuring needs an NVIDIA card: CUDA_VISIBLE_DEVICES={visible!r} names none")
        command += ["-i", visible]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    rows = [[value.strip() for value in line.split(",")] for line in done.stdout.strip().splitlines()]
    if done.returncode or not rows or any(len(row) != len(fields) for row in rows):
        said = " ".join((done.stdout + done.stderr).split())
        raise MissingDependency(f"nvidia-smi found no card: {said or 'it said nothing'}")
    return rows


def clocks() -> dict[str, float]:
    """Return the first card's clocks, power and temperature now; what the driver does not report is left out."""
    values = dict(zip(_CLOCKS.values(), query(*_CLOCKS)[0], strict=True))
    return {name: float(value) for name, value in values.items() if value.replace(".", "", 1).isdigit()}


def refuse_busy(num_cards: int = 1) -> None:
    """Raise when another program uses one of the first cards this process may use.

    Raises:
        LiveError: memory or processors in use, and how much; a card that does not say; or fewer cards.
        MissingDependency: as of :func:`query`.
    """
    cards = query("memory.used", "utilization.gpu")
    if len(cards) < num_cards:
        raise LiveError(f"{num_cards} cards are needed, this process may use {len(cards)}; see CUDA_VISIBLE_DEVICES")
    for i, told in enumerate(cards[:num_cards]):
        try:
            used_mib, busy_percent = map(float, told)
        except ValueError:
            raise LiveError(
                f"whether card {i} is busy is not known: nvidia-smi says {told[0]} MiB are in use and {told[1]}% of it "
                "(a part of a card, as MIG makes them, tells neither); measure on a whole card"
            ) from None
        if used_mib > 1024 or busy_percent > 5:
            raise LiveError(
                f"card {i} is busy ({used_mib:.0f} MiB in use, {busy_percent:.0f}% utilised): times measured beside "
                "another program are worthless; stop that program, or name another card in CUDA_VISIBLE_DEVICES"
            )
