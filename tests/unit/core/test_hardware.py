from __future__ import annotations

import os
import platform
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import msgspec
import numpy as np
import pytest

from hasten.core.system.cache import cache_directory
from hasten.core.system.hardware import (
    Gpu,
    Machine,
    library_versions,
    peak_memory_bytes,
    this_machine,
    usable_cores,
)

MIB = 2**20


def test_this_machine_is_plausible() -> None:
    machine = this_machine()
    assert machine.system.startswith(platform.system())
    assert machine.architecture == platform.machine()
    assert machine.cpu
    assert 1 <= machine.cores <= (os.cpu_count() or 1)
    assert 256 * MIB < machine.memory_bytes < 2**50
    assert machine.python == platform.python_version()
    assert machine.libraries["numpy"] == np.__version__


@pytest.mark.skipif(not Path("/proc/cpuinfo").exists(), reason="needs /proc/cpuinfo to compare with")
def test_instructions_equal_those_of_the_kernel() -> None:
    flags = Path("/proc/cpuinfo").read_text().split()
    theirs = {"avx2": "avx2", "avx512": "avx512f", "avx512_vnni": "avx512_vnni", "amx_int8": "amx_int8", "sve": "sve"}
    for ours, flag in theirs.items():
        assert this_machine().has(ours) == (flag in flags)


def test_usable_cores_respect_the_affinity() -> None:
    if not hasattr(os, "sched_setaffinity"):
        pytest.skip("this system has no affinity")
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        assert usable_cores() == 1
    finally:
        os.sched_setaffinity(0, before)
    assert 1 <= usable_cores() <= len(before)


def test_peak_memory_grows_and_stays() -> None:
    before = peak_memory_bytes()
    # More than the peak so far, whatever ran before this test.
    array = np.ones(before + 32 * MIB, np.uint8)
    during = peak_memory_bytes()
    del array
    # The kernel counts pages in batches per core, so its peak may be slightly off.
    assert during >= before + 24 * MIB
    assert peak_memory_bytes() >= during - 8 * MIB


def test_library_versions_name_only_what_is_installed() -> None:
    versions = library_versions()
    assert versions["hasten"] == version("hasten")
    assert versions["tokenizers"] == version("tokenizers")
    assert all(versions.values())


def test_machine_has_any_of_several_instruction_sets(machine: Machine) -> None:
    assert machine.has("amx_int8", "avx2")
    assert not machine.has("amx_int8")
    assert not machine.has()


def test_machine_prints_as_one_line() -> None:
    gpus = (Gpu("NVIDIA L4", 24 * 2**30, "8.9", "580.1"),) * 2
    machine = Machine("Linux 6", "x86_64", "Some CPU", (), 4, 16 * 2**30, gpus, "3.11.9", {})
    assert str(machine) == "Some CPU (x86_64), 4 cores, 16 GiB, 2× NVIDIA L4"


@pytest.mark.parametrize("gpus", [(), (Gpu("NVIDIA L4", 24 * 2**30, "8.9", "580.1"),)])
def test_machine_survives_json(gpus: tuple[Gpu, ...]) -> None:
    machine = replace(this_machine(), gpus=gpus)
    assert msgspec.json.decode(msgspec.json.encode(machine), type=Machine) == machine


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"HASTEN_CACHE": "/a/b", "XDG_CACHE_HOME": "/x"}, "/a/b"),
        ({"HASTEN_CACHE": "~/b"}, "/home/me/b"),
        ({"XDG_CACHE_HOME": "/x"}, "/x/hasten"),
        ({"HASTEN_CACHE": "", "XDG_CACHE_HOME": ""}, "/home/me/.cache/hasten"),
    ],
)
def test_cache_directory_follows_the_environment(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str
) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    for name in ("HASTEN_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache_directory() == Path(expected)
