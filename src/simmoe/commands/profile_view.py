"""How a profile looks: its provenance and times as terminal tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from simmoe.profiles.catalog import Profile
from simmoe.profiles.layer_times import LayerTime, LayerTimes
from simmoe.profiles.shape import StepShape
from simmoe.profiles.weights import described

#: KV tokens a sequence the decode times are shown at.
CONTEXT_TOKENS = 1024

_RUN_FACTS = ("model", "weights", "dtype", "card", "driver", "clocks", "versions", "kernels", "graphs", "k_check")


def facts(profile: Profile) -> Table:
    """Return the provenance, one fact a row."""
    table = profile.table
    rows = Table(box=None, show_header=False, pad_edge=False)
    rows.add_column(style="bold", no_wrap=True)
    rows.add_column(overflow="fold")
    rows.add_row("status", table.status)
    for run in profile.provenance.get("runs", []):
        for key in _RUN_FACTS:
            rows.add_row(key, described(run[key]) if key == "weights" else _plain(run[key]))
        scheduling = "asynchronous" if run["async_scheduling"] else "synchronous"
        rows.add_row("engine", _plain({**run["engine_flags"], "scheduling": scheduling}))
        rows.add_row("run", f"{run['date']}: {run['command']}")
        for note in run["notes"]:
            rows.add_row("note", _plain(note))
    for name, value in _estimate_facts(profile.provenance.get("estimate")):
        rows.add_row(name, value)
    rows.add_row("captured sizes", _plain(table.captured_sizes) or "none (eager)")
    rows.add_row("captured k", _plain(table.captured_ks) or "none (eager)")
    rows.add_row("budgets", f"k 1..{table.k_max}, multiples of {table.k_granularity}")
    given = "; given, not measured" if "num_gpu_blocks" in profile.provenance.get("fit", {}) else ""
    rows.add_row("KV cache", f"{table.num_gpu_blocks} blocks of {table.block_size} tokens{given}")
    rows.add_row("front end", f"ingress {table.ingress_s * 1e3:g} ms, egress {table.egress_s * 1e3:g} ms")
    rows.add_row("sha256", profile.sha256)
    return rows


def _estimate_facts(estimate: Mapping[str, Any] | None) -> Iterator[tuple[str, str]]:
    """Yield what an estimated table rests on."""
    if estimate is None:
        return
    card, learned = estimate["card"], estimate["learned"]
    yield "model", estimate["model"]
    yield "weights", described(estimate["weights"])
    rates = f"{card['bf16_flop_s'] / 1e12:,.1f} TFLOP/s bf16, {card['memory_byte_s'] / 1e12:.3f} TB/s"
    cards = f"{estimate['num_cards']} x {card['driver_name']}" if estimate["num_cards"] > 1 else card["driver_name"]
    yield "card", f"{cards}: {rates}, {card['num_sms']} SMs ({card['source']})"
    yield "learned from", _plain(learned["tables"])
    yield "efficiencies", _plain({name: f"{value:.3g}" for name, value in learned["device"].items()})
    yield "attention", f"pair_compute {learned['pair_compute']:.3g}, kv_memory {learned['kv_memory']:.3g}"
    for row in estimate["held_out"]:
        errors = f"bias {row['bias']:+z.1%}, median {row['median']:.1%}, p95 {row['p95']:.1%}"
        what = f"{row['held_out']} held out, {row['steps']} {row['sizes']} bound by {row['bound_by']}"
        yield "method's error", f"{what}: {errors}"


def time_tables(profile: Profile, *, async_scheduling: bool) -> Iterator[Table]:
    """Yield T(n, k), the decode steps, the terms beside the grids, and how far the fit is from its samples."""
    table, cost = profile.table, profile.cost(async_scheduling)
    scheduling = "asynchronous" if async_scheduling else "synchronous"
    yield _grid(
        f"{profile.label}: T(n, k) of prompt tokens, ms a step ({scheduling} scheduling)",
        "tokens",
        table.prefill.ks,
        {size: [cost.prefill_s(size, k) for k in table.prefill.ks] for size in table.prefill.sizes},
    )
    yield _grid(
        f"{profile.label}: decode at {CONTEXT_TOKENS:,} KV tokens a sequence, ms a step ({scheduling} scheduling)",
        "seqs",
        table.decode.ks,
        {size: [cost.step_s(decode_shape(size, k)) for k in table.decode.ks] for size in table.decode.sizes},
    )
    terms = Table(
        "term", "value", title=f"{profile.label}: terms beside the grids", title_justify="left", box=SIMPLE_HEAD
    )
    for name, value in table.attention._asdict().items():
        terms.add_row(name, f"{value:.4g}")
    for kind, knots in table.real_share._asdict().items():
        terms.add_row(f"real_share, {kind} (size)", " ".join(f"{share:.2f} ({size:,})" for size, share in knots))
    per_kv_token = " ".join(f"{value:.4g} ({size:,})" for size, value in table.decode_kv)
    terms.add_row("decode per_kv_token_s (sequences)", per_kv_token)
    for path, share in table.host.items():
        terms.add_row(
            f"host, {path}",
            f"{share.base_s * 1e3:.3f} ms, {share.per_seq_s * 1e6:.2f} us a sequence",
        )
    if any(table.update):
        base_s, per_seq_s = table.update
        terms.add_row("of it, taking tokens in", f"{base_s * 1e3:.3f} ms, {per_seq_s * 1e6:.2f} us a sequence")
    if table.graph_tail_s is not None:
        of = profile.provenance.get("fit", {}).get("graph_tail_of")
        tail = f"{table.graph_tail_s * 1e3:.3f} ms" + (f", of {of}" if of else "")
        terms.add_row("of a decode-only step's launch, beside the device", tail)
    yield terms
    residuals = profile.provenance.get("fit", {}).get("residuals")
    if residuals:
        yield residual_table(residuals)


def are_ceilings(times: LayerTimes) -> bool:
    """Whether nothing went beyond the card's measured ceilings: rates that were exceeded are none."""
    return all(times.bound_s(row) <= row.seconds for row in times.rows)


def layer_tables(times: LayerTimes) -> Iterator[str | Table]:
    """Yield headings and tables of one MoE layer's routed experts alone: times, rates, share of measured ceilings."""
    at = {(row.num_tokens, row.k): row for row in times.rows}
    sizes, ks = sorted({n for n, _ in at}), sorted({k for _, k in at})
    ceilings = f"{times.matmul_flop_s / 1e12:,.0f} TFLOP/s and {times.copy_byte_s / 1e12:.2f} TB/s measured"
    shown: tuple[tuple[str, Callable[[LayerTime], str]], ...] = (
        ("us by CUDA events", lambda row: f"{row.seconds * 1e6:.1f}"),
        ("achieved TFLOP/s", lambda row: f"{times.flop(row) / row.seconds / 1e12:.1f}"),
        ("achieved GB/s", lambda row: f"{times.bytes_moved(row) / row.seconds / 1e9:,.0f}"),
        (f"% of the binding ceiling ({ceilings})", lambda row: f"{100 * times.bound_s(row) / row.seconds:.0f}"),
    )
    if not times.in_engine:
        yield (
            f"\nthe layer was timed on {times.date} by itself ('profile layer'), not in the engine of the table: "
            f"{times.num_layers} layers in turn, of the shapes one card holds"
        )
    for what, text in shown:
        yield f"\none MoE layer's experts ({times.kernel}), {what}"
        table = _grid_table(None, "tokens", ks)
        for n in sizes:
            table.add_row(f"{n:,}", *(text(at[n, k]) if (n, k) in at else "-" for k in ks))
        yield table
    if not are_ceilings(times):
        yield "above 100%: the product or copy that measured a ceiling did not reach it; 'plot' takes the datasheet's"


def residual_table(residuals: Sequence[Mapping[str, Any]]) -> Table:
    """Return the fit's relative errors, one row a group of samples."""
    rows = Table(title="predicted / measured - 1", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("steps", "clock", "samples"):
        rows.add_column(name)
    for name in ("number", "bias", "median |error|", "p95 |error|"):
        rows.add_column(name, justify="right")
    for row in residuals:
        errors = (f"{row[name] * 100:.2f}%" for name in ("bias", "median", "p95"))
        rows.add_row(row["kind"], row["clock"], row["source"], str(row["num_samples"]), *errors)
    return rows


def decode_shape(num_seqs: int, k: int) -> StepShape:
    """Return the decode-only step times are shown at."""
    return StepShape(num_decode_seqs=num_seqs, decode_kv_tokens=num_seqs * CONTEXT_TOKENS, k_exec=k)


def _grid(title: str, size_name: str, ks: Sequence[int], seconds: Mapping[int, Sequence[float]]) -> Table:
    rows = _grid_table(title, size_name, ks)
    shown = [(size, [f"{value * 1e3:.2f}" for value in values]) for size, values in seconds.items()]
    for values, group in groupby(shown, key=lambda row: row[1]):
        sizes = [f"{size:,}" for size, _ in group]
        rows.add_row(sizes[0] if len(sizes) == 1 else f"{sizes[0]}..{sizes[-1]}", *values)
    return rows


def _grid_table(title: str | None, size_name: str, ks: Sequence[int]) -> Table:
    rows = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0), pad_edge=False)
    for name in (size_name, *(f"k={k}" for k in ks)):
        rows.add_column(name, justify="right", no_wrap=True)
    return rows


def _plain(value: Any) -> str:
    if isinstance(value, dict) and any(isinstance(item, dict) for item in value.values()):
        return ", ".join(
            f"{key} ({len(item)} in the table file)" if isinstance(item, dict) else f"{key} {_plain(item)}"
            for key, item in value.items()
        )
    if isinstance(value, dict):
        return ", ".join(f"{key} {_plain(item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return " ".join(_plain(item) for item in value)
    return str(value)
