"""Model repositories: their configurations, the files beside the models, and unsupported options."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hasten.bundle import Bundle, open_bundle
from hasten.cli import main
from hasten.core.errors import BundleError
from hasten.deploy import MARKER_FILE
from hasten.deploy.tritonserver import Options, Repository, Runtime, write_models, write_repository
from support.fakes.engine_bundle import PLAN

pb2: Any = pytest.importorskip("tritonclient.grpc.model_config_pb2", reason="the messages come with tritonclient")
text_format: Any = pytest.importorskip("google.protobuf.text_format")

COMMAND = ["deploy", "tritonserver"]


@pytest.fixture(scope="module")
def tagger_bundle(tiny_tagger: Any, quick_build: Any, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    file.write_text('{"text": "the cat sat"}\n{"text": "rain"}\n', encoding="utf-8")
    return quick_build(tiny_tagger("bert"), variants=["openvino-fp32"], batch_size=(1, 4, 16), data=file)


def read_config(directory: Path, name: str) -> Any:
    config = text_format.Parse((directory / name / "config.pbtxt").read_text(encoding="utf-8"), pb2.ModelConfig())
    assert config.name == name
    assert (directory / name / "1").is_dir()
    return config


def tensors(messages: Any) -> dict[str, tuple[str, list[int]]]:
    return {message.name: (pb2.DataType.Name(message.data_type), list(message.dims)) for message in messages}


def write(bundle: Bundle, directory: Path, **options: Any) -> Repository:
    return write_models(bundle, directory, Options(**options))


def test_classifier_is_written_as_an_ensemble(classifier_bundle: Bundle, tmp_path: Path) -> None:
    written = write(classifier_bundle, tmp_path, name="mine", instances=2, cache=True, max_delay_us=70)
    names = ("mine_onnx_model", "mine_onnx_tokenize", "mine_onnx_inference")
    assert written.names == names
    assert {path.name for path in tmp_path.iterdir()} == set(names)
    model, tokenize, inference = (read_config(tmp_path, name) for name in names)

    signature, shapes = classifier_bundle.manifest.signature, classifier_bundle.report.plan.shapes
    kinds = {"int32": "TYPE_INT32", "int64": "TYPE_INT64", "float32": "TYPE_FP32"}
    inputs = {spec.name: (kinds[spec.dtype], [-1]) for spec in signature.inputs}
    outputs = {"logits": ("TYPE_FP32", [3])}
    assert (model.platform, model.default_model_filename) == ("onnxruntime_onnx", "model.onnx")
    assert tensors(model.input) == tensors(tokenize.output) == inputs
    assert tensors(model.output) == tensors(inference.output) == outputs
    assert (tmp_path / names[0] / "1" / "model.onnx").stat().st_size > 0
    for config in (model, tokenize, inference):
        assert config.max_batch_size == shapes.batch.max
        assert config.version_policy.latest.num_versions == 1
    for config in (model, tokenize):
        # Both models share the permitted delay equally.
        assert config.dynamic_batching.max_queue_delay_microseconds == 35
        assert list(config.dynamic_batching.preferred_batch_size) == [shapes.batch.opt, shapes.batch.max]
        assert [(group.count, group.kind) for group in config.instance_group] == [(2, pb2.ModelInstanceGroup.KIND_AUTO)]
    texts = {"TEXT": ("TYPE_STRING", [1]), "TEXT_PAIR": ("TYPE_STRING", [1])}
    assert tensors(tokenize.input) == tensors(inference.input) == texts
    assert [tensor.optional for tensor in inference.input] == [False, True]
    assert inference.response_cache.enable
    first, second = inference.ensemble_scheduling.step
    assert (first.model_name, second.model_name) == (names[1], names[0])
    assert set(first.output_map.values()) == set(second.input_map.values()) == set(inputs)
    for name in (names[0], names[2]):
        assert (tmp_path / name / "labels.txt").read_text().split() == ["bad", "fair", "good"]
        assert read_config(tmp_path, name).output[0].label_filename == "labels.txt"


def test_warmup_samples_match_the_inputs_of_the_model(classifier_bundle: Bundle, tmp_path: Path) -> None:
    written = write(classifier_bundle, tmp_path)
    model, shapes = read_config(tmp_path, written.model), classifier_bundle.report.plan.shapes
    sizes = [(sample.batch_size, list(sample.inputs["input_ids"].dims)) for sample in model.model_warmup]
    limit = classifier_bundle.manifest.signature.max_length
    assert sizes == [(1, [shapes.sequence.min]), (shapes.batch.opt, [min(limit, shapes.sequence.opt)])]
    kinds = {"TYPE_INT32": np.int32, "TYPE_INT64": np.int64}
    for sample in model.model_warmup:
        for name, entry in sample.inputs.items():
            content = (tmp_path / written.model / "warmup" / entry.input_data_file).read_bytes()
            values = np.frombuffer(content, kinds[pb2.DataType.Name(entry.data_type)])
            assert list(values.shape) == list(entry.dims)
            assert (values == (name != "token_type_ids")).all()


def test_configured_inputs_match_the_graph(classifier_bundle: Bundle, tmp_path: Path) -> None:
    import onnxruntime

    written = write(classifier_bundle, tmp_path)
    model = read_config(tmp_path, written.model)
    session = onnxruntime.InferenceSession(str(tmp_path / written.model / "1" / "model.onnx"))
    assert {entry.name for entry in session.get_inputs()} == set(tensors(model.input))
    kinds = {"TYPE_INT32": np.int32, "TYPE_INT64": np.int64}
    feeds = {name: np.ones((2, 5), kinds[kind]) for name, (kind, _) in tensors(model.input).items()}
    (logits,) = session.run(["logits"], feeds)
    assert logits.shape == (2, 3)


def test_tagger_runs_in_the_python_backend(tagger_bundle: Bundle, tmp_path: Path) -> None:
    written = write(tagger_bundle, tmp_path, runtime=Runtime.PYTHON, device="cpu")
    assert written.names == ("transformer_openvino_model", "transformer_openvino_inference")
    assert [name.partition("==")[0] for name in written.packages] == ["tokenizers", "msgspec", "openvino"]
    model, inference = (read_config(tmp_path, name) for name in written.names)
    assert (model.backend, inference.backend) == ("python", "python")
    # The model separates requests itself, so that their lengths may differ.
    assert all(tensor.allow_ragged_batch for tensor in model.input)
    assert tensors(model.output) == {"logits": ("TYPE_FP32", [-1, 5])}
    assert tensors(inference.output) == {"ANSWER": ("TYPE_STRING", [1])}
    assert tensors(inference.input) == {"TEXT": ("TYPE_STRING", [1]), "OPTIONS": ("TYPE_STRING", [1])}
    assert [tensor.optional for tensor in inference.input] == [False, True]
    assert model.max_batch_size == inference.max_batch_size == 16
    assert model.dynamic_batching.max_queue_delay_microseconds == 0
    assert inference.dynamic_batching.max_queue_delay_microseconds > 0
    assert {group.kind for config in (model, inference) for group in config.instance_group} == {
        pb2.ModelInstanceGroup.KIND_CPU
    }
    assert (tmp_path / written.model / "1" / "variant" / "model.xml").exists()


def test_int8_cpu_variant_is_pinned_to_the_cpu(tiny_classifier: Any, quick_build: Any, tmp_path: Path) -> None:
    """A server with a GPU would run it there by default."""
    bundle = quick_build(tiny_classifier("bert"), variants=["onnxruntime-int8"], min_agreement=0.0)
    written = write(bundle, tmp_path)
    kinds = {group.kind for name in written.names for group in read_config(tmp_path, name).instance_group}
    assert kinds == {pb2.ModelInstanceGroup.KIND_CPU}


def test_tensorrt_engine_is_configured_from_its_record(engine_bundle: Bundle, tmp_path: Path) -> None:
    written = write(engine_bundle, tmp_path, name="mine", instances=2, max_rows=1000)
    names = ("mine_tensorrt_model", "mine_tensorrt_tokenize", "mine_tensorrt_inference")
    assert written.names == names
    model, tokenize, inference = (read_config(tmp_path, name) for name in names)
    assert (model.platform, model.default_model_filename) == ("tensorrt_plan", "model.plan")
    assert {file.name for file in (tmp_path / names[0] / "1").iterdir()} == {".keep", "model.plan"}
    assert (tmp_path / names[0] / "1" / "model.plan").read_bytes() == PLAN
    # The types of the engine, not those of the manifest.
    inputs = {"input_ids": ("TYPE_INT64", [-1]), "attention_mask": ("TYPE_INT64", [-1])}
    assert tensors(model.input) == tensors(tokenize.output) == inputs
    assert tensors(model.output) == tensors(inference.output) == {"logits": ("TYPE_FP16", [3])}
    (group,) = model.instance_group
    assert (group.count, group.kind, list(group.profile)) == (2, pb2.ModelInstanceGroup.KIND_GPU, ["0", "1"])
    assert {group.kind for group in tokenize.instance_group} == {pb2.ModelInstanceGroup.KIND_CPU}
    # Limited by the engine's profiles.
    assert model.max_batch_size == engine_bundle.report.plan.shapes.batch.max
    for sample in model.model_warmup:
        assert set(sample.inputs) == set(inputs)
        for name, entry in sample.inputs.items():
            content = (tmp_path / names[0] / "warmup" / entry.input_data_file).read_bytes()
            assert (np.frombuffer(content, np.int64) == 1).all(), name
            assert len(content) == 8 * entry.dims[0]


def test_readme_describes_the_engine(engine_bundle: Bundle, tmp_path: Path) -> None:
    written = write_repository(engine_bundle, tmp_path / "out", Options())
    readme = (tmp_path / "out" / "README.md").read_text()
    assert "The engine runs on NVIDIA H200 (9.0) with TensorRT 11.4.0" in readme
    assert "its backends for TensorRT and Python" in readme
    assert "capabilities: [gpu]" in (tmp_path / "out" / "compose.yaml").read_text()
    assert written.packages[0].startswith("tokenizers")


@pytest.mark.parametrize(
    ("options", "backend"),
    [
        ({}, "tensorrt"),
        ({"device": "cuda"}, "tensorrt"),
        ({"device": "cpu"}, "onnxruntime"),
        ({"threads": 2}, "onnxruntime"),
        ({"runtime": Runtime.PYTHON}, "onnxruntime"),
        ({"variant": "graph", "device": "cuda"}, "graph"),
    ],
)
def test_engine_is_chosen_if_the_options_allow_it(
    engine_bundle: Bundle, tmp_path: Path, options: dict[str, Any], backend: str
) -> None:
    assert write(engine_bundle, tmp_path, **options).variant.split("-")[0] == backend


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "cpu"], "tensorrt-fp16@cuda cannot be deployed: it needs a GPU, and the device is cpu"),
        (["--threads", "2"], "tensorrt-fp16@cuda cannot be deployed: --threads is not supported on GPUs"),
        (["--runtime", "python"], "--runtime python does not run tensorrt"),
    ],
)
def test_engine_is_rejected_with_unsupported_options(
    engine_bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    words = [str(engine_bundle.path), "-o", str(tmp_path / "out"), "--variant", "tensorrt-fp16@cuda", *words]
    assert main([*COMMAND, *words]) == 3
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_graph_is_deployed_if_no_variant_fits(tagger_bundle: Bundle, tmp_path: Path) -> None:
    written = write(tagger_bundle, tmp_path)
    assert (written.variant, written.model) == ("graph-fp32", "transformer_onnx_model")
    graph = (tagger_bundle.path / "graph" / "model.onnx").read_bytes()
    assert (tmp_path / written.model / "1" / "model.onnx").read_bytes() == graph


def test_fill_mask_model_has_no_batch_axis(tiny_model: Any, quick_build: Any, tmp_path: Path) -> None:
    """The server cannot split a tensor with a row per masked token, so the task batches requests."""
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "the [MASK] sat"}\n', encoding="utf-8")
    bundle = quick_build(tiny_model("bert", "ForMaskedLM"), variants=["onnxruntime-fp32"], data=file)
    repository = tmp_path / "repository"
    repository.mkdir()
    written = write(bundle, repository)
    model, inference = (read_config(repository, name) for name in written.names)
    assert (model.max_batch_size, model.HasField("dynamic_batching")) == (0, False)
    assert {tuple(dims) for _, dims in tensors(model.input).values()} == {(-1, -1)}
    assert [dims[0] for _, dims in tensors(model.output).values()] == [-1]
    assert inference.max_batch_size > 1
    assert inference.HasField("dynamic_batching")


def test_flat_repository_accepts_texts_of_transformer_deploys_clients(
    classifier_bundle: Bundle, tmp_path: Path
) -> None:
    written = write(classifier_bundle, tmp_path, is_flat=True, output="output")
    model, tokenize, inference = (read_config(tmp_path, name) for name in written.names)
    assert (tokenize.max_batch_size, inference.max_batch_size) == (0, 0)
    assert model.max_batch_size == classifier_bundle.report.plan.shapes.batch.max
    assert tensors(inference.input)["TEXT"] == ("TYPE_STRING", [-1])
    assert tensors(inference.output) == {"output": ("TYPE_FP32", [-1, 3])}
    assert dict(inference.ensemble_scheduling.step[1].output_map) == {"logits": "output"}


def test_image_clients_and_readme_are_written(classifier_bundle: Bundle, tmp_path: Path) -> None:
    output = tmp_path / "triton_models"
    written = write_repository(classifier_bundle, output, Options())
    assert written.directory == output
    files = {path.name for path in output.iterdir() if path.is_file()}
    clients = {"client_http.py", "client_grpc.py", "client_requests.py"}
    assert files == {MARKER_FILE, "Dockerfile", "compose.yaml", "README.md", "query_body.bin", *clients}
    for name in clients:
        compile((output / name).read_text(encoding="utf-8"), name, "exec")
    docker = (output / "Dockerfile").read_text()
    assert "ARG BASE\nFROM ${BASE}\n" in docker
    assert set(re.findall(r"COPY (\S+) /models/\1\n", docker)) == set(written.names)
    length = int(re.search(r"Inference-Header-Content-Length: (\d+)", (output / "README.md").read_text())[1])
    head = json.loads((output / "query_body.bin").read_bytes()[:length])
    assert head["inputs"][0]["shape"] == [2, 1]
    yaml = pytest.importorskip("yaml")
    (service,) = yaml.safe_load((output / "compose.yaml").read_text())["services"].values()
    assert service["build"]["args"]["BASE"].startswith("${BASE:?")


def test_command_writes_and_replaces_a_repository(
    classifier_bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*COMMAND, str(classifier_bundle.path), "-o", str(tmp_path / "out"), "--runtime", "python"]
    assert main([*words, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["repository"]["model"] == "transformer_onnx_model"
    assert result["check"] is None
    assert main(words) == 2
    assert "already holds a deployment" in capsys.readouterr().err
    assert main([*words, "--force", "--name", "other"]) == 0
    assert (tmp_path / "out" / "other_onnx_model").is_dir()
    assert not (tmp_path / "out" / "transformer_onnx_model").exists()
    assert "other_onnx_inference" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [
        (["--name", "a/b"], 2, "is not a valid name for a model in tritonserver"),
        (["--variant", "onnxruntime-int8"], 2, "has no variant 'onnxruntime-int8'"),
        (["--instances", "0"], 2, "--instances 0 is less than 1"),
        (
            ["--runtime", "python", "--device", "cuda"],
            3,
            "--runtime python runs CPU variants on the CPU",
        ),
        (["--check", "/nowhere/tritonserver"], 2, "no tritonserver at /nowhere/tritonserver"),
        (["--check", "127.0.0.1:9"], 7, "127.0.0.1:9 does not answer"),
    ],
)
def test_invalid_option_is_rejected_and_writes_nothing(
    classifier_bundle: Bundle,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    code: int,
    message: str,
) -> None:
    assert main([*COMMAND, str(classifier_bundle.path), "-o", str(tmp_path / "new" / "out"), *words]) == code
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_variant_of_another_runtime_is_rejected(
    tagger_bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*COMMAND, str(tagger_bundle.path), "-o", str(tmp_path / "new" / "out"), "--variant", "openvino-fp32"]
    assert main(words) == 3
    assert "--runtime native does not run openvino, but --runtime python does" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_folder_with_other_files_is_not_replaced(
    classifier_bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "letter").write_text("dear")
    assert main([*COMMAND, str(classifier_bundle.path), "-o", str(tmp_path), "--force"]) == 2
    assert "is not empty and holds no deployment" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["letter"]


def test_malicious_versions_are_not_installed(classifier_bundle: Bundle, tmp_path: Path) -> None:
    """Versions become parts of shell commands in the Dockerfile and the README."""
    machine = classifier_bundle.manifest.machine
    libraries = {"tokenizers": "1; touch /tmp/mine", "onnxruntime": "1.31.1", "msgspec": "$(id)"}
    changed = replace(classifier_bundle.manifest, machine=replace(machine, libraries=libraries))
    bundle = Bundle(classifier_bundle.path, changed)
    written = write_repository(bundle, tmp_path / "out", Options(runtime=Runtime.PYTHON))
    assert written.packages == ("tokenizers", "onnxruntime==1.31.1")


def test_tensor_name_with_a_path_is_rejected(classifier_bundle: Bundle, tmp_path: Path) -> None:
    signature = classifier_bundle.manifest.signature
    first, *others = signature.inputs
    inputs = (replace(first, name=f"../../../{first.name}"), *others)
    changed = replace(classifier_bundle.manifest, signature=replace(signature, inputs=inputs))
    with pytest.raises(BundleError, match="is unsafe: it names the tensor"):
        write_repository(Bundle(classifier_bundle.path, changed), tmp_path / "out", Options())
    assert not list(tmp_path.iterdir())


def test_unlisted_link_in_a_variant_is_rejected(classifier_bundle: Bundle, tmp_path: Path) -> None:
    """A link in a variant's folder may lead out of the bundle."""
    (tmp_path / "secret").write_text("mine")
    path = tmp_path / "bundle"
    shutil.copytree(classifier_bundle.path, path)
    (path / "variants" / classifier_bundle.chosen.name / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(BundleError, match="a file that its manifest does not list"):
        write_repository(open_bundle(path), tmp_path / "out", Options())
    assert not (tmp_path / "out").exists()
