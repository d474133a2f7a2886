from __future__ import annotations

from dataclasses import replace

import pytest

from hasten.core.errors import PlanError
from hasten.core.hardware import Machine
from hasten.core.plan import Plan
from hasten.core.targets import TARGETS, describe_target, find_target, needed, reduces_range, target_of, why_not

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
def test_a_machine_is_the_most_capable_target(machine: Machine, instructions: tuple[str, ...], expected: str) -> None:
    assert target_of(replace(machine, instructions=instructions)).name == expected


@pytest.mark.parametrize("name", TARGETS)
def test_only_what_keeps_to_seven_bits_runs_anywhere(name: str) -> None:
    target = find_target(name)
    assert needed(target) == (() if reduces_range(target) else EXACT)
    assert reduces_range(target) == (name in ("avx2", "avx512"))


def test_int8_in_eight_bits_is_refused_where_sums_saturate(machine: Machine) -> None:
    assert why_not(EXACT, machine) == (
        "made for amx_int8 or avx512_vnni or avx_vnni or neon; this processor has avx2: its sums would saturate"
    )
    assert "has avx512:" in str(why_not(EXACT, replace(machine, instructions=("avx2", "avx512"))))
    assert why_not((), machine) is None
    assert why_not(EXACT, replace(machine, instructions=("neon",))) is None


def test_building_for_another_machine_is_said(machine: Machine) -> None:
    assert describe_target(find_target("arm64"), machine) == [
        "made for arm64, judged on avx2: hasten verify proves it there"
    ]
    assert describe_target(find_target("avx2"), machine) == [
        "int8 weights in seven bits: sums of two products saturate on avx2"
    ]
    assert len(describe_target(find_target("avx512"), machine)) == 2


def test_an_unknown_target_is_refused_before_any_work() -> None:
    with pytest.raises(PlanError, match="there is no target 'avx3'") as caught:
        Plan("acme/model", target="avx3")
    assert "amx, avx512_vnni, avx512, avx2, arm64" in str(caught.value.hint)
    assert Plan("acme/model", target="arm64").target == "arm64"
