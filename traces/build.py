"""Build a workload from its specification: rows, filter, clip, arrivals, budgets; all said in ``Workload.source``."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from simmoe.errors import TraceError, UsageError
from simmoe.traces import arrivals, budgets
from simmoe.traces.catalog import NamedTrace, resolve
from simmoe.traces.columns import HashRuns, NumberedIds
from simmoe.traces.reader import MAX_SPAN_S, Trace, read_trace
from simmoe.traces.spec import WorkloadSpec
from simmoe.traces.streams import CELLS, DESCRIPTION, LENGTHS, stream
from simmoe.traces.summary import Summary, shipped
from simmoe.traces.workload import Workload

IntColumn = npt.NDArray[np.int64]
FloatColumn = npt.NDArray[np.float64]

#: Pairs of on and off phases of one workload: 16 bytes each.
MAX_PHASES = 10_000_000


def build_workload(spec: WorkloadSpec) -> Workload:
    """Build the workload ``spec`` describes; equal specifications and files give equal workloads.

    Replay takes the kept rows in recorded order, the first ``requests`` of them. Under any other process arrivals say
    nothing about rows, and the lengths stream draws them: passes over all kept rows, shuffled anew each pass, so that
    none comes twice before all have come once. A trace with prefix hashes is not shuffled, for its order is what prefix
    caching lives on: it is walked from a random row, around its end, and each further pass has hash ids of its own.

    Raises:
        TraceError: the file is unusable, the filter keeps nothing, an output leaves no room for a prompt when clipping,
            or a budget of the trace is above k_max.
        UsageError: a name that is not known, or options that do not go together.
    """
    named, path = resolve(spec.trace)
    if path is None:
        assert named is not None
        return _from_summary(spec, named)
    return _from_file(spec, named, read_trace(path))


@dataclass(frozen=True, slots=True)
class _Lengths:
    """Lengths as drawn, before clipping. [n] each."""

    prompt: IntColumn
    output: IntColumn
    at: Callable[[int], str]
    """How a message names the row a request came from."""


def _from_file(spec: WorkloadSpec, named: NamedTrace | None, trace: Trace) -> Workload:
    process = _checked_process(spec)
    kept, filtered = _filter(spec, named, trace)
    rows, passes, selection = _select(spec, kept, ordered=trace.prefix_hashes is not None)
    n = len(rows)
    if process == "replay":
        arrival_s, described = _replay(spec, trace, rows)
    else:
        arrival_s, described = _synthetic(spec, process, n)
    lengths = _Lengths(
        prompt=trace.prompt_tokens[rows].astype(np.int64),
        output=trace.output_tokens[rows].astype(np.int64),
        at=lambda i: f"'{trace.path}' row {trace.file_row(int(rows[i]))}",
    )
    prompt, clip = _clip(spec, lengths)
    k_qos, drawn = _budgets(spec, n, trace, rows)
    hashes = None
    if trace.prefix_hashes is not None:
        hashes = _hashes(trace, trace.prefix_hashes, rows, passes, prompt)
    once = int(passes[-1]) == 0
    source: dict[str, object] = {
        "trace": spec.trace if named else trace.path.name,
        "lengths": "original",
        **trace.source,
        **_published(named, trace),
        "prefix_block_tokens": None if hashes is None else trace.prefix_block_tokens,
        "filter": filtered,
        "selection": selection,
        "clip": clip,
        "arrivals": described,
        "budgets": drawn,
        "seed": spec.seed,
        "random_streams": DESCRIPTION,
    }
    return Workload(
        request_id=trace.request_id.take(rows) if trace.request_id is not None and once else NumberedIds(n),
        arrival_s=arrival_s,
        prompt_tokens=prompt,
        output_tokens=lengths.output,
        k_qos=k_qos,
        prefix_hashes=hashes,
        prefix_block_tokens=trace.prefix_block_tokens,
        source=source,
    )


def _from_summary(spec: WorkloadSpec, named: NamedTrace) -> Workload:
    process = _checked_process(spec)
    summary, sha256 = shipped()
    missing = f"{named.file.file_name} is not on this machine and the shipped summary"
    remedy = f"run 'simmoe traces fetch {named.name}'"
    if process == "replay":
        raise UsageError(f"{missing} has no recorded arrivals; give a rate, or {remedy}")
    if spec.budgets == "trace":
        raise UsageError(f"{missing} has no budgets; choose other budgets")
    low, high = _bounds(spec, named)
    if (low, high) != summary.total_tokens:
        raise UsageError(
            f"{missing} covers {summary.total_tokens[0]}..{summary.total_tokens[1]} total tokens alone; "
            f"leave the bounds as they are, or {remedy}"
        )
    rows, _, selection = _select(spec, np.arange(len(summary), dtype=np.int64), ordered=False)
    n = len(rows)
    lengths = _sample(spec, summary, rows)
    prompt, clip = _clip(spec, lengths)
    arrival_s, described = _synthetic(spec, process, n)
    k_qos, drawn = _budgets(spec, n, None, rows)
    source: dict[str, object] = {
        "trace": spec.trace,
        "lengths": "shipped summary",
        "sha256": sha256,
        "summary_of": summary.about,
        "prefix_block_tokens": None,
        "filter": {"min_total_tokens": low, "max_total_tokens": high, "rows_kept": len(summary)},
        "selection": selection,
        "clip": clip,
        "arrivals": described,
        "budgets": drawn,
        "seed": spec.seed,
        "random_streams": DESCRIPTION,
    }
    return Workload(
        request_id=NumberedIds(n),
        arrival_s=arrival_s,
        prompt_tokens=prompt,
        output_tokens=lengths.output,
        k_qos=k_qos,
        source=source,
    )


def _sample(spec: WorkloadSpec, summary: Summary, rows: IntColumn) -> _Lengths:
    prompt, output = summary.lengths(rows, stream(spec.seed, CELLS))
    return _Lengths(prompt, output, at=lambda i: f"request {i} drawn from the shipped summary")


def _checked_process(spec: WorkloadSpec) -> str:
    process = spec.arrival_process
    if process != "replay" and spec.rate is None:
        raise UsageError(f"{process} arrivals need a rate in requests a second; give --rate")
    return process


def _bounds(spec: WorkloadSpec, named: NamedTrace | None) -> tuple[int | None, int | None]:
    low, high = named.total_tokens if named and named.total_tokens else (None, None)
    low = spec.min_total_tokens if spec.min_total_tokens is not None else low
    high = spec.max_total_tokens if spec.max_total_tokens is not None else high
    if named and low is not None and high is not None and low > high:
        given, other, default = ("min", "max", high) if spec.max_total_tokens is None else ("max", "min", low)
        raise UsageError(
            f"{given}_total_tokens is {low if given == 'min' else high}, but trace '{named.name}' keeps rows of "
            f"{'at most' if other == 'max' else 'at least'} {default} total tokens unless told otherwise; "
            f"give {other}_total_tokens too"
        )
    return low, high


def _filter(spec: WorkloadSpec, named: NamedTrace | None, trace: Trace) -> tuple[IntColumn, dict[str, object]]:
    """Return the positions of the rows kept, in order of arrival, and what was done."""
    low, high = _bounds(spec, named)
    if low is None and high is None:
        return np.arange(len(trace)), {"min_total_tokens": None, "max_total_tokens": None, "rows_kept": len(trace)}
    total = trace.prompt_tokens.astype(np.int64) + trace.output_tokens
    keep = np.ones(len(trace), dtype=bool)
    if low is not None:
        keep &= total >= low
    if high is not None:
        keep &= total <= high
    kept = np.flatnonzero(keep)
    if not len(kept):
        raise TraceError(
            f"'{trace.path}': none of {len(trace)} rows has {'0' if low is None else low}.."
            f"{'any number of' if high is None else high} total tokens (the file's are {int(total.min())}.."
            f"{int(total.max())}); change min_total_tokens or max_total_tokens"
        )
    return kept, {"min_total_tokens": low, "max_total_tokens": high, "rows_kept": len(kept)}


def _select(spec: WorkloadSpec, kept: IntColumn, ordered: bool) -> tuple[IntColumn, IntColumn, str]:
    """Choose the rows to replay, as ``build_workload`` says.

    Returns:
        rows: [n] positions in the trace.
        passes: [n] how often the trace had been gone through before, non-decreasing.
        what was done.
    """
    n = len(kept) if spec.requests is None else spec.requests
    if spec.arrival_process == "replay":
        if n > len(kept):
            raise UsageError(
                f"requests is {n}, but the trace has {len(kept)} rows to replay; ask for fewer, or for poisson arrivals"
            )
        return kept[:n], np.zeros(n, dtype=np.int64), f"the first {n} rows, in recorded order"
    passes = np.arange(n, dtype=np.int64) // len(kept)
    rng = stream(spec.seed, LENGTHS)
    if ordered:
        start = int(rng.integers(len(kept)))
        return (
            kept[(start + np.arange(n)) % len(kept)],
            passes,
            f"recorded order from kept row {start + 1}, around the end",
        )
    shuffled = [rng.permutation(kept) for _ in range(int(passes[-1]) + 1)]
    return np.concatenate(shuffled)[:n], passes, "shuffled, no row twice before every row once"


def _replay(spec: WorkloadSpec, trace: Trace, rows: IntColumn) -> tuple[FloatColumn, dict[str, object]]:
    recorded = trace.arrival_s[rows] - trace.arrival_s[rows[0]]
    if spec.rate is None:
        return recorded, {"process": "replay", "rate": None}
    if recorded[-1] == 0 and len(rows) > 1 and not math.isinf(spec.rate):
        raise TraceError(
            f"'{trace.path}': all rows to replay arrive at one instant, which no rate can be scaled to; "
            f"leave the rate out, or choose poisson arrivals"
        )
    return _checked_span(spec, arrivals.rescaled(recorded, spec.rate)), {"process": "replay", "rate": _plain(spec.rate)}


def _synthetic(spec: WorkloadSpec, process: str, n: int) -> tuple[FloatColumn, dict[str, object]]:
    arrival_s, described = _drawn(spec, process, n)
    return _checked_span(spec, arrival_s), described


def _checked_span(spec: WorkloadSpec, arrival_s: FloatColumn) -> FloatColumn:
    """Refuse times that are as far apart as no trace's: within MAX_SPAN_S a double tells them apart to 60 ns."""
    if arrival_s[-1] > MAX_SPAN_S:
        raise UsageError(
            f"at rate {spec.rate:g} the last of {len(arrival_s)} requests arrives after {arrival_s[-1]:.3g} s, more "
            f"than {MAX_SPAN_S:.3g} s (10 years); ask for fewer requests, or for a higher rate"
        )
    return arrival_s


def _drawn(spec: WorkloadSpec, process: str, n: int) -> tuple[FloatColumn, dict[str, object]]:
    assert spec.rate is not None
    described: dict[str, object] = {"process": process, "rate": _plain(spec.rate)}
    if math.isinf(spec.rate):
        return np.zeros(n), described
    if process == "poisson":
        return arrivals.poisson(n, spec.rate, spec.seed), described
    if process == "gamma":
        return arrivals.gamma(n, spec.rate, spec.cv, spec.seed), {**described, "cv": spec.cv}
    if process == "constant":
        return arrivals.constant(n, spec.rate), described
    num_phases = n / (spec.rate * (spec.on_s + spec.off_s))
    if num_phases > MAX_PHASES:
        raise UsageError(
            f"on_s {spec.on_s:g} and off_s {spec.off_s:g} make about {num_phases:.0g} phases of {n} requests at rate "
            f"{spec.rate:g}; at most {MAX_PHASES:,} are drawn: lengthen the phases"
        )
    times = arrivals.onoff(n, spec.rate, spec.on_s, spec.off_s, spec.seed)
    return times, {**described, "on_s": spec.on_s, "off_s": spec.off_s}


def _clip(spec: WorkloadSpec, lengths: _Lengths) -> tuple[IntColumn, dict[str, object] | None]:
    """Shorten prompts; outputs are never touched, so one that fills the bound alone is an error."""
    bound = spec.clip_total_tokens
    if bound is None:
        return lengths.prompt, None
    full = lengths.output >= bound
    if full.any():
        i = int(full.argmax())
        raise TraceError(
            f"{lengths.at(i)}: output of {int(lengths.output[i])} tokens leaves no room "
            f"for a prompt in clip_total_tokens {bound}, as in {int(full.sum())} rows; clip at more than "
            f"{int(lengths.output.max())}, or leave such rows out with max_total_tokens"
        )
    prompt = np.minimum(lengths.prompt, bound - lengths.output)
    shortened = prompt < lengths.prompt
    return prompt, {
        "total_tokens": bound,
        "prompts_shortened": int(shortened.sum()),
        "prompt_tokens_removed": int((lengths.prompt - prompt).sum()),
    }


def _budgets(spec: WorkloadSpec, n: int, trace: Trace | None, rows: IntColumn) -> tuple[IntColumn, dict[str, object]]:
    column = trace.k_qos if trace is not None else None
    kind = spec.budgets or ("normal" if column is None else "trace")
    if kind == "normal":
        described = {"generator": "normal", "mu": spec.mu, "sigma": spec.sigma, "k_max": spec.k_max}
        return budgets.truncated_normal(n, spec.mu, spec.sigma, spec.k_max, spec.seed), described
    if kind == "mix":
        return budgets.weighted_mix(n, spec.mix, spec.seed), {"generator": "mix", "mix": [list(t) for t in spec.mix]}
    if kind == "fixed":
        k = spec.k_max if spec.k is None else spec.k
        return np.full(n, k, dtype=np.int64), {"generator": "fixed", "k": k}
    if trace is None or column is None:
        raise TraceError(f"'{spec.trace}' has no column 'k_qos'; choose other budgets: normal, fixed or mix")
    k_qos = column[rows]
    if int(k_qos.max()) > spec.k_max:
        i = int((k_qos > spec.k_max).argmax())
        raise TraceError(
            f"'{trace.path}' row {trace.file_row(int(rows[i]))}: k_qos is {int(k_qos[i])}; "
            f"the deployment runs 1..k_max ({spec.k_max}): choose other budgets, or a profile of a larger k_max"
        )
    return k_qos, {"generator": "trace", "column": "k_qos"}


def _hashes(trace: Trace, runs: HashRuns, rows: IntColumn, passes: IntColumn, prompt: IntColumn) -> HashRuns:
    """Cut each run to the blocks its prompt still has; give each further pass ids of its own."""
    blocks = -(-prompt // trace.prefix_block_tokens)
    shift = passes * (int(runs.ids.max(initial=-1)) + 1)
    return runs.take(rows, at_most=blocks, shift=shift)


def _published(named: NamedTrace | None, trace: Trace) -> dict[str, object]:
    if named is None:
        return {}
    known = named.file.sha256
    same = None if known is None or trace.path.suffix == ".gz" else trace.source["sha256"] == known
    return {"as_published": same, "license": named.file.license, "citation": named.file.citation}


def _plain(rate: float) -> float | str:
    return "inf" if math.isinf(rate) else rate
