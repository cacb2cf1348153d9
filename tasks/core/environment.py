"""Facts of the surroundings that shape an output: a part of its key.

A stage declares them by a function ``environment(cfg)`` in its module, which returns facts by name, or None if this
machine is not the one that ``cfg`` declares. Without the function, only inputs, configuration and code count.
"""

import ast
import functools
import sys
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

Facts = Mapping[str, str]
"""Facts by name, such as ``{"torch": "2.13.0+cpu"}``."""

ENVIRONMENT_FILE = Path("artifacts/environment.json")
"""The facts of all stages, by section of params.yaml. DVC compares them with those of dvc.lock."""


def versions(*distributions: str) -> dict[str, str]:
    """Return the versions of those of these Python packages that are installed."""
    found = {name: _version(name) for name in distributions}
    return {name: version for name, version in found.items() if version}


def imported_versions(files: Iterable[Path], *, without: Collection[str] = ()) -> dict[str, str]:
    """Return the versions of the installed packages (distributions) that Python files import anywhere in their code.

    Modules that no installed package provides are left out, and so are the modules named by `without`.
    """
    modules = {module for file in files for module in _imported_modules(file)}
    modules -= {*sys.stdlib_module_names, *without}
    if not modules:
        return {}
    providers = _providers(tuple(sys.path))
    return versions(*sorted({name for module in modules for name in providers.get(module, ())}))


def _imported_modules(file: Path) -> frozenset[str]:
    """Return the top-level modules that a file imports; none of a file that is not Python's."""
    status = file.stat()
    return _modules_of(file.absolute(), status.st_mtime_ns, status.st_size)


@functools.cache
def _modules_of(file: Path, _mtime_ns: int, _size_bytes: int) -> frozenset[str]:
    """Parse a file once in its present state: a package such as timm has hundreds, and is asked for several times."""
    try:
        tree = ast.parse(file.read_bytes())
    except (SyntaxError, ValueError):  # it cannot be imported either
        return frozenset()
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
        elif isinstance(node, ast.Call) and _called(node.func) in ("import_module", "__import__"):
            names.update(str(value.value) for value in node.args[:1] if isinstance(value, ast.Constant))
    return frozenset(name.partition(".")[0] for name in names)


def _called(function: ast.expr) -> str:
    """Return the last part of the name of what is called; empty if it has none."""
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


@functools.cache
def _providers(_path: tuple[str, ...]) -> Mapping[str, list[str]]:
    """Return the installed packages that provide each top-level module."""
    import importlib.metadata

    return importlib.metadata.packages_distributions()


@functools.cache
def _version(distribution: str) -> str:
    import importlib.metadata  # late, so that a small stage starts faster

    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""
