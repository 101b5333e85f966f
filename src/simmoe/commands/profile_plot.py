"""Pictures of profiles: one look, and the kinds of files they are written as."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from simmoe.errors import OutputError, UsageError

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
        try:
            figure.savefig(out, dpi=150, format=kind, metadata=undated[kind])
        except OSError as error:
            raise OutputError(f"cannot write the picture to '{out}': {error.strerror or error}") from None


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
