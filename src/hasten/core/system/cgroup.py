"""Read the CPU and memory limits of this process's control group (cgroup v2) and its parents."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_NO_LIMIT = "max"


def cpu_quota() -> float | None:
    """Return the CPU quota in cores, or None if there is no limit."""
    quotas = [values for group in _groups() if (values := _read(group / "cpu.max").split())]
    return min((int(limit) / int(period) for limit, period in quotas if limit != _NO_LIMIT), default=None)


def memory_left_bytes() -> int | None:
    """Return the memory that is left below the limit, or None if there is no limit."""
    limits = [(group, limit) for group in _groups() if (limit := _read(group / "memory.max")).isdigit()]
    return min((max(0, int(limit) - _used_bytes(group)) for group, limit in limits), default=None)


def _used_bytes(group: Path) -> int:
    """Return the memory that the kernel cannot reclaim: inactive page cache does not count."""
    statistics = dict(line.split() for line in _read(group / "memory.stat").splitlines())
    return int(_read(group / "memory.current") or 0) - int(statistics.get("inactive_file", 0))


def _groups() -> Iterator[Path]:
    """Yield the group of this process and its parents: each may have a limit."""
    path = next((line.removeprefix("0::/") for line in _read(_MEMBERSHIP).splitlines() if line.startswith("0::/")), "")
    # Groups outside a container's namespace are not mounted in it: then the root is the container's own group.
    group = _ROOT / ("" if ".." in path else path)
    yield from (level for level in (group, *group.parents) if level.is_relative_to(_ROOT))


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
