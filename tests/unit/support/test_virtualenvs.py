"""Environments for tests: what is made again, and what is never touched."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import pytest

from support import virtualenvs


@pytest.fixture(autouse=True)
def _locks_apart(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path_factory.mktemp("locks")))


def test_a_folder_that_is_somebody_elses_stays(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    for _ in range(2):
        with pytest.raises(pytest.skip.Exception, match="is not empty and is not a virtual environment"):
            virtualenvs.python(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_what_was_interrupted_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment, commands = tmp_path / "environment", []

    def interrupted(command: list[str | Path], **_: object) -> None:
        commands.append(command)
        (environment / "bin").mkdir()
        (environment / "bin" / "python").touch()
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "run", interrupted)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            virtualenvs.python(environment)
    assert len(commands) == 2
