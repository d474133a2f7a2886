"""The parts of a repository for tritonserver: configurations, batching from a benchmark, vendored code."""

from __future__ import annotations

import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from hasten.core.errors import PlanError, StageError, UnavailableError, UnsupportedError
from hasten.core.plan import Plan, Range, Shapes
from hasten.core.report import Bench, Interval, Report, Timing
from hasten.core.system.hardware import this_machine
from hasten.core.tensors import Shape
from hasten.core.variant import Precision
from hasten.deploy.tritonserver import Options
from hasten.deploy.tritonserver.batching import derive_batching
from hasten.deploy.tritonserver.check import are_close
from hasten.deploy.tritonserver.client import Client
from hasten.deploy.tritonserver.pbtxt import Tensor, Word, entries, to_text
from hasten.deploy.tritonserver.server_binary import ServerBinary, TritonServer
from hasten.deploy.tritonserver.variant_choice import choose_variant
from hasten.deploy.tritonserver.vendoring import vendor

pb2: Any = pytest.importorskip("tritonclient.grpc.model_config_pb2", reason="the messages come with tritonclient")
text_format: Any = pytest.importorskip("google.protobuf.text_format")

VARIANT = "onnxruntime-fp32"


def parse(text: str) -> Any:
    return text_format.Parse(text, pb2.ModelConfig())


def test_configuration_text_is_parsed_by_protobuf() -> None:
    message = {
        "name": 'a "quoted" näme\\',
        "max_batch_size": 8,
        "input": [
            Tensor("TEXT", "BYTES", (1,)).to_message(),
            Tensor("mask", "INT64", (-1, 3), is_optional=True, is_ragged=True).to_message(),
        ],
        "output": [Tensor("logits", "FP32", (3,), labels="labels.txt").to_message()],
        "instance_group": {"count": 2, "kind": Word("KIND_CPU")},
        "dynamic_batching": {"preferred_batch_size": [], "max_queue_delay_microseconds": 0},
        "parameters": entries({"one": {"string_value": "1"}, "two": {"string_value": "2"}}),
        "response_cache": {"enable": True},
    }
    config = parse(to_text(message))
    expected = pb2.ModelConfig(name='a "quoted" näme\\', max_batch_size=8)
    expected.input.add(name="TEXT", data_type=pb2.TYPE_STRING, dims=[1])
    expected.input.add(name="mask", data_type=pb2.TYPE_INT64, dims=[-1, 3], optional=True, allow_ragged_batch=True)
    expected.output.add(name="logits", data_type=pb2.TYPE_FP32, dims=[3], label_filename="labels.txt")
    expected.instance_group.add(count=2, kind=pb2.ModelInstanceGroup.KIND_CPU)
    expected.dynamic_batching.SetInParent()
    expected.parameters["one"].string_value = "1"
    expected.parameters["two"].string_value = "2"
    expected.response_cache.enable = True
    assert config == expected


def report(times: dict[Shape, float]) -> Report:
    shapes = Shapes(Range(1, 8, 32), Range(16, 128, 256))
    timings = tuple(
        Timing(VARIANT, shape, 9, ms, ms, None, shape.batch * 1e3 / ms, Interval(1.0, 1.0, 1.0), (ms,))
        for shape, ms in times.items()
    )
    bench = Bench(VARIANT, timings, ())
    return Report(Plan("m", shapes=shapes), "", this_machine(), (), (), bench, VARIANT)


def test_preferred_batch_sizes_raise_throughput() -> None:
    """A row takes 12 ms alone, 10 ms in a batch of 8, and 20 instead of 4 ms in a batch of 32."""
    times = {Shape(1, 16): 4.0, Shape(1, 128): 12.0, Shape(8, 128): 80.0, Shape(32, 16): 640.0}
    batching = derive_batching(report(times), VARIANT)
    assert (batching.max_rows, batching.preferred) == (32, (8,))
    # A tenth of the lowest latency.
    assert batching.delay_us == 400


def test_requests_do_not_wait_if_no_batch_size_raises_throughput() -> None:
    times = {Shape(1, 128): 1.0, Shape(8, 128): 80.0, Shape(32, 128): 640.0}
    assert derive_batching(report(times), VARIANT).to_message() == {
        "preferred_batch_size": (),
        "max_queue_delay_microseconds": 0,
    }
    assert derive_batching(report(times), VARIANT, 77).delay_us == 77


def test_batching_without_timings_follows_the_plan() -> None:
    batching = derive_batching(report({}), "graph-fp32")
    assert (batching.preferred, batching.delay_us) == ((8, 32), 500)
    slow = derive_batching(report({Shape(8, 128): 1e4}), VARIANT)
    assert slow.delay_us == 5000


@pytest.mark.parametrize("name", ["", "a/b", "..", "../x", ".hidden", "two words", "ü", "-x", "x" * 101, "a\n"])
def test_invalid_model_name_is_rejected(name: str) -> None:
    with pytest.raises(PlanError, match="not a valid name for a model"):
        Options(name=name)


def test_invalid_options_are_rejected() -> None:
    with pytest.raises(PlanError, match="--instances 0 is less than 1"):
        Options(instances=0)
    with pytest.raises(PlanError, match="unknown device 'tpu'"):
        Options(device="tpu")


def test_int8_graph_is_rejected_on_a_gpu(tmp_path: Path, write_bundle: Any, make_manifest: Any) -> None:
    """The hint differs from the options that were set."""
    manifest = make_manifest("onnxruntime-int8", graph_precision=Precision.INT8)
    with pytest.raises(UnsupportedError, match=r"its int8 operators are for CPUs \(use --device cpu\)"):
        choose_variant(write_bundle(tmp_path / "bundle", manifest), Options(device="cuda"))


@pytest.mark.parametrize("location", ["/nowhere/tritonserver", "/nowhere/at/all", "localhost"])
def test_missing_server_binary_is_rejected(location: str) -> None:
    with pytest.raises(PlanError, match="no tritonserver at"):
        ServerBinary.find(location)


def test_file_that_is_not_executable_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "tritonserver").touch(mode=0o644)
    with pytest.raises(PlanError, match="is not an executable file"):
        ServerBinary.find(str(tmp_path / "tritonserver"))


def test_folder_with_other_files_is_not_cleared(tmp_path: Path) -> None:
    (tmp_path / "letter").write_text("dear")
    with pytest.raises(PlanError, match="is not empty and was not created by hasten"):
        ServerBinary.find(str(tmp_path))
    assert (tmp_path / "letter").exists()


def test_environment_not_created_by_hasten_is_not_cleared(tmp_path: Path) -> None:
    (tmp_path / "pyvenv.cfg").write_text("home = /usr/bin\n")
    with pytest.raises(PlanError, match="is not empty and was not created by hasten"):
        ServerBinary.find(str(tmp_path))
    assert (tmp_path / "pyvenv.cfg").exists()


def test_binary_of_another_platform_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "tritonserver").write_bytes(b"\x00not for this machine")
    (tmp_path / "tritonserver").chmod(0o755)
    with pytest.raises(PlanError, match="cannot be executed: Exec format error"):
        TritonServer(ServerBinary.find(str(tmp_path / "tritonserver")), tmp_path, tmp_path)


def test_exit_code_is_reported_if_the_server_prints_nothing(tmp_path: Path) -> None:
    (tmp_path / "tritonserver").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "tritonserver").chmod(0o755)
    with pytest.raises(StageError, match="does not start: no output, exit code 3"):
        TritonServer(ServerBinary.find(str(tmp_path / "tritonserver")), tmp_path, tmp_path)


@pytest.mark.parametrize("url", ["http://here:port", "here:99999", "https://here:1", "http://", "http://here:1/v2"])
def test_invalid_server_address_is_rejected(url: str) -> None:
    with pytest.raises(PlanError, match="is not an address of a tritonserver"):
        Client(url)


def test_other_http_server_is_not_a_tritonserver() -> None:
    class Page(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"<html></html>")

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Page) as server:
        threading.Thread(target=server.handle_request, daemon=True).start()
        with (
            Client(f"127.0.0.1:{server.server_port}") as client,
            pytest.raises(UnavailableError, match="not a tritonserver"),
        ):
            client.version()


def modules_loaded_by(folder: Path, module: str) -> set[str]:
    """Return the modules that a process loads which can import only the vendored modules of hasten."""
    program = f"import sys; sys.path.insert(0, {str(folder)!r}); import {module} as m; print(m.__file__, *sys.modules)"
    # Isolated: without PYTHONPATH and the working directory.
    process = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, check=True)
    file, *loaded = process.stdout.split()
    assert Path(file).is_relative_to(folder)
    return set(loaded)


def test_tokenize_model_imports_only_tokenizers_and_numpy(tmp_path: Path) -> None:
    module = "hasten.deploy.tritonserver.models.tokenize"
    vendor([module], tmp_path)
    loaded = modules_loaded_by(tmp_path, module)
    assert {"numpy", "tokenizers", "hasten.core.text.tokenizer"} <= loaded
    assert loaded.isdisjoint({"msgspec", "onnxruntime", "hasten.tasks", "hasten.bundle", "hasten.core.report"})


@pytest.mark.parametrize(
    ("module", "registered_name"),
    [("tasks.question_answering", "TASK"), ("backends.openvino", "BACKEND"), ("backends.fused", "BACKEND")],
)
def test_vendored_modules_can_be_imported(tmp_path: Path, module: str, registered_name: str) -> None:
    vendor([f"hasten.{module}"], tmp_path)
    loaded = modules_loaded_by(tmp_path, f"hasten.{module}")
    assert loaded.isdisjoint({"torch", "transformers", "onnx", "hasten.bundle", "hasten.server"})
    path = tmp_path.joinpath("hasten", *module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    assert registered_name in file.read_text(encoding="utf-8")


def test_answers_are_compared_with_a_tolerance() -> None:
    answer = [{"label": "good", "score": 0.5, "places": [1, 2]}]
    assert are_close(answer, [{"label": "good", "score": 0.5004, "places": [1, 2]}], 1e-3)
    for other in ({"label": "bad"}, {"score": 0.502}, {"places": [1]}, {"places": [1, 3]}):
        assert not are_close(answer, [{**answer[0], **other}], 1e-3)
    assert not are_close(answer, [*answer, *answer], 1e-3)
    assert not are_close({"a": 1}, {"b": 1}, 1e-3)
    assert are_close(1000.0, 1000.5, 1e-3)
