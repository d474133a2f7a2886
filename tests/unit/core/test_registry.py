from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hasten.backends import BACKENDS
from hasten.core.errors import HastenError, PlanError
from hasten.core.registry import Registry, did_you_mean
from hasten.tasks import TASKS

PACKAGE = "hasten_test_fruits"


@pytest.fixture
def fruits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Registry[str]]:
    """A package of two built-in entries and a helper module, registered like hasten's own."""
    folder = tmp_path / "site" / PACKAGE
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "apple.py").write_text("FRUIT = 'a built-in apple'")
    (folder / "blood_orange.py").write_text("FRUIT = 'a built-in orange'")
    (folder / "_peel.py").touch()
    monkeypatch.syspath_prepend(folder.parent)
    yield Registry("fruit", PACKAGE, "FRUIT")
    for name in [name for name in sys.modules if name.startswith(("hasten_test_", PACKAGE))]:
        del sys.modules[name]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Write a distribution with entry points, as pip would install it."""

    def write(entry_points: str) -> None:
        site = tmp_path / "plugins"
        info = site / "acme_fruits-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-fruits\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{PACKAGE}]\n{entry_points}\n")
        (site / "hasten_test_acme.py").write_text("CHERRY = 'a plugin cherry'\nAPPLE = 'a plugin apple'\n")
        monkeypatch.syspath_prepend(site)

    return write


def test_file_is_registered_under_its_name(fruits: Registry[str]) -> None:
    assert fruits.names() == ["apple", "blood-orange"]
    assert fruits.get("blood-orange") == "a built-in orange"
    assert fruits.all() == ["a built-in apple", "a built-in orange"]


def test_file_is_loaded_on_first_use(fruits: Registry[str]) -> None:
    fruits.names()
    fruits.get("apple")
    assert f"{PACKAGE}.apple" in sys.modules
    assert f"{PACKAGE}.blood_orange" not in sys.modules


def test_entry_points_are_picked_up(fruits: Registry[str], install: Callable[[str], None]) -> None:
    install("cherry = hasten_test_acme:CHERRY")
    assert fruits.names() == ["apple", "blood-orange", "cherry"]
    assert fruits.get("cherry") == "a plugin cherry"
    assert fruits.all() == ["a built-in apple", "a built-in orange", "a plugin cherry"]


def test_built_in_wins_over_an_entry_point(fruits: Registry[str], install: Callable[[str], None]) -> None:
    install("apple = hasten_test_acme:APPLE")
    assert fruits.names() == ["apple", "blood-orange"]
    assert fruits.get("apple") == "a built-in apple"


def test_broken_plugin_is_named(fruits: Registry[str], install: Callable[[str], None]) -> None:
    install("durian = hasten_test_nowhere:DURIAN")
    with pytest.raises(HastenError, match="durian"):
        fruits.get("durian")


def test_script_can_add_an_entry(fruits: Registry[str]) -> None:
    fruits.add("fig", "a custom fig")
    assert fruits.get("fig") == "a custom fig"


def test_unknown_name_is_answered_with_a_suggestion_and_the_list(fruits: Registry[str]) -> None:
    with pytest.raises(PlanError) as caught:
        fruits.get("aple")
    assert caught.value.message == "unknown fruit 'aple': did you mean 'apple'?"
    assert caught.value.hint == "known: apple, blood-orange"


def test_dissimilar_name_gets_no_suggestion(fruits: Registry[str]) -> None:
    with pytest.raises(PlanError) as caught:
        fruits.get("zzz")
    assert caught.value.message == "unknown fruit 'zzz'"


def test_did_you_mean_suggests_a_similar_word() -> None:
    assert did_you_mean("sofmax", ["none", "softmax"]) == ": did you mean 'softmax'?"
    assert did_you_mean("sofmax", []) == ""


def test_built_in_tasks_are_named_like_their_files() -> None:
    assert {"sentence-similarity", "text-classification"} <= set(TASKS.names())
    assert [task.name for task in TASKS.all()] == TASKS.names()


def test_built_in_backends_are_listed() -> None:
    assert {"inductor", "onnxruntime", "openvino", "torch"} <= set(BACKENDS.names())
    with pytest.raises(PlanError, match="did you mean 'onnxruntime'"):
        BACKENDS.get("onnx-runtime")
