"""Reading a profile's files: what cannot be read, unpacked or parsed is refused in one line that names it."""

from __future__ import annotations

import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, get_type_hints

from simmoe.errors import DataError, ProfileError
from simmoe.reading import what_is_no_file

T = TypeVar("T")


class NotJson(ProfileError):
    """A text is no JSON, or JSON beyond what is read."""


#: Digits of the largest whole number: no count here has more, and what has fits no machine word.
MOST_DIGITS = 18


def read_bytes(path: str | os.PathLike[str], what: str) -> bytes:
    """Return a regular file's content, unpacked when its name ends in ``.gz``.

    Args:
        path: of the file.
        what: it is expected to be, such as 'the recording'.
    Raises:
        ProfileError: it is not there, no regular file (a pipe would be waited for), cannot be read, or is cut short.
    """
    with _opened(path, what) as file:
        return file.read()


def read_text(path: str | os.PathLike[str], what: str) -> str:
    """Return a file's text; as :func:`read_bytes`, and refuses what is no UTF-8."""
    return _text(read_bytes(path, what), path, what)


def read_first_line(path: str | os.PathLike[str], what: str) -> str:
    """Return a text file's first line, reading no more of it; otherwise as :func:`read_text`."""
    with _opened(path, what) as file:
        line = file.readline()
    return _text(line, path, what)


@contextmanager
def _opened(path: str | os.PathLike[str], what: str) -> Iterator[gzip.GzipFile | io.BufferedReader]:
    """Open a file for :func:`read_bytes`, whose errors are raised for the length of the block."""
    name = f"{what} '{os.fspath(path)}'"
    is_packed = Path(path).suffix == ".gz"
    try:
        if kind := what_is_no_file(path):
            raise ProfileError(f"cannot read {name}: it is {kind}; name a file")
        with Path(path).open("rb") as file:
            yield gzip.GzipFile(fileobj=file) if is_packed else file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ProfileError(f"cannot unpack {name}: {error}; copy it again, or measure again") from None
    except (OSError, ValueError) as error:
        raise ProfileError(f"cannot read {name}: {getattr(error, 'strerror', None) or error}") from None


def _text(content: bytes, path: str | os.PathLike[str], what: str) -> str:
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ProfileError(f"cannot read {what} '{os.fspath(path)}': it is no text: {error}") from None


def parse_json(text: str | bytes, where: str) -> Any:
    """Return the value of a JSON text.

    Args:
        text: of one value.
        where: it stands, such as "profile 'x.json'", for errors.
    Raises:
        NotJson: it is no JSON, is nested too deeply, has a name twice (of whose values JSON readers keep one,
            silently), or a whole number beyond MOST_DIGITS.
    """
    try:
        return json.loads(text, object_pairs_hook=_unrepeated, parse_int=_whole)
    except ProfileError as error:
        raise NotJson(f"{where} {error}") from None
    except ValueError as error:
        raise NotJson(f"{where} is not JSON: {error}") from None
    except RecursionError:
        raise NotJson(f"{where} is nested too deeply") from None


def build(cls: type[T], record: Mapping[str, Any], where: str) -> T:
    """Return ``cls(**record)``, a dataclass or named tuple, after checking names and types, those of elements too.

    Args:
        cls: whose fields are of JSON's types, lists and dicts of them, or literals.
        record: of a file.
        where: it stands, such as "'x.jsonl' line 3", for errors.
    Raises:
        ProfileError: a field is missing, unknown or of another type, or ``cls`` refuses a value.
    """
    hints, optional = _fields(cls)  # type: ignore[arg-type]  # classes are hashable
    missing = [name for name in hints if name not in record and name not in optional]
    if missing:
        raise ProfileError(f"{where} lacks {', '.join(missing)}")
    unknown = [name for name in record if name not in hints]
    if unknown:
        raise ProfileError(f"{where} has unknown {', '.join(unknown)}")
    values = {name: _typed(value, hints[name], name, where) for name, value in record.items()}
    try:
        return cls(**values)
    except DataError as error:
        raise ProfileError(f"{where}: {error}") from None


def _typed(value: Any, hint: Any, name: str, where: str) -> Any:
    """Return a value of the type a hint names; a whole number where it names a float becomes one."""
    if hint is Any:
        return value
    wanted = getattr(hint, "__origin__", hint)
    if wanted is Literal:
        wanted = str
    if wanted is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, wanted) or (wanted is int and isinstance(value, bool)):
        raise ProfileError(f"{where}: {name} is {value!r}; it must be {wanted.__name__}")
    if wanted is str and not str(value).isprintable():
        raise ProfileError(f"{where}: {name} is {value!r}; it must be one line of text")
    elements = getattr(hint, "__args__", ())
    if wanted is list and elements:
        return [_typed(item, elements[0], f"{name}[{place}]", where) for place, item in enumerate(value)]
    if wanted is dict and elements:
        return {key: _typed(item, elements[1], f"{name}.{key}", where) for key, item in value.items()}
    return value


@cache
def _fields(cls: type) -> tuple[dict[str, Any], set[str]]:
    """Return a class's fields with their types, and those that have a default."""
    if is_dataclass(cls):
        optional = {f.name for f in fields(cls) if f.default is not MISSING or f.default_factory is not MISSING}
    else:
        optional = set(getattr(cls, "_field_defaults", ()))
    return get_type_hints(cls), optional


def _unrepeated(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ProfileError(f"has '{next(name for name in names if names.count(name) > 1)}' twice")
    return found


def _whole(digits: str) -> int:
    number = len(digits.lstrip("-"))
    if number > MOST_DIGITS:
        raise ProfileError(f"has the number {digits[:9]}… of {number} digits; none here has more than {MOST_DIGITS}")
    return int(digits)
