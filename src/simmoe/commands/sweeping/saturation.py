"""Where a deployment saturates, and the rates worth simulating around it.

A policy's saturation rate is measured in an offline run of the sweep's own requests, all present at time 0: requests
a second that get their first token, up to the last one. The deployment never lacks work, prompts compete with the
decodes they leave behind as they would online, and the drain after the last prompt, in which it is idle by
construction, does not count. Offered more than this, the queue grows for as long as requests arrive.

Load 1 is the baseline's rate (vLLM+K's), not the largest: a policy that sorts what waits, as tiers do, has all of it to
sort offline and so saturates later there than it can online.
"""

from __future__ import annotations

from collections.abc import Iterable

from simmoe.commands.sweeping.cells import Metrics
from simmoe.errors import SimmoeError

#: Load, as a share of the baseline's saturation rate: from light to just above.
LOADS = (0.25, 0.5, 0.7, 0.85, 1.0, 1.15)


def saturation_rate(offline: Metrics, policy: str) -> float:
    """Return a policy's saturation rate, requests a second, from the metrics of its offline run.

    Raises:
        SimmoeError: no request got a first token.
    """
    rate = offline["first_tokens_per_s"]
    if not rate > 0:
        raise SimmoeError(
            f"policy '{policy}' finished none of {offline['injected']:.0f} requests offline "
            f"({offline['rejected']:.0f} rejected): no saturation point; raise --num-gpu-blocks or shorten the requests"
        )
    return rate


def rates_around(saturation_per_s: float, loads: Iterable[float] = LOADS) -> tuple[float, ...]:
    """Return rates at the loads given, to three significant digits, ascending.

    >>> rates_around(80.0, loads=(0.5, 1.15))
    (40.0, 92.0)
    """
    return tuple(sorted({float(f"{load * saturation_per_s:.3g}") for load in loads}))
