"""The Python code of docs/migration.md runs, and levels and presets build their variants."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hasten
from hasten.builder.search.presets import INT8, PRESETS, candidates_for_level
from hasten.core.errors import PlanError, UnsupportedError
from hasten.core.system.cpu_targets import TARGETS
from hasten.core.system.hardware import this_machine
from support.fake_bench import fake_benchmark

PAGE = (Path(__file__).parents[3] / "docs" / "migration.md").read_text(encoding="utf-8")
# By heading and number within the section.
BLOCKS = {
    f"{section.splitlines()[0]} {number}": code
    for section in PAGE.split("\n## ")[1:]
    for number, code in enumerate(re.findall(r"```python\n(.*?)```", section, re.DOTALL), 1)
}


@pytest.fixture(scope="module")
def models(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_classifier: Any,
    tiny_model: Any,
    tiny_embedder: Any,
    quick_build: Any,
) -> Path:
    """Models under the names that the page uses; most are bundles already, which saves building them."""
    folder = tmp_path_factory.mktemp("page")
    (folder / "classifier").symlink_to(tiny_classifier("bert"))
    quick_build(tiny_embedder(), folder / "embedder", variants=["onnxruntime-fp32"])
    rows = folder / "rows.jsonl"
    rows.write_text(json.dumps({"question": "is this it?", "context": "the cat sat on the mat"}) + "\n")
    quick_build(tiny_model("bert", "ForQuestionAnswering"), folder / "qa", variants=["onnxruntime-fp32"], data=rows)
    return folder


@pytest.mark.parametrize("name", BLOCKS)
def test_code_of_the_page_runs(name: str, models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = BLOCKS[name]
    for package in re.findall(r"^(?:from|import) (\w+)", code, re.MULTILINE):
        if find_spec(package) is None:
            pytest.skip(f"the package '{package}' is not installed")
    monkeypatch.chdir(models)
    namespace: dict[str, Any] = {}
    with fake_benchmark():
        exec(compile(code, "docs/migration.md", "exec"), namespace)
    CHECKS[name](namespace)


def check_vectors(namespace: dict[str, Any]) -> None:
    expected = hasten.SentenceEncoder("embedder").encode(["a dog ran", "the cat sat"], normalize_embeddings=True)
    assert np.allclose(namespace["vectors"], expected, atol=1e-5)


CHECKS: dict[str, Callable[[dict[str, Any]], object]] = {
    "transformers 1": lambda namespace: namespace["logits"].shape == (2, 3) or pytest.fail("other logits"),
    "transformers 2": lambda namespace: (
        {answer["label"] for answer in namespace["answers"]} <= {"bad", "fair", "good"} or pytest.fail("other labels")
    ),
    "transformers 3": lambda namespace: namespace["answer"] in "the cat sat on the mat" or pytest.fail("no answer"),
    "Optimum 1": lambda namespace: namespace["classify"]("a dog ran") or pytest.fail("no answer"),
    "sentence-transformers 1": check_vectors,
    "sentence-transformers 2": check_vectors,
    "LangChain 1": lambda namespace: namespace["found"] == "the cat sat on the mat" or pytest.fail("found another"),
    "LlamaIndex 1": check_vectors,
}


def test_every_code_block_is_checked() -> None:
    assert list(CHECKS) == list(BLOCKS)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_level_builds_its_variants(level: Any, tiny_classifier: Any, quick_build: Any) -> None:
    bundle = quick_build(tiny_classifier("bert"), level=level, keep="all")
    tried = {candidate.variant for candidate in bundle.report.candidates}
    assert tried == {*PRESETS[level], "torch-fp32"}
    assert {entry.name for entry in bundle.manifest.variants} <= set(PRESETS[level])


def test_level_o3_uses_approximate_gelu(tiny_classifier: Any, quick_build: Any) -> None:
    import onnx

    variants = ("onnxruntime-fp32", "onnxruntime-fp32+tanhgelu")
    bundle = quick_build(tiny_classifier("distilbert"), level="O3", keep="all", speeds={variants[1]: 0.5})
    assert bundle.chosen.name == variants[1]
    operators = {
        name: {node.op_type for node in onnx.load(bundle.artifact(bundle.entry(name)).path()).graph.node}
        for name in variants
    }
    assert "FastGelu" in operators[variants[1]]
    assert not {"BiasGelu", "Gelu"} & operators[variants[1]]
    assert "FastGelu" not in operators[variants[0]]


def test_preset_quantizes_for_its_target(tiny_classifier: Any, quick_build: Any) -> None:
    """Weights have 7 bits on CPUs whose int8 sums saturate."""
    import onnx

    bundle = quick_build(tiny_classifier("bert"), preset="avx2", keep="all", min_agreement=0.1)
    assert {entry.name for entry in bundle.manifest.variants} <= set(INT8)
    assert bundle.report.plan.target == "avx2"
    model = onnx.load(bundle.artifact(bundle.chosen).path())
    weights = [
        onnx.numpy_helper.to_array(tensor)
        for tensor in model.graph.initializer
        if tensor.data_type == onnx.TensorProto.INT8 and len(tensor.dims) == 2
    ]
    assert weights
    assert max(int(np.abs(weight.astype(int)).max()) for weight in weights) <= 64


def test_levels_and_presets_combine_only_with_each_other(tiny_classifier: Any) -> None:
    machine = this_machine()
    assert candidates_for_level("O2", "arm64", machine) == ("onnxruntime-fp32", *INT8)
    assert all(candidates_for_level(None, preset, machine) == INT8 for preset in TARGETS)
    model = tiny_classifier("bert")
    for options in ({"variants": "graph-fp32"}, {"target": "avx2"}, {"recipe": "r.toml"}):
        with pytest.raises(PlanError, match="level and preset already name variants and target"):
            hasten.build(model, level="O1", **options)
    for options in ({"level": "O2"}, {"preset": "arm64"}, {"level": "O4", "preset": "arm64"}):
        with pytest.raises(PlanError, match="is for CPUs, and device is cuda"):
            hasten.build(model, device="cuda", **options)
    assert candidates_for_level("O3", None, machine, "cpu") == PRESETS["O3"]
    if not machine.gpus:
        with pytest.raises(UnsupportedError, match=r"no variant of level O4 runs here \(onnxruntime-fp16@cuda: "):
            hasten.build(model, device="cuda", level="O4")
    with pytest.raises(PlanError, match=r"no level 'O5' \(one of O1, O2, O3, O4\)"):
        hasten.build(model, level="O5")  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"no preset 'avx521'.*avx512"):
        hasten.build(model, preset="avx521")  # type: ignore[arg-type]


def test_level_o4_is_rejected_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PRESETS, "O4", ("onnxruntime-fp16@cuda",))
    if this_machine().gpus:
        pytest.skip("there is a GPU here")
    with pytest.raises(UnsupportedError, match=r"no variant of level O4 runs here \(onnxruntime-fp16@cuda: "):
        candidates_for_level("O4", None, this_machine())
