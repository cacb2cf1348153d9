"""Measure what a target's runtime reaches on this machine: multiply-adds, bytes and calls per second."""

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tasks.core.bounds import AtLeast
from tasks.parts.engines.machine import target_environment
from tasks.parts.engines.target import Target
from tasks.parts.measuring.machine_state import measuring_environment
from tasks.parts.roofs.roofs import Roofs

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Config:
    """For which target, and how long."""

    target: Target
    """The target whose runtime and options are measured."""
    num_rounds: Annotated[int, AtLeast(3)]
    """Rounds that run every graph once; a roof is the median of the rounds, its spread the smallest and largest."""
    working_sets_kib: list[Annotated[int, AtLeast(64)]]
    """What the layers read and write whose bandwidth is measured, small ones first."""


Report = Roofs


def environment(cfg: Config) -> dict[str, str] | None:
    """Return the machine, and what an engine depends on here; None without the GPU or the runtime of the target."""
    engine = target_environment(cfg.target)
    return None if engine is None else {**engine, **measuring_environment()}


def measures(_: Config) -> bool:
    """Return True: while this runs, nothing else may be measured on this machine."""
    return True


def measure_machine(cfg: Config, *, out: Path) -> Report:
    """Measure small graphs of which it is known what bounds them, through the target's runtime and options.

    Raises TargetMismatch if the machine or its runtime is not the declared one.
    """
    from tasks.parts.roofs.measure import measure_roofs
    from tasks.parts.roofs.rates import Effort

    logger.info("measure_machine: target %s", cfg.target.name)
    roofs = measure_roofs(cfg.target, Effort(cfg.num_rounds, [1024 * size for size in cfg.working_sets_kib]))
    for roof in roofs.compute:
        logger.info(
            "measure_machine: %s, %s: %.3g GMAC/s",
            cfg.target.name,
            roof.name,
            roof.macs_per_s.value / 1e9,
        )
    if roofs.reason:
        logger.info("measure_machine: %s: nothing measured, %s", cfg.target.name, roofs.reason)
    return roofs
