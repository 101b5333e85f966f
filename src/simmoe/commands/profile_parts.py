"""``simmoe profile show NAME --parts``: what of a step's milliseconds is what."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rich.table import Table

from simmoe.commands.profile_view import CONTEXT_TOKENS, decode_shape
from simmoe.profiles.catalog import Profile, layer_times_of, load_profile, profile_names
from simmoe.profiles.estimating.parts import StepTakenApart, efficiencies_of
from simmoe.profiles.layer_times import LayerTimes
from simmoe.profiles.shape import StepShape
from simmoe.profiles.step_cost import PROMPT_TOKENS, prompt_shape
from simmoe.profiles.table import GridTable

#: Heading -> field of StepSeconds, in the order shown.
_COLUMNS = {
    "dense": "dense_s",
    "experts": "experts_s",
    "attention": "attention_s",
    "head": "head_s",
    "exchanges": "exchanges_s",
    "host": "host_s",
    "rest": "rest_s",
    "step": "step_s",
}


def part_tables(profile: Profile, layer: LayerTimes | None, *, async_scheduling: bool) -> Iterator[str | Table]:
    """Yield where the parts are from, and the parts of steps with prompt tokens and of decode-only steps.

    Shown are sizes that are powers of two, and the last one, at the least, a middle and the largest budget.

    Raises:
        UsageError: the profile names no model on a known card.
    """
    tables_by_name = ((name, load_profile(name).table) for name in profile_names())
    shipped = ((table, layer_times_of(name, table)) for name, table in tables_by_name)
    efficiencies, tables = efficiencies_of(profile.table, layer, shipped)
    apart = StepTakenApart(profile.table, efficiencies, layer, async_scheduling)
    timed = (
        "experts marked t are one layer's timed alone, times the layers; those not so marked" if layer else "experts"
    )
    scheduling = "asynchronous" if async_scheduling else "synchronous"
    yield (
        f"{profile.label}: parts of a step, ms ({scheduling} scheduling). Step, attention and host are the table's; "
        f"{timed}, dense layers, head with sampler and exchanges are counted work at efficiencies "
        f"learned from {', '.join(tables)}; rest is what all of them leave of the step."
    )
    prompts = f"prompts of {PROMPT_TOKENS:,} tokens"
    decode = f"decode at {CONTEXT_TOKENS:,} KV tokens a sequence"
    yield _part_table(prompts, "tokens", profile.table.prefill, prompt_shape, apart)
    yield _part_table(decode, "seqs", profile.table.decode, decode_shape, apart)


def _part_table(
    title: str, size_name: str, grid: GridTable, shape_of: Callable[[int, int], StepShape], apart: StepTakenApart
) -> Table:
    ks = sorted({grid.ks[0], grid.ks[len(grid.ks) // 2], grid.ks[-1]})
    rows = Table(title=title, title_justify="left", box=None, padding=(0, 1, 0, 0), pad_edge=False)
    for heading in (size_name, "k", *_COLUMNS):
        rows.add_column(heading, justify="right", no_wrap=True)
    for size in grid.sizes:
        if size & (size - 1) and size != grid.sizes[-1]:
            continue
        for k in ks:
            parts = apart.seconds(shape_of(size, k))
            shown = {heading: f"{1e3 * getattr(parts, field):z.2f}" for heading, field in _COLUMNS.items()}
            shown["experts"] += " t" if apart.is_timed(size, k) else "  "
            rows.add_row(f"{size:,}", str(k), *shown.values())
    return rows
