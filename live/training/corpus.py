"""Real text under free licences, from Debian's documentation packages.

``python -m simmoe.live.training.corpus OUT`` downloads the packages in :data:`SOURCES` with ``apt-get download``,
unpacks them without installing anything, turns their HTML into plain text and writes
``OUT/{train,validation,test}.txt`` and ``OUT/corpus.json`` (versions, licences, bytes, sha256).

Every block of text (a paragraph, a list item, a code listing) is kept the first time it is seen and dropped
afterwards, so navigation bars go away and no block of the held-out text occurs in the training text. The split is by
document: the sha256 of ``package/path`` decides, so it does not change when a package is added.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path

from simmoe.errors import DataError, MissingDependency

SPLITS = ("train", "validation", "test")
#: Documents in a hundred that go to validation, and as many to test.
HELD_OUT_PERCENT = 2
#: A document starts with this line; the tokeniser script turns it into the end-of-text token.
DOCUMENT_MARK = "\x00"

_DICTIONARY_ENTRIES_PER_DOCUMENT = 100


@dataclass(frozen=True)
class Source:
    """One Debian package and the part of it that is English prose."""

    package: str
    """Binary package name; bookworm's version is what the committed model saw."""
    licence: str
    """As its debian/copyright states for the documentation."""
    pattern: str
    """Regular expression a file's path inside the package must match from its beginning."""


SOURCES = (
    Source(
        "linux-doc-6.1",
        "GPL-2.0",
        r"usr/share/doc/linux-doc-6\.1/html/(?!translations|_static|genindex|search).*\.html$",
    ),
    Source("python3.11-doc", "PSF-2.0", r".*/html/(?!genindex|search|_static).*\.html(\.gz)?$"),
    Source("postgresql-doc-15", "PostgreSQL", r".*\.html$"),
    Source("debian-handbook", "GPL-2.0+ or CC-BY-SA-3.0", r".*/html/en-US/.*\.html$"),
    Source("debian-reference-en", "GPL-2.0+", r".*\.en\.html$"),
    Source("debian-policy", "GPL-2.0+", r".*/policy\.html/(?!genindex|search).*\.html$"),
    Source("developers-reference", "GPL-2.0+", r".*/(?!genindex|search)[^/]*\.html$"),
    Source("apache2-doc", "Apache-2.0", r".*/manual/en/.*\.html$"),
    Source("git-doc", "GPL-2.0", r".*\.html$"),
    Source("sqlite3-doc", "public domain", r".*\.html$"),
    Source("dict-gcide", "GPL-3.0+", r".*/gcide\.dict\.dz$"),
    Source(
        "rust-doc",
        "MIT or Apache-2.0",
        r".*/html/(book|reference|nomicon|cargo|rust-by-example|rustc|rustdoc|embedded-book|edition-guide)/(?!print).*\.html$",
    ),
    Source("python-django-doc", "BSD-3-Clause", r".*/html/(?!genindex|search|_modules).*\.html$"),
    Source("libreoffice-help-en-us", "MPL-2.0", r".*/text/.*\.html$"),
    Source("octave-doc", "GPL-3.0+", r".*/octave\.html/.*\.html$"),
    Source("cmake-doc", "BSD-3-Clause", r".*/html/(?!genindex|search|_sources).*\.html$"),
    Source("maxima-doc", "GPL-2.0+", r".*/html/maxima_\d+\.html$"),
    Source("erlang-doc", "Apache-2.0", r".*/doc/html/(?!search|404).*\.html$"),
    Source("python-scipy-doc", "BSD-3-Clause", r".*/html/(?!genindex|search|_modules).*\.html$"),
    Source("harden-doc", "GPL-2.0+", r".*/html/en-US/.*\.html$"),
    Source("r-doc-html", "GPL-2.0+", r".*\.html$"),
)

_SKIPPED = {"script", "style", "nav", "head", "footer", "svg", "button", "select"}
_BLOCKS = {
    "p", "div", "li", "ul", "ol", "dl", "dt", "dd", "pre", "table", "tr", "h1", "h2", "h3", "h4", "h5", "h6", "section",
    "article", "blockquote", "hr", "main", "aside", "header", "body", "caption", "figcaption",
}  # fmt: skip


class _Blocks(HTMLParser):
    """Collects the text blocks of one HTML page, white space collapsed outside ``<pre>``."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks: list[str] = []
        self._parts: list[str] = []
        self._skip = 0
        self._pre = 0

    def _flush(self) -> None:
        text = "".join(self._parts)
        self._parts.clear()
        text = text.strip("\n").rstrip() if self._pre else re.sub(r"\s+", " ", text).strip()
        if text.strip():
            self.blocks.append(text.replace("\xb6", "").rstrip())

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag in _SKIPPED:
            self._skip += 1
        elif tag in _BLOCKS:
            self._flush()
            self._pre += tag == "pre"
        elif tag == "br":
            self._parts.append("\n" if self._pre else " ")
        elif tag in ("td", "th"):
            self._parts.append(" ")

    def handle_endtag(self, tag: str) -> None:
        if tag in _SKIPPED:
            self._skip = max(0, self._skip - 1)
        elif tag in _BLOCKS:
            self._flush()
            self._pre = max(0, self._pre - (tag == "pre"))

    def handle_data(self, data: str) -> None:
        if not self._skip:
            self._parts.append(data)

    def close(self) -> None:
        super().close()
        self._flush()


def html_blocks(html: str) -> list[str]:
    """The text blocks of a page in reading order, without scripts, navigation and markup."""
    parser = _Blocks()
    parser.feed(html)
    parser.close()
    return parser.blocks


def split_of(document: str) -> str:
    """``train``, ``validation`` or ``test``, from the document's name alone."""
    draw = int.from_bytes(hashlib.sha256(document.encode()).digest()[:8], "big") % 100
    return "validation" if draw < HELD_OUT_PERCENT else "test" if draw < 2 * HELD_OUT_PERCENT else "train"


def documents(root: Path, source: Source) -> Iterator[tuple[str, list[str]]]:
    """(name, blocks) of every document that ``source`` selects under the unpacked package ``root``, by path."""
    wanted = re.compile(source.pattern)
    for path in sorted(p for p in root.rglob("*") if p.is_file() and not p.is_symlink()):
        inside = path.relative_to(root).as_posix()
        if not wanted.match(inside):
            continue
        raw = path.read_bytes()
        if path.suffix in (".gz", ".dz"):
            raw = gzip.decompress(raw)
        text = raw.decode("utf-8", errors="replace")
        if path.suffix == ".dz":
            entries = [entry.strip("\n") for entry in re.split(r"\n\n(?=\S)", text)]
            for first in range(0, len(entries), _DICTIONARY_ENTRIES_PER_DOCUMENT):
                yield f"{source.package}/{inside}#{first}", entries[first : first + _DICTIONARY_ENTRIES_PER_DOCUMENT]
        else:
            yield f"{source.package}/{inside}", html_blocks(text)


def build(out: Path, sources: tuple[Source, ...] = SOURCES) -> dict[str, object]:
    """Download, clean and split the corpus; returns what ``corpus.json`` says.

    Raises:
        MissingDependency: ``apt-get`` or ``dpkg-deb`` is not here or cannot reach its packages.
        DataError: a package holds no document that its pattern selects.
    """
    out.mkdir(parents=True, exist_ok=True)
    seen: set[bytes] = set()
    rows = []
    files = {split: (out / f"{split}.txt").open("w", encoding="utf-8", newline="\n") for split in SPLITS}
    with tempfile.TemporaryDirectory() as scratch:
        for source in sources:
            root, version = _unpack(source, Path(scratch))
            count, size = 0, dict.fromkeys(SPLITS, 0)
            for name, blocks in documents(root, source):
                fresh = []
                for block in blocks:
                    key = hashlib.blake2b(block.encode(), digest_size=8).digest()
                    if key not in seen:
                        seen.add(key)
                        fresh.append(block)
                text = "\n\n".join(fresh)
                if len(text) < 200:
                    continue
                split = split_of(name)
                files[split].write(f"{DOCUMENT_MARK}\n{text}\n")
                count += 1
                size[split] += len(text.encode())
            if not count:
                raise DataError(
                    f"{source.package} {version}: no document matches {source.pattern!r}; adjust its Source"
                )
            rows.append({"package": source.package, "version": version, "licence": source.licence, "documents": count,
                         "bytes": size})  # fmt: skip
            print(
                f"{source.package:24} {count:6} documents {sum(size.values()) / 1e6:7.2f} MB",
                file=sys.stderr,
                flush=True,
            )
    for file in files.values():
        file.close()
    digests = {split: hashlib.sha256((out / f"{split}.txt").read_bytes()).hexdigest() for split in SPLITS}
    summary: dict[str, object] = {"sources": rows, "sha256": digests, "held_out_percent": HELD_OUT_PERCENT}
    (out / "corpus.json").write_text(json.dumps(summary, indent=1) + "\n")
    return summary


def _unpack(source: Source, scratch: Path) -> tuple[Path, str]:
    root = scratch / source.package
    root.mkdir()
    try:
        subprocess.run(["apt-get", "download", "-q", source.package], cwd=root, check=True, capture_output=True)
        (package,) = root.glob("*.deb")
        version = subprocess.run(
            ["dpkg-deb", "-f", package, "Version"], check=True, capture_output=True, text=True
        ).stdout
        subprocess.run(["dpkg-deb", "-x", package, root], check=True, capture_output=True)
        package.unlink()
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", None) or str(error)
        reason = (said.decode(errors="replace") if isinstance(said, bytes) else said).strip().splitlines()[-1]
        raise MissingDependency(
            f"cannot fetch Debian package {source.package}: {reason}; run on Debian after 'apt-get update', "
            "or train on text of your own"
        ) from error
    return root, version.strip()


if __name__ == "__main__":
    build(Path(sys.argv[1]))
