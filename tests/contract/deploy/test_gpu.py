"""Deploy a bundle that was built for a GPU: its configuration, its runtime, and unsupported options."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hasten.backends import RunOptions
from hasten.backends.onnxruntime import stored_precision
from hasten.bundle import Bundle
from hasten.cli import main
from hasten.cli.convert_model import run
from hasten.core.errors import UnsupportedError
from hasten.core.tensors import Batch
from hasten.core.variant import Precision, Variant
from hasten.deploy.tritonserver import Options, Runtime, write_models, write_repository
from hasten.deploy.tritonserver.variant_choice import choose_variant
from hasten.predictor import open_session
from support.fakes.engine_bundle import with_variant
from support.fakes.triton_backend import stub

pb2: Any = pytest.importorskip("tritonclient.grpc.model_config_pb2", reason="the messages come with tritonclient")
text_format: Any = pytest.importorskip("google.protobuf.text_format")

FP16, FP32 = "onnxruntime-fp16@cuda", "onnxruntime-fp32@cuda"
FUSED = Variant.parse("fused-fp16@cuda")
ON_CPU, ON_GPU = pb2.ModelInstanceGroup.KIND_CPU, pb2.ModelInstanceGroup.KIND_GPU


@pytest.fixture(scope="module")
def fused_bundle(gpu_bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """The same bundle with a fused variant as the fastest."""
    files = {"model.safetensors": b"weights", "fused.json": b"{}", "tuning.json": b"{}"}
    return with_variant(gpu_bundle, tmp_path_factory.mktemp("fused"), FUSED, files)


def read_config(directory: Path, name: str) -> Any:
    return text_format.Parse((directory / name / "config.pbtxt").read_text(encoding="utf-8"), pb2.ModelConfig())


def instance_groups(config: Any) -> list[tuple[int, int, list[int]]]:
    return [(group.count, group.kind, list(group.gpus)) for group in config.instance_group]


# --- tritonserver's own ONNX Runtime


def test_gpu_bundle_runs_on_gpus_by_default(gpu_bundle: Bundle, tmp_path: Path) -> None:
    written = write_repository(gpu_bundle, tmp_path / "out", Options(instances=2))
    assert (written.variant, written.device) == (FP16, "cuda")
    model, tokenize, _ = (read_config(written.directory, name) for name in written.names)
    assert model.platform == "onnxruntime_onnx"
    # On every GPU visible to the server.
    assert instance_groups(model) == [(2, ON_GPU, [])]
    assert instance_groups(tokenize) == [(2, ON_CPU, [])]
    assert "capabilities: [gpu]" in (written.directory / "compose.yaml").read_text()
    assert stored_precision(written.directory / written.model / "1" / "model.onnx") is Precision.FP16


@pytest.mark.parametrize("name", [FP16, FP32])
def test_configured_types_match_the_graph(gpu_bundle: Bundle, tmp_path: Path, name: str) -> None:
    onnx: Any = pytest.importorskip("onnx")
    written = write_models(gpu_bundle, tmp_path, Options(variant=name))
    graph = onnx.load(tmp_path / written.model / "1" / "model.onnx").graph
    elements = {pb2.TYPE_INT32: onnx.TensorProto.INT32, pb2.TYPE_INT64: onnx.TensorProto.INT64}
    elements |= {pb2.TYPE_FP32: onnx.TensorProto.FLOAT}
    config = read_config(tmp_path, written.model)
    for configured, expected in ((config.input, graph.input), (config.output, graph.output)):
        assert {tensor.name: elements[tensor.data_type] for tensor in configured} == {
            tensor.name: tensor.type.tensor_type.elem_type for tensor in expected
        }


def test_tf32_is_disabled_for_fp32_on_a_gpu(gpu_bundle: Bundle, tmp_path: Path) -> None:
    cases = [("fp16", FP16, None), ("fp32", FP32, None), ("graph", "graph", "cuda"), ("cpu", "graph", None)]
    excluded = {}
    for name, variant, device in cases:
        written = write_models(gpu_bundle, tmp_path, Options(name=name, variant=variant, device=device))
        accelerators = read_config(tmp_path, written.model).optimization.execution_accelerators
        excluded[name] = [(entry.name, dict(entry.parameters)) for entry in accelerators.gpu_execution_accelerator]
    exact = [("cuda", {"use_tf32": "0"})]
    assert excluded == {"fp16": [], "fp32": exact, "graph": exact, "cpu": []}


# --- its Python backend


def test_python_runtime_uses_the_first_gpu(gpu_bundle: Bundle, tmp_path: Path) -> None:
    written = write_repository(gpu_bundle, tmp_path / "out", Options(runtime=Runtime.PYTHON, instances=2))
    assert (written.variant, written.device) == (FP16, "cuda")
    model = read_config(written.directory, written.model)
    assert (model.backend, model.HasField("optimization")) == ("python", False)
    assert instance_groups(model) == [(2, ON_GPU, [0])]
    assert [name.partition("==")[0] for name in written.packages] == ["tokenizers", "onnxruntime-gpu[cuda,cudnn]"]
    readme = (written.directory / "README.md").read_text()
    assert "The model runs on the first GPU that the server sees" in readme
    assert "capabilities: [gpu]" in (written.directory / "compose.yaml").read_text()


def test_python_model_answers_like_the_session(gpu_bundle: Bundle, gpu: Any, tmp_path: Path) -> None:
    """The vendored model answers two requests of different widths in one call."""
    written = write_models(gpu_bundle, tmp_path, Options(runtime=Runtime.PYTHON))
    requests = [stub.ask(*lengths, names=written.tokens, outputs=("logits",)) for lengths in ((3, 7), (5,))]
    with gpu(), open_session(gpu_bundle.artifact(gpu_bundle.entry(FP16)), RunOptions(1)) as session:
        with stub.running(tmp_path / written.model) as model:
            answers = model.execute(requests)
        assert type(model._session).__name__ == "CudaSession"
        for request, answer in zip(requests, answers, strict=True):
            mask = request.inputs["attention_mask"] != 0
            rest = {name: value for name, value in request.inputs.items() if name != "attention_mask"}
            lengths = mask.sum(axis=1).astype(np.int32)
            rows = Batch({name: value[mask].astype(np.int32) for name, value in rest.items()}, lengths)
            np.testing.assert_allclose(answer.outputs["logits"], session.run(rows)["logits"], atol=1e-2)


def test_kernels_are_vendored(fused_bundle: Bundle, tmp_path: Path) -> None:
    written = write_repository(fused_bundle, tmp_path / "out", Options(name="mine", runtime=Runtime.PYTHON))
    assert written.names == ("mine_fused_model", "mine_fused_tokenize", "mine_fused_inference")
    assert instance_groups(read_config(written.directory, written.model)) == [(1, ON_GPU, [0])]
    packages = [name.partition("==")[0] for name in written.packages]
    assert packages == ["tokenizers", "msgspec", "safetensors", "torch", "triton"]
    # Without local build tags, which no index has.
    assert all("+" not in name for name in written.packages)
    folder = written.directory / written.model / "1"
    assert {file.name for file in (folder / "variant").iterdir()} == {"model.safetensors", "fused.json", "tuning.json"}
    source, kernels = Path(__file__).parents[3] / "src/hasten/kernels", folder / "hasten" / "kernels"
    vendored = {file.relative_to(kernels) for file in kernels.rglob("*.py")}
    assert vendored <= {file.relative_to(source) for file in source.rglob("*.py")}
    assert Path("encoder.py") in vendored
    assert not (folder / "hasten" / "builder").exists()
    assert "apt-get install" in (written.directory / "Dockerfile").read_text()


def test_skipped_variant_is_logged(fused_bundle: Bundle, caplog: pytest.LogCaptureFixture) -> None:
    assert choose_variant(fused_bundle, Options()).variant.name == FP16
    message = "skipping fused-fp16@cuda: --runtime native does not run fused, but --runtime python does"
    assert f"{message}; using {FP16} instead" in caplog.text


# --- unsupported options


def test_graph_is_deployed_if_the_device_is_cpu(gpu_bundle: Bundle, caplog: pytest.LogCaptureFixture) -> None:
    for runtime in Runtime:
        caplog.clear()
        assert choose_variant(gpu_bundle, Options(device="cpu", runtime=runtime)).variant.name == "graph-fp32"
        assert f"skipping {FP16}: it needs a GPU, and the device is cpu; using graph-fp32 instead" in caplog.text
    with pytest.raises(UnsupportedError, match=f"{FP16} cannot be deployed: it needs a GPU, and the device is cpu"):
        choose_variant(gpu_bundle, Options(device="cpu", variant=FP16))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--variant", FP16, "--device", "cpu"], f"{FP16} cannot be deployed: it needs a GPU, and the device is cpu"),
        (["--variant", FP16, "--threads", "2"], f"{FP16} cannot be deployed: --threads is not supported on GPUs"),
        (["--variant", FUSED.name], "--runtime native does not run fused, but --runtime python does"),
        (["--variant", "graph", "--device", "cuda", "--runtime", "python"], "the bundle's graph cannot be deployed"),
    ],
)
def test_gpu_variant_is_rejected_with_unsupported_options(
    fused_bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert main(["deploy", "tritonserver", str(fused_bundle.path), "-o", str(tmp_path / "out"), *words]) == 3
    first, *hints = capsys.readouterr().err.splitlines()
    assert first.startswith("error: ")
    assert message in first
    assert len(hints) == 1
    assert not list(tmp_path.iterdir())


# --- convert_model


@pytest.mark.parametrize("words", [["-d", "cuda"], [], ["--runtime", "python"]])
def test_convert_model_writes_a_gpu_repository(
    gpu_bundle: Bundle,
    gpu: Any,
    tiny_classifier: Any,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
) -> None:
    """Also by default on a machine with a GPU, like transformer-deploy."""
    output = tmp_path / "models"
    sizes = ["--nb-measures", "2", "--warmup", "1", "--quiet"]
    with gpu() as patch:
        plans = []
        patch.setattr("hasten.deploy.convert.build", lambda plan, *_, **__: plans.append(plan) or gpu_bundle)
        assert run(["-m", str(tiny_classifier("bert")), "-o", str(output), *sizes, *words]) == 0
    (plan,) = plans
    assert (plan.device, set(plan.variants)) == ("cuda", {FP16, FP32})
    engines = re.findall(r"^\[(.+)\] mean=", capsys.readouterr().out, re.MULTILINE)
    assert engines == ["Pytorch (FP32)", "ONNX Runtime (FP32)", "ONNX Runtime (optimized)"]
    configs = {file.parent.name: file.read_text() for file in output.glob("*/config.pbtxt")}
    assert [name for name, config in configs.items() if "KIND_GPU" in config] == ["transformer_onnx_model"]
    assert ('backend: "python"' in configs["transformer_onnx_model"]) == ("python" in words)
    assert stored_precision(output / "model.onnx") is Precision.FP16
