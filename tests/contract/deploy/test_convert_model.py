"""Convert a tiny model with transformer-deploy's command, from its weights to a repository for tritonserver."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from hasten.backends import Artifact
from hasten.builder.export.encoder import export
from hasten.bundle import Bundle
from hasten.cli.convert_model import run
from hasten.core.report import Bench, Footprint, Interval, Timing
from hasten.core.tensors import Shape
from hasten.deploy.convert import write_engines
from hasten.deploy.tritonserver import Options
from hasten.onnx_graph import depends_on_batch
from support.fakes.engine_bundle import PLAN

LINE = re.compile(
    r"\[(.+)\] mean=\d+\.\d\dms, sd=\d+\.\d\dms, min=\d+\.\d\dms, max=\d+\.\d\dms,"
    r" median=\d+\.\d\dms, 95p=\d+\.\d\dms, 99p=\d+\.\d\dms"
)
SIZES = ["-b", "1", "2", "4", "-s", "8", "16", "16", "--nb-measures", "3", "--warmup", "2", "--quiet"]


@pytest.fixture(scope="module", autouse=True)
def instant_benchmark() -> Iterator[None]:
    """Skip hasten's own benchmark, which takes ten seconds; these tests are about transformer-deploy's."""

    def fake_bench(contenders: Sequence[Artifact], shapes: Sequence[Shape], *_: object, **__: object) -> Bench:
        names = [artifact.variant.name for artifact in contenders]
        timings = [Timing(name, shapes[0], 1, 1.0, 1.0, None, 1.0, Interval(1.0, 1.0, 1.0), (1.0,)) for name in names]
        return Bench(names[0], tuple(timings), tuple(Footprint(name, 1.0, 1, 1) for name in names))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hasten.builder.encoder_build.bench", fake_bench)
        yield


@pytest.fixture(scope="module")
def classifier(tiny_classifier: Callable[..., Path]) -> Path:
    return tiny_classifier("bert")


@pytest.fixture(scope="module")
def words(classifier: Path, texts_file: Path) -> list[str]:
    return ["-m", str(classifier), "--data", str(texts_file), *SIZES]


def test_weights_are_converted_to_a_repository(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_TOKEN", "another")
    output = tmp_path / "triton_models[v2]"
    options = ["-d", "cpu", "--nb-instances", "2", "--seed", "7", "-w", "100", "--load-external-data"]
    assert run([*words, "-o", str(output), "-n", "tiny", *options, "--auth-token", "secret"]) == 0
    assert os.environ["HF_TOKEN"] == "secret"
    assert re.search(r"count: 2\s+kind: KIND_CPU", (output / "tiny_onnx_model" / "config.pbtxt").read_text())
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "latencies:"
    matches = [LINE.fullmatch(line) for line in lines[1:4]]
    assert [match[1] for match in matches if match] == [
        "Pytorch (FP32)",
        "ONNX Runtime (FP32)",
        "ONNX Runtime (optimized)",
    ]
    assert lines[4] == "Each inference engine output is within 0.3 tolerance compared to Pytorch output"
    assert {"verified:", "truncation:", "labels:"} <= {line.split()[0] for line in lines if line.startswith("  ")}
    assert f"isin{output}" in "".join("".join(lines).split())  # lines may be wrapped
    files = {path.relative_to(output).as_posix() for path in output.rglob("*") if path.is_file()}
    assert {"model-original.onnx", "model.onnx", "tiny_onnx_model/1/model.onnx"} <= files
    assert {f"tiny_onnx_{step}/config.pbtxt" for step in ("model", "tokenize", "inference")} <= files
    assert (output / "model.onnx").read_bytes() == (output / "tiny_onnx_model/1/model.onnx").read_bytes()
    feeds = {name: np.ones((2, 5), np.int32) for name in _inputs(output / "model.onnx")}
    optimized, original = (_scores(output / name, feeds) for name in ("model.onnx", "model-original.onnx"))
    assert np.abs(optimized - original).max() < 1e-4
    # An existing repository is replaced only with --force.
    assert run([*words, "-o", str(output)]) == 2
    assert "--force replaces it" in capsys.readouterr().err
    assert (output / "tiny_onnx_model").is_dir()
    assert run([*words, "-o", str(output), "--force", "--fast", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [entry["engine"] for entry in result["latencies"]] == ["ONNX Runtime (FP32)", "ONNX Runtime (optimized)"]
    assert [len(entry["ms"]) for entry in result["latencies"]] == [3, 3]
    assert all(entry["max_error"] < 1e-4 for entry in result["latencies"])
    assert not (output / "tiny_onnx_model").exists()
    assert (output / "transformer_onnx_model").is_dir()


def test_int8_variant_is_deployed_although_fp32_is_faster(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With equal timings, the benchmark puts fp32 first."""
    assert run([*words, "-q", "--atol", "9", "-o", str(tmp_path / "out"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["report"]["chosen"] == "onnxruntime-fp32"
    assert result["variant"].startswith("onnxruntime-int8")
    assert depends_on_batch(tmp_path / "out/model.onnx")
    assert depends_on_batch(tmp_path / "out/transformer_onnx_model/1/model.onnx")
    assert not depends_on_batch(tmp_path / "out/model-original.onnx")


def test_int8_beyond_the_tolerance_writes_nothing(
    words: list[str], no_leftovers: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*words, "-q", "--atol", "1e-7", "-o", str(no_leftovers)]) == 5
    assert re.match(
        r"error: outputs of .* differ from the reference by .*, more than --atol 1e-07", capsys.readouterr().err
    )


def test_other_tokenizer_replaces_the_models_own(
    words: list[str], classifier: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The deployed tokenizer swaps "cat" and "dog"; the model's own files do not change."""
    other = tmp_path / "tokenizer"
    other.mkdir()
    config = json.loads((classifier / "tokenizer.json").read_text(encoding="utf-8"))
    vocabulary = config["model"]["vocab"]
    vocabulary["cat"], vocabulary["dog"] = vocabulary["dog"], vocabulary["cat"]
    (other / "tokenizer.json").write_text(json.dumps(config), encoding="utf-8")
    (other / "tokenizer_config.json").write_bytes((classifier / "tokenizer_config.json").read_bytes())
    before = {path.name: path.read_bytes() for path in classifier.iterdir()}
    assert run([*words, "-t", str(other), "-o", str(tmp_path / "out"), "--json"]) == 0
    deployed = tmp_path / "out/transformer_onnx_tokenize/1/tokenizer.json"
    assert json.loads(deployed.read_text(encoding="utf-8"))["model"]["vocab"] == vocabulary
    assert {path.name: path.read_bytes() for path in classifier.iterdir()} == before
    capsys.readouterr()


def test_tensorrt_and_onnxruntime_are_written_side_by_side(engine_bundle: Bundle, tmp_path: Path) -> None:
    """As with `--backend tensorrt onnx`, but without a TensorRT that builds the engine."""
    options = Options(name="tiny", is_flat=True, output="output", max_rows=128)
    names = write_engines(engine_bundle, engine_bundle.manifest.variants, options, tmp_path)
    steps = ("model", "tokenize", "inference")
    assert names == tuple(f"tiny_{word}_{step}" for word in ("tensorrt", "onnx") for step in steps)
    assert (tmp_path / "model.plan").read_bytes() == PLAN
    assert (tmp_path / "tiny_tensorrt_model/1/model.plan").read_bytes() == PLAN
    assert (tmp_path / "model.onnx").read_bytes() == (tmp_path / "tiny_onnx_model/1/model.onnx").read_bytes()
    docker = (tmp_path / "Dockerfile").read_text()
    assert all(f"COPY {name} /models/{name}" in docker for name in names)


@pytest.mark.slow
@pytest.mark.usefixtures("standin")
def test_tensorrt_engine_is_built_and_deployed(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a fake TensorRT: a real one builds for minutes, on a GPU."""
    output = tmp_path / "out"
    assert run([*words, "--backend", "tensorrt", "onnx", "-w", "64", "-o", str(output)]) == 0
    engines = [match[1] for line in capsys.readouterr().out.splitlines() if (match := LINE.fullmatch(line))]
    assert engines == ["Pytorch (FP32)", "TensorRT (FP16)", "ONNX Runtime (FP32)", "ONNX Runtime (optimized)"]
    plan = (output / "model.plan").read_bytes()
    assert plan == (output / "transformer_tensorrt_model/1/model.plan").read_bytes()
    assert (output / "transformer_onnx_model/1/model.onnx").read_bytes() == (output / "model.onnx").read_bytes()
    assert run([*words, "--backend", "tensorrt", "-o", str(tmp_path / "alone")]) == 0
    engines = [match[1] for line in capsys.readouterr().out.splitlines() if (match := LINE.fullmatch(line))]
    assert engines == ["Pytorch (FP32)", "TensorRT (FP16)"]
    assert not (tmp_path / "alone" / "transformer_onnx_model").exists()


@pytest.mark.usefixtures("standin")
def test_int8_is_deployed_for_both_backends(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a fake TensorRT: both backends use int8, each on its own device; fp16 is built, too."""
    output = tmp_path / "out"
    options = ["-q", "--backend", "tensorrt", "onnx", "--atol", "9", "--min-agreement", "0.5"]
    assert run([*words, *options, "-o", str(output)]) == 0
    output_text = capsys.readouterr().out
    engines = [match[1] for line in output_text.splitlines() if (match := LINE.fullmatch(line))]
    assert engines == ["Pytorch (FP32)", "TensorRT (INT8)", "ONNX Runtime (FP32)", "ONNX Runtime (optimized)"]
    assert "tensorrt-fp16@cuda" in output_text
    assert "tensorrt-int8+qdq@cuda is in" in output_text
    assert "verified: tensorrt-int8+qdq@cuda agrees" in output_text
    assert "verified: onnxruntime-int8" in output_text
    # A server with TensorRT has a GPU, and would use it for the other model, too.
    kinds = {name: (output / f"transformer_{name}_model/config.pbtxt").read_text() for name in ("tensorrt", "onnx")}
    assert "kind: KIND_GPU" in kinds["tensorrt"]
    assert "kind: KIND_CPU" in kinds["onnx"]
    plan = (output / "model.plan").read_bytes()
    assert plan == (output / "transformer_tensorrt_model/1/model.plan").read_bytes()
    graph = onnx.load_from_string(base64.b85decode(json.loads(plan)["graph"]))  # the format of a fake engine
    assert Counter(node.op_type for node in graph.graph.node)["QuantizeLinear"] > 10
    assert depends_on_batch(output / "model.onnx")


@pytest.mark.usefixtures("standin")
def test_int8_for_tensorrt_is_rejected_without_a_module(
    words: list[str], classifier: Path, load_tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Quantizers are inserted into a PyTorch module; the error precedes any work."""
    folder = tmp_path / "graph"
    shutil.copytree(classifier, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    export(load_tiny(classifier), folder / "model.onnx")
    command = ["-m", str(folder), "-q", "--backend", "tensorrt", "--quiet", "-o", str(tmp_path / "out")]
    assert run(command) == 3
    first, hint = capsys.readouterr().err.splitlines()
    assert "tensorrt-int8+qdq@cuda is made by quantizers in a PyTorch module" in first
    assert first.endswith("comes as an ONNX graph")
    assert hint == "  hint: give the model the graph was made from"
    assert run([*command, "--file-name", "model.onnx"]) == 3
    assert "hint: leave --file-name out, or give the model" in capsys.readouterr().err
    assert run([*words, "-q", "--backend", "tensorrt", "--atol", "1e-7", "-o", str(tmp_path / "out")]) == 5
    assert "more than --atol 1e-07" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def _inputs(graph: Path) -> list[str]:
    session = onnxruntime.InferenceSession(str(graph), providers=["CPUExecutionProvider"])
    return [entry.name for entry in session.get_inputs()]


def _scores(graph: Path, feeds: dict[str, Any]) -> Any:
    session = onnxruntime.InferenceSession(str(graph), providers=["CPUExecutionProvider"])
    return session.run(None, {entry.name: feeds[entry.name] for entry in session.get_inputs()})[0]
