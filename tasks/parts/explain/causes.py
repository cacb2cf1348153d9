"""Why an engine is not faster: causes from a closed list, each found by a rule of its own."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

from tasks.parts.cpu import VNNI
from tasks.parts.engines.runtimes import CPU, Precision
from tasks.parts.explain.engine_view import INT8, EngineView
from tasks.parts.explain.layers import TimedLayer
from tasks.parts.roofs.roofs import Bound

_MUCH_OVERHEAD = 0.25
"""An engine is bound by overhead if more of its latency than this goes into starting layers and the call."""
_MOST_NAMED = 4
"""Layers beside casts that a cause names."""
_BF16_FLAGS = {"avx512_bf16", "amx_bf16"}


class CauseKind(StrEnum):
    """The causes that the rules can tell."""

    CONVERSION = "CONVERSION"
    """A layer only changes layout or precision."""
    LEFT_IN_FLOAT = "LEFT_IN_FLOAT"
    """A layer of a quantized engine does not run in INT8."""
    FUSION_LOST = "FUSION_LOST"
    """A layer stands alone that the float engine computes inside another one."""
    UNALIGNED_CHANNELS = "UNALIGNED_CHANNELS"
    """Channels are not a multiple of what fills the registers."""
    SMALLER_THAN_VECTOR = "SMALLER_THAN_VECTOR"
    """Channels do not fill one register."""
    DEPTHWISE_MEMORY_BOUND = "DEPTHWISE_MEMORY_BOUND"
    """A depthwise convolution waits for memory: fewer bits save bytes, not arithmetic."""
    OVERHEAD_BOUND = "OVERHEAD_BOUND"
    """Starting layers takes much of the time, whatever they compute in."""
    S8_ACTIVATIONS = "S8_ACTIVATIONS"
    """Activations are int8, for which x86 has no product without a detour."""
    WRONG_ISA = "WRONG_ISA"
    """The CPU has no dot products of 8-bit integers (VNNI, AMX)."""
    EMULATED_PRECISION = "EMULATED_PRECISION"
    """The CPU has no arithmetic for the precision, so the runtime converts back and forth."""
    WEIGHT_QUANTIZED_AT_RUNTIME = "WEIGHT_QUANTIZED_AT_RUNTIME"
    """Weights are quantized or dequantized in every inference instead of once."""


@dataclass(frozen=True)
class Cause:
    """One finding about an engine."""

    kind: CauseKind
    layer: str
    """The layer; empty if the whole engine is meant."""
    milliseconds: float
    """The time of the layers that it concerns, not what could be won."""
    detail: str
    """What was found and, where there is one, what was expected."""
    source: str
    """Module and file:line; empty if the graph does not tell."""


Rule = Callable[[EngineView, EngineView | None], Iterator[Cause]]
"""From an engine and its float twin, if it has one, to its causes."""


def find_causes(engine: EngineView, twin: EngineView | None = None) -> tuple[Cause, ...]:
    """Return what all rules find, those that concern the most time first."""
    found = [cause for rule in _RULES for cause in rule(engine, twin)]
    return tuple(sorted(found, key=lambda cause: -cause.milliseconds))


def _conversions(engine: EngineView, _: EngineView | None) -> Iterator[Cause]:
    for layer in engine.layers:
        if layer.is_conversion and not _quantizes_weights(layer):
            before, after = engine.neighbours(layer)
            words = f"between {', '.join(before) or 'the image'} and {', '.join(after) or 'the output'}"
            yield _cause(engine, CauseKind.CONVERSION, layer, f"{layer.kind} {words}")


def _left_in_float(engine: EngineView, _: EngineView | None) -> Iterator[Cause]:
    for layer in engine.left_in_float:
        operators = " ".join(layer.operators) or layer.kind
        yield _cause(
            engine, CauseKind.LEFT_IN_FLOAT, layer, f"{operators} runs in {layer.precision or 'float'}"
        )


def _fusions_lost(engine: EngineView, twin: EngineView | None) -> Iterator[Cause]:
    fused = {
        node: layer.name
        for layer in (twin.layers if twin else ())
        if layer.macs and len(layer.nodes) > 1
        for node in layer.nodes
    }
    for layer in engine.layers:
        if not layer.macs and not layer.is_conversion and layer.nodes and fused.keys() >= set(layer.nodes):
            detail = (
                f"{' '.join(layer.operators)} stands alone; in {twin.name if twin else ''} it is part of "
            )
            yield _cause(engine, CauseKind.FUSION_LOST, layer, detail + fused[layer.nodes[0]])


def _widths(engine: EngineView, _: EngineView | None) -> Iterator[Cause]:
    """Find convolutions whose channels do not fill the registers that the target declares."""
    multiple = engine.manifest.target.channel_multiple
    for layer in engine.layers:
        if layer.channels_in is None or layer.channels_out is None or layer.is_depthwise:
            continue
        widths = {"reads": layer.channels_in, "writes": layer.channels_out}
        small = {verb: count for verb, count in widths.items() if count < multiple}
        uneven = {verb: count for verb, count in widths.items() if count > multiple and count % multiple}
        for kind, found in (
            (CauseKind.SMALLER_THAN_VECTOR, small),
            (CauseKind.UNALIGNED_CHANNELS, uneven),
        ):
            if found:
                has = " and ".join(f"{verb} {count}" for verb, count in found.items())
                wants = " and ".join(str(-(-count // multiple) * multiple) for count in found.values())
                yield _cause(engine, kind, layer, f"{has} channels, wants {wants}")


def _depthwise(engine: EngineView, _: EngineView | None) -> Iterator[Cause]:
    """Find depthwise convolutions that wait for their values: from memory, or at their own roof from the caches."""
    for layer in engine.layers:
        if not layer.is_depthwise:
            continue
        own, others = (engine.roofs.peak(layer.precision, is_depthwise=own) for own in (True, False))
        if engine.bounds[layer.name] not in ((Bound.memory, Bound.compute) if own else (Bound.memory,)):
            continue
        detail = f"{layer.macs / layer.moved_bytes:.1f} multiply-adds per byte"
        if own and others:
            reached, most = own.macs_per_s.value / 1e9, others.macs_per_s.value / 1e9
            detail += (
                f", of which this runtime computes {reached:.0f}e9 per second where others reach {most:.0f}e9"
            )
        yield _cause(engine, CauseKind.DEPTHWISE_MEMORY_BOUND, layer, detail)


def _overhead(engine: EngineView, _: EngineView | None) -> Iterator[Cause]:
    """Sum up what starting the layers and the call take."""
    if engine.roofs.layer_ms is None:
        return
    num_layers = sum(layer.milliseconds > 0 for layer in engine.layers)
    overhead_ms = engine.call_ms + num_layers * engine.roofs.layer_ms.value
    if overhead_ms > _MUCH_OVERHEAD * engine.latency_ms:
        detail = (
            f"{overhead_ms / engine.latency_ms:.0%} of the latency: {num_layers} layers at "
            f"{1000 * engine.roofs.layer_ms.value:.1f} us and a call at {1000 * engine.call_ms:.1f} us"
        )
        yield Cause(CauseKind.OVERHEAD_BOUND, "", overhead_ms, detail, "")


def _activations(engine: EngineView, _: EngineView | None) -> Iterator[Cause]:
    target = engine.manifest.target
    if (
        engine.manifest.is_quantized
        and target.device == CPU
        and _is_x86(engine)
        and not target.uint8_activations
    ):
        yield Cause(
            CauseKind.S8_ACTIVATIONS,
            "",
            _int8_ms(engine),
            f"target.{target.name}.uint8_activations is false, but products on x86 take unsigned activations",
            "",
        )


def _instruction_set(engine: EngineView, _: EngineView | None) -> Iterator[Cause]:
    flags = set(engine.manifest.isa)
    if engine.manifest.is_quantized and _is_x86(engine) and not flags & {*VNNI, "amx_int8"}:
        yield Cause(
            CauseKind.WRONG_ISA,
            "",
            _int8_ms(engine),
            f"this CPU has {', '.join(sorted(flags))}, and neither VNNI nor AMX: a product of 8-bit integers takes "
            "three instructions, and weights have 7 bits",
            "",
        )


def _emulation(engine: EngineView, _: EngineView | None) -> Iterator[Cause]:
    target = engine.manifest.target
    if target.device != CPU:
        return
    runs_in = " and ".join(sorted({layer.precision for layer in engine.layers if layer.macs}))
    if target.precision is Precision.bf16 and not _BF16_FLAGS & set(engine.manifest.isa):
        detail = (
            f"target.{target.name}.precision is bf16, but this CPU has neither AVX512_BF16 nor AMX: layers run in "
            f"{runs_in}"
        )
        yield Cause(CauseKind.EMULATED_PRECISION, "", engine.layers_ms, detail, "")
    elif not engine.manifest.is_quantized and not engine.manifest.is_precision_ok:
        detail = f"layers that are to compute in 16 bits run in {runs_in}"
        yield Cause(CauseKind.EMULATED_PRECISION, "", engine.layers_ms, detail, "")
    casts = [layer for layer in engine.layers if _casts_floats(layer)]
    if casts:
        beside = dict.fromkeys(name for layer in casts for side in engine.neighbours(layer) for name in side)
        named = ", ".join(list(beside)[:_MOST_NAMED]) + (", ..." if len(beside) > _MOST_NAMED else "")
        detail = f"casts between 16 and 32 bits: {len(casts)}, beside {named}"
        casts_ms = sum(engine.times_ms[layer.name] for layer in casts)
        yield Cause(CauseKind.EMULATED_PRECISION, "", casts_ms, detail, "")


def _casts_floats(layer: TimedLayer) -> bool:
    """Return whether a layer makes 32 bits of 16, or 16 of 32; integers are converted for other reasons."""
    if layer.kind not in ("Cast", "Convert") or not layer.output_bytes:
        return False
    is_shortened = layer.precision == "f32" and layer.input_bytes == 2 * layer.output_bytes
    return layer.precision in ("f16", "bf16") or is_shortened


def _weights(engine: EngineView, _: EngineView | None) -> Iterator[Cause]:
    for layer in engine.layers:
        if _quantizes_weights(layer):
            detail = f"{layer.kind} of {layer.weight_bytes:,} bytes of weights in every inference"
            yield _cause(engine, CauseKind.WEIGHT_QUANTIZED_AT_RUNTIME, layer, detail)


def _quantizes_weights(layer: TimedLayer) -> bool:
    return layer.is_conversion and not layer.input_bytes and bool(layer.weight_bytes)


def _is_x86(engine: EngineView) -> bool:
    return bool(engine.manifest.isa)  # the flags that are looked for are those of x86


def _int8_ms(engine: EngineView) -> float:
    return sum(engine.times_ms[layer.name] for layer in engine.layers if layer.precision == INT8)


def _cause(engine: EngineView, kind: CauseKind, layer: TimedLayer, detail: str) -> Cause:
    source = f"{layer.module} ({layer.source})" if layer.source else ""
    return Cause(kind, layer.name, engine.times_ms[layer.name], detail, source)


_RULES: tuple[Rule, ...] = (
    _conversions,
    _left_in_float,
    _fusions_lost,
    _widths,
    _depthwise,
    _overhead,
    _activations,
    _instruction_set,
    _emulation,
    _weights,
)
