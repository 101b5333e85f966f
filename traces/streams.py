"""Named random streams of one seed: each subsystem draws from its own, so changing one leaves the others alone."""

from __future__ import annotations

import hashlib

import numpy as np

#: Which rows are taken and in which order.
LENGTHS = "lengths"
#: Where requests of the shipped summary fall within their cells.
CELLS = "cells"
#: Gaps between arrivals, at unit mean: a rate only scales them.
ARRIVALS = "arrivals"
#: On and off phases of bursty arrivals.
PHASES = "phases"
#: Routing budgets.
BUDGETS = "budgets"


#: How streams come about, for the manifest.
DESCRIPTION = "PCG64 from SeedSequence(seed, spawn_key=sha256(name)); names: lengths, cells, arrivals, phases, budgets"


def stream(seed: int, name: str) -> np.random.Generator:
    """Return the generator of subsystem ``name`` under ``seed``.

    The spawn key is the name's SHA-256 (Python's ``hash`` changes from process to process), the bit generator PCG64.
    """
    digest = hashlib.sha256(name.encode()).digest()
    key = tuple(int.from_bytes(digest[i : i + 4], "little") for i in range(0, 16, 4))
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(entropy=seed, spawn_key=key)))
