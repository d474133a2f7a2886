"""A bundle that was built for a GPU, deployed: what it is given, what runs it, and where it is refused."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines import with_variant
from hasten.backends import RunOptions
from hasten.backends.onnxruntime import stored_precision
from hasten.bundle import Bundle
from hasten.cli import main
from hasten.cli.convert_model import run
from hasten.core.errors import UnsupportedError
from hasten.core.tensors import Batch
from hasten.core.variant import Precision, Variant
from hasten.deploy.tritonserver import Options, Runtime, write_models, write_repository
from hasten.deploy.tritonserver.options import choose
from hasten.predictor import open_session
from tritonserver import stub

pb2: Any = pytest.importorskip("tritonclient.grpc.model_config_pb2", reason="the messages come with tritonclient")
text_format: Any = pytest.importorskip("google.protobuf.text_format")

HALF, WHOLE = "onnxruntime-fp16@cuda", "onnxruntime-fp32@cuda"
FUSED = Variant.parse("fused-fp16@cuda")
ON_CPU, ON_GPU = pb2.ModelInstanceGroup.KIND_CPU, pb2.ModelInstanceGroup.KIND_GPU


@pytest.fixture(scope="module")
def fused_bundle(gpu_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The same with our own runtime in front."""
    files = {"model.safetensors": b"weights", "fused.json": b"{}", "tuning.json": b"{}"}
    return with_variant(gpu_bundle, tmp_path_factory.mktemp("fused"), FUSED, files)


def config(place: Path, name: str) -> Any:
    return text_format.Parse((place / name / "config.pbtxt").read_text(encoding="utf-8"), pb2.ModelConfig())


def kinds(own: Any) -> list[tuple[int, int, list[int]]]:
    return [(group.count, group.kind, list(group.gpus)) for group in own.instance_group]


# --- tritonserver's own ONNX Runtime


def test_it_is_for_a_gpu_by_itself(gpu_bundle: Bundle, tmp_path: Path) -> None:
    """Whoever built it for one does not want its graph on a processor."""
    written = write_repository(gpu_bundle, tmp_path / "out", Options(instances=2))
    assert (written.variant, written.device) == (HALF, "cuda")
    model, tokenize, _ = (config(written.directory, name) for name in written.names)
    assert model.platform == "onnxruntime_onnx"
    # On every GPU that the server sees.
    assert kinds(model) == [(2, ON_GPU, [])]
    assert kinds(tokenize) == [(2, ON_CPU, [])]
    assert "capabilities: [gpu]" in (written.directory / "compose.yaml").read_text()
    assert stored_precision(written.directory / written.model / "1" / "model.onnx") is Precision.FP16


@pytest.mark.parametrize("name", [HALF, WHOLE])
def test_types_are_the_graphs_own(gpu_bundle: Bundle, tmp_path: Path, name: str) -> None:
    onnx: Any = pytest.importorskip("onnx")
    written = write_models(gpu_bundle, tmp_path, Options(variant=name))
    graph = onnx.load(tmp_path / written.model / "1" / "model.onnx").graph
    elements = {pb2.TYPE_INT32: onnx.TensorProto.INT32, pb2.TYPE_INT64: onnx.TensorProto.INT64}
    elements |= {pb2.TYPE_FP32: onnx.TensorProto.FLOAT}
    told = config(tmp_path, written.model)
    for ours, theirs in ((told.input, graph.input), (told.output, graph.output)):
        assert {one.name: elements[one.data_type] for one in ours} == {
            one.name: one.type.tensor_type.elem_type for one in theirs
        }


def test_fp32_is_not_tf32(gpu_bundle: Bundle, tmp_path: Path) -> None:
    asked = [("half", HALF, None), ("whole", WHOLE, None), ("graph", "graph", "cuda"), ("cpu", "graph", None)]
    told = {}
    for name, variant, device in asked:
        written = write_models(gpu_bundle, tmp_path, Options(name=name, variant=variant, device=device))
        accelerators = config(tmp_path, written.model).optimization.execution_accelerators
        told[name] = [(one.name, dict(one.parameters)) for one in accelerators.gpu_execution_accelerator]
    exact = [("cuda", {"use_tf32": "0"})]
    assert told == {"half": [], "whole": exact, "graph": exact, "cpu": []}


# --- its Python backend


def test_our_session_runs_on_the_first_gpu(gpu_bundle: Bundle, tmp_path: Path) -> None:
    written = write_repository(gpu_bundle, tmp_path / "out", Options(runtime=Runtime.PYTHON, instances=2))
    assert (written.variant, written.device) == (HALF, "cuda")
    model = config(written.directory, written.model)
    assert (model.backend, model.HasField("optimization")) == ("python", False)
    assert kinds(model) == [(2, ON_GPU, [0])]
    assert [name.partition("==")[0] for name in written.packages] == ["tokenizers", "onnxruntime-gpu[cuda,cudnn]"]
    readme = (written.directory / "README.md").read_text()
    assert "The model runs on the first GPU that the server sees" in readme
    assert "capabilities: [gpu]" in (written.directory / "compose.yaml").read_text()


def test_what_it_answers(gpu_bundle: Bundle, gpu: Any, tmp_path: Path) -> None:
    """The shipped model, asked as the backend asks it: two requests of other widths in one go."""
    written = write_models(gpu_bundle, tmp_path, Options(runtime=Runtime.PYTHON))
    requests = [stub.ask(*lengths, names=written.tokens, outputs=("logits",)) for lengths in ((3, 7), (5,))]
    with gpu(), open_session(gpu_bundle.artifact(gpu_bundle.entry(HALF)), RunOptions(1)) as session:
        with stub.running(tmp_path / written.model) as model:
            answers = model.execute(requests)
        assert type(model._session).__name__ == "CudaSession"
        for request, answer in zip(requests, answers, strict=True):
            mask = request.inputs["attention_mask"] != 0
            rest = {name: value for name, value in request.inputs.items() if name != "attention_mask"}
            lengths = mask.sum(axis=1).astype(np.int32)
            rows = Batch({name: value[mask].astype(np.int32) for name, value in rest.items()}, lengths)
            np.testing.assert_allclose(answer.outputs["logits"], session.run(rows)["logits"], atol=1e-2)


def test_our_own_kernels_come_along(fused_bundle: Bundle, tmp_path: Path) -> None:
    written = write_repository(fused_bundle, tmp_path / "out", Options(name="mine", runtime=Runtime.PYTHON))
    assert written.names == ("mine_fused_model", "mine_fused_tokenize", "mine_fused_inference")
    assert kinds(config(written.directory, written.model)) == [(1, ON_GPU, [0])]
    packages = [name.partition("==")[0] for name in written.packages]
    assert packages == ["tokenizers", "msgspec", "safetensors", "torch", "triton"]
    # Of a version no index has: the mark of a build of one's own is left out.
    assert all("+" not in name for name in written.packages)
    folder = written.directory / written.model / "1"
    assert {file.name for file in (folder / "variant").iterdir()} == {"model.safetensors", "fused.json", "tuning.json"}
    ours = {file.name for file in Path(__file__).parents[2].glob("src/hasten/kernels/*.py")}
    assert {file.name for file in (folder / "hasten" / "kernels").iterdir()} <= ours
    assert (folder / "hasten" / "kernels" / "encoder.py").is_file()
    assert not (folder / "hasten" / "builder").exists()
    assert "apt-get install" in (written.directory / "Dockerfile").read_text()


def test_what_the_server_cannot_run_is_passed_over_aloud(
    fused_bundle: Bundle, caplog: pytest.LogCaptureFixture
) -> None:
    assert choose(fused_bundle, Options()).variant.name == HALF
    told = "passing over fused-fp16@cuda: --runtime native does not run fused, with --runtime python it does"
    assert f"{told}; using {HALF} instead" in caplog.text


# --- refusals


def test_where_there_is_no_gpu_the_graph_runs(gpu_bundle: Bundle, caplog: pytest.LogCaptureFixture) -> None:
    for runtime in Runtime:
        caplog.clear()
        assert choose(gpu_bundle, Options(device="cpu", runtime=runtime)).variant.name == "graph-fp32"
        assert f"passing over {HALF}: it runs on GPUs; using graph-fp32 instead" in caplog.text
    with pytest.raises(UnsupportedError, match=f"{HALF} does not run there: it runs on GPUs"):
        choose(gpu_bundle, Options(device="cpu", variant=HALF))


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--variant", HALF, "--device", "cpu"], f"{HALF} does not run there: it runs on GPUs"),
        (["--variant", HALF, "--threads", "2"], f"{HALF} does not run there: it has no threads to be given"),
        (["--variant", FUSED.name], "--runtime native does not run fused, with --runtime python it does"),
        (["--variant", "graph", "--device", "cuda", "--runtime", "python"], "the bundle's graph does not run there"),
    ],
)
def test_a_gpus_variant_where_it_does_not_run(
    fused_bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], what: str
) -> None:
    assert main(["deploy", "tritonserver", str(fused_bundle.path), "-o", str(tmp_path / "out"), *words]) == 3
    first, *hints = capsys.readouterr().err.splitlines()
    assert first.startswith("error: ")
    assert what in first
    assert len(hints) == 1
    assert not list(tmp_path.iterdir())


# --- convert_model


@pytest.mark.parametrize("words", [["-d", "cuda"], [], ["--runtime", "python"]])
def test_convert_model_writes_it(
    gpu_bundle: Bundle,
    gpu: Any,
    tiny_classifier: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
) -> None:
    """Also unasked, where there is a GPU: so does transformer-deploy."""
    place = tmp_path / "models"
    sizes = ["--nb-measures", "2", "--warmup", "1", "--quiet"]
    with gpu() as patch:
        plans = []
        patch.setattr("hasten.deploy.convert.build", lambda plan, *_, **__: plans.append(plan) or gpu_bundle)
        assert run(["-m", str(tiny_classifier("bert")), "-o", str(place), *sizes, *words]) == 0
    (plan,) = plans
    assert (plan.device, set(plan.variants)) == ("cuda", {HALF, WHOLE})
    engines = re.findall(r"^\[(.+)\] mean=", capsys.readouterr().out, re.MULTILINE)
    assert engines == ["Pytorch (FP32)", "ONNX Runtime (FP32)", "ONNX Runtime (optimized)"]
    configs = {file.parent.name: file.read_text() for file in place.glob("*/config.pbtxt")}
    assert [name for name, config in configs.items() if "KIND_GPU" in config] == ["transformer_onnx_model"]
    assert ('backend: "python"' in configs["transformer_onnx_model"]) == ("python" in words)
    assert stored_precision(place / "model.onnx") is Precision.FP16
