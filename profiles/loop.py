"""The pace of steps that follow one another, as vLLM's loop runs them.

With asynchronous scheduling two steps are under way. The host composes and launches a step once it has taken in the one
before last, the device runs it once it is done with the step before and can begin (of a graph, nearly when all is
launched), no sooner done than all is launched; the step before is taken in when it is done and this one is launched. In
a train of like steps each takes the longer of what device and host need. Among unlike steps the host launches ahead
while a long one runs, and is late after a short one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from simmoe.profiles.shape import StepParts


def paces(steps: Iterable[tuple[bool, StepParts]]) -> Iterator[float]:
    """Yield the seconds from the device's end of the step before to that of each step.

    Of a step that follows none they count from when it is composed.

    Args:
        steps: whether each follows the one before without a pause, and what it takes.
    """
    free_s = 0.0  # when the host is to compose the next step, and when the device has run all it was given
    ended_s = 0.0
    before = StepParts(0.0)
    for follows, parts in steps:
        composed_s = free_s if follows else 0.0
        launched_s = composed_s + parts.launch_s
        ready_s = composed_s + parts.wait_s
        began_s = max(ready_s, ended_s) if follows else ready_s
        end_s = began_s + parts.device_s
        if began_s == ended_s and end_s >= launched_s:
            yield parts.device_s
        else:
            end_s = max(end_s, launched_s)
            yield end_s - (ended_s if follows else 0.0)
        free_s = max(ended_s, launched_s) + before.update_s if follows else launched_s
        ended_s, before = end_s, parts
