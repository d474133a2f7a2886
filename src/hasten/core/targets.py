"""The processors graphs are quantized for: what their int8 instructions lose, and which of them this machine has."""

from __future__ import annotations

from dataclasses import dataclass

from hasten.core.errors import PlanError
from hasten.core.hardware import Machine


@dataclass(frozen=True, slots=True)
class Target:
    name: str
    # The processor has it where it has any of these.
    instructions: tuple[str, ...]
    # Adding two products of unsigned and signed bytes in 16 bits saturates: weights keep to seven bits.
    saturates: bool = False


# The most capable first.
TARGETS = {
    target.name: target
    for target in (
        Target("amx", ("amx_int8",)),
        Target("avx512_vnni", ("avx512_vnni", "avx_vnni")),
        Target("avx512", ("avx512",), saturates=True),
        Target("avx2", ("avx2",), saturates=True),
        Target("arm64", ("neon",)),
    )
}


def target_of(machine: Machine) -> Target:
    """The most capable one that this machine is."""
    found = (target for target in TARGETS.values() if machine.has(*target.instructions))
    return next(found, TARGETS["avx2"])


def find_target(name: str) -> Target:
    if name not in TARGETS:
        raise PlanError(f"there is no target '{name}'", hint=f"--target takes one of: {', '.join(TARGETS)}")
    return TARGETS[name]


def runs_on(target: Target, machine: Machine) -> bool:
    """Whether what was made for a target computes the same here: what fears saturation runs anywhere."""
    return target.saturates or any(
        machine.has(*other.instructions) for other in TARGETS.values() if not other.saturates
    )
