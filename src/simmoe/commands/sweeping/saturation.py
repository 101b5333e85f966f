"""Where a deployment saturates, and the rates worth simulating around it.

A policy's saturation rate is what it finishes when it never lacks work: an offline run, every request present at time
0, of many times the requests that can run at once, counted over the middle half of the finishes so that neither filling
nor draining shows. Offered more than this, the queue grows for as long as requests arrive.

Load 1 is the baseline's rate (vLLM+K's), not the largest: a policy that sorts what waits, as tiers do, has all of it to
sort offline and so saturates later there than it can online.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from simmoe.commands.sweeping.cells import Cell, Metrics, workload_of
from simmoe.errors import SimmoeError

#: Load, as a share of the baseline's saturation rate: from light to just above.
LOADS = (0.25, 0.5, 0.7, 0.85, 1.0, 1.15)

#: An offline run has this many times the requests that can run at once. At 16 the rate is within 1% of that of a long
#: online overload for fixed-k, fifo and lanes on the shipped profile; at 4 it is 10% too high, for requests that start
#: together finish together.
ROUNDS = 16

#: Many ranks get fewer rounds, at least 4, rather than more requests than this.
MOST_REQUESTS = 65_536


def offline_cell(cell: Cell) -> Cell:
    """Return the cell that shows where the deployment and policy of ``cell`` saturate, at seed 0."""
    workload = workload_of(cell.workload)
    engine = cell.config.engine
    mean_tokens = float((workload.prompt_tokens + workload.output_tokens).mean())
    in_cache = (engine.num_gpu_blocks - 1) * engine.block_size / mean_tokens
    at_once = cell.config.num_ranks * max(1, min(engine.max_num_seqs, math.ceil(in_cache)))
    rounds = min(ROUNDS, max(4, MOST_REQUESTS // at_once))
    # At an infinite rate Poisson arrivals all come at 0 s, and rows may come again, which replay does not allow.
    offline = replace(cell.workload, requests=rounds * at_once, arrivals="poisson", rate=math.inf, seed=0)
    return replace(cell, workload=offline)


def saturation_rate(offline: Metrics, policy: str) -> float:
    """Return a policy's saturation rate, requests a second, from the metrics of its offline run.

    Raises:
        SimmoeError: no request finished.
    """
    if not offline["finished"]:
        raise SimmoeError(
            f"policy '{policy}' finished none of {offline['injected']:.0f} requests offline "
            f"({offline['rejected']:.0f} rejected): no saturation point; raise --num-gpu-blocks or shorten the requests"
        )
    rate = offline["steady_throughput_per_s"]
    return rate if math.isfinite(rate) else offline["request_throughput_per_s"]


def rates_around(saturation_per_s: float, loads: Iterable[float] = LOADS) -> tuple[float, ...]:
    """Return rates at the loads given, to three significant digits, ascending.

    >>> rates_around(80.0, loads=(0.5, 1.15))
    (40.0, 92.0)
    """
    return tuple(sorted({float(f"{load * saturation_per_s:.3g}") for load in loads}))
