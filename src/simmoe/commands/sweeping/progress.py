"""Progress on stderr: a bar on a terminal, now and then a line elsewhere. Draws only when told to: no thread."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Protocol, TextIO

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID


class Progress(Protocol):
    """Told what happens; shows it."""

    def start(self, phase: str, total: int) -> None:
        """Enter a phase; ``total`` counts the cells of all phases so far known."""
        ...

    def advance(self, cells: int, resumed: bool = False) -> None:
        """Count cells as done; ``resumed`` ones were on disk already."""
        ...

    def tick(self) -> None:
        """Show that work goes on."""
        ...

    def close(self) -> None:
        """Leave the screen tidy."""
        ...


class LineProgress:
    """A line at each tenth of the way, no more than one a second."""

    def __init__(self, stream: TextIO, command: str) -> None:
        self._stream = stream
        self._command = command
        self._phase = ""
        self._total = 0
        self._done = 0
        self._resumed = 0
        self._began = self._last = time.monotonic()
        self._told = 0

    def start(self, phase: str, total: int) -> None:
        """Note the phase."""
        self._phase, self._total = phase, total
        self._told = 10 * self._done // max(total, 1)

    def advance(self, cells: int, resumed: bool = False) -> None:
        """Print a line if there is news."""
        self._done += cells
        self._resumed += cells if resumed else 0
        now = time.monotonic()
        tenth = 10 * self._done // max(self._total, 1)
        if (tenth > self._told and now - self._last >= 1) or (
            self._done == self._total and self._phase == "simulating"
        ):
            self._told, self._last = tenth, now
            resumed_note = f", {self._resumed} of them from an earlier run" if self._resumed else ""
            done = f"{self._done}/{self._total} cells{resumed_note}, {now - self._began:.1f} s"
            print(
                f"simmoe {self._command}: {self._phase}: {done}",
                file=self._stream,
                flush=True,
            )

    def tick(self) -> None:
        """Say nothing."""

    def close(self) -> None:
        """Nothing to tidy."""


class BarProgress:
    """A bar with counts and times."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
        from rich.progress import Progress as RichProgress

        self._bar: RichProgress = RichProgress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("cells"),
            TimeElapsedColumn(),
            TextColumn("left:"),
            TimeRemainingColumn(),
            console=Console(stderr=True),
            auto_refresh=False,
            expand=True,
        )
        self._task: TaskID = self._bar.add_task("", total=None)
        self._resumed = 0
        self._bar.start()

    def start(self, phase: str, total: int) -> None:
        """Name the phase and set the bar's length."""
        self._bar.update(self._task, description=phase, total=total, refresh=True)

    def advance(self, cells: int, resumed: bool = False) -> None:
        """Move the bar."""
        self._resumed += cells if resumed else 0
        if resumed and cells:
            self._bar.console.print(f"{self._resumed} cells resumed from an earlier run", highlight=False)
        self._bar.update(self._task, advance=cells, refresh=True)

    def tick(self) -> None:
        """Let the clock on the bar go on."""
        self._bar.refresh()

    def close(self) -> None:
        """Leave the bar as it stands."""
        self._bar.stop()


def open_progress(command: str) -> Progress:
    """Return a bar on a terminal, else lines that begin with the command's name."""
    return BarProgress() if sys.stderr.isatty() else LineProgress(sys.stderr, command)
