"""Files are written whole or not at all, and over nothing but a file."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from simmoe.analysis.picture import picture
from simmoe.commands.profile_plot import drawn
from simmoe.commands.sweeping.store import SweepStore
from simmoe.errors import OutputError
from simmoe.traces.export import SUFFIXES, write_trace
from simmoe.traces.workload import Workload
from simmoe.writing import whole_file, write_whole

COUNTS = np.array([7, 8])
WORKLOAD = Workload(["a", "b"], np.array([0.0, 1.5]), COUNTS, COUNTS, COUNTS)


def write_picture(path: Path) -> None:
    with picture(path, (2, 1)) as figure:
        figure.add_subplot()


def write_drawing(path: Path) -> None:
    with drawn(path, (2, 1)) as figure:
        figure.add_subplot()


def write_cell(path: Path) -> None:
    with SweepStore(path.parent.parent, {}) as store:
        store.write(f"cells/{path.name}", b"{}")


#: What writes a file, and a name for it.
WRITERS: list[tuple[str, Callable[[Path], object]]] = [
    ("plot.png", write_picture),
    *((f"drawing{suffix}", write_drawing) for suffix in (".png", ".svg", ".pdf")),
    *((f"trace{suffix}", lambda path: write_trace(path, WORKLOAD, True)) for suffix in SUFFIXES),
    ("cell.json", write_cell),
]
writers = pytest.mark.parametrize(("name", "write"), WRITERS, ids=[name for name, _ in WRITERS])


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder, that of a sweep's cells."""
    with SweepStore(tmp_path, {}):
        return tmp_path / "cells"


@writers
def test_whatever_is_written_goes_through_a_link(name: str, write: Callable[[Path], object], folder: Path) -> None:
    link, file = folder / name, folder / f"of-{name}"
    link.symlink_to(file)
    write(link)
    assert link.is_symlink() and file.is_file() and sorted(folder.iterdir()) == sorted([link, file])


@writers
def test_whatever_is_written_leaves_a_pipe_alone(name: str, write: Callable[[Path], object], folder: Path) -> None:
    os.mkfifo(folder / name)
    with pytest.raises(OutputError, match=f"to '{folder / name}': what stands there is no file; choose another"):
        write(folder / name)
    assert (folder / name).is_fifo() and list(folder.iterdir()) == [folder / name]


@writers
def test_whatever_is_written_stays_as_it_was_where_the_disk_is_full(
    name: str, write: Callable[[Path], object], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / name).write_bytes(b"before")
    kept = Path.replace

    def full(self: Path, target: Path) -> Path:
        if target.name == name:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return kept(self, target)

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OutputError, match=f"to '{folder / name}': No space left on device; choose another"):
        write(folder / name)
    assert (folder / name).read_bytes() == b"before" and list(folder.iterdir()) == [folder / name]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError("not of writing"), SystemExit(1)])
def test_what_is_interrupted_leaves_what_was_there(error: BaseException, tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    path.write_bytes(b"before")
    with pytest.raises(type(error)), whole_file(path, "the table") as partial:
        partial.write_bytes(b"half")
        raise error
    assert path.read_bytes() == b"before" and list(tmp_path.iterdir()) == [path]


def test_folders_are_created_and_nothing_is_left_beside_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "table.json"
    for content in (b"one", b"two"):
        write_whole(path, content, "the table")
        assert path.read_bytes() == content
        assert list(path.parent.iterdir()) == [path]


def test_a_link_is_followed_not_replaced(tmp_path: Path) -> None:
    link, file = tmp_path / "link.json", tmp_path / "file.json"
    link.symlink_to(file)
    for content in (b"one", b"two"):
        write_whole(link, content, "the table")
        assert link.is_symlink() and file.read_bytes() == content


def test_what_is_no_file_stays_what_it_is(tmp_path: Path) -> None:
    folder, pipe, link = tmp_path / "folder", tmp_path / "pipe", tmp_path / "link"
    folder.mkdir()
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    for path in (folder, pipe, link):
        with pytest.raises(OutputError, match=rf"cannot write the table to '{path}': what stands there is no file"):
            write_whole(path, b"x", "the table")
    assert folder.is_dir() and pipe.is_fifo() and link.is_symlink()
    assert sorted(tmp_path.iterdir()) == sorted([folder, pipe, link])


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "table.json"
    path.write_bytes(b"before")

    def full(self: Path, content: bytes) -> int:
        self.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(OutputError, match="No space left on device; choose another place"):
        write_whole(path, b"after", "the table")
    assert path.read_bytes() == b"before" and list(tmp_path.iterdir()) == [path]
