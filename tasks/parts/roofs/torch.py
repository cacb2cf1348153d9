"""Measure the roofs of a target that runs checkpoints: eager PyTorch or AOTInductor, on the CPU or an NVIDIA GPU.

These runtimes report no layers, so small networks are timed as a whole; on a GPU with CUDA events, without the copies
of images and logits.
"""

import statistics
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from torch import nn, zeros

from tasks.parts.builders.report import new_manifest
from tasks.parts.engines.manifest import FloatArray
from tasks.parts.engines.rounds import rounds_ms
from tasks.parts.engines.runtimes import CPU, CUDA, Precision, Runtime
from tasks.parts.engines.target import Target
from tasks.parts.engines.torch.precision import CastNetwork
from tasks.parts.engines.torch.runner import Program, TorchRunner, set_up_torch
from tasks.parts.measuring.machine_state import Machine
from tasks.parts.roofs.probes import TINY_CHANNELS, probe_card
from tasks.parts.roofs.rates import (
    Effort,
    choose_roof,
    compute_roof,
    cost_of_calls,
    memory_roof,
    moved_rate,
    rate_of,
)
from tasks.parts.roofs.roofs import MemoryRoof, Roofs

_DEPTH = 4
_SHORT, _LONG = 4, 20
"""Lengths of the chains whose difference is the cost of a layer; compiling longer ones takes long."""
_CONVOLUTION = {CPU: (128, 32), CUDA: (1024, 64)}
"""Channels and size of the maps."""
_PRODUCT = {CPU: (256, 512), CUDA: (4096, 4096)}
"""Rows and width of the matrices."""
_CHUNK = (TINY_CHANNELS, 1, 32)
"""An image of the network that moves data."""
_CHUNK_BYTES = 4 << 10
"""What it reads and writes for such an image, in float32."""
_CALLS_ON_DEVICE = 20


@dataclass(frozen=True)
class _Probe:
    name: str
    network: nn.Module
    image_shape: tuple[int, ...]
    values_shape: tuple[int, ...]
    macs: int


def measure_torch_roofs(target: Target, version: str, machine: Machine, effort: Effort) -> Roofs:
    """Return what torch or AOTInductor reaches; AOTInductor compiles five networks for that."""
    set_up_torch(target)
    single = replace(target, max_batch=1)
    compute, repetitions = [], {}
    for probe in (_convolutions(*_CONVOLUTION[target.device]), _products(*_PRODUCT[target.device])):
        with _opened(single, version, probe) as runner:
            rate, repetitions[probe.name] = (
                rate_of([1000 * probe.macs / value for value in _times_ms(runner, _images(probe, 1), rounds)])
                for rounds in (effort.num_rounds, effort.num_rounds)
            )
        compute.append(compute_roof(target, machine, target.precision, rate, probe.name))
    chosen = choose_roof(compute, lambda roof: repetitions[roof.probe])
    probes = {length: _chain(length) for length in (_SHORT, _LONG)}
    with ExitStack() as opened:
        chains = {
            length: opened.enter_context(_opened(single, version, probe)).run
            for length, probe in probes.items()
        }
        # On a GPU with the copies, as the application sees it.
        layer_ms, call_ms = cost_of_calls(chains, _images(probes[_SHORT], 1), effort.num_rounds)
    return Roofs(
        target=target.name,
        runtime_version=version,
        num_threads=target.num_threads,
        machine=machine,
        compute=(chosen,) if chosen else (),
        memory=_bandwidths(target, version, effort),
        layer_ms=layer_ms,
        call_ms=call_ms,
        profiled_layer_ms=0.0,
        reason="",
    )


def _convolutions(channels: int, size: int) -> _Probe:
    layers: list[nn.Module] = []
    for number in range(_DEPTH):
        layers += [nn.Conv2d(channels if number else TINY_CHANNELS, channels, 3, padding=1), nn.ReLU()]
    macs = 9 * size**2 * channels * (TINY_CHANNELS + (_DEPTH - 1) * channels)
    name = f"{_DEPTH} convolutions 3x3 of {channels} channels on {size}x{size}"
    shapes = (TINY_CHANNELS, size, size), (channels, size, size)
    return _Probe(name, nn.Sequential(*layers), *shapes, macs)


def _products(rows: int, width: int) -> _Probe:
    layers: list[nn.Module] = []
    for _ in range(_DEPTH):
        layers += [nn.Linear(width, width), nn.ReLU()]
    shape = (1, rows, width)
    name = f"{_DEPTH} products of {rows}x{width} by {width}x{width}"
    return _Probe(name, nn.Sequential(*layers), shape, shape, _DEPTH * rows * width**2)


def _chain(length: int) -> _Probe:
    shape = (TINY_CHANNELS, 2, 2)
    layers = [nn.Conv2d(TINY_CHANNELS, TINY_CHANNELS, 1) for _ in range(length)]
    return _Probe(f"{length} tiny convolutions", nn.Sequential(*layers), shape, shape, 0)


def _images(probe: _Probe, count: int) -> FloatArray:
    return np.random.default_rng(0).standard_normal((count, *probe.image_shape), np.float32)


@contextmanager
def _opened(target: Target, version: str, probe: _Probe) -> Iterator[TorchRunner]:
    """Build the engine of a network and load it."""
    manifest = new_manifest(target, version, probe_card(probe.image_shape, probe.values_shape))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "probe.pt2"
        with TorchRunner(file, manifest, _build(target, probe, file)) as runner:
            yield runner


def _build(target: Target, probe: _Probe, file: Path) -> Callable[[Path, Target], Program]:
    """Return the loader of a network; write the package that it loads, if the runtime needs one."""
    network = CastNetwork(probe.network, target.precision).to(target.device)
    if target.runtime is not Runtime.aotinductor:
        return lambda *_: network
    from tasks.parts.builders.aotinductor import compile_network
    from tasks.parts.engines.aotinductor.runner import load_package

    # torch treats a size of 1 as a constant, so the example is a batch of 2.
    example_NCHW = zeros(min(2, target.max_batch), *probe.image_shape, device=target.device)
    compile_network(network, example_NCHW, target, file)
    return load_package


def _times_ms(runner: TorchRunner, images_NCHW: FloatArray, num_rounds: int) -> list[float]:
    """Return the median of each round."""
    runner.run(images_NCHW)
    if runner.manifest.target.device == CUDA:
        rounds = (runner.time_on_device(images_NCHW, _CALLS_ON_DEVICE) for _ in range(num_rounds))
        return [statistics.median(times.compute_ms) for times in rounds if times]
    return [statistics.median(burst) for burst in rounds_ms({"": runner.run}, images_NCHW, num_rounds)[""]]


def _bandwidths(target: Target, version: str, effort: Effort) -> tuple[MemoryRoof, ...]:
    """Measure a ReLU in float32, whatever the target computes in, against the same call on next to nothing.

    A working set is a batch of chunks, so that one engine serves all sizes. The call takes longer than moving a small
    one: what stands there is a lower bound.
    """
    counts = [size // _CHUNK_BYTES for size in effort.working_sets_bytes]
    target = replace(target, precision=Precision.f32, max_batch=max(counts))
    probe = _Probe("ReLU", nn.ReLU(), _CHUNK, _CHUNK, 0)
    roofs = []
    with _opened(target, version, probe) as runner:
        nothing_ms = min(_times_ms(runner, _images(probe, 1), effort.num_rounds))
        for size, count in zip(effort.working_sets_bytes, counts, strict=True):
            times_ms = _times_ms(runner, _images(probe, count), effort.num_rounds)
            if rate := moved_rate(count * _CHUNK_BYTES, times_ms, nothing_ms):
                roofs.append(memory_roof(target, size, rate))
    return tuple(roofs)
