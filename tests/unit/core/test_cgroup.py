"""Limits of control groups, read from a tree of files like the kernel's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hasten.core.system import hardware
from hasten.core.system.cgroup import cpu_quota, memory_left_bytes

MIB = 2**20
Tree = Callable[..., None]


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Tree:
    """Put this process in a group and write the files of groups: `tree("0::/a/b", {"a/cpu.max": "max 100000"})`."""
    root, membership = tmp_path / "mounted", tmp_path / "membership"
    monkeypatch.setattr("hasten.core.system.cgroup._ROOT", root)
    monkeypatch.setattr("hasten.core.system.cgroup._MEMBERSHIP", membership)

    def make(group: str, files: dict[str, str]) -> None:
        membership.write_text(f"1:cpu:/elsewhere\n{group}\n")
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(f"{text}\n")

    return make


@pytest.mark.parametrize(
    ("group", "files", "quota"),
    [
        ("0::/a/b", {"a/b/cpu.max": "150000 100000"}, 1.5),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/cpu.max": "300000 100000"}, 3.0),
        ("0::/a/b", {"a/b/cpu.max": "800000 100000", "a/cpu.max": "200000 100000", "cpu.max": "400000 100000"}, 2.0),
        ("0::/a/b", {"a/b/cpu.max": "max 100000", "a/other/cpu.max": "100000 100000"}, None),
        ("0::/", {"cpu.max": "250000 100000"}, 2.5),
        # A container that sees the path on its host, and one whose group lies outside of its namespace.
        ("0::/system.slice/docker-1.scope", {"cpu.max": "250000 100000"}, 2.5),
        ("0::/../other", {"cpu.max": "250000 100000"}, 2.5),
        ("2:cpu:/version/one", {}, None),
    ],
)
def test_smallest_quota_of_all_parent_groups_counts(
    tree: Tree, group: str, files: dict[str, str], quota: float | None
) -> None:
    tree(group, files)
    assert cpu_quota() == quota


def test_fraction_of_a_core_counts_as_one(tree: Tree) -> None:
    tree("0::/a", {"a/cpu.max": "50000 100000"})
    assert hardware.usable_cores() == 1


def test_no_limits_without_control_groups(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("hasten.core.system.cgroup._MEMBERSHIP", tmp_path / "nowhere")
    monkeypatch.setattr("hasten.core.system.cgroup._ROOT", tmp_path / "nowhere")
    assert (cpu_quota(), memory_left_bytes()) == (None, None)


def test_memory_left_is_that_of_the_tightest_group(tree: Tree) -> None:
    files = {
        "a/b/memory.max": "max",
        "a/memory.max": str(100 * MIB),
        "a/memory.current": str(90 * MIB),
        "a/memory.stat": f"anon {60 * MIB}\ninactive_file {30 * MIB}",
        "memory.max": str(500 * MIB),
        "memory.current": str(100 * MIB),
    }
    tree("0::/a/b", files)
    assert memory_left_bytes() == 40 * MIB
    tree("0::/a/b", {"a/memory.current": str(200 * MIB)})
    assert memory_left_bytes() == 0
