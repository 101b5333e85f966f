"""What jobs made, in few files: a compressed archive a GPU, in parts where it would be too large.

Unpacked into a campaign's folder on another machine, they are where that campaign goes on.
"""

from __future__ import annotations

import io
import os
import tarfile
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

MOST_BYTES = 16 << 20
"""Of one archive."""


def pack(out: Path, folders: Mapping[str, Iterable[Path]], to: Path, most_bytes: int = MOST_BYTES) -> list[Path]:
    """Write the archives anew; killed while it writes, it leaves those of before with all that was in them.

    A file may move from one archive to another, so none is replaced before all are written.

    Args:
        out: the campaign's folder; names in an archive begin below it.
        folders: of jobs, by GPU.
        to: folder of the archives.
        most_bytes: of each, but for one file that is larger by itself.
    """
    to.mkdir(parents=True, exist_ok=True)
    written: dict[Path, Path] = {}
    for gpu, of_gpu in folders.items():
        files = [path for folder in sorted(of_gpu) for path in sorted(folder.rglob("*")) if path.is_file()]
        for number, part in enumerate(_parts(files, most_bytes)):
            path = to / (f"gpu{gpu}.tar.gz" if number == 0 else f"gpu{gpu}-{number}.tar.gz")
            written[path] = _write(path, {str(file.relative_to(out)): data for file, data in part})
    for path, whole in written.items():
        os.replace(whole, path)
    for stale in set(to.glob("gpu*.tar.*")) - set(written):
        stale.unlink()
    return list(written)


def _parts(files: Iterable[Path], most_bytes: int) -> list[list[tuple[Path, bytes]]]:
    """Return the files with what is in them, in parts that compress to no more than that."""
    parts: list[list[tuple[Path, bytes]]] = []
    size = 0
    for file in files:
        try:
            data = file.read_bytes()
        except FileNotFoundError:  # a job that runs has replaced it by another
            continue
        # by itself it compresses no better than in company; an entry has a header and is padded, by 512 bytes each
        packed = len(zlib.compress(data)) + 1024
        if not parts or size + packed > most_bytes:
            parts.append([])
            size = 0
        parts[-1].append((file, data))
        size += packed
    return parts


def _write(path: Path, entries: Mapping[str, bytes]) -> Path:
    """Write an archive beside its place, and return where."""
    part = path.with_suffix(".part")
    with tarfile.open(part, "w:gz", compresslevel=6) as archive:
        for name, data in entries.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            archive.addfile(entry, io.BytesIO(data))
    return part
