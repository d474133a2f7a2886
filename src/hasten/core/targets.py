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


def reduces_range(target: Target) -> bool:
    """Whether weights are to keep to seven bits for it."""
    return target.saturates


def needed(target: Target) -> tuple[str, ...]:
    """The instructions of which a processor must have any to compute the same as the target; none: all do.

    What was made for one that saturates fears it, and runs anywhere.
    """
    exact = (other.instructions for other in TARGETS.values() if not other.saturates)
    return () if target.saturates else tuple(name for names in exact for name in names)


def why_not(instructions: tuple[str, ...], machine: Machine) -> str | None:
    """The reason why int8 that needs any of these does not compute the same on a machine; None where it does."""
    if not instructions or machine.has(*instructions):
        return None
    return f"made for {' or '.join(instructions)}; this processor has {_best(machine)}: its sums would saturate"


def describe_target(target: Target, machine: Machine) -> list[str]:
    """What a person should know who builds for it on this machine."""
    notes = []
    if target.saturates:
        notes.append(f"int8 weights in seven bits: sums of two products saturate on {target.name}")
    if target.name != target_of(machine).name:
        notes.append(f"made for {target.name}, judged on {_best(machine)}: hasten verify proves it there")
    return notes


def _best(machine: Machine) -> str:
    found = (name for target in TARGETS.values() for name in target.instructions if machine.has(name))
    return next(found, "none of them")
