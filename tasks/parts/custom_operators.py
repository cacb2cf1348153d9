"""Operators outside standard ONNX: shared libraries that a user declares with their sha256 and their domains.

To load a library is to run its code, so none is loaded unless its bytes are the declared ones. A graph with such
operators carries the declaration of its libraries for ONNX Runtime, in which every graph is judged. So all stages
that run the graph load them, and their keys, which have the digest of the graph, have that of the libraries.
"""

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tasks.core.bounds import Distinct, Matches, MinItems
from tasks.core.errors import ArtifactError

if TYPE_CHECKING:
    from onnx import ModelProto

STANDARD_DOMAINS = ("", "ai.onnx")

OPERATORS_FOLDER = "operators"
"""Folder beside an engine file, with the libraries that it needs."""

OPERATORS_KEY = "enginewright_operators"
"""Metadata of a graph: its declared libraries, as JSON."""


@dataclass(frozen=True)
class CustomOperators:
    """A shared library with operators of some ONNX domains, for one runtime."""

    library: Annotated[str, Matches(r".*[^/]", "the path of a shared library, from the workspace")]
    sha256: Annotated[str, Matches(r"[0-9a-f]{64}", "64 hexadecimal digits, as sha256sum writes them")]
    """Digest of the library; another file is not loaded."""
    domains: Annotated[
        list[Annotated[str, Matches(r"(?!ai\.onnx$)\S+", "a domain of operators, not ONNX's own")]],
        MinItems(1),
        Distinct(),
    ]
    """Domains of its operators in the graph."""

    @property
    def name(self) -> str:
        """Name of the file, which it keeps beside an engine."""
        return Path(self.library).name


def check_libraries(libraries: Sequence[CustomOperators], key: str, folder: Path | None = None) -> list[Path]:
    """Return the absolute paths of libraries, found under their declared paths, or by their names in `folder`.

    Raises ArtifactError if one is missing or has another sha256; `key` of the configuration declares them.
    """
    names = [declared.name for declared in libraries]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise ArtifactError(
            f"{len(names)} libraries, of which several are called {', '.join(sorted(repeated))} ({key}), expected "
            "names of their own: engines have them in one folder. Rename them."
        )
    paths = []
    for declared in libraries:
        path = Path(declared.library) if folder is None else folder / declared.name
        if not path.is_file():
            raise ArtifactError(
                f"{path}: not found, expected the library with operators of {', '.join(declared.domains)} ({key}). "
                "Build it, or copy it here."
            )
        found = hashlib.sha256(path.read_bytes()).hexdigest()
        if found != declared.sha256:
            raise ArtifactError(
                f"{path}: sha256 {found[:12]}..., {key} declares {declared.sha256[:12]}...; the library is not "
                f"loaded, because that would run its code. If it is the right one, declare sha256={found}."
            )
        paths.append(path.resolve())
    return paths


def declare_libraries(model: "ModelProto", libraries: Sequence[CustomOperators]) -> None:
    """Write the libraries of a graph into its metadata, in place of others."""
    for entry in [entry for entry in model.metadata_props if entry.key == OPERATORS_KEY]:
        model.metadata_props.remove(entry)
    if libraries:
        entry = model.metadata_props.add()
        entry.key, entry.value = OPERATORS_KEY, json.dumps([asdict(library) for library in libraries])


def libraries_of(model: "ModelProto") -> list[CustomOperators]:
    """Return the libraries for ONNX Runtime that a graph declares."""
    texts = [entry.value for entry in model.metadata_props if entry.key == OPERATORS_KEY]
    return [CustomOperators(**fields) for text in texts for fields in json.loads(text)]


def domains_of(libraries: Collection[CustomOperators]) -> set[str]:
    """Return the domains of all libraries."""
    return {domain for library in libraries for domain in library.domains}
