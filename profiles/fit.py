"""Raw samples to a step-cost table.

What a step costs from one to the next is the truth. It is the larger of what the device and what the host needed, and
the host is not always equally fast, so a step may have taken longer than its device needed, never less:

1. Steps clearly longer than the host clock's share were bound by the device. They give what attention adds.
2. What is left of every step bounds the device's time at its (size, k) from above, and so at every smaller size and k;
   so do device-clock times below the host's share, which no step can show. Rows within TRUST of the least such bound
   give the grid; those above it were held up by the host. Where noise turned the grid round, it is projected back.
3. What decoding sequences add to a step with prompt tokens, and then the host's share by launch path, are what best
   explains the steps (least absolute error). The host has more to do while it serves than between measured points, so a
   calibration recording's steps take part in its share, and in nothing else.

Without step-clock samples, the device clock's take their place. Samples marked ``held_out`` take no part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace

import numpy as np

from simmoe.errors import ProfileError
from simmoe.profiles.device_grid import context_knots, fit_device, slope_ramps
from simmoe.profiles.evidence import (
    Evidence,
    gather,
    host_clock,
    launch_path,
    left_graphs_aside,
    not_held_up,
    num_seqs,
)
from simmoe.profiles.regression import FloatArray
from simmoe.profiles.residuals import Predictor, Residual, residuals
from simmoe.profiles.samples import Sample, SampleHeader
from simmoe.profiles.table import PATHS, Attention, HostShare, StepTable

Run = tuple[SampleHeader, Sequence[Sample]]

#: Mixed steps must have been measured at contexts this many times apart to tell KV tokens from sequences.
CONTEXTS_APART = 4.0

#: Header fields in which runs fitted together must agree: they decide what a step computes and how.
_SHARED = (
    "model",
    "model_config",
    "dtype",
    "k_max",
    "k_granularity",
    "card",
    "num_cards",
    "captured_sizes",
    "block_size",
)


def fit_table(runs: Sequence[Run], name: str, status: str, summary: str, recorded: Sequence[Sample] = ()) -> StepTable:
    """Fit one table to the samples of one engine; its budgets are in sub-expert units.

    Args:
        runs: headers with their samples; several when the engine was measured in several settings or sittings.
        name: of the profile.
        status: one of table.STATUSES.
        summary: one line on model, card and execution mode.
        recorded: steps of real runs of the same engine, asynchronously scheduled. The table is checked on them; those
            not held out tell the host's share while it serves.
    Raises:
        ProfileError: runs of different engines, or no points of a kind that is needed.
    """
    header = _shared_header(runs)
    runs = [(head, [replace(s, k=s.k * head.k_granularity) for s in samples]) for head, samples in runs]
    recorded = [replace(s, k=s.k * header.k_granularity) for s in recorded]
    captured = tuple(header.captured_sizes)
    used = [(head, sample) for head, samples in runs for sample in samples if not sample.held_out]
    if not any(head.async_scheduling for head, _ in runs):
        raise ProfileError("no sample file is of an engine that schedules asynchronously; the fit needs one")
    clocked = [sample for head, sample in used if sample.clock == "host" and head.async_scheduling]
    if not clocked:
        raise ProfileError("no samples under the host clock: steps bound by the host cannot be told from others")
    clock = host_clock(clocked, captured)
    device = [sample for head, sample in used if sample.clock == "device" and head.async_scheduling]
    steps = [sample for head, sample in used if sample.clock == "step" and head.async_scheduling] or device
    # what ran without its graphs tells the host's share, and of the device nothing that steps with graphs do not
    with_graphs, device = ([s for s in rows if not left_graphs_aside(s, captured)] for rows in (steps, device))

    def of(kind: str) -> Evidence:
        return gather(kind, with_graphs, device, clock, captured)

    decodes, prefills = of("decode"), of("prefill")
    knots = context_knots(decodes.sure)
    decode = fit_device(decodes, captured, lambda s: slope_ramps(knots, s.num_decode_seqs, s.decode_kv_tokens))
    slopes = np.cumsum(decode.values).tolist()
    # The same tokens decoding do the same and sample more, so a step of prompt tokens takes no longer.
    prefill = fit_device(prefills, captured, lambda s: [s.prefill_kv_pairs, s.num_prefill_seqs], decode.grid)
    pair_s, prompt_s = prefill.values

    paths = PATHS if captured else PATHS[-1:]
    table = StepTable(
        name=name,
        status=status,
        summary=summary,
        k_max=header.k_max * header.k_granularity,
        k_granularity=header.k_granularity,
        block_size=header.block_size,
        num_gpu_blocks=header.num_gpu_blocks,
        ingress_s=header.front_end.get("ingress_s", 0.0),
        egress_s=header.front_end.get("egress_s", 0.0),
        captured_sizes=captured,
        captured_ks=tuple(k * header.k_granularity for k in header.captured_ks),
        prefill=prefill.grid,
        decode=decode.grid,
        decode_kv=tuple(zip(knots, slopes, strict=True)),
        attention=Attention(pair_s, prompt_s, 0.0, 0.0),
        host={path: HostShare(0.0, 0.0) for path in paths},
        provenance={},
    )
    table = replace(table, attention=_mixed_terms(table, not_held_up(of("mixed"))))
    serving = [sample for sample in recorded if not sample.held_out]
    table = replace(table, host=_host_shares(table, [*steps, *serving], clock))
    facts = {
        "steps": len(steps),
        "calibration_steps": len(serving),
        "steps_the_grids_rest_on": prefill.trusted + decode.trusted,
        "monotone_projection_moved_at_most": {"prefill": prefill.moved, "decode": decode.moved},
        "residuals": [row._asdict() for row in _checks(table, runs, recorded)],
    }
    return replace(table, provenance={"runs": [asdict(head) for head, _ in runs], "fit": facts})


def _checks(table: StepTable, runs: Sequence[Run], recorded: Sequence[Sample]) -> list[Residual]:
    rows: list[Residual] = []
    for header, samples in runs:
        scheduling = header.async_scheduling
        note = "" if scheduling else ", synchronous"
        graphs = [sample for sample in samples if not left_graphs_aside(sample, table.captured_sizes)]
        fitted = [sample for sample in graphs if not sample.held_out]
        held_out = [sample for sample in graphs if sample.held_out]
        rows += residuals(table, fitted, async_scheduling=scheduling, source=f"fitted{note}")
        rows += residuals(table, held_out, async_scheduling=scheduling, source=f"held out{note}")
        eager = [sample for sample in samples if left_graphs_aside(sample, table.captured_sizes)]
        source = f"fitted, without graphs{note}"
        rows += residuals(table.without_graphs(), eager, async_scheduling=scheduling, source=source)
    held_out = [sample for sample in recorded if sample.held_out]
    return rows + residuals(table, held_out, async_scheduling=True, source="recorded")


def _shared_header(runs: Sequence[Run]) -> SampleHeader:
    if not runs:
        raise ProfileError("no sample files given; a table is fitted to at least one")
    first = runs[0][0]
    for header, _ in runs[1:]:
        for name in _SHARED:
            if getattr(header, name) != getattr(first, name):
                raise ProfileError(
                    f"sample files disagree on {name}: {getattr(first, name)} and {getattr(header, name)}; "
                    f"fit one engine at a time"
                )
    return first


def _mixed_terms(table: StepTable, sure: Sequence[Sample]) -> Attention:
    """Return the attention terms with those of a mixed step, which explain its steps best (least absolute error).

    A KV token is read once whether or not prompt tokens are beside it: where the contexts measured are too alike to
    tell KV tokens from sequences, it costs what it costs a decode-only step.
    """
    if not sure:
        return table.attention._replace(mixed_kv_token_s=table.decode_kv[-1][1])
    hostless = Predictor(table, async_scheduling=True)
    seqs = np.array([s.num_decode_seqs for s in sure], dtype=np.float64)
    kv_tokens = np.array([s.decode_kv_tokens for s in sure], dtype=np.float64)
    all_prompt = [
        s.shape._replace(num_prefill_tokens=s.shape.num_tokens, num_decode_seqs=0, decode_kv_tokens=0) for s in sure
    ]
    rest = np.array([hostless.device_s(shape) for shape in all_prompt])
    decodes_alone = [s.shape._replace(num_prefill_tokens=0, num_prefill_seqs=0, prefill_kv_pairs=0) for s in sure]
    floor = np.array([hostless.device_s(shape) for shape in decodes_alone])
    measured = np.array([s.median_s for s in sure])

    decode_rate_s = table.decode_kv[-1][1]
    contexts = kv_tokens / seqs
    told_apart = contexts.max() >= CONTEXTS_APART * contexts.min()

    def predicted(values: FloatArray) -> FloatArray:
        rate_s = values[1] if told_apart else decode_rate_s
        steps: FloatArray = np.maximum(floor, rest + values[0] * seqs + rate_s * kv_tokens)
        return steps

    start = np.array([1e-5, decode_rate_s]) if told_apart else np.array([1e-5])
    values = _least_absolute(predicted, measured, start)
    rate_s = values[1] if told_apart else decode_rate_s
    return table.attention._replace(mixed_seq_s=float(values[0]), mixed_kv_token_s=float(rate_s))


def _host_shares(table: StepTable, steps: Sequence[Sample], clock: Mapping[str, HostShare]) -> dict[str, HostShare]:
    """Return each launch path's share; a path never measured has that of the path before."""
    hostless = Predictor(table, async_scheduling=True)
    shares: dict[str, HostShare] = {}
    before = HostShare(0.0, 0.0)
    for path in table.host:
        mine = [s for s in steps if launch_path(s, table.captured_sizes) == path]
        if mine:
            device = np.array([hostless.device_s(s.shape) for s in mine])
            seqs = np.array([num_seqs(s) for s in mine], dtype=np.float64)
            measured = np.array([s.median_s for s in mine])

            def predicted(share: FloatArray, device: FloatArray = device, seqs: FloatArray = seqs) -> FloatArray:
                steps: FloatArray = np.maximum(device, share[0] + share[1] * seqs)
                return steps

            start = np.maximum(clock[path], 1e-6)
            base_s, per_seq_s = _least_absolute(predicted, measured, start).tolist()
            before = HostShare(max(base_s, before.base_s), max(per_seq_s, before.per_seq_s))
        shares[path] = before
    return shares


def _least_absolute(
    predicted: Callable[[FloatArray], FloatArray], measured: FloatArray, start: FloatArray
) -> FloatArray:
    """Return the non-negative values that minimise the sum of |log(predicted / measured)|.

    The search starts at some multiples of a positive ``start``: where a term is far below the others, as a host's share
    below the device's, nothing changes around it.
    """
    from scipy.optimize import minimize

    def misfit(scaled: FloatArray) -> float:
        return float(np.abs(np.log(predicted(np.abs(scaled) * start) / measured)).sum())

    corners = np.ones((len(start) + 1, len(start)))
    corners[1:] -= 0.5 * np.eye(len(start))
    found = [
        minimize(
            misfit,
            corners[0],
            method="Nelder-Mead",
            options={"initial_simplex": multiple * corners, "maxiter": 2000, "xatol": 1e-7, "fatol": 1e-9},
        )
        for multiple in (1.0, 2.0, 4.0)
    ]
    best = min(found, key=lambda result: float(result.fun))
    return np.asarray(np.abs(best.x) * start, dtype=np.float64)
