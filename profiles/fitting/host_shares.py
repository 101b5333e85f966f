"""The host's share of a step by launch path as a fit finds it, what of it follows the output, and when graphs begin.

It is what best explains the pace of steps. Prompts beside decodes that are launched apart are seldom the host's in
trains of like steps, as measured points are: where the loop of a recorded engine was clocked, it is what the host took
for them. So it is of every step that workers of their own launch, one after another: a step after prompts waits for
their launch besides its own. How long before the end of a launch a graph can begin is told by the clocks too. All is
by least absolute relative error: a host that stalls tells little of one that does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from simmoe.profiles.fitting.evidence import launch_path, num_seqs
from simmoe.profiles.fitting.regression import FloatArray, least_absolute, least_absolute_terms
from simmoe.profiles.recorded_steps import RecordedStep
from simmoe.profiles.residuals import Predictor
from simmoe.profiles.samples import Sample
from simmoe.profiles.table import NO_SHARE, HostShare, MixedHost, StepTable

#: Fewer clocked steps tell nothing of the host.
LEAST_STEPS = 20

#: Seconds after the device was done with the step before: of decode-only steps, those launched later tell when a graph
#: can begin. The graph of one launched sooner may have waited for the device, not for its launch.
LATE_S = 1e-3

#: Fewer steps launched so late do not tell it.
LEAST_LATE = 10

#: Attention backends that launch prompts of more than so many tokens apart from decodes: latent attention has other
#: kernels for either, and takes shorter prompts as decodes. Source: vLLM 0.32.0, ``reorder_batch_threshold``.
APART_ABOVE = {"FLASH_ATTN_MLA": 512}


def update_share(recorded: Sequence[RecordedStep]) -> HostShare:
    """Return what the host takes to take a step in; nothing where it was not clocked."""
    clocked = [(step.num_seqs, step.update_s) for step in recorded if step.update_s is not None]
    if not clocked:
        return NO_SHARE
    columns = [[1.0, seqs] for seqs, _ in clocked]
    seconds = [update_s for _, update_s in clocked]
    return HostShare(*least_absolute_terms(columns, np.zeros(len(columns)), seconds, [None, None]).tolist())


def with_host_shares(
    table: StepTable,
    steps: Sequence[Sample],
    clock: Mapping[str, HostShare],
    recorded: Sequence[RecordedStep] = (),
    apart_above: int | None = None,
) -> StepTable:
    """Return the table with each launch path's share; a path never measured has that of the path before.

    A sequence takes the host as long however a step's kernels are launched: decode-only steps tell, where most of the
    sequences are and the host is seldom hidden.

    Args:
        table: with all that the device takes.
        steps: under the step clock.
        clock: the host clock's share by launch path, from which the search starts.
        recorded: steps of a served load, whose host may have been clocked.
        apart_above: prompt tokens above which those of a step are launched apart from its decodes; None: never.
    """
    mixed = None if apart_above is None else MixedHost(apart_above, NO_SHARE)

    def apart(sample: Sample) -> bool:
        is_apart = mixed is not None and mixed.is_apart(sample.num_prefill_tokens, sample.num_decode_seqs)
        return is_apart and launch_path(sample, table.captured_sizes) == "piecewise"

    clocks: dict[str, list[tuple[int, float]]] = {path: [] for path in (*table.host, "apart")}
    for step in recorded:
        if step.launch_s is not None and step.update_s is not None:
            path = "apart" if apart(step.sample) else launch_path(step.sample, table.captured_sizes)
            host_s = step.launch_s if table.launches_apart else step.launch_s + step.update_s
            clocks[path].append((step.num_seqs, host_s))
    told = {path: np.array(times).T for path, times in clocks.items() if len(times) >= LEAST_STEPS}
    hostless = Predictor(table, async_scheduling=True)
    shares: dict[str, HostShare] = {}
    before = HostShare(0.0, 0.0)
    for path in table.host:
        mine = [s for s in steps if launch_path(s, table.captured_sizes) == path and not ("apart" in told and apart(s))]
        if table.launches_apart and path in told:
            seqs, seconds = told[path]
            known = before.per_seq_s
            columns = np.ones((len(seqs), 1)) if known else np.stack([np.ones(len(seqs)), seqs], axis=1)
            terms = least_absolute_terms(columns, known * seqs, seconds, [None] * columns.shape[1]).tolist()
            before = HostShare(max(terms[0], before.base_s), known or terms[1])
        elif mine:
            device = np.array([hostless.device_s(s.shape) for s in mine])
            seqs = np.array([num_seqs(s) for s in mine], dtype=np.float64)
            measured = np.array([s.median_s for s in mine])

            known = before.per_seq_s

            def predicted(
                share: FloatArray, device: FloatArray = device, seqs: FloatArray = seqs, known: float = known
            ) -> FloatArray:
                steps: FloatArray = np.maximum(device, share[0] + (known or share[-1]) * seqs)
                return steps

            start = np.maximum(clock[path][: 1 if known else 2], 1e-6)
            found = least_absolute(predicted, measured, start).tolist()
            before = HostShare(max(found[0], before.base_s), known or found[1])
        shares[path] = before
    if "apart" not in told or mixed is None:
        return replace(table, host=shares, mixed_host=None)
    least_s, per_seq_s = shares["piecewise"]
    seqs, seconds = told["apart"]
    (base_s,) = least_absolute_terms(np.ones((len(seqs), 1)), per_seq_s * seqs, seconds, [None]).tolist()
    mixed = mixed._replace(share=HostShare(max(base_s, least_s), per_seq_s))
    return replace(table, host=shares, mixed_host=mixed)


def graph_tail_s(table: StepTable, recorded: Sequence[RecordedStep]) -> float | None:
    """Return how long before all of it is launched the device can begin a decode-only step's graph.

    A device that has run out of work begins a graph as soon as it can, and is done with it as long after as the graph
    takes: steps that were launched late tell by when they ended.

    Args:
        table: with all that the device takes.
        recorded: steps of a served load whose loop was clocked.
    Returns:
        None where too few of them were launched late.
    """
    late = [
        (step.late_s, step.sample)
        for step in recorded
        if step.late_s is not None and step.late_s > LATE_S and step.sample.kind == "decode"
    ]
    late = [(late_s, sample) for late_s, sample in late if launch_path(sample, table.captured_sizes) == "full"]
    if len(late) < LEAST_LATE:
        return None
    hostless = Predictor(table, async_scheduling=True)
    late_s = np.array([seconds for seconds, _ in late])
    device_s = np.array([hostless.device_s(sample.shape) for _, sample in late])

    def predicted(tail: FloatArray) -> FloatArray:
        steps: FloatArray = np.maximum(late_s - tail[0], 0.0) + device_s
        return steps

    measured = np.array([sample.median_s for _, sample in late])
    return float(least_absolute(predicted, measured, np.array([LATE_S]))[0])
