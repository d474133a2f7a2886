"""What a container, or a service manager, lets this process have: limits of its control group and of those above."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

_ROOT = Path("/sys/fs/cgroup")
_OWN = Path("/proc/self/cgroup")
_NO_LIMIT = "max"


def cpu_quota() -> float | None:
    """How many processors' time it may use; None where nobody limits it."""
    quotas = [values for group in _groups() if (values := _read(group / "cpu.max").split())]
    return min((int(limit) / int(period) for limit, period in quotas if limit != _NO_LIMIT), default=None)


def memory_left_bytes() -> int | None:
    """How much more it may take before it is stopped; None where nobody limits it."""
    limits = [(group, limit) for group in _groups() if (limit := _read(group / "memory.max")).isdigit()]
    return min((max(0, int(limit) - _held(group)) for group, limit in limits), default=None)


def _held(group: Path) -> int:
    """What cannot be taken back: files that were read once and not since can."""
    counted = dict(line.split() for line in _read(group / "memory.stat").splitlines())
    return int(_read(group / "memory.current") or 0) - int(counted.get("inactive_file", 0))


def _groups() -> Iterator[Path]:
    """The group of this process and those above it, in version 2 of control groups: each may have a limit."""
    own = next((line.removeprefix("0::/") for line in _read(_OWN).splitlines() if line.startswith("0::/")), "")
    # What lies outside of a container's namespace is not mounted in it: then the root is the container's own.
    group = _ROOT / ("" if ".." in own else own)
    yield from (place for place in (group, *group.parents) if place.is_relative_to(_ROOT))


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
