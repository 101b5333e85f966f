"""Which files decide what a policy answers: those it imports of its author's own, however it imports them."""

from __future__ import annotations

import hashlib
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from simmoe.commands.sweeping.imports import imported_hashes

#: The policy's module -> the modules found, for files laid out as in FILES.
CASES = {
    "import helper": ["helper"],
    "from helper import f": ["helper"],
    "import helper as h, json, numpy, simmoe.records": ["helper"],
    "from pathlib import Path\nimport pyarrow.parquet": [],
    "def plan():\n    import helper": ["helper"],
    "try:\n    import helper\nexcept ImportError:\n    import missing": ["helper"],
    "import chain": ["chain", "helper"],
    "import circle": ["circle", "circle2"],
    "import package.inner": ["helper", "package", "package.inner", "package.sibling"],
    "from package import inner": ["helper", "package", "package.inner", "package.sibling"],
    "from package.deep import leaf": ["package", "package.deep", "package.deep.leaf", "package.sibling"],
    "from space import alone": ["space.alone"],
    "import importlib\nhelper = importlib.import_module('helper')": ["helper"],
    "import importlib\nf = importlib.import_module('helper').f": ["helper"],
    "import importlib.util as u, os\n"
    "s = u.spec_from_file_location('by_path', os.path.join(os.path.dirname(__file__), 'helper.py'))\n"
    "m = u.module_from_spec(s)\ns.loader.exec_module(m)": ["by_path"],
}

FILES = {
    "helper.py": "def f(): ...\n",
    "chain.py": "from helper import f\n",
    "circle.py": "import circle2\n",
    "circle2.py": "import circle\n",
    "package/__init__.py": "",
    "package/inner.py": "from . import sibling\nfrom helper import f\n",
    "package/sibling.py": "",
    "package/deep/__init__.py": "",
    "package/deep/leaf.py": "from .. import sibling\n",
    "space/alone.py": "",
    "unrelated.py": "",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    return tmp_path


FIND = """
import json, sys
import unrelated
from simmoe.commands.sweeping.imports import imported_hashes
from simmoe.policies.registry import parse_policy
answers = {}
for number in range(int(sys.argv[1])):
    cls = parse_policy(f"policy{number}.py:Mine").route_part.load()
    answers[number] = imported_hashes(cls.__module__)
print(json.dumps(answers))
"""


def test_modules_are_found_however_they_are_imported(folder: Path) -> None:
    end = "\nclass Mine:\n    def route(self, request, ranks, now_s):\n        return 0\n"
    for number, text in enumerate(CASES):
        (folder / f"policy{number}.py").write_text(text + end)
    argv = [sys.executable, "-c", FIND, str(len(CASES))]
    answers = json.loads(subprocess.run(argv, cwd=folder, check=True, capture_output=True, text=True).stdout)
    for number, (text, expected) in enumerate(CASES.items()):
        found = answers[str(number)]
        assert list(found) == expected, text
        for name, sha256 in found.items():
            path = folder / ("helper" if name == "by_path" else name.replace(".", "/"))
            file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            assert sha256 == hashlib.sha256(file.read_bytes()).hexdigest()


def test_a_packages_own_modules_count_wherever_it_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site = tmp_path / "site-packages"
    for package, text in (("plugin_one", "import plugin_two\nfrom plugin_one import parts\n"), ("plugin_two", "")):
        (site / package).mkdir(parents=True)
        (site / package / "__init__.py").write_text(text)
        (site / package / "parts.py").write_text("")
    monkeypatch.syspath_prepend(str(site))
    importlib.import_module("plugin_one")
    assert list(imported_hashes("plugin_one")) == ["plugin_one.parts"]


def test_shipped_policies_import_nothing_of_the_users() -> None:
    importlib.import_module("simmoe.policies.lanes")
    assert imported_hashes("simmoe.policies.lanes") == {}
