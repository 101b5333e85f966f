"""What went wrong, from the end of an engine's log."""

from __future__ import annotations

import re

_OURS = re.compile(r"\bsimmoe\.errors\.\w+: (.*)")
_RAISED = re.compile(r"\b\w*(?:Error|Exception): ")

_NUM_LINES = 400
"""Of the log's end: a failure's tracebacks, one in each of the engine's processes."""


def last_failure(log: str) -> str:
    """Return the line that says why an engine ended; empty where the log is.

    One of simmoe's own says what it means. Else the last exception counts, and the last line where there is none.

    >>> last_failure("x simmoe.errors.PolicyError: rank 0: policy P: boom\\nEngineDeadError: see above\\nbye")
    'rank 0: policy P: boom'
    >>> last_failure("RuntimeError: no weights\\nbye"), last_failure("killed\\n")
    ('RuntimeError: no weights', 'killed')
    """
    lines = log.strip().splitlines()[-_NUM_LINES:]
    ours = [match[1] for line in lines if (match := _OURS.search(line))]
    raised = [line for line in lines if _RAISED.search(line)]
    found = ours[-1:] or raised[-1:] or lines[-1:]
    return found[0].strip() if found else ""
