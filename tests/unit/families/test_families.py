"""The contract of model families: every task has one family, and every family implements every stage."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import pytest

from hasten.builder.pipeline import BuildPipeline
from hasten.core.errors import PlanError
from hasten.core.generation_types import GENERATION_TASKS
from hasten.families import FAMILIES, Family, all_tasks, family_of
from hasten.measure.verify_bundle import Judge
from hasten.tasks import TASKS

CONTRACT = [name for name, member in vars(Family).items() if callable(member) or isinstance(member, property)]
CONTRACT = [name for name in CONTRACT if not name.startswith("_")]


@pytest.fixture(params=FAMILIES.names())
def family(request: pytest.FixtureRequest) -> Family:
    return FAMILIES.get(request.param)


def test_every_task_belongs_to_one_family() -> None:
    assert sorted(all_tasks()) == sorted({*TASKS.names(), *GENERATION_TASKS})


@pytest.mark.parametrize("task", all_tasks())
def test_family_of_task_has_the_task(task: str) -> None:
    assert task in family_of(task).tasks


def test_unknown_task_is_rejected_by_name() -> None:
    with pytest.raises(PlanError, match="unknown task 'text-telepathy'"):
        family_of("text-telepathy").heads("text-telepathy")


def test_family_implements_the_whole_contract(family: Family) -> None:
    for name in CONTRACT:
        implemented = inspect.getattr_static(type(family), name)
        if callable(implemented):
            expected = inspect.signature(inspect.getattr_static(Family, name)).parameters
            assert list(inspect.signature(implemented).parameters) == list(expected), name


def test_pipeline_and_judge_are_complete(family: Family) -> None:
    for implementation, contract in ((family.pipeline, BuildPipeline), (family.judge, Judge)):
        assert issubclass(implementation, contract)
        assert not inspect.isabstract(implementation)


def test_detected_tasks_have_the_heads_they_are_detected_by(family: Family) -> None:
    for task, suffixes in family.detected_heads.items():
        assert suffixes == family.heads(task)


def test_auto_class_exists_in_transformers(family: Family) -> None:
    transformers = pytest.importorskip("transformers")
    for task in family.tasks:
        assert hasattr(transformers, family.auto_class(task))


def test_family_of_another_package_takes_its_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A family for images, say, needs no change here: an entry point registers it."""
    (tmp_path / "hasten_vision.py").write_text(
        "from hasten.families.encoder import EncoderFamily\n\n\n"
        "class VisionFamily(EncoderFamily):\n"
        "    tasks = ('image-classification',)\n\n\n"
        "FAMILY = VisionFamily()\n"
    )
    info = tmp_path / "hasten_vision-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: hasten-vision\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[hasten.families]\nvision = hasten_vision:FAMILY\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(FAMILIES, "_loaded", {})
    assert type(family_of("image-classification")).__name__ == "VisionFamily"
    assert "image-classification" in all_tasks()
    sys.modules.pop("hasten_vision")
