"""Raw samples to a step-cost table.

What a step costs from one to the next is the truth. It is the larger of what the device and what the host needed, and
the host is not always equally fast, so a step may have taken longer than its device needed, never less:

1. Steps through which the device was busy, and clearly longer than the host can have taken, were bound by the device.
   They give what attention adds.
2. What is left of every step bounds the device's time at its (size, k) from above, and so at every smaller size and k;
   so do device-clock times below the host's share, which no step can show. Rows within TRUST of the least such bound
   give the grid; those above it were held up by the host. Where the device was held until a step was launched, those
   rows alone give it. Where noise turned the grid round, it is projected back.
3. What decoding sequences add to a step with prompt tokens, cells that the host hid from every point, and then the
   host's share by launch path, are what best explains the steps (least absolute error). The host has more to do while
   it serves than between measured points, and at times hides less of the device, so a calibration recording's steps
   take part.

Without step-clock samples, the device clock's take their place. Samples marked ``held_out`` take no part.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from simmoe.errors import ProfileError
from simmoe.profiles.checking.same_engine import require_one_engine
from simmoe.profiles.fitting.device_grid import context_knots, fit_device, slope_ramps
from simmoe.profiles.fitting.evidence import (
    Evidence,
    device_bound,
    gather,
    host_clock,
    left_graphs_aside,
    not_held_up,
    served_bound,
)
from simmoe.profiles.fitting.host_shares import APART_ABOVE, graph_tail_s, update_share, with_host_shares
from simmoe.profiles.fitting.served_cells import with_served_cells
from simmoe.profiles.fitting.serving_terms import with_decode_share, with_serving_contexts
from simmoe.profiles.recorded_steps import RecordedStep
from simmoe.profiles.residuals import Residual, recorded_residuals, residuals
from simmoe.profiles.samples import Sample, SampleHeader
from simmoe.profiles.table import PATHS, Attention, HostShare, StepTable

Run = tuple[SampleHeader, Sequence[Sample]]


def fit_table(
    runs: Sequence[Run],
    name: str,
    status: str,
    summary: str,
    recorded: Sequence[RecordedStep] = (),
    tail_of: StepTable | None = None,
    num_gpu_blocks: int | None = None,
) -> StepTable:
    """Fit one table to the samples of one engine; its budgets are in sub-expert units.

    Args:
        runs: headers with their samples; several when the engine was measured in several settings or sittings.
        name: of the profile.
        status: one of table.STATUSES.
        summary: one line on model, card and execution mode.
        recorded: steps of real runs of the same engine, asynchronously scheduled. The table is checked on them; those
            not held out tell the host's share while it serves, and what mixed steps cost.
        tail_of: table of an engine whose host launches the same graph; its ``graph_tail_s`` is taken where the clocks
            of the recorded steps do not tell it.
        num_gpu_blocks: KV blocks an engine has that was measured with fewer; None: those of the samples.
    Raises:
        ProfileError: runs of different engines, or no points of a kind that is needed.
    """
    if not runs:
        raise ProfileError("no sample files given; a table is fitted to at least one")
    header = runs[0][0]
    require_one_engine([head for head, _ in runs])
    runs = [(head, [replace(s, k=s.k * head.k_granularity) for s in samples]) for head, samples in runs]
    recorded = [r._replace(sample=replace(r.sample, k=r.sample.k * header.k_granularity)) for r in recorded]
    calibrating = [r for r in recorded if not r.sample.held_out]
    captured = tuple(header.captured_sizes)
    used = [(head, sample) for head, samples in runs for sample in samples if not sample.held_out]
    if not any(head.async_scheduling for head, _ in runs):
        raise ProfileError("no sample file is of an engine that schedules asynchronously; the fit needs one")
    clocked = [sample for head, sample in used if sample.clock == "host" and head.async_scheduling]
    if not clocked:
        raise ProfileError("no samples under the host clock: steps bound by the host cannot be told from others")
    clock = host_clock(clocked, captured)
    device = [sample for head, sample in used if sample.clock in ("device", "held") and head.async_scheduling]
    rows = [sample for head, sample in used if head.async_scheduling]
    if not any(sample.clock == "step" for sample in rows):
        rows = [*clocked, *(replace(sample, clock="step") for sample in device if sample.clock == "device")]
    bound = device_bound(rows, clock, captured)
    steps = [sample for sample, _ in bound]
    # what ran without its graphs tells the host's share, and of the device nothing that steps with graphs do not
    device = [s for s in device if not left_graphs_aside(s, captured)]
    with_graphs = [(s, by_device) for s, by_device in bound if not left_graphs_aside(s, captured)]

    def of(kind: str) -> Evidence:
        return gather(kind, with_graphs, device, clock, captured)

    decodes, prefills = of("decode"), of("prefill")
    knots = context_knots(decodes.sure)
    decode = fit_device(
        decodes,
        captured,
        lambda s: slope_ramps(knots, s.num_decode_seqs, s.decode_kv_tokens),
        telling=lambda s: s.num_decode_seqs >= knots[0],
    )
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
        num_gpu_blocks=header.num_gpu_blocks if num_gpu_blocks is None else num_gpu_blocks,
        ingress_s=header.front_end.get("ingress_s", 0.0),
        egress_s=header.front_end.get("egress_s", 0.0),
        captured_sizes=captured,
        captured_ks=tuple(k * header.k_granularity for k in header.captured_ks),
        prefill=prefill.grid,
        decode=decode.grid,
        decode_kv=tuple(zip(knots, slopes, strict=True)),
        attention=Attention(pair_s, prompt_s, 0.0, 0.0),
        host={path: HostShare(0.0, 0.0) for path in paths},
        provenance={"runs": [asdict(head) for head, _ in runs]},
    )
    calibration = served_bound(calibrating, clock, captured)
    serving = [sample for sample, _ in calibration]
    serving_bound = [sample for sample, by_device in calibration if by_device]
    served = [s for s in serving_bound if s.kind == "decode"]
    table = with_serving_contexts(with_decode_share(table, decodes.sure), served)
    table = with_decode_share(table, [*decodes.sure, *served])
    points, mixed = of("mixed"), [s for s in serving_bound if s.kind == "mixed"]
    table = with_served_cells(table, prefill.shown, prefills.sure, not_held_up(points.sure, points.steps), mixed)
    apart_above = APART_ABOVE.get(header.kernels.get("attention", ""))
    table = with_host_shares(table, [*steps, *serving], clock, calibrating, apart_above)
    tail_s = graph_tail_s(table, calibrating)
    given: dict[str, Any] = {} if num_gpu_blocks is None else {"num_gpu_blocks": num_gpu_blocks}
    if captured and tail_s is None and tail_of is not None:
        tail_s = tail_of.graph_tail_s
        given["graph_tail_of"] = tail_of.name
    table = replace(table, update=update_share(calibrating), graph_tail_s=tail_s)
    facts = {
        "steps": len(steps),
        "calibration_steps": len(serving),
        "steps_the_grids_rest_on": prefill.trusted + decode.trusted,
        "monotone_projection_moved_at_most": {"prefill": prefill.moved, "decode": decode.moved},
        "residuals": [row._asdict() for row in _checks(table, runs, recorded)],
    }
    return replace(table, provenance={**table.provenance, "fit": {**facts, **given}})


def _checks(table: StepTable, runs: Sequence[Run], recorded: Sequence[RecordedStep]) -> list[Residual]:
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
    return rows + recorded_residuals(table, recorded, source="recorded")
