"""How an engine uses the CPU, beside what is compiled into its file."""

from dataclasses import dataclass
from typing import Any

from tasks.parts.engines.runtimes import Runtime


@dataclass(frozen=True)
class Tuning:
    """Settings that are made when an engine is opened; the defaults are those that benchmark measures."""

    num_threads: int
    """Threads of one inference."""
    is_pinned: bool = False
    """Whether each lane keeps to CPUs of its own; with OpenVINO the threads of its streams do as well."""
    has_arena: bool = True
    """Whether ONNX Runtime keeps the memory of intermediate results from one inference to the next."""
    num_branches: int = 1
    """Operators of one inference that ONNX Runtime runs at the same time, where the graph forks."""

    def options_for(self, runtime: Runtime) -> dict[str, Any]:
        """Return the options that change the sessions of a runtime, as in model.json; empty for the defaults."""
        if runtime is Runtime.openvino:
            return {"ENABLE_CPU_PINNING": True} if self.is_pinned else {}
        if runtime is not Runtime.onnxruntime:
            return {}
        arena = {} if self.has_arena else {"memory_arena": False}
        return arena | ({"num_branches": self.num_branches} if self.num_branches > 1 else {})

    def describe(self) -> str:
        """Return the settings in words: ``2 threads, pinned, no arena``."""
        words = [f"{self.num_threads} thread{'' if self.num_threads == 1 else 's'}"]
        words += ["pinned"] if self.is_pinned else []
        words += [] if self.has_arena else ["no arena"]
        return ", ".join(words + ([f"{self.num_branches} branches"] if self.num_branches > 1 else []))
