"""Pictures as files: one look for all of them, and equal drawings give equal bytes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from simmoe.writing import whole_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DPI = 110
_RC = {
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.7,
    "lines.linewidth": 1.7,
    "lines.markersize": 4.5,
    "legend.frameon": False,
    "figure.facecolor": "white",
}


@contextmanager
def picture(path: str | os.PathLike[str], size_inches: tuple[float, float]) -> Iterator[Figure]:
    """Give a figure to draw on and write it as PNG when the block ends; matplotlib's own settings do not reach it.

    Raises:
        OutputError: the file cannot be written.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        for name, value in _RC.items():
            matplotlib.rcParams[name] = value  # type: ignore[index]
        figure = Figure(figsize=size_inches, dpi=_DPI, layout="constrained")
        FigureCanvasAgg(figure)
        yield figure
        with whole_file(path, "the plot") as partial:
            figure.savefig(partial, format="png", metadata={"Software": None})
