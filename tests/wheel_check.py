"""Build the sdist and from it the wheel, install that into a clean environment, and simulate from there.

``python -m tests.wheel_check``
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
#: The target of a link to another page, a picture or a table. (Rooms are in src/simmoe there, checkpoints left out.)
LINK = re.compile(r"\]\((?!https?:|\.\./)([^)#]+\.(?:md|png|csv))")
ROOMS = ("analysis", "live", "policies", "profiles", "simulator", "traces")


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command outside the source tree and return what it printed."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "SIMMOE"))}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


def unpacked_sdist(work: Path) -> Path:
    """Build the sdist and return its folder: complete in itself, every page and picture that its pages link to."""
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", str(work), cwd=ROOT)
    (sdist,) = work.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        assert all(member.isfile() or member.isdir() for member in archive), "the sdist has links"
        archive.extractall(work, filter="data")
    source = work / sdist.name.removesuffix(".tar.gz")
    for page in (source / "README.md", *(source / "docs").glob("*.md")):
        for target in LINK.findall(page.read_text()):
            assert (page.parent / target).is_file(), f"the sdist's {page.name} links to {target}, which it lacks"
    for name in ("Makefile", "tests/support/worlds.py", "benchmarks/run.py"):
        assert (source / name).is_file(), f"the sdist lacks {name}"
    return source


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        source = unpacked_sdist(work)
        run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(work), cwd=source)
        (wheel,) = work.glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
        for room in ROOMS:
            assert f"simmoe/{room}/__init__.py" in names, f"the wheel lacks {room}"
        assert {name.split("/")[0].split("-")[0] for name in names} == {"simmoe"}, "site-packages gets one name"
        run(sys.executable, "-m", "venv", "env", cwd=work)
        bin_dir = work / "env" / "bin"
        run(bin_dir / "pip", "install", "--quiet", "--disable-pip-version-check", str(wheel), cwd=work)
        sweep = ("sweep", "--rates", "5,20", "--seeds", "2", "--requests", "64", "--out", "out")
        table = run(bin_dir / "simmoe", *sweep, cwd=work)
        assert "lanes" in table and "fifo" in table, table
        written = {path.name for path in (work / "out").iterdir()}
        assert {"sweep.csv", "sweep.png", "cells.parquet", "manifest.json"} <= written, written
        print(f"{wheel.name}: {len(names)} files; installed clean, swept: {', '.join(sorted(written))}")


if __name__ == "__main__":
    main()
