"""What Python source uses of TensorRT, found without running it.

Types are followed through the source: `trt.Builder(log)` is a Builder, and what its methods return stands in the
signatures that pybind11 writes into their docstrings. So every attribute, enum member, method and keyword on a
TensorRT object can be held against the real bindings. Calls that fail tell it by what they return, so a result that
nobody looks at is a fault, too.
"""

import ast
import re
from dataclasses import dataclass
from types import ModuleType
from typing import Any

_FLAVOURS = ("tensorrt", "tensorrt_rtx")
_OLDEST_MAJOR = 10
"""Of TensorRT; TensorRT for RTX has numbers of its own, which are lower."""
_ARGUMENT = re.compile(r"(\w+): ")
_RETURNED = re.compile(r"-> (?:\w+(?:\.|::))*(\w+)")
_RENAMED = {"IParserError": "ParserError"}
"""Classes that docstrings call by their C++ name."""
_MAY_BE_NONE = {
    "Builder.build_serialized_network",
    "Builder.create_builder_config",
    "Builder.create_network",
    "Builder.create_optimization_profile",
    "IBuilderConfig.create_timing_cache",
    "IBuilderConfig.get_timing_cache",
    "ICudaEngine.create_engine_inspector",
    "ICudaEngine.create_execution_context",
    "ICudaEngine.create_runtime_config",
    "IRuntimeCache.serialize",
    "IRuntimeConfig.create_runtime_cache",
    "Runtime.deserialize_cuda_engine",
}
"""Methods that return None if they fail: they return a pointer."""
_MOST_STEPS = 4
"""A name may be used above the line that tells its type, so types are learnt in several passes."""


@dataclass(frozen=True)
class Fault:
    """A use that the bindings do not know, or whose result is not looked at."""

    line: int
    use: str


@dataclass(frozen=True)
class Instance:
    """A value of a class of the bindings."""

    kind: type


def find_uses_and_faults(source: str, bindings: ModuleType) -> tuple[set[str], list[Fault]]:
    """Return what is used, as `Class.member`, and what of it the bindings lack.

    Source that imports `tensorrt` runs with both flavours. What it uses of `tensorrt_rtx` is looked at where the
    bindings are that flavour's.
    """
    tree = ast.parse(source)
    is_rtx = int(bindings.__version__.partition(".")[0]) < _OLDEST_MAJOR
    packages = _FLAVOURS if is_rtx else _FLAVOURS[:1]
    imports = [one for node in ast.walk(tree) if isinstance(node, ast.Import) for one in node.names]
    reader = _Reader(bindings, {one.asname or one.name for one in imports if one.name in packages})
    for _ in range(_MOST_STEPS):
        for node in ast.walk(tree):
            reader.learn(node)
    reader.uses.clear()
    reader.faults.clear()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            reader.type_of(node)
        elif isinstance(node, ast.Call):
            reader.check_keywords(node)
        elif isinstance(node, ast.Expr):
            reader.check_dropped(node)
        elif isinstance(node, ast.FunctionDef):
            reader.check_none(node)
    return reader.uses, sorted(reader.faults, key=lambda fault: (fault.line, fault.use))


class _Reader:
    def __init__(self, bindings: ModuleType, aliases: set[str]) -> None:
        self._bindings, self._aliases = bindings, aliases
        self._types: dict[str, Instance] = {}
        self._returned: dict[str, Instance] = {}
        self.uses: set[str] = set()
        self.faults: set[Fault] = set()

    def learn(self, node: ast.AST) -> None:
        """Remember the type of a name or of an attribute of self by its text."""
        if isinstance(node, ast.arg) and node.annotation is not None:
            self._note(self._types, node.arg, self._annotated(node.annotation))
        elif isinstance(node, ast.AnnAssign):
            self._note(self._types, ast.unparse(node.target), self._annotated(node.annotation))
        elif isinstance(node, ast.FunctionDef) and node.returns is not None:
            self._note(self._returned, node.name, self._annotated(node.returns))
        elif isinstance(node, ast.Assign) and len(node.targets) == 1:
            self._note(self._types, ast.unparse(node.targets[0]), self.type_of(node.value))

    def type_of(self, node: ast.expr) -> Any:
        """Return a class, module or function of the bindings, an Instance, or None for anything else."""
        text = ast.unparse(node)
        if text in self._types:
            return self._types[text]
        if isinstance(node, ast.Name):
            return self._bindings if node.id in self._aliases else None
        if isinstance(node, ast.Call):
            return self._result_of(node)
        if not isinstance(node, ast.Attribute):
            return None
        owner = self.type_of(node.value)
        place = owner.kind if isinstance(owner, Instance) else owner
        if not isinstance(place, type | ModuleType):
            return None
        name = f"{place.__name__.rpartition('.')[2]}.{node.attr}"
        self.uses.add(name)
        if not hasattr(place, node.attr):
            self.faults.add(Fault(node.lineno, name))
        return getattr(place, node.attr, None)

    def check_keywords(self, call: ast.Call) -> None:
        """Hold the keywords of a call against the documented signatures."""
        function = self.type_of(call.func)
        if isinstance(function, type):
            function = function.__init__
        signatures = [
            line for line in (getattr(function, "__doc__", None) or "").splitlines() if "->" in line
        ]
        known = {name for line in signatures for name in _ARGUMENT.findall(line)}
        for keyword in call.keywords:
            if signatures and keyword.arg not in known:
                self.faults.add(Fault(call.lineno, f"{ast.unparse(call.func)}({keyword.arg}=)"))

    def check_dropped(self, statement: ast.Expr) -> None:
        """Find a call that stands alone although it returns whether it succeeded, or what it made."""
        call = statement.value
        name = self._method_of(call)
        documented = (
            getattr(self.type_of(call.func), "__doc__", None) or "" if isinstance(call, ast.Call) else ""
        )
        returned = [line.rpartition("->")[2].strip() for line in documented.splitlines() if "->" in line]
        if name and any(kind != "None" for kind in returned):
            self.faults.add(Fault(call.lineno, f"{name}() is not checked"))

    def check_none(self, function: ast.FunctionDef) -> None:
        """Find results that may be None and that a function does not compare with None."""
        compared = {
            ast.unparse(node.left)
            for node in ast.walk(function)
            if isinstance(node, ast.Compare) and ast.unparse(node.comparators[0]) == "None"
        }
        made = {
            id(node.value): ast.unparse(node.targets[0])
            for node in ast.walk(function)
            if isinstance(node, ast.Assign)
        }
        for node in ast.walk(function):
            name = self._method_of(node)
            if name in _MAY_BE_NONE and made.get(id(node)) not in compared:
                self.faults.add(Fault(node.lineno, f"{name}() may be None"))

    def _method_of(self, node: ast.AST) -> str:
        """Return `Class.method` of a call of a TensorRT object, else nothing."""
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            return ""
        owner = self.type_of(node.func.value)
        return f"{owner.kind.__name__}.{node.func.attr}" if isinstance(owner, Instance) else ""

    def _result_of(self, call: ast.Call) -> Instance | None:
        if isinstance(call.func, ast.Name) and call.func.id in self._returned:
            return self._returned[call.func.id]
        function = self.type_of(call.func)
        if isinstance(function, type):
            return Instance(function)
        found = _RETURNED.search(getattr(function, "__doc__", None) or "")
        kind = getattr(self._bindings, _RENAMED.get(found[1], found[1]), None) if found else None
        return Instance(kind) if isinstance(kind, type) else None

    def _annotated(self, annotation: ast.expr) -> Instance | None:
        if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
            annotation = ast.parse(annotation.value, mode="eval").body
        found = self.type_of(annotation)
        return Instance(found) if isinstance(found, type) else None

    @staticmethod
    def _note(known: dict[str, Instance], name: str, found: Any) -> None:
        if isinstance(found, Instance):
            known[name] = found
