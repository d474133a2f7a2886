"""A model repository as it is written: what its configurations say, what lies beside them, what is refused."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from engines import PLAN
from hasten.bundle import Bundle, open_bundle
from hasten.cli import main
from hasten.core.errors import BundleError
from hasten.deploy import MARK
from hasten.deploy.tritonserver import Options, Repository, Runtime, write_models, write_repository

pb2: Any = pytest.importorskip("tritonclient.grpc.model_config_pb2", reason="the messages come with tritonclient")
text_format: Any = pytest.importorskip("google.protobuf.text_format")

COMMAND = ["deploy", "tritonserver"]


@pytest.fixture(scope="module")
def tagger_bundle(tiny_tagger: Any, quick_build: Any, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    file = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    file.write_text('{"text": "the cat sat"}\n{"text": "rain"}\n', encoding="utf-8")
    return quick_build(tiny_tagger("bert"), variants=["openvino-fp32"], batch_size=(1, 4, 16), data=file)


def config(place: Path, name: str) -> Any:
    found = text_format.Parse((place / name / "config.pbtxt").read_text(encoding="utf-8"), pb2.ModelConfig())
    assert found.name == name
    assert (place / name / "1").is_dir()
    return found


def tensors(messages: Any) -> dict[str, tuple[str, list[int]]]:
    return {one.name: (pb2.DataType.Name(one.data_type), list(one.dims)) for one in messages}


def write(bundle: Bundle, place: Path, **options: Any) -> Repository:
    return write_models(bundle, place, Options(**options))


def test_a_classifier(classifier_bundle: Bundle, tmp_path: Path) -> None:
    written = write(classifier_bundle, tmp_path, name="mine", instances=2, cache=True, max_delay_us=70)
    names = ("mine_onnx_model", "mine_onnx_tokenize", "mine_onnx_inference")
    assert written.names == names
    assert {path.name for path in tmp_path.iterdir()} == set(names)
    model, tokenize, inference = (config(tmp_path, name) for name in names)

    signature, shapes = classifier_bundle.manifest.signature, classifier_bundle.report.plan.shapes
    kinds = {"int32": "TYPE_INT32", "int64": "TYPE_INT64", "float32": "TYPE_FP32"}
    inputs = {spec.name: (kinds[spec.dtype], [-1]) for spec in signature.inputs}
    outputs = {"logits": ("TYPE_FP32", [3])}
    assert (model.platform, model.default_model_filename) == ("onnxruntime_onnx", "model.onnx")
    assert tensors(model.input) == tensors(tokenize.output) == inputs
    assert tensors(model.output) == tensors(inference.output) == outputs
    assert (tmp_path / names[0] / "1" / "model.onnx").stat().st_size > 0
    for own in (model, tokenize, inference):
        assert own.max_batch_size == shapes.batch.max
        assert own.version_policy.latest.num_versions == 1
    for own in (model, tokenize):
        # Of what a request may wait in all it may wait half in each.
        assert own.dynamic_batching.max_queue_delay_microseconds == 35
        assert list(own.dynamic_batching.preferred_batch_size) == [shapes.batch.opt, shapes.batch.max]
        assert [(group.count, group.kind) for group in own.instance_group] == [(2, pb2.ModelInstanceGroup.KIND_AUTO)]
    texts = {"TEXT": ("TYPE_STRING", [1]), "TEXT_PAIR": ("TYPE_STRING", [1])}
    assert tensors(tokenize.input) == tensors(inference.input) == texts
    assert [one.optional for one in inference.input] == [False, True]
    assert inference.response_cache.enable
    first, second = inference.ensemble_scheduling.step
    assert (first.model_name, second.model_name) == (names[1], names[0])
    assert set(first.output_map.values()) == set(second.input_map.values()) == set(inputs)
    for name in (names[0], names[2]):
        assert (tmp_path / name / "labels.txt").read_text().split() == ["bad", "fair", "good"]
        assert config(tmp_path, name).output[0].label_filename == "labels.txt"


def test_warmup_samples_are_what_the_model_takes(classifier_bundle: Bundle, tmp_path: Path) -> None:
    written = write(classifier_bundle, tmp_path)
    model, shapes = config(tmp_path, written.model), classifier_bundle.report.plan.shapes
    sizes = [(sample.batch_size, list(sample.inputs["input_ids"].dims)) for sample in model.model_warmup]
    limit = classifier_bundle.manifest.signature.max_length
    assert sizes == [(1, [shapes.sequence.min]), (shapes.batch.opt, [min(limit, shapes.sequence.opt)])]
    kinds = {"TYPE_INT32": np.int32, "TYPE_INT64": np.int64}
    for sample in model.model_warmup:
        for name, given in sample.inputs.items():
            content = (tmp_path / written.model / "warmup" / given.input_data_file).read_bytes()
            values = np.frombuffer(content, kinds[pb2.DataType.Name(given.data_type)])
            assert list(values.shape) == list(given.dims)
            assert (values == (name != "token_type_ids")).all()


def test_the_graph_takes_what_its_configuration_says(classifier_bundle: Bundle, tmp_path: Path) -> None:
    import onnxruntime

    written = write(classifier_bundle, tmp_path)
    model = config(tmp_path, written.model)
    session = onnxruntime.InferenceSession(str(tmp_path / written.model / "1" / "model.onnx"))
    assert {entry.name for entry in session.get_inputs()} == set(tensors(model.input))
    kinds = {"TYPE_INT32": np.int32, "TYPE_INT64": np.int64}
    feeds = {name: np.ones((2, 5), kinds[kind]) for name, (kind, _) in tensors(model.input).items()}
    (logits,) = session.run(["logits"], feeds)
    assert logits.shape == (2, 3)


def test_a_tagger_runs_in_python(tagger_bundle: Bundle, tmp_path: Path) -> None:
    written = write(tagger_bundle, tmp_path, runtime=Runtime.PYTHON, device="cpu")
    assert written.names == ("transformer_openvino_model", "transformer_openvino_inference")
    assert [name.partition("==")[0] for name in written.packages] == ["tokenizers", "msgspec", "openvino"]
    model, inference = (config(tmp_path, name) for name in written.names)
    assert (model.backend, inference.backend) == ("python", "python")
    # Who takes requests apart by itself may be given any lengths at once.
    assert all(one.allow_ragged_batch for one in model.input)
    assert tensors(model.output) == {"logits": ("TYPE_FP32", [-1, 5])}
    assert tensors(inference.output) == {"ANSWER": ("TYPE_STRING", [1])}
    assert tensors(inference.input) == {"TEXT": ("TYPE_STRING", [1]), "OPTIONS": ("TYPE_STRING", [1])}
    assert [one.optional for one in inference.input] == [False, True]
    assert model.max_batch_size == inference.max_batch_size == 16
    assert model.dynamic_batching.max_queue_delay_microseconds == 0
    assert inference.dynamic_batching.max_queue_delay_microseconds > 0
    assert {group.kind for own in (model, inference) for group in own.instance_group} == {
        pb2.ModelInstanceGroup.KIND_CPU
    }
    assert (tmp_path / written.model / "1" / "variant" / "model.xml").exists()


def test_eight_bits_for_processors_are_not_left_to_the_server(
    tiny_classifier: Any, quick_build: Any, tmp_path: Path
) -> None:
    """One with a GPU would put them there."""
    bundle = quick_build(tiny_classifier("bert"), variants=["onnxruntime-int8"], min_agreement=0.0)
    written = write(bundle, tmp_path)
    kinds = {group.kind for name in written.names for group in config(tmp_path, name).instance_group}
    assert kinds == {pb2.ModelInstanceGroup.KIND_CPU}


def test_an_engine_of_tensorrt(engine_bundle: Bundle, tmp_path: Path) -> None:
    written = write(engine_bundle, tmp_path, name="mine", instances=2, max_rows=1000)
    names = ("mine_tensorrt_model", "mine_tensorrt_tokenize", "mine_tensorrt_inference")
    assert written.names == names
    model, tokenize, inference = (config(tmp_path, name) for name in names)
    assert (model.platform, model.default_model_filename) == ("tensorrt_plan", "model.plan")
    assert {file.name for file in (tmp_path / names[0] / "1").iterdir()} == {".keep", "model.plan"}
    assert (tmp_path / names[0] / "1" / "model.plan").read_bytes() == PLAN
    # As the engine says, not the manifest.
    inputs = {"input_ids": ("TYPE_INT64", [-1]), "attention_mask": ("TYPE_INT64", [-1])}
    assert tensors(model.input) == tensors(tokenize.output) == inputs
    assert tensors(model.output) == tensors(inference.output) == {"logits": ("TYPE_FP16", [3])}
    (group,) = model.instance_group
    assert (group.count, group.kind, list(group.profile)) == (2, pb2.ModelInstanceGroup.KIND_GPU, ["0", "1"])
    assert {group.kind for group in tokenize.instance_group} == {pb2.ModelInstanceGroup.KIND_CPU}
    # No more than its profiles take, whatever was asked for.
    assert model.max_batch_size == engine_bundle.report.plan.shapes.batch.max
    for sample in model.model_warmup:
        assert set(sample.inputs) == set(inputs)
        for name, given in sample.inputs.items():
            content = (tmp_path / names[0] / "warmup" / given.input_data_file).read_bytes()
            assert (np.frombuffer(content, np.int64) == 1).all(), name
            assert len(content) == 8 * given.dims[0]


def test_what_lies_beside_an_engine(engine_bundle: Bundle, tmp_path: Path) -> None:
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
def test_an_engine_is_chosen_where_it_runs(
    engine_bundle: Bundle, tmp_path: Path, options: dict[str, Any], backend: str
) -> None:
    assert write(engine_bundle, tmp_path, **options).variant.split("-")[0] == backend


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["--device", "cpu"], "tensorrt-fp16@cuda does not run there: it runs on GPUs"),
        (["--threads", "2"], "tensorrt-fp16@cuda does not run there: it has no threads to be given"),
        (["--runtime", "python"], "--runtime python does not run tensorrt"),
    ],
)
def test_an_engine_where_it_does_not_run(
    engine_bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], what: str
) -> None:
    words = [str(engine_bundle.path), "-o", str(tmp_path / "out"), "--variant", "tensorrt-fp16@cuda", *words]
    assert main([*COMMAND, *words]) == 3
    assert what in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_without_a_variant_that_fits_the_graph_is_taken(tagger_bundle: Bundle, tmp_path: Path) -> None:
    written = write(tagger_bundle, tmp_path)
    assert (written.variant, written.model) == ("graph-fp32", "transformer_onnx_model")
    graph = (tagger_bundle.path / "graph" / "model.onnx").read_bytes()
    assert (tmp_path / written.model / "1" / "model.onnx").read_bytes() == graph


def test_masks_have_no_batch(tiny_model: Any, quick_build: Any, tmp_path: Path) -> None:
    """A tensor with a row for each mask cannot be cut by the server, so the task puts requests together."""
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "the [MASK] sat"}\n', encoding="utf-8")
    bundle = quick_build(tiny_model("bert", "ForMaskedLM"), variants=["onnxruntime-fp32"], data=file)
    place = tmp_path / "repository"
    place.mkdir()
    written = write(bundle, place)
    model, inference = (config(place, name) for name in written.names)
    assert (model.max_batch_size, model.HasField("dynamic_batching")) == (0, False)
    assert {tuple(dims) for _, dims in tensors(model.input).values()} == {(-1, -1)}
    assert [dims[0] for _, dims in tensors(model.output).values()] == [-1]
    assert inference.max_batch_size > 1
    assert inference.HasField("dynamic_batching")


def test_texts_as_transformer_deploys_clients_send_them(classifier_bundle: Bundle, tmp_path: Path) -> None:
    written = write(classifier_bundle, tmp_path, is_flat=True, output="output")
    model, tokenize, inference = (config(tmp_path, name) for name in written.names)
    assert (tokenize.max_batch_size, inference.max_batch_size) == (0, 0)
    assert model.max_batch_size == classifier_bundle.report.plan.shapes.batch.max
    assert tensors(inference.input)["TEXT"] == ("TYPE_STRING", [-1])
    assert tensors(inference.output) == {"output": ("TYPE_FP32", [-1, 3])}
    assert dict(inference.ensemble_scheduling.step[1].output_map) == {"logits": "output"}


def test_what_lies_beside_the_models(classifier_bundle: Bundle, tmp_path: Path) -> None:
    place = tmp_path / "triton_models"
    written = write_repository(classifier_bundle, place, Options())
    assert written.directory == place
    files = {path.name for path in place.iterdir() if path.is_file()}
    clients = {"client_http.py", "client_grpc.py", "client_requests.py"}
    assert files == {MARK, "Dockerfile", "compose.yaml", "README.md", "query_body.bin", *clients}
    for name in clients:
        compile((place / name).read_text(encoding="utf-8"), name, "exec")
    docker = (place / "Dockerfile").read_text()
    assert "ARG BASE\nFROM ${BASE}\n" in docker
    assert set(re.findall(r"COPY (\S+) /models/\1\n", docker)) == set(written.names)
    length = int(re.search(r"Inference-Header-Content-Length: (\d+)", (place / "README.md").read_text())[1])
    head = json.loads((place / "query_body.bin").read_bytes()[:length])
    assert head["inputs"][0]["shape"] == [2, 1]
    yaml = pytest.importorskip("yaml")
    (service,) = yaml.safe_load((place / "compose.yaml").read_text())["services"].values()
    assert service["build"]["args"]["BASE"].startswith("${BASE:?")


def test_the_command(classifier_bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*COMMAND, str(classifier_bundle.path), "-o", str(tmp_path / "out"), "--runtime", "python"]
    assert main([*words, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["repository"]["model"] == "transformer_onnx_model"
    assert told["check"] is None
    assert main(words) == 2
    assert "already holds a deployment" in capsys.readouterr().err
    assert main([*words, "--force", "--name", "other"]) == 0
    assert (tmp_path / "out" / "other_onnx_model").is_dir()
    assert not (tmp_path / "out" / "transformer_onnx_model").exists()
    assert "other_onnx_inference" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "code", "what"),
    [
        (["--name", "a/b"], 2, "is no name for a model in tritonserver"),
        (["--variant", "onnxruntime-int8"], 2, "holds no variant 'onnxruntime-int8'"),
        (["--instances", "0"], 2, "--instances 0 is less than 1"),
        (
            ["--runtime", "python", "--device", "cuda"],
            3,
            "--runtime python runs what was built for processors on the CPU",
        ),
        (["--check", "/nowhere/tritonserver"], 2, "there is no tritonserver at /nowhere/tritonserver"),
        (["--check", "127.0.0.1:9"], 7, "127.0.0.1:9 gives no answer"),
    ],
)
def test_refusals(
    classifier_bundle: Bundle,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    code: int,
    what: str,
) -> None:
    assert main([*COMMAND, str(classifier_bundle.path), "-o", str(tmp_path / "new" / "out"), *words]) == code
    assert what in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_variant_that_the_runtime_cannot_run(
    tagger_bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*COMMAND, str(tagger_bundle.path), "-o", str(tmp_path / "new" / "out"), "--variant", "openvino-fp32"]
    assert main(words) == 3
    assert "--runtime native does not run openvino, with --runtime python it does" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_not_ours(
    classifier_bundle: Bundle, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "letter").write_text("dear")
    assert main([*COMMAND, str(classifier_bundle.path), "-o", str(tmp_path), "--force"]) == 2
    assert "is not empty and holds no deployment" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["letter"]


def test_what_a_bundle_says_does_not_become_a_command(classifier_bundle: Bundle, tmp_path: Path) -> None:
    """Versions are installed by a shell, in the Dockerfile and as README says."""
    machine = classifier_bundle.manifest.machine
    libraries = {"tokenizers": "1; touch /tmp/mine", "onnxruntime": "1.31.1", "msgspec": "$(id)"}
    changed = replace(classifier_bundle.manifest, machine=replace(machine, libraries=libraries))
    bundle = Bundle(classifier_bundle.path, changed)
    written = write_repository(bundle, tmp_path / "out", Options(runtime=Runtime.PYTHON))
    assert written.packages == ("tokenizers", "onnxruntime==1.31.1")


def test_nothing_is_written_outside_for_the_name_of_a_tensor(classifier_bundle: Bundle, tmp_path: Path) -> None:
    signature = classifier_bundle.manifest.signature
    first, *others = signature.inputs
    inputs = (replace(first, name=f"../../../{first.name}"), *others)
    changed = replace(classifier_bundle.manifest, signature=replace(signature, inputs=inputs))
    with pytest.raises(BundleError, match="is unsafe: it names the tensor"):
        write_repository(Bundle(classifier_bundle.path, changed), tmp_path / "out", Options())
    assert not list(tmp_path.iterdir())


def test_nothing_is_copied_that_the_manifest_does_not_list(classifier_bundle: Bundle, tmp_path: Path) -> None:
    """A link in a variant's folder may lead anywhere."""
    (tmp_path / "secret").write_text("mine")
    place = tmp_path / "bundle"
    shutil.copytree(classifier_bundle.path, place)
    (place / "variants" / classifier_bundle.chosen.name / "link").symlink_to(tmp_path / "secret")
    with pytest.raises(BundleError, match="a file its manifest does not list"):
        write_repository(open_bundle(place), tmp_path / "out", Options())
    assert not (tmp_path / "out").exists()
