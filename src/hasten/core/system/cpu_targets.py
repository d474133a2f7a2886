"""The CPU targets that graphs are quantized for, and whether their int8 instructions saturate."""

from __future__ import annotations

from dataclasses import dataclass

from hasten.core.errors import PlanError
from hasten.core.system.hardware import Machine


@dataclass(frozen=True, slots=True)
class CpuTarget:
    """A class of CPUs with the same int8 arithmetic."""

    name: str
    # A CPU belongs to the target if it has any of these.
    instructions: tuple[str, ...]
    # Adding two u8·s8 products in 16 bits saturates, so that weights must keep to seven bits.
    saturates: bool = False


# Most capable first.
TARGETS = {
    target.name: target
    for target in (
        CpuTarget("amx", ("amx_int8",)),
        CpuTarget("avx512_vnni", ("avx512_vnni", "avx_vnni")),
        CpuTarget("avx512", ("avx512",), saturates=True),
        CpuTarget("avx2", ("avx2",), saturates=True),
        CpuTarget("arm64", ("neon",)),
    )
}


def target_of(machine: Machine) -> CpuTarget:
    """Return the most capable target that this machine belongs to."""
    matches = (target for target in TARGETS.values() if machine.has(*target.instructions))
    return next(matches, TARGETS["avx2"])


def find_target(name: str) -> CpuTarget:
    """Return the target of this name."""
    if name not in TARGETS:
        raise PlanError(f"there is no target '{name}'", hint=f"--target takes one of: {', '.join(TARGETS)}")
    return TARGETS[name]


def required_features(target: CpuTarget) -> tuple[str, ...]:
    """Return the instruction sets of which a CPU needs any to compute the same as the target; empty if every CPU does.

    A graph for a target that saturates avoids saturation and therefore runs anywhere.
    """
    exact = (other.instructions for other in TARGETS.values() if not other.saturates)
    return () if target.saturates else tuple(name for names in exact for name in names)


def incompatibility(instructions: tuple[str, ...], machine: Machine) -> str | None:
    """Return why int8 that needs any of these computes something else on this machine; None if it does not."""
    if not instructions or machine.has(*instructions):
        return None
    return f"made for {' or '.join(instructions)}; this CPU has {_best(machine)}, whose sums would saturate"


def describe_target(target: CpuTarget, machine: Machine) -> list[str]:
    """Return notes for a user who builds for the target on this machine."""
    notes = []
    if target.saturates:
        notes.append(f"int8 weights use seven bits: sums of two products saturate on {target.name}")
    if target.name != target_of(machine).name:
        notes.append(f"made for {target.name}, verified on {_best(machine)}: run hasten verify on the target")
    return notes


def _best(machine: Machine) -> str:
    present = (name for target in TARGETS.values() for name in target.instructions if machine.has(name))
    return next(present, "none of them")
