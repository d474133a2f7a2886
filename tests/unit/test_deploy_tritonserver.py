"""What a repository for tritonserver is made of: configurations, batching from a benchmark, code that is shipped."""

from __future__ import annotations

import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from hasten.core.errors import PlanError, StageError, UnavailableError, UnsupportedError
from hasten.core.hardware import this_machine
from hasten.core.plan import Plan, Range, Shapes
from hasten.core.report import Bench, Report, Timing
from hasten.core.statistics import Interval
from hasten.core.tensors import Shape
from hasten.core.variant import Precision
from hasten.deploy.tritonserver import Options
from hasten.deploy.tritonserver.batching import batching
from hasten.deploy.tritonserver.check import are_alike
from hasten.deploy.tritonserver.client import Client
from hasten.deploy.tritonserver.options import choose
from hasten.deploy.tritonserver.pbtxt import Tensor, Word, entries, to_text
from hasten.deploy.tritonserver.program import Program, TritonServer
from hasten.deploy.tritonserver.shipping import ship

pb2: Any = pytest.importorskip("tritonclient.grpc.model_config_pb2", reason="the messages come with tritonclient")
text_format: Any = pytest.importorskip("google.protobuf.text_format")

VARIANT = "onnxruntime-fp32"


def parsed(text: str) -> Any:
    return text_format.Parse(text, pb2.ModelConfig())


def test_text_is_read_as_it_was_meant() -> None:
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
    config = parsed(to_text(message))
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


def test_sizes_that_pay_are_preferred() -> None:
    """Of 8 a sentence takes 10 ms, alone 12; of 32 it takes 20 where it was measured both ways."""
    times = {Shape(1, 16): 4.0, Shape(1, 128): 12.0, Shape(8, 128): 80.0, Shape(32, 16): 640.0}
    found = batching(report(times), VARIANT)
    assert (found.max_rows, found.preferred) == (32, (8,))
    # A tenth of what the quickest took.
    assert found.delay_us == 400


def test_where_no_size_pays_nobody_waits() -> None:
    times = {Shape(1, 128): 1.0, Shape(8, 128): 80.0, Shape(32, 128): 640.0}
    assert batching(report(times), VARIANT).to_message() == {
        "preferred_batch_size": (),
        "max_queue_delay_microseconds": 0,
    }
    assert batching(report(times), VARIANT, 77).delay_us == 77


def test_what_was_not_measured_is_taken_from_the_plan() -> None:
    found = batching(report({}), "graph-fp32")
    assert (found.preferred, found.delay_us) == ((8, 32), 500)
    slow = batching(report({Shape(8, 128): 1e4}), VARIANT)
    assert slow.delay_us == 5000


@pytest.mark.parametrize("name", ["", "a/b", "..", "../x", ".hidden", "two words", "ü", "-x", "x" * 101, "a\n"])
def test_a_name_that_is_none(name: str) -> None:
    with pytest.raises(PlanError, match="no name for a model"):
        Options(name=name)


def test_options_that_contradict() -> None:
    with pytest.raises(PlanError, match="--instances 0 is less than 1"):
        Options(instances=0)
    with pytest.raises(PlanError, match="unknown device 'tpu'"):
        Options(device="tpu")


def test_a_quantized_graph_is_not_for_a_gpu(tmp_path: Path, write_bundle: Any, make_manifest: Any) -> None:
    """And the next step is not what was asked for already."""
    manifest = make_manifest("onnxruntime-int8", graph_precision=Precision.INT8)
    with pytest.raises(UnsupportedError, match=r"its int8 operators are for processors \(--device cpu\)"):
        choose(write_bundle(tmp_path / "given", manifest), Options(device="cuda"))


@pytest.mark.parametrize("where", ["/nowhere/tritonserver", "/nowhere/at/all", "localhost"])
def test_a_binary_that_is_not_there(where: str) -> None:
    with pytest.raises(PlanError, match="there is no tritonserver at"):
        Program.find(where)


def test_a_file_that_is_no_program(tmp_path: Path) -> None:
    (tmp_path / "tritonserver").touch(mode=0o644)
    with pytest.raises(PlanError, match="is no program"):
        Program.find(str(tmp_path / "tritonserver"))


def test_a_folder_that_is_somebody_elses(tmp_path: Path) -> None:
    (tmp_path / "letter").write_text("dear")
    with pytest.raises(PlanError, match="is not empty, and holds no tritonserver of ours"):
        Program.find(str(tmp_path))
    assert (tmp_path / "letter").exists()


def test_an_environment_that_is_somebody_elses(tmp_path: Path) -> None:
    """It is not cleared to make room for ours."""
    (tmp_path / "pyvenv.cfg").write_text("home = /usr/bin\n")
    with pytest.raises(PlanError, match="is not empty, and holds no tritonserver of ours"):
        Program.find(str(tmp_path))
    assert (tmp_path / "pyvenv.cfg").exists()


def test_a_program_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "tritonserver").write_bytes(b"\x00not for this machine")
    (tmp_path / "tritonserver").chmod(0o755)
    with pytest.raises(PlanError, match="is no program: Exec format error"):
        TritonServer(Program.find(str(tmp_path / "tritonserver")), tmp_path, tmp_path)


def test_a_program_that_ends_without_a_word(tmp_path: Path) -> None:
    (tmp_path / "tritonserver").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "tritonserver").chmod(0o755)
    with pytest.raises(StageError, match="does not start: it wrote nothing, and ended with exit code 3"):
        TritonServer(Program.find(str(tmp_path / "tritonserver")), tmp_path, tmp_path)


@pytest.mark.parametrize("url", ["http://here:port", "here:99999", "https://here:1", "http://", "http://here:1/v2"])
def test_an_address_that_is_none(url: str) -> None:
    with pytest.raises(PlanError, match="is no address of a tritonserver"):
        Client(url)


def test_a_server_of_another_kind() -> None:
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
            pytest.raises(UnavailableError, match="no tritonserver"),
        ):
            client.version()


def modules_after(folder: Path, module: str) -> set[str]:
    """All that a process has loaded that finds nothing of ours but what was shipped."""
    program = f"import sys; sys.path.insert(0, {str(folder)!r}); import {module} as m; print(m.__file__, *sys.modules)"
    # Isolated: no PYTHONPATH, and not the folder it is started in.
    done = subprocess.run([sys.executable, "-I", "-c", program], capture_output=True, text=True, check=True)
    file, *loaded = done.stdout.split()
    assert Path(file).is_relative_to(folder)
    return set(loaded)


def test_the_tokenizer_needs_tokenizers_and_numpy_alone(tmp_path: Path) -> None:
    module = "hasten.deploy.tritonserver.models.tokenize"
    ship([module], tmp_path)
    loaded = modules_after(tmp_path, module)
    assert {"numpy", "tokenizers", "hasten.core.tokenizer"} <= loaded
    assert loaded.isdisjoint({"msgspec", "onnxruntime", "hasten.tasks", "hasten.bundle", "hasten.core.report"})


@pytest.mark.parametrize(
    ("module", "brings"),
    [("tasks.question_answering", "TASK"), ("backends.openvino", "BACKEND"), ("backends.fused", "BACKEND")],
)
def test_what_is_shipped_is_whole(tmp_path: Path, module: str, brings: str) -> None:
    ship([f"hasten.{module}"], tmp_path)
    loaded = modules_after(tmp_path, f"hasten.{module}")
    assert loaded.isdisjoint({"torch", "transformers", "onnx", "hasten.bundle", "hasten.server"})
    path = tmp_path.joinpath("hasten", *module.split("."))
    file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    assert brings in file.read_text(encoding="utf-8")


def test_answers_are_compared() -> None:
    answer = [{"label": "good", "score": 0.5, "places": [1, 2]}]
    assert are_alike(answer, [{"label": "good", "score": 0.5004, "places": [1, 2]}], 1e-3)
    for other in ({"label": "bad"}, {"score": 0.502}, {"places": [1]}, {"places": [1, 3]}):
        assert not are_alike(answer, [{**answer[0], **other}], 1e-3)
    assert not are_alike(answer, [*answer, *answer], 1e-3)
    assert not are_alike({"a": 1}, {"b": 1}, 1e-3)
    assert are_alike(1000.0, 1000.5, 1e-3)
