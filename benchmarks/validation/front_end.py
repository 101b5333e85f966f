"""The front end's times, from the two runs of the plan that are for nothing else."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from simmoe.records import RunRecord
from simmoe.simulator.config import FrontEndConfig

FloatArray = npt.NDArray[np.float64]

_ROUNDING_S = 1e-6


def front_end_times(burst: RunRecord, load: RunRecord) -> FrontEndConfig:
    """Return what a front end adds to what an engine takes.

    * The burst's requests leave their front end one by one (some in clumps): the mean distance is the work on one.
    * Under load, requests take ``ingress_s`` and that work on average from their arrival to the engine.
    * The time from the end of a step, on the device, to its first tokens' arrival at the client is a line in the step's
      tokens, through the means of the lower and of the upper half of the tokens.

    Args:
        burst: of requests that arrive at once at one rank.
        load: of Poisson arrivals, its steps recorded.
    """
    service_s = float(np.mean(np.diff(np.sort(burst.requests["dispatched_s"]))))
    requests = load.requests
    ingress_s = float(np.mean(requests["dispatched_s"] - requests["arrival_s"])) - service_s
    tokens, egress_s = first_token_egress(load)
    few = tokens <= np.median(tokens)
    centres = [(np.mean(tokens[half]), np.mean(egress_s[half])) for half in (few, ~few)]
    (few_tokens, few_s), (many_tokens, many_s) = centres
    per_token_s = max(0.0, float((many_s - few_s) / (many_tokens - few_tokens)))
    constant_s = max(0.0, float(few_s - per_token_s * few_tokens))
    return FrontEndConfig(
        ingress_s=max(0.0, ingress_s),
        egress_s=constant_s,
        ingress_service_s=service_s,
        egress_per_token_s=per_token_s,
    )


def first_token_egress(record: RunRecord) -> tuple[FloatArray, FloatArray]:
    """Return, a request, the tokens of the step that made its first one, and the seconds from that step's end.

    That step is the one the request was scheduled in; the plan's loads leave no prompt cut.
    """
    steps, requests = record.steps, record.requests
    assert steps is not None
    tokens, egress_s = [], []
    for rank in np.unique(steps["dp_rank"]):
        prefill = (steps["dp_rank"] == rank) & (steps["num_prefill_tokens"] > 0)
        starts_s = steps["start_s"][prefill]
        mine = requests["dp_rank"] == rank
        step = np.searchsorted(starts_s, requests["scheduled_s"][mine] - _ROUNDING_S)
        tokens.append(steps["num_decode_tokens"][prefill][step].astype(np.float64) + 1)
        egress_s.append(requests["first_token_s"][mine] - (starts_s + steps["duration_s"][prefill])[step])
    return np.concatenate(tokens), np.concatenate(egress_s)
