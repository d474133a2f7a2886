"""The dynamic axes of an exported graph, and the directory it is written to."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.models import tiny_encoders

pytest.importorskip("onnx", reason="graphs with quantizers need hasten[build]")
transformers = pytest.importorskip("transformers", reason="quantizers need hasten[build]")

from hasten.core.errors import PlanError  # noqa: E402
from hasten.quantize import qdq  # noqa: E402
from hasten.quantize.qdq.export import export_graph  # noqa: E402

HEAD = "ForSequenceClassification"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bert")
    tiny_encoders.save("bert", HEAD, directory)
    return directory


@pytest.fixture
def model(folder: Path) -> Any:
    return calibrated(folder, HEAD)


@pytest.fixture
def tokenizer(folder: Path) -> Any:
    return transformers.AutoTokenizer.from_pretrained(folder)


def calibrated(folder: Path, head: str) -> Any:
    batch = transformers.AutoTokenizer.from_pretrained(folder)(
        list(tiny_encoders.CORPUS), padding=True, return_tensors="pt"
    )
    with qdq.patched(), qdq.calibration("max") as calibrate:
        model = getattr(transformers, f"AutoModel{head}").from_pretrained(folder).eval()
        calibrate(model, [batch])
    return model


class RecordingTokenizer:
    """A tokenizer that records the sizes of its output."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        self.sizes: set[int] = set()

    def __call__(self, *args: Any, **options: Any) -> Any:
        encoded = self.tokenizer(*args, **options)
        self.sizes |= set(encoded["input_ids"].shape)
        return encoded


@pytest.mark.parametrize(("head", "axes"), [(HEAD, ["batch"]), ("ForTokenClassification", ["batch", "sequence"])])
def test_label_axis_is_fixed_even_if_it_equals_another_size(head: str, axes: list[str], tmp_path: Path) -> None:
    def shape_of(labels: int) -> list[Any]:
        folder = tmp_path / str(labels)
        tiny_encoders.save("bert", head, folder, num_labels=labels)
        tokenizer = RecordingTokenizer(folder)
        [output] = export_graph(calibrated(folder, head), tokenizer).graph.output
        sizes.update(tokenizer.sizes)
        return [dim.dim_param or dim.dim_value for dim in output.type.tensor_type.shape.dim]

    sizes: set[int] = set()
    assert shape_of(64) == [*axes, 64]
    assert len(sizes) > 1
    for labels in sorted(sizes):
        assert shape_of(labels) == [*axes, labels]


def test_earlier_export_is_replaced_only_with_force(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    target = tmp_path / "above" / "made"
    file = qdq.export(model, tokenizer, target)
    first = file.read_bytes()
    for name in ("model.onnx.data", "notes.txt"):  # left by an earlier, larger export, and by someone else
        (target / name).write_text("before")
    qdq.disable(model, "classifier.*")
    with pytest.raises(PlanError, match=r"made already holds a graph \(force=True replaces it\)"):
        qdq.export(model, tokenizer, target)
    assert file.read_bytes() == first
    assert (target / "model.onnx.data").exists()
    assert qdq.export(model, tokenizer, target, force=True) == file
    assert file.read_bytes() != first
    assert not (target / "model.onnx.data").exists()
    assert (target / "notes.txt").read_text() == "before"


@pytest.mark.parametrize("force", [False, True])
def test_other_directories_are_never_overwritten(model: Any, tokenizer: Any, tmp_path: Path, *, force: bool) -> None:
    config = tmp_path / "config.json"
    config.write_text("{}")
    with pytest.raises(PlanError, match=r"is not empty and holds no graph \(choose another directory\)"):
        qdq.export(model, tokenizer, tmp_path, force=force)
    with pytest.raises(PlanError, match=r"config\.json is a file \(choose another directory\)"):
        qdq.export(model, tokenizer, config, force=force)
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("config.json", "{}")]
