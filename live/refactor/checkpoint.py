"""Hugging Face checkpoints on disk: read tensor by tensor, written shard by shard into a directory that appears whole.

A checkpoint is written into a hidden sibling directory and renamed when its index is on disk, so what bears the asked
name is complete. The sibling of a run that was killed is removed by the next one that writes to that name on the same
machine. Memory holds one output shard, never the model.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from simmoe.errors import OutputError, RefactorError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
#: Files of a checkpoint directory that hold weights or describe them, and are therefore never copied.
_WEIGHT_SUFFIXES = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".gguf")


class Checkpoint:
    """A directory of safetensors shards with its config.json.

    Args:
        path: the directory.
    Raises:
        RefactorError: no config.json, no safetensors, a shard the index names is missing, or a shard is cut short.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = _read_json(path / "config.json", "a Hugging Face model directory has one")
        self.shard_of = self._locate()

    def _locate(self) -> dict[str, Path]:
        if (self.path / INDEX).exists():
            weight_map = _read_json(self.path / INDEX, "").get("weight_map")
            if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
                raise RefactorError(f"{self.path / INDEX}: weight_map names no file for each tensor; download it again")
            shards = {name: self.path / file for name, file in weight_map.items()}
            for file in sorted(set(shards.values())):
                if not file.exists():
                    raise RefactorError(f"{file}: shard named in {INDEX} is missing; download the checkpoint again")
            for file in sorted(set(shards.values())):
                absent = {name for name, home in shards.items() if home == file} - set(_open(file).keys())
                if absent:
                    raise RefactorError(f"{file}: holds no tensor {min(absent)!r} although {INDEX} says so")
            return shards
        single = self.path / SINGLE
        if not single.exists():
            raise RefactorError(
                f"{self.path}: neither {SINGLE} nor {INDEX} is there; convert the weights to safetensors"
            )
        return {name: single for name in _open(single).keys()}  # noqa: SIM118 (a safetensors handle is no mapping)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Every tensor by name, one in memory at a time, shard after shard."""
        for shard in dict.fromkeys(self.shard_of.values()):
            handle = _open(shard)
            for name in (name for name, home in self.shard_of.items() if home == shard):
                yield name, handle.get_tensor(name)

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor.

        Raises:
            RefactorError: the checkpoint has none of that name.
        """
        if name not in self.shard_of:
            raise RefactorError(f"{self.path}: tensor {name!r} is missing")
        return _open(self.shard_of[name]).get_tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape, without reading it; ``name`` must be there."""
        return tuple(_open(self.shard_of[name]).get_slice(name).get_shape())


class CheckpointWriter:
    """Collects tensors into shards of at most ``shard_bytes``; used inside :func:`new_checkpoint`."""

    def __init__(self, path: Path, shard_bytes: int) -> None:
        self.path = path
        self._shard_bytes = shard_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        self._total_bytes = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Queue one tensor; a full shard goes to disk."""
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self._shard_bytes:
            self._flush()
        self._pending[name] = tensor.contiguous()
        self._pending_bytes += size
        self._total_bytes += size

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write one JSON file beside the shards."""
        (self.path / name).write_text(json.dumps(content, indent=2) + "\n")

    def _flush(self) -> None:
        save_file(self._pending, self.path / f"shard-{len(self._shards)}", metadata={"format": "pt"})
        self._shards.append(list(self._pending))
        self._pending.clear()
        self._pending_bytes = 0

    def finish(self) -> None:
        """Write what is queued, give the shards their published names and write the index."""
        self._flush()
        count = len(self._shards)
        weight_map: dict[str, str] = {}
        for number, names in enumerate(self._shards):
            final = SINGLE if count == 1 else f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            (self.path / f"shard-{number}").rename(self.path / final)
            # safetensors lets nobody but the owner read; these are as readable as the directory
            (self.path / final).chmod(self.path.stat().st_mode & 0o666)
            weight_map |= dict.fromkeys(names, final)
        if count > 1:
            self.write_json(INDEX, {"metadata": {"total_size": self._total_bytes}, "weight_map": weight_map})


@contextmanager
def new_checkpoint(out: Path, *, shard_bytes: int = 4_000_000_000) -> Iterator[CheckpointWriter]:
    """A writer whose directory becomes ``out`` when the block ends well, and vanishes when it does not.

    Raises:
        OutputError: ``out`` exists, or the disk is full or not writable.
    """
    check_new(out)
    stem = f".{out.name}.partial-{socket.gethostname()}-"
    partial = out.parent / f"{stem}{os.getpid()}"
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(out.parent, stem)
        partial.mkdir()
        writer = CheckpointWriter(partial, shard_bytes)
        yield writer
        writer.finish()
        for file in partial.iterdir():
            with file.open("rb") as handle:
                os.fsync(handle.fileno())
        partial.rename(out)
    except (OSError, SafetensorError) as error:
        raise OutputError(f"cannot write checkpoint {out}: {error}; nothing was left there") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _remove_leftovers(parent: Path, stem: str) -> None:
    """Remove what killed runs of this machine left: directories named by ``stem`` and a process that is gone."""
    for entry in parent.iterdir():
        pid = entry.name.removeprefix(stem)
        if entry.name.startswith(stem) and pid.isdecimal() and (int(pid) == os.getpid() or not _runs(int(pid))):
            shutil.rmtree(entry, ignore_errors=True)


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except PermissionError:  # somebody else's
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True


def check_new(out: Path) -> None:
    """Raise ``OutputError`` if ``out`` is there already, or no directory can be made there."""
    if out.exists() or out.is_symlink():
        raise OutputError(f"{out}: exists already; choose a new directory or remove it")
    above = next(parent for parent in out.absolute().parents if parent.exists() or parent.is_symlink())
    try:
        with tempfile.TemporaryDirectory(dir=above):
            pass
    except OSError:
        raise OutputError(f"{out}: {above} is no directory that can be written to; choose another place") from None


def copy_companions(source: Path, target: Path, *, skip: Iterable[str] = ("config.json",)) -> None:
    """Copy tokeniser, generation settings, licence and the like: every plain file that holds no weights."""
    skipped = set(skip)
    for file in sorted(source.iterdir()):
        if file.is_file() and file.name not in skipped and not file.name.endswith(_WEIGHT_SUFFIXES):
            shutil.copyfile(file, target / file.name)


def _open(shard: Path) -> Any:
    try:
        return safe_open(shard, framework="pt")
    except (OSError, SafetensorError) as error:
        raise RefactorError(f"{shard}: not a readable safetensors file ({error}); download it again") from error


def _read_json(path: Path, hint: str) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise RefactorError(f"{path}: not found; {hint}") from error
    except (OSError, ValueError) as error:
        raise RefactorError(f"{path}: not readable JSON ({error})") from error
    if not isinstance(content, dict):
        raise RefactorError(f"{path}: holds a {type(content).__name__}, not an object")
    return content
