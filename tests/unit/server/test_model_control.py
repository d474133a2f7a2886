"""Loading and unloading on behalf of clients: off by default, coalesced, bounded and cancellable."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from hasten.core.errors import ForbiddenError, HastenError, PlanError
from hasten.server.models.control import ModelControl
from hasten.server.models.registry import Model, ModelRegistry
from support.wait import wait_until


class Repository:
    """A registry whose models open when the test lets them."""

    def __init__(self, folder: Path) -> None:
        self.opened: list[str] = []
        self.may_open = threading.Event()
        self.registry = ModelRegistry(self._open, drain_s=0)
        for name in ("one", "two"):
            (folder / name).mkdir()
            (folder / name / "manifest.json").write_text("{}")
            self.registry.register(folder / name, name)
        self.control = ModelControl(self.registry, is_enabled=True)
        self.outcomes: list[HastenError | None] = []

    def _open(self, path: Path, name: str, _old: Model | None) -> Model:
        self.opened.append(name)
        assert self.may_open.wait(20)
        return cast("Model", SimpleNamespace(name=name, path=path, close=lambda _: True))

    def load(self, name: str) -> Any:
        return self.control.load(name, {}, self.outcomes.append)


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    repository = Repository(tmp_path)
    yield repository
    repository.may_open.set()
    repository.control.close()


def test_model_control_is_off_by_default(repository: Repository) -> None:
    control = ModelControl(repository.registry)
    for action in (lambda: control.load("one", {}, print), lambda: control.unload("one", print)):
        with pytest.raises(ForbiddenError, match="start the server with --model-control"):
            action()


def test_concurrent_loads_of_one_model_load_it_once(repository: Repository) -> None:
    for _ in range(100):
        repository.load("one")
    repository.may_open.set()
    wait_until(lambda: len(repository.outcomes) == 100)
    assert (repository.outcomes, repository.opened) == ([None] * 100, ["one"])


def test_bundle_that_changes_during_a_load_is_loaded_again(repository: Repository) -> None:
    repository.load("one")
    wait_until(lambda: repository.opened)
    (repository.registry.paths["one"] / "new").touch()
    repository.load("one")
    repository.may_open.set()
    wait_until(lambda: len(repository.outcomes) == 2)
    assert (repository.outcomes, repository.opened) == ([None, None], ["one", "one"])


def test_withdrawn_load_does_not_run(repository: Repository) -> None:
    """All threads wait for the first load to end; the last request of an operation that is queued withdraws it."""
    from hasten.server.models import control

    for _ in range(control._THREADS):
        repository.load("one")
    for _ in range(control._THREADS - 1):
        # Finished operations are joined no more: these take the other threads, and wait for the registry.
        repository.control._threads.submit(repository.may_open.wait, 20)
    wait_until(lambda: repository.opened)
    withdrawals = [repository.load("two") for _ in range(2)]
    for withdraw in withdrawals:
        withdraw()
    repository.may_open.set()
    wait_until(lambda: len(repository.outcomes) == control._THREADS)
    assert repository.control.close()
    assert repository.opened == ["one"]


def test_close_reports_a_load_in_progress(repository: Repository) -> None:
    repository.load("one")
    wait_until(lambda: repository.opened)
    assert not repository.control.close()


def test_unknown_model_and_parameters_are_rejected_at_once(repository: Repository) -> None:
    with pytest.raises(PlanError, match="not one of this server's models"):
        repository.load("three")
    with pytest.raises(PlanError, match="model 'one' not found"):
        repository.control.unload("one", repository.outcomes.append)
    with pytest.raises(HastenError, match="load parameters are not supported"):
        repository.control.load("one", {"config": "{}"}, repository.outcomes.append)


def test_failed_load_is_reported_to_all_that_wait(repository: Repository, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        assert repository.may_open.wait(20)
        raise RuntimeError("secret")

    monkeypatch.setattr(repository.registry, "load", fail)
    for _ in range(3):
        repository.load("one")
    repository.may_open.set()
    wait_until(lambda: len(repository.outcomes) == 3)
    assert {str(error) for error in repository.outcomes} == {"internal server error: see the server's log"}
