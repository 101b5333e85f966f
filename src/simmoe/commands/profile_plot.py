"""Pictures of profiles: T(n, k), the share of the card it uses, and how pictures are written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from io import BytesIO
from pathlib import Path
from typing import TYPE_CHECKING

from simmoe.commands.profile_view import CONTEXT_TOKENS, decode_shape
from simmoe.errors import UsageError
from simmoe.profiles.catalog import Profile
from simmoe.profiles.estimating.binding import roofline_of
from simmoe.profiles.shape import StepShape
from simmoe.profiles.step_cost import PROMPT_TOKENS, prompt_shape
from simmoe.profiles.table import GridTable
from simmoe.writing import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: What a picture's name may end in.
PICTURES = (".png", ".svg", ".pdf")


def check_name(out: Path) -> None:
    """Refuse a name that no picture can have, before anything is computed.

    Raises:
        UsageError: it ends in none of PICTURES.
    """
    if out.suffix.lower() not in PICTURES:
        raise UsageError(f"'{out}' names no picture; end it in one of {', '.join(PICTURES)}")


@contextmanager
def drawn(out: Path, size_inches: tuple[float, float]) -> Iterator[Figure]:
    """Give a figure to draw on and write it when the block ends; equal drawings give equal bytes.

    Raises:
        UsageError: the file's name asks for another format than PICTURES.
        OutputError: the picture cannot be written.
    """
    check_name(out)
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context({"svg.hashsalt": "simmoe"}):
        figure = Figure(figsize=size_inches, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        kind = out.suffix.lower()[1:]
        undated: dict[str, dict[str, None]] = {
            "png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}
        }  # fmt: skip
        picture = BytesIO()
        figure.savefig(picture, dpi=150, format=kind, metadata=undated[kind])
    write_whole(out, picture.getvalue(), "the picture")


def plot_profile(
    profile: Profile, out: Path, *, async_scheduling: bool, ceilings: tuple[float, float] | None = None
) -> None:
    """Draw T against n and decode steps against batch, a line a k; below, the share of the binding roofline they reach.

    The lower row is left out where the table does not say which model and card it is of.

    Args:
        profile: drawn.
        out: file to write.
        async_scheduling: whether the host composes a step while the device runs the one before.
        ceilings: (FLOP/s, byte/s) measured on its card; its datasheet's without.
    Raises:
        UsageError: the file's name asks for another format than PICTURES.
        OutputError: the picture cannot be written.
    """
    table, cost = profile.table, profile.cost(async_scheduling)
    roofline = roofline_of(table, ceilings)
    columns: list[tuple[GridTable, Callable[[int, int], StepShape], str, str]] = [
        (table.prefill, prompt_shape, "prompt tokens n", f"prefill, prompts of {PROMPT_TOKENS:,} tokens"),
        (table.decode, decode_shape, "sequences", f"decode, {CONTEXT_TOKENS:,} KV tokens a sequence"),
    ]
    rows = 1 if roofline is None else 2
    with drawn(out, (11, 0.6 + 4.1 * rows)) as figure:
        all_axes = figure.subplots(rows, 2, squeeze=False)
        for column, (grid, shape, size_name, title) in enumerate(columns):
            steps = [[(shape(n, k), cost.step_s(shape(n, k))) for n in grid.sizes] for k in grid.ks]
            times = all_axes[0, column]
            largest = table.captured_sizes[-1] if table.captured_sizes else 0
            sizes = sorted({*grid.sizes, *(n + 1 for n in grid.sizes[:-1] if n < largest)})
            _lines(times, grid, sizes, [[1e3 * cost.step_s(shape(n, k)) for n in sizes] for k in grid.ks])
            log_axis(times, "y")
            times.set(xlabel=size_name, ylabel="step, ms", title=title)
            if roofline is not None:
                shares = [[100 * roofline.bound_s(step) / seconds for step, seconds in row] for row in steps]
                _lines(all_axes[1, column], grid, grid.sizes, shares)
                all_axes[1, column].set_ylim(0, max(100.0, 1.05 * max(map(max, shares))))
                all_axes[1, column].set(xlabel=size_name, ylabel=f"% of the binding roofline\n({roofline.source})")
        all_axes[0, 1].legend(title="k", fontsize="small")
        scheduling = "asynchronous" if async_scheduling else "synchronous"
        figure.suptitle(f"{profile.label}; {scheduling} scheduling\n{table.summary}", fontsize="medium")


def _lines(axes: Axes, grid: GridTable, sizes: Sequence[int], values: list[list[float]]) -> None:
    """Draw one line a k through [num_ks][num_sizes] values, marked at the grid's sizes."""
    marked = [place for place, size in enumerate(sizes) if size in grid.sizes]
    for index, (k, line) in enumerate(zip(grid.ks, values, strict=True)):
        axes.plot(sizes, line, marker=".", markevery=marked, color=shade(index, len(grid.ks)), label=str(k))
    log_axis(axes, "x", base=2)
    axes.grid(alpha=0.3)


def log_axis(axes: Axes, which: str, base: int = 10) -> None:
    """Make an axis ('x' or 'y') logarithmic, with plain numbers beside it: powers of the base, of 10 also 2 and 5."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis = axes.xaxis if which == "x" else axes.yaxis
    getattr(axes, f"set_{which}scale")("log", base=base)
    axis.set_major_locator(LogLocator(base, subs=(1, 2, 5) if base == 10 else (1,)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(lambda value, _: f"{value:,.0f}" if value >= 100 else f"{value:g}")


def shade(index: int, number: int) -> tuple[float, float, float, float]:
    """Return the colour of one of several values in order."""
    from matplotlib import colormaps

    red, green, blue, alpha = colormaps["viridis"](0.92 * index / max(1, number - 1))
    return float(red), float(green), float(blue), float(alpha)
