"""What a user's policy imports of the user's own: files that decide its answers beside the one that defines it.

Followed are import statements, wherever they stand in a module, and the modules that its globals come from (which finds
those imported by other means). Neither what else the process has loaded nor when matters, so the answer is the same in
the command, in its workers and on other machines.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import sys
import sysconfig
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import ModuleType

_INSTALLED = {"site-packages", "dist-packages"}


@lru_cache(maxsize=64)
def imported_hashes(module_name: str) -> dict[str, str]:
    """Return the SHA-256 of each module that a loaded one imports, directly or not, by name, in order of names.

    Left out are simmoe, the standard library and installed packages, save the package that the module itself is of.
    """
    own_package = module_name.partition(".")[0]
    found: dict[str, str] = {}
    pending: list[tuple[str, ModuleType | None]] = [(module_name, sys.modules[module_name])]
    seen = {module_name}
    while pending:
        name, module = pending.pop()
        file = _file_of(name, module)
        if file is None or (name != module_name and not _is_followed(name, file, own_package)):
            continue
        source = file.read_bytes()
        found[name] = hashlib.sha256(source).hexdigest()
        for imported in (*_in_globals(module), *((name, None) for name in _in_source(name, file, source))):
            if imported[0] not in seen and _is_followed(imported[0], None, own_package):
                seen.add(imported[0])
                pending.append(imported)
    return {name: found[name] for name in sorted(found) if name != module_name}


def _is_followed(name: str, file: Path | None, own_package: str) -> bool:
    """Return whether a module is the user's; by its name and its package's alone where its file is not known yet."""
    top = name.partition(".")[0]
    if top == "simmoe" or top in sys.stdlib_module_names:
        return False
    if top == own_package:
        return True
    file = file or _file_of(top, None)
    return file is None or not (_INSTALLED.intersection(file.parts) or file.is_relative_to(_stdlib()))


@lru_cache(maxsize=1)
def _stdlib() -> Path:
    return Path(sysconfig.get_path("stdlib")).resolve()


def _file_of(name: str, module: ModuleType | None) -> Path | None:
    """Return a module's file; None where it has none (built in, a namespace) or cannot be found."""
    module = module or sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if module is None:
        try:
            spec = importlib.util.find_spec(name)
        except Exception:  # its parent is no package, or fails when it is imported
            return None
        file = spec.origin if spec is not None and spec.has_location else None
    path = Path(file).resolve() if file else None
    return path if path is not None and path.is_file() else None


def _in_globals(module: ModuleType | None) -> Iterator[tuple[str, ModuleType | None]]:
    """Yield the modules that the globals of a loaded module are, or were defined in."""
    for value in list(vars(module).values()) if module else ():
        if isinstance(value, ModuleType):
            yield value.__name__, value
        elif (inspect.isclass(value) or inspect.isfunction(value)) and value.__module__:
            yield value.__module__, None


def _in_source(name: str, file: Path, source: bytes) -> Iterator[str]:
    """Yield the names in a module's import statements, their parents included; some may be no modules."""
    if file.suffix != ".py":
        return
    try:
        tree = ast.parse(source)
    except SyntaxError:  # importing it fails too, where that is tried
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield from _with_parents(alias.name)
        elif isinstance(node, ast.ImportFrom):
            base = _base(name, file.name == "__init__.py", node)
            if base:
                yield from _with_parents(base)
                yield from (f"{base}.{alias.name}" for alias in node.names if alias.name != "*")


def _base(name: str, is_package: bool, node: ast.ImportFrom) -> str:
    """Return the package that ``from ... import`` names, absolute."""
    if not node.level:
        return node.module or ""
    parents = name.split(".")
    parents = parents[: len(parents) - node.level + is_package]
    return ".".join([*parents, *([node.module] if node.module else [])])


def _with_parents(name: str) -> Iterator[str]:
    parts = name.split(".")
    return (".".join(parts[: end + 1]) for end in range(len(parts)))
