"""The code of networks that are not in this package: where it lies, its digest, and the function that it offers.

Needs no torch. A path comes from the configuration, never the dotted name of a module: only a file of this workspace,
or what an installed package offers under a name of its own, is run.
"""

import functools
import hashlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path, PurePath
from types import ModuleType
from typing import Any

from tasks.core.environment import imported_versions, versions
from tasks.core.errors import ConfigError, first_line
from tasks.parts.networks.config import ENTRY_POINTS, NetworkConfig, NetworkName

_PACKAGE = "enginewright_custom"
"""Name of the package as which the folder of the file is imported, so that it hides no installed one."""


_KNOWN = ("torch", "transformers")
"""Modules whose versions each stage with a network has in its key."""


def network_facts(config: NetworkConfig) -> dict[str, str]:
    """Return what identifies the code of a foreign network, as facts of the surroundings; none for our own.

    These are the code's digest, and the version of each installed package that it imports, such as timm.
    Raises ConfigError if the file or the entry point does not exist.
    """
    if config.name is NetworkName.installed:
        entry = _entry_point(config)
        assert entry.dist is not None  # the search went through installed packages
        return _imported(_installed_files(entry)) | versions(entry.dist.name)
    code = code_sha256(config)
    if code is None or config.name is NetworkName.transformers:
        return {"network": code} if code else {}
    return _imported(_files(find_file(config).parent)) | {"network": code}


def _imported(files: Iterable[Path]) -> dict[str, str]:
    return imported_versions((file for file in files if file.suffix == ".py"), without=_KNOWN)


def _installed_files(entry: EntryPoint) -> Iterator[Path]:
    """Yield the files of the package that offers a network, without importing it."""
    try:
        spec = importlib.util.find_spec(entry.module.partition(".")[0])
    except (ImportError, ValueError):  # what is wrong with it is told where it is imported
        return
    for folder in (spec and spec.submodule_search_locations) or ():
        yield from sorted(Path(folder).rglob("*.py"))
    if spec and spec.origin and not spec.submodule_search_locations:
        yield Path(spec.origin)


def code_sha256(config: NetworkConfig, workspace: Path = Path()) -> str | None:
    """Return the sha256 of the folder of a network's file, or of a configuration of `transformers`; None without.

    It covers names and contents of all files of the folder and those below it, except ``__pycache__``, and the
    versions of installed packages that they import, but for torch and transformers; for an installed network name
    and version of its package, and of those that it imports.
    """
    if config.name is NetworkName.installed:
        return hashlib.sha256(json.dumps(network_facts(config), sort_keys=True).encode()).hexdigest()
    if config.file is None:
        return None
    file = find_file(config, workspace)
    if config.name is NetworkName.transformers:
        return hashlib.sha256(file.read_bytes()).hexdigest()
    digest = hashlib.sha256()
    for path in _files(file.parent):
        content = hashlib.sha256(path.read_bytes()).hexdigest()
        digest.update(f"{content} {path.relative_to(file.parent).as_posix()}\n".encode())
    for name, version in _imported(_files(file.parent)).items():
        digest.update(f"{name}=={version.partition('+')[0]}\n".encode())  # builds of one version are one code
    return digest.hexdigest()


def find_file(config: NetworkConfig, workspace: Path = Path()) -> Path:
    """Return the file; raise ConfigError if it is missing, or lies outside of this workspace or in its top folder."""
    path = PurePath(str(config.file))
    if path.is_absolute() or ".." in path.parts or len(path.parts) < 2:
        raise ConfigError(
            f"network.file is {config.file}, expected a file in a folder of this workspace, such as "
            "my_networks/unet.py: the whole folder counts as the network's code."
        )
    file = workspace / path
    if not file.is_file():
        raise ConfigError(
            f"network.file is {config.file}, which does not exist. Expected a path from {workspace.absolute()}."
        )
    return file


def find_factory(config: NetworkConfig) -> Callable[..., Any]:
    """Import the code of a custom or installed network and return its function.

    Raises ConfigError if it cannot be imported or has no such function.
    """
    if config.name is NetworkName.installed:
        return _installed_factory(config)
    file = find_file(config)
    module = _import(file, str(code_sha256(config)))
    factory = getattr(module, str(config.factory), None)
    if factory is None:
        own = [name for name, value in vars(module).items() if _is_own(module, value)]
        raise ConfigError(
            f"{config.file} has no function {config.factory!r} (network.factory), found: {', '.join(own) or 'none'}."
        )
    _check_callable(factory, config, str(config.file))

    @functools.wraps(factory)
    def make(**arguments: Any) -> Any:
        with _siblings(file):
            return factory(**arguments)

    return make


def _is_own(module: ModuleType, value: object) -> bool:
    return callable(value) and getattr(value, "__module__", None) == module.__name__


def _installed_factory(config: NetworkConfig) -> Callable[..., Any]:
    entry = _entry_point(config)
    try:
        factory: Callable[..., Any] = entry.load()
    except Exception as error:  # whatever the package raises
        raise ConfigError(
            f"network.factory is {config.factory}, and its package cannot be imported ({type(error).__name__}: "
            f"{first_line(error)}). Try it alone: python -c 'import {entry.module}'."
        ) from error
    _check_callable(factory, config, f"entry point {config.factory}")
    return factory


def _check_callable(factory: object, config: NetworkConfig, where: str) -> None:
    if not callable(factory):
        raise ConfigError(f"{where}: {config.factory!r} is not a function (network.factory).")


def _entry_point(config: NetworkConfig) -> EntryPoint:
    offered = entry_points(group=ENTRY_POINTS)
    for entry in offered:
        if entry.name == config.factory:
            return entry
    raise ConfigError(
        f"network.factory is {config.factory}, and no installed package offers a network of that name (entry points "
        f"of the group {ENTRY_POINTS}). Found: {', '.join(sorted(offered.names)) or 'none'}."
    )


def _files(folder: Path) -> Iterator[Path]:
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() and path.is_dir():
            raise ConfigError(
                f"{path} is a link to a folder, whose files would not count as code of the network "
                "(network.file). Move the folder there."
            )
        if path.is_file() and "__pycache__" not in path.parts:
            yield path


def _package_of(file: Path) -> str:
    return f"{_PACKAGE}_{'_'.join(file.parent.parts)}"


@contextmanager
def _siblings(file: Path) -> Iterator[None]:
    """Let code import its siblings by their plain names, which are those of other files in another network's folder.

    Raises ConfigError if it imports a module of this workspace that lies elsewhere: the digest does not cover it.
    """
    package, folder = sys.modules[_package_of(file)], file.parent.resolve()
    sys.modules.update(package.siblings)
    sys.path.append(str(folder))  # the last place: it hides nothing
    before = set(sys.modules)
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        named = {name for name in sys.modules if not name.startswith(_PACKAGE)}
        own = {name for name in named if _lies_in(sys.modules[name], folder)}
        package.siblings = {name: sys.modules.pop(name) for name in own}  # type: ignore[attr-defined]
    outside = sorted(name for name in named - own - before if _lies_in(sys.modules[name], Path.cwd()))
    for name in outside:
        del sys.modules[name]  # so that it is refused again
    if outside:
        raise ConfigError(
            f"network.file {file} imports {outside[0]}, a file of this workspace that lies outside of {file.parent}: "
            "a change of it would not be noticed. Move it into that folder."
        )


def _lies_in(module: ModuleType, folder: Path) -> bool:
    path = Path(getattr(module, "__file__", None) or "/")
    parts = path.relative_to(folder).parts if path.is_relative_to(folder) else ()
    return bool(parts) and not {"site-packages", "dist-packages", "tasks", "flows"}.intersection(parts)


def _import(file: Path, sha256: str) -> ModuleType:
    """Import a file as a module of a package that is its folder: it may import its siblings in either form.

    A long process imports the folder anew when its digest is another one.
    """
    folder, name = file.parent.resolve(), _package_of(file)
    if getattr(sys.modules.get(name), "sha256", None) != sha256:
        for known in [known for known in sys.modules if known == name or known.startswith(f"{name}.")]:
            del sys.modules[known]
        package = ModuleType(name)
        package.__path__, package.sha256 = [str(folder)], sha256  # type: ignore[attr-defined]
        package.siblings = {}  # type: ignore[attr-defined]
        sys.modules[name] = package
    module_name = f"{name}.{file.stem}"
    if module_name in sys.modules:
        return sys.modules[module_name]
    spec = importlib.util.spec_from_file_location(module_name, file.resolve())
    if spec is None or spec.loader is None:
        raise ConfigError(f"network.file is {file}, expected a Python file (.py).")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        with _siblings(file):
            spec.loader.exec_module(module)
    except ConfigError:
        del sys.modules[module_name]
        raise
    except Exception as error:  # whatever the user's code raises
        del sys.modules[module_name]
        raise ConfigError(
            f"network.file {file} cannot be imported ({type(error).__name__}: {first_line(error)}). It is run as "
            "`python` runs it: try it there."
        ) from error
    return module
