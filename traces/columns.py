"""Columns of strings and of hash runs kept flat: read-only sequences that cost a few bytes a row, not an object."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import overload

import numpy as np
import numpy.typing as npt

IntColumn = npt.NDArray[np.int64]


class NumberedIds(Sequence[str]):
    """The ids ``"0"``, ``"1"``, ...: position in the workload, made on access."""

    __slots__ = ("_n",)

    def __init__(self, n: int) -> None:
        self._n = n

    def __len__(self) -> int:
        return self._n

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        found = range(self._n)[index]
        return str(found) if isinstance(found, int) else [str(i) for i in found]

    def __iter__(self) -> Iterator[str]:
        return map(str, range(self._n))


class PackedStrings(Sequence[str]):
    """Strings in one UTF-8 blob.

    Args:
        blob: the strings' bytes, one after another.
        offsets: [num_strings + 1] int64; string i is ``blob[offsets[i]:offsets[i + 1]]``.
    """

    __slots__ = ("_blob", "_offsets")

    def __init__(self, blob: bytes, offsets: IntColumn) -> None:
        self._blob = blob
        self._offsets = offsets

    @classmethod
    def of(cls, texts: Iterable[str]) -> PackedStrings:
        """Pack ``texts``."""
        parts = [text.encode() for text in texts]
        return cls(b"".join(parts), _offsets([len(part) for part in parts]))

    @classmethod
    def concatenate(cls, parts: Sequence[PackedStrings]) -> PackedStrings:
        """Join packed columns in order."""
        blob = b"".join(part._blob for part in parts)
        return cls(blob, _offsets(np.concatenate([np.diff(part._offsets) for part in parts])))

    def take(self, rows: IntColumn) -> PackedStrings:
        """Return the strings at ``rows``, in that order."""
        return PackedStrings.of(self[int(row)] for row in rows)

    def __len__(self) -> int:
        return len(self._offsets) - 1

    @overload
    def __getitem__(self, index: int) -> str: ...
    @overload
    def __getitem__(self, index: slice) -> list[str]: ...
    def __getitem__(self, index: int | slice) -> str | list[str]:
        found = range(len(self))[index]
        if isinstance(found, int):
            return self._blob[self._offsets[found] : self._offsets[found + 1]].decode()
        return [self[i] for i in found]


class HashRuns(Sequence[tuple[int, ...]]):
    """Runs of hash ids in one array: run i holds the ids of request i's consecutive prompt blocks.

    Args:
        ids: [num_ids] int64, all runs one after another.
        offsets: [num_runs + 1] int64; run i is ``ids[offsets[i]:offsets[i + 1]]``.
    """

    __slots__ = ("ids", "offsets")

    def __init__(self, ids: IntColumn, offsets: IntColumn) -> None:
        self.ids = ids
        self.offsets = offsets

    @classmethod
    def of(cls, runs: Sequence[Sequence[int]]) -> HashRuns:
        """Pack ``runs``."""
        offsets = _offsets([len(run) for run in runs])
        flat = np.fromiter((value for run in runs for value in run), dtype=np.int64, count=int(offsets[-1]))
        return cls(flat, offsets)

    @classmethod
    def concatenate(cls, parts: Sequence[HashRuns]) -> HashRuns:
        """Join packed columns in order."""
        lengths = np.concatenate([part.lengths() for part in parts])
        return cls(np.concatenate([part.ids for part in parts]), _offsets(lengths))

    def lengths(self) -> IntColumn:
        """Return [num_runs] int64, ids in each run."""
        return np.diff(self.offsets)

    def take(self, rows: IntColumn, at_most: IntColumn | None = None, shift: IntColumn | None = None) -> HashRuns:
        """Return the runs at ``rows``, in that order.

        Args:
            rows: [n] int64.
            at_most: [n] int64, keeps only the leading ids of each run (a prompt that was shortened).
            shift: [n] int64, added to each run's ids (a later pass over the trace shares nothing with the first).
        """
        lengths = self.lengths()[rows]
        if at_most is not None:
            lengths = np.minimum(lengths, at_most)
        offsets = _offsets(lengths)
        within = np.arange(int(offsets[-1]), dtype=np.int64) - np.repeat(offsets[:-1], lengths)
        ids = self.ids[np.repeat(self.offsets[rows], lengths) + within]
        if shift is not None:
            ids = ids + np.repeat(shift, lengths)
        return HashRuns(ids, offsets)

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @overload
    def __getitem__(self, index: int) -> tuple[int, ...]: ...
    @overload
    def __getitem__(self, index: slice) -> list[tuple[int, ...]]: ...
    def __getitem__(self, index: int | slice) -> tuple[int, ...] | list[tuple[int, ...]]:
        found = range(len(self))[index]
        if isinstance(found, int):
            return tuple(self.ids[self.offsets[found] : self.offsets[found + 1]].tolist())
        return [self[i] for i in found]


def _offsets(lengths: Sequence[int] | IntColumn) -> IntColumn:
    offsets = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=offsets[1:])
    return offsets
