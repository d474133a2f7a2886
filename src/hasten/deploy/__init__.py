"""From a bundle to the engines that run fleets: a file, or a folder, for each."""

from __future__ import annotations

from pathlib import Path

from hasten.core.staging import Staging, check_target

# Every directory that we write holds one, so that --force never replaces what somebody else wrote.
MARK = ".hasten-deployment"


def written(target: Path, *, force: bool) -> Staging:
    """A context whose `path` is filled and then put in the target's place by `put_in_place`; asks first if it may."""

    def check(place: Path) -> None:
        check_target(place, force=force, what="deployment", is_ours=lambda found: (found / MARK).is_file())

    check(target)
    return _Marked(target, check)


class _Marked(Staging):
    def put_in_place(self) -> None:
        (self.path / MARK).touch()
        super().put_in_place()
