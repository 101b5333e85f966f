"""The loads that are recorded: a burst, then Poisson arrivals at shares of the rate at which the burst drained."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from simmoe.live.measure import recording
from simmoe.live.measure.engine import MeasuredEngine, Prompt
from simmoe.profiles.recorded_steps import CALIBRATION
from simmoe.traces.budgets import truncated_normal
from simmoe.traces.summary import shipped

#: Mean and deviation of budgets, of the largest: N(16, 5) of 32, MoE-Prism's.
BUDGETS = (16 / 32, 5 / 32)


@dataclass(frozen=True)
class Poisson:
    """Poisson arrivals for some time."""

    name: str
    share: float
    """Of the rate at which the burst drained."""
    seconds: float


@dataclass(frozen=True)
class Loads:
    """What is recorded."""

    burst_requests: int = 400
    poisson: tuple[Poisson, ...] = (
        Poisson("poisson-85", 0.85, 20.0),
        Poisson(CALIBRATION, 0.7, 8.0),
        Poisson("poisson-50", 0.5, 20.0),
    )

    @classmethod
    def lasting(cls, seconds: float) -> Loads:
        """Return all of them, shortened alike so that arrivals last so many seconds together.

        The one a fit may look at is the last to be: no more than to a third of all.
        """
        full = cls()
        lasts_s = {each.name: each.seconds for each in full.poisson}
        share = seconds / sum(lasts_s.values())
        calibration_s = max(lasts_s[CALIBRATION] * share, min(lasts_s[CALIBRATION], seconds / len(lasts_s)))
        others = (seconds - calibration_s) / (sum(lasts_s.values()) - lasts_s[CALIBRATION])
        poisson = tuple(
            replace(each, seconds=calibration_s if each.name == CALIBRATION else each.seconds * others)
            for each in full.poisson
        )
        return cls(math.ceil(full.burst_requests * share), poisson)


def requests(number: int, k_max: int, seed: int) -> list[Prompt]:
    """Return requests with the lengths of Azure's conversations, by the summary simmoe ships, and normal budgets.

    Args:
        number: of requests.
        k_max: largest budget; mean and deviation are shares of it.
        seed: of everything drawn.
    """
    summary, _ = shipped()
    rng = np.random.default_rng((seed, 1))
    prompt, output = summary.lengths(rng.integers(0, len(summary), number), rng)
    mean, deviation = (share * k_max for share in BUDGETS)
    k = truncated_normal(number, mean, deviation, k_max, seed)
    return [Prompt(*row) for row in zip(prompt.tolist(), k.tolist(), output.tolist(), strict=True)]


async def record_loads(
    engine: MeasuredEngine,
    loads: Loads,
    k_max: int,
    path: Path,
    header: dict[str, Any],
    time_left_s: Callable[[], float],
    progress: Callable[[str], None],
) -> None:
    """Record what the file lacks and there is time for; Poisson runs are shortened, not below a third.

    Args:
        engine: idle.
        loads: what to record.
        k_max: the model's largest budget.
        path: of the recording.
        header: what the file says of model and engine.
        time_left_s: seconds left for recording.
        progress: told what goes on.
    """
    found = {r.name: r for r in recording.read(path)}
    mean, deviation = (share * k_max for share in BUDGETS)
    what = f"Azure conversation lengths, k ~ N({mean:g}, {deviation:g}) within 1..{k_max}"

    async def take(name: str, load: str, arrivals: list[tuple[float, Prompt]]) -> None:
        progress(f"recording {name}: {load}")
        taking = recording.record(engine, name, f"{load}; {what}", arrivals)
        with suppress(asyncio.TimeoutError):  # what is under way when time is up is stopped, and not kept
            found[name] = await asyncio.wait_for(
                taking, max(time_left_s(), 0.0) if math.isfinite(time_left_s()) else None
            )
            recording.append(found[name], header, path)

    if "burst" not in found:
        burst = requests(loads.burst_requests, k_max, 1)
        await take("burst", f"{len(burst)} requests at once", [(0.0, prompt) for prompt in burst])
    if "burst" not in found:
        return
    rate = found["burst"].drain_rate()
    for i, poisson in enumerate(loads.poisson):
        # the last requests take some seconds to drain
        seconds = min(poisson.seconds, time_left_s() - 8.0)
        if poisson.name in found or seconds < poisson.seconds / 3:
            continue
        number = max(1, math.ceil(rate * poisson.share * seconds))
        arrivals = recording.poisson(requests(number, k_max, 2 + i), rate * poisson.share, 2 + i)
        await take(poisson.name, f"{number} Poisson arrivals at {rate * poisson.share:.3f}/s", arrivals)
