"""The pace of steps that follow one another, as vLLM's loop runs them.

With asynchronous scheduling two steps are under way. The host composes and launches a step once it has taken in the one
before last, the device runs it once it is done with the step before and can begin (of a graph, nearly when all is
launched), no sooner done than all is launched; the step before is taken in when it is done and this one is launched. In
a train of like steps each takes the longer of what device and host need. Among unlike steps the host launches ahead
while a long one runs, and is late after a short one.

Workers in processes of their own (vLLM's executor ``mp``, as with tensor parallelism) launch steps one after another.
The loop composes a step though the one before is still being launched, and takes one in when the device is done with
it: a train of like steps then takes the longer of the device and the launch alone, unless taking in and composing last
longer than either, as of many hundred sequences.

With synchronous scheduling a step is composed once the one before has been taken in, whoever launches it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from simmoe.profiles.shape import StepParts


def paces(steps: Iterable[tuple[bool, StepParts]], distributed_executor_backend: str = "uni") -> Iterator[float]:
    """Yield the seconds from the device's end of the step before to that of each step.

    Of a step that follows none they count from when it is composed.

    Args:
        steps: whether each follows the one before without a pause, and what it takes.
        distributed_executor_backend: 'uni', the loop itself launches; 'mp', workers of their own do.
    """
    launches_apart = distributed_executor_backend == "mp"
    free_s = 0.0  # when the host is to compose the next step, the workers can launch it, the device has run all it has
    workers_free_s = ended_s = 0.0
    before = StepParts(0.0)
    for follows, parts in steps:
        composed_s = free_s if follows else 0.0
        begun_s = max(composed_s, workers_free_s) if follows and launches_apart else composed_s
        launched_s = begun_s + parts.launch_s
        ready_s = begun_s + parts.wait_s
        began_s = max(ready_s, ended_s) if follows else ready_s
        end_s = began_s + parts.device_s
        if began_s == ended_s and end_s >= launched_s:
            yield parts.device_s
        else:
            end_s = max(end_s, launched_s)
            yield end_s - (ended_s if follows else 0.0)
        host_free_s = composed_s if launches_apart else launched_s
        free_s = max(ended_s, host_free_s) + before.update_s if follows else host_free_s
        workers_free_s, ended_s, before = launched_s, end_s, parts


def synchronous_paces(steps: Iterable[tuple[bool, StepParts]]) -> Iterator[float]:
    """Yield the same of an engine that schedules synchronously.

    Args:
        steps: whether each was composed as soon as the one before had been taken in, and what it takes.
    """
    before = StepParts(0.0)
    for follows, parts in steps:
        yield (before.update_s if follows else 0.0) + parts.alone_s - parts.update_s
        before = parts
