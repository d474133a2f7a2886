"""Deploy bundles to Kubernetes, KServe, tritonserver and Ray Serve."""

from __future__ import annotations

from pathlib import Path

from hasten.core.system.atomic_directory import AtomicDirectory, check_target

# Marks every directory that hasten writes, so that --force never replaces other files.
MARKER_FILE = ".hasten-deployment"


def atomic_output(target: Path, *, force: bool) -> AtomicDirectory:
    """Return a context with a `path` to fill, which `put_in_place` renames to the target; check the target first."""

    def check(path: Path) -> None:
        check_target(path, force=force, kind="deployment", is_ours=lambda path: (path / MARKER_FILE).is_file())

    check(target)
    return _MarkedDirectory(target, check)


class _MarkedDirectory(AtomicDirectory):
    def put_in_place(self) -> None:
        (self.path / MARKER_FILE).touch()
        super().put_in_place()
