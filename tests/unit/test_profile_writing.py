"""Files are written whole or not at all, and over nothing but a file."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from simmoe.errors import OutputError
from simmoe.profiles.writing import write_whole


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
