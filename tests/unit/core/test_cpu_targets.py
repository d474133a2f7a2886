from __future__ import annotations

from dataclasses import replace

import pytest

from hasten.core.errors import PlanError
from hasten.core.plan import Plan
from hasten.core.system.cpu_targets import (
    TARGETS,
    describe_target,
    find_target,
    incompatibility,
    required_features,
    target_of,
)
from hasten.core.system.hardware import Machine

EXACT = ("amx_int8", "avx512_vnni", "avx_vnni", "neon")


@pytest.mark.parametrize(
    ("instructions", "expected"),
    [
        (("avx2", "avx512", "avx512_vnni", "amx_int8"), "amx"),
        (("avx2", "avx512", "avx512_vnni"), "avx512_vnni"),
        (("avx2", "avx_vnni"), "avx512_vnni"),
        (("avx2", "avx512"), "avx512"),
        (("avx2",), "avx2"),
        (("neon", "dotprod"), "arm64"),
        ((), "avx2"),
    ],
)
def test_machine_belongs_to_its_most_capable_target(
    machine: Machine, instructions: tuple[str, ...], expected: str
) -> None:
    assert target_of(replace(machine, instructions=instructions)).name == expected


@pytest.mark.parametrize("name", TARGETS)
def test_only_seven_bit_targets_run_anywhere(name: str) -> None:
    target = find_target(name)
    assert required_features(target) == (() if target.saturates else EXACT)
    assert target.saturates == (name in ("avx2", "avx512"))


def test_full_range_int8_is_rejected_where_sums_saturate(machine: Machine) -> None:
    assert incompatibility(EXACT, machine) == (
        "made for amx_int8 or avx512_vnni or avx_vnni or neon; this CPU has avx2, whose sums would saturate"
    )
    assert "has avx512," in str(incompatibility(EXACT, replace(machine, instructions=("avx2", "avx512"))))
    assert incompatibility((), machine) is None
    assert incompatibility(EXACT, replace(machine, instructions=("neon",))) is None


def test_building_for_another_machine_adds_a_note(machine: Machine) -> None:
    assert describe_target(find_target("arm64"), machine) == [
        "made for arm64, verified on avx2: run hasten verify on the target"
    ]
    assert describe_target(find_target("avx2"), machine) == [
        "int8 weights use seven bits: sums of two products saturate on avx2"
    ]
    assert len(describe_target(find_target("avx512"), machine)) == 2


def test_unknown_target_is_rejected_by_the_plan() -> None:
    with pytest.raises(PlanError, match="there is no target 'avx3'") as caught:
        Plan("acme/model", target="avx3")
    assert "amx, avx512_vnni, avx512, avx2, arm64" in str(caught.value.hint)
    assert Plan("acme/model", target="arm64").target == "arm64"
