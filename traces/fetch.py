"""Download published traces into the user cache: checked, whole or absent, and resumed after a break."""

from __future__ import annotations

import hashlib
import http.client
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from simmoe.errors import OutputError, TraceError
from simmoe.traces.catalog import TraceFile
from simmoe.traces.rows import RowFile

_BLOCK_BYTES = 1 << 18
_TIMEOUT_S = 30.0

Progress = Callable[[int, int | None], None]


def fetch(file: TraceFile, folder: Path, url: str | None = None, progress: Progress | None = None) -> tuple[Path, str]:
    """Download ``file`` into ``folder`` and return its path and sha256.

    The download goes to ``NAME.partial`` and is renamed when it has passed its checks: against the checksum where one
    is known, else the length the server announced and the header, one of a known format. What a broken download left
    is resumed if a checksum can vouch for the whole, and started over otherwise.

    Args:
        folder: made if it does not exist.
        url: a mirror; the publisher's address by default.
        progress: called with bytes so far and in all (None if the server does not say).
    Raises:
        TraceError: the server cannot be reached, the download broke off, or the file fails its checks.
        OutputError: the folder cannot be written.
    """
    path = folder / file.file_name
    partial = folder / f"{file.file_name}.partial"
    address = url or file.url
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if file.sha256 is None:
            partial.unlink(missing_ok=True)
        resumed = partial.exists() and partial.stat().st_size > 0
        _download(address, partial, progress)
        sha256 = _sha256(partial)
        if resumed and sha256 != file.sha256:
            # What was left may be of another version of the file: once more from the start.
            partial.unlink()
            _download(address, partial, progress)
            sha256 = _sha256(partial)
        _check(file, partial, sha256, address)
        partial.replace(path)
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
        reason = getattr(error, "reason", None) or error
        status = f"HTTP {error.code} " if isinstance(error, urllib.error.HTTPError) else ""
        raise TraceError(
            f"cannot fetch {address}: {status}{reason}; check the network, or give a mirror's --url"
        ) from None
    except OSError as error:
        raise OutputError(
            f"cannot write '{partial}': {error.strerror or error}; set XDG_CACHE_HOME elsewhere"
        ) from None
    return path, sha256


def as_published(file: TraceFile, path: Path) -> bool:
    """Return whether ``path`` holds the published bytes, as far as a checksum is known; a gzipped copy is believed."""
    return file.sha256 is None or path.suffix == ".gz" or _sha256(path) == file.sha256


def _download(address: str, partial: Path, progress: Progress | None) -> None:
    """Append to ``partial`` what it lacks; from the start if the server does not serve ranges."""
    have = partial.stat().st_size if partial.exists() else 0
    request = urllib.request.Request(address, headers={"User-Agent": "simmoe", "Accept-Encoding": "identity"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        response = urllib.request.urlopen(request, timeout=_TIMEOUT_S)
    except urllib.error.HTTPError as error:
        if have and error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return  # nothing is lacking; the checksum decides
        raise
    with response:
        if response.status != http.HTTPStatus.PARTIAL_CONTENT:
            have = 0
        length = response.headers.get("Content-Length")
        total = have + int(length) if length is not None else None
        with partial.open("ab" if have else "wb") as out:
            done = have
            while block := response.read(_BLOCK_BYTES):
                out.write(block)
                done += len(block)
                if progress is not None:
                    progress(done, total)
    if total is not None and done != total:
        raise TraceError(
            f"the download of {address} broke off after {done:,} of {total:,} bytes; run the command again"
        )


def _check(file: TraceFile, partial: Path, sha256: str, address: str) -> None:
    if file.sha256 is None:
        try:
            next(RowFile(partial).chunks())
        except TraceError as error:
            partial.unlink()
            raise TraceError(f"{address} does not serve a trace: {error}") from None
    elif sha256 != file.sha256:
        partial.unlink()
        raise TraceError(
            f"{address} serves other bytes than {file.file_name} as published (sha256 {sha256}, not {file.sha256}); "
            f"nothing was kept"
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
