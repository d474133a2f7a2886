"""The v2 protocol over gRPC with the real tritonclient, grpc_health and grpc_reflection."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import hasten
from hasten.bundle import Bundle
from support.grpc_client import (
    SERVICE,
    TEXTS,
    assert_rejected,
    channel,
    grpc,
    infer_request,
    running_server,
    silent_calls,
    stub,
    text_inputs,
    text_request,
    triton,
    triton_client,
)
from support.server_process import Server

pytestmark = pytest.mark.usefixtures("workers")


@pytest.fixture(scope="module")
def server(classifier: Bundle, workers: int) -> Iterator[Server]:
    with running_server(str(classifier.path), "--model-control", "--workers", str(workers)) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with triton_client(server) as client:
        yield client


def token_id_inputs(classifier: Bundle, texts: list[str], kind: str = "INT64") -> list[Any]:
    """Return padded token ids and their mask."""
    batch = classifier.tokenizer().encode(texts).batch
    rows, width = len(texts), int(batch.lengths.max())
    mask = np.arange(width) < batch.lengths[:, None]
    dtype = kind.lower()
    ids = np.zeros((rows, width), dtype)
    ids[mask] = batch.values["input_ids"]
    tensors = []
    for name, values in (("input_ids", ids), ("attention_mask", mask.astype(dtype))):
        tensors.append(triton.InferInput(name, [rows, width], kind))
        tensors[-1].set_data_from_numpy(values)
    return tensors


def labels(answer: Any) -> list[str]:
    return [json.loads(entry)["label"] for entry in answer.as_numpy("answer")]


# Health and metadata


def test_health_and_metadata_are_reported(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("classifier")
    assert client.is_model_ready("classifier", "1")
    assert not client.is_model_ready("classifier", "2")
    assert not client.is_model_ready("missing")
    metadata = client.get_server_metadata(as_json=True)
    assert (metadata["name"], metadata["version"]) == ("hasten", hasten.__version__)
    model = client.get_model_metadata("classifier", as_json=True)
    assert model["inputs"][0] == {"name": "text", "datatype": "BYTES", "shape": ["-1"]}
    assert {output["name"]: output["datatype"] for output in model["outputs"]} == {"logits": "FP32", "answer": "BYTES"}
    assert model["versions"] == ["1"]


def test_model_can_be_unloaded_and_loaded(client: Any) -> None:
    def state() -> dict[str, str]:
        return {entry.name: entry.state for entry in client.get_model_repository_index().models}

    assert state() == {"classifier": "READY"}
    client.unload_model("classifier")
    assert state() == {"classifier": "UNAVAILABLE"}
    assert client.is_server_ready()
    assert not client.is_model_ready("classifier")
    assert_rejected(client.infer, "NOT_FOUND", "model 'classifier' not found", "classifier", text_inputs(TEXTS))
    client.load_model("classifier")
    assert state() == {"classifier": "READY"}
    client.infer("classifier", text_inputs(TEXTS))
    assert_rejected(
        client.load_model, "INVALID_ARGUMENT", "load parameters are not supported", "classifier", config="{}"
    )
    assert_rejected(client.load_model, "NOT_FOUND", "not one of this server's models", "missing")


def test_grpc_health_service_answers(server: Server) -> None:
    pb = pytest.importorskip("grpc_health.v1.health_pb2", reason="grpcio-health-checking is not installed")
    from grpc_health.v1.health_pb2_grpc import HealthStub

    with channel(server) as opened:
        health = HealthStub(opened)
        for name in ("", SERVICE):
            assert (
                health.Check(pb.HealthCheckRequest(service=name), timeout=20).status == pb.HealthCheckResponse.SERVING
            )
        with pytest.raises(grpc.RpcError) as error:
            health.Check(pb.HealthCheckRequest(service="missing"), timeout=20)
        assert error.value.code() is grpc.StatusCode.NOT_FOUND


def test_reflection_lists_services(server: Server) -> None:
    pb = pytest.importorskip("grpc_reflection.v1alpha.reflection_pb2", reason="grpcio-reflection is not installed")
    from google.protobuf.descriptor_pool import DescriptorPool
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

    assert pb is not None
    with channel(server) as opened:
        database = ProtoReflectionDescriptorDatabase(opened)
        assert {SERVICE, "grpc.health.v1.Health"} <= set(database.get_services())
        pool = DescriptorPool(database)
        methods = pool.FindServiceByName(SERVICE).methods_by_name
        assert methods["ModelInfer"].input_type.full_name == "inference.ModelInferRequest"
        assert pool.FindServiceByName("grpc.health.v1.Health").methods_by_name["Check"]


# Answers


@pytest.mark.parametrize("shape", [[2], [2, 1]])
def test_texts_get_same_answers_as_in_process(client: Any, classifier: Bundle, shape: list[int]) -> None:
    answer = client.infer("classifier", text_inputs(TEXTS, shape), request_id="7", model_version="1")
    expected = hasten.load(classifier.path, threads=1)
    assert labels(answer) == [entry["label"] for entry in expected(TEXTS)]
    scores = [json.loads(entry)["score"] for entry in answer.as_numpy("answer")]
    assert scores == pytest.approx([entry["score"] for entry in expected(TEXTS)], abs=1e-6)
    response = answer.get_response()
    assert (response.id, response.model_name, response.model_version) == ("7", "classifier", "1")
    assert answer.as_numpy("logits").shape == (2, 3)


@pytest.mark.parametrize("kind", ["INT32", "INT64"])
def test_token_ids_get_same_logits_as_texts(client: Any, classifier: Bundle, kind: str) -> None:
    by_text = client.infer("classifier", text_inputs(TEXTS)).as_numpy("logits")
    by_ids = client.infer("classifier", token_id_inputs(classifier, TEXTS, kind))
    np.testing.assert_allclose(by_ids.as_numpy("logits"), by_text, atol=1e-5)
    assert by_ids.as_numpy("answer") is None


def test_only_requested_outputs_are_returned(client: Any) -> None:
    outputs = [triton.InferRequestedOutput("logits")] * 2
    answer = client.infer("classifier", text_inputs(TEXTS), outputs=outputs)
    assert [output.name for output in answer.get_response().outputs] == ["logits"]


def test_typed_contents_get_same_logits(server: Server, classifier: Bundle) -> None:
    ids = classifier.tokenizer().encode(["one answer"]).batch.values["input_ids"].tolist()
    with channel(server) as opened:
        answers = [stub(opened).ModelInfer(text_request(outputs=[{"name": "logits"}]))]
        for kind, field in (("INT32", "int_contents"), ("UINT32", "uint_contents"), ("INT64", "int64_contents")):
            tensor = {"name": "input_ids", "datatype": kind, "shape": [1, len(ids)], "contents": {field: ids}}
            answers.append(stub(opened).ModelInfer(infer_request(inputs=[tensor])))
    first, *others = [np.frombuffer(answer.raw_output_contents[0], "<f4") for answer in answers]
    for other in others:
        np.testing.assert_allclose(other, first, atol=1e-5)


def test_compressed_calls_are_answered(client: Any) -> None:
    plain = client.infer("classifier", text_inputs(TEXTS)).as_numpy("logits")
    for algorithm in ("gzip", "deflate"):
        answer = client.infer("classifier", text_inputs(TEXTS), compression_algorithm=algorithm)
        np.testing.assert_array_equal(answer.as_numpy("logits"), plain)


def test_async_infer_is_answered(client: Any) -> None:
    results: queue.Queue[Any] = queue.Queue()
    for _ in range(20):
        client.async_infer("classifier", text_inputs(TEXTS), lambda result, error: results.put(error or result))
    expected = client.infer("classifier", text_inputs(TEXTS)).as_numpy("logits")
    for _ in range(20):
        np.testing.assert_allclose(results.get(timeout=30).as_numpy("logits"), expected, atol=1e-5)


# Streams


def test_stream_is_answered_in_order_and_survives_an_error(client: Any) -> None:
    results: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: results.put(error or result))
    count = 200
    for index in range(count):
        model = "missing" if index == 100 else "classifier"
        client.async_stream_infer(model, text_inputs(TEXTS[: 1 + index % 2]), request_id=str(index))
    answers = [results.get(timeout=60) for _ in range(count)]
    client.stop_stream()
    error = answers.pop(100)
    assert "model 'missing' not found" in str(error)
    request_ids = [int(answer.get_response().id) for answer in answers]
    assert request_ids == [index for index in range(count) if index != 100]
    for request_id, answer in zip(request_ids, answers, strict=True):
        assert answer.as_numpy("logits").shape == (1 + request_id % 2, 3)
        assert answer.get_response().parameters["triton_final_response"].bool_param
    assert results.empty()


def test_stream_survives_an_invalid_message(server: Server) -> None:
    with channel(server) as opened:
        ask = opened.stream_stream(
            f"/{SERVICE}/ModelStreamInfer",
            request_serializer=None,
            response_deserializer=triton.service_pb2.ModelStreamInferResponse.FromString,
        )
        first, second = ask(iter([b"\xff\xff", text_request().SerializeToString()]), timeout=30)
    assert "not a valid ModelInferRequest" in first.error_message
    assert not second.error_message
    assert second.infer_response.model_name == "classifier"


# Errors


def text_tensor(**fields: Any) -> dict[str, Any]:
    return {"name": "text", "datatype": "BYTES", "shape": [1], **fields}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "input 'text' is missing"),
        ({"inputs": [text_tensor()]}, "0 values, but its shape is [1]"),
        ({"inputs": [text_tensor(shape=[-1])], "raw_input_contents": [b""]}, "invalid shape: [-1]"),
        ({"inputs": [text_tensor(shape=[2**40])], "raw_input_contents": [b""]}, "invalid shape"),
        ({"inputs": [text_tensor()], "raw_input_contents": [b"", b""]}, "2 entries, but the request has 1"),
        ({"inputs": [text_tensor()], "raw_input_contents": [b"\x09\0\0\0ab"]}, "in the middle of a string"),
        ({"inputs": [text_tensor()], "raw_input_contents": [b"\x02\0\0\0\xff\xff"]}, "not UTF-8"),
        ({"inputs": [text_tensor(shape=[1, 2])], "raw_input_contents": [b"\1\0\0\0a\1\0\0\0b"]}, "[n] or [n, 1]"),
        ({"inputs": [text_tensor(), text_tensor()], "raw_input_contents": [b"\1\0\0\0a"] * 2}, "occurs twice"),
        ({"inputs": [text_tensor(datatype="INT32")], "raw_input_contents": [b"\1\0\0\0"]}, "must be BYTES"),
        ({"inputs": [text_tensor(datatype="STRING")], "raw_input_contents": [b"\1\0\0\0a"]}, "unknown datatype"),
        ({"inputs": [text_tensor(datatype="FP16")]}, "use raw_input_contents"),
        ({"inputs": [text_tensor(contents={"bytes_contents": [b"a"]})], "raw_input_contents": [b"\1\0\0\0a"]}, "both"),
        ({"inputs": [text_tensor(name="words")], "raw_input_contents": [b"\1\0\0\0a"]}, "no input 'words'"),
        (
            {"inputs": [text_tensor(parameters={"shared_memory_region": {"string_param": "x"}})]},
            "parameter shared_memory_region of 'text' is not supported",
        ),
        ({"inputs": [{"name": "input_ids", "datatype": "INT32", "shape": [1, 1]}],
          "raw_input_contents": [b"\xff\xff\xff\x7f"]}, "token id"),
        ({"inputs": [{"name": "input_ids", "datatype": "INT32", "shape": [1, 2]}],
          "raw_input_contents": [b"\1\0\0\0"]}, "4 bytes"),
        ({"inputs": [{"name": "input_ids", "datatype": "FP32", "shape": [1, 1]}],
          "raw_input_contents": [b"\1\0\0\0"]}, "must be integers"),
    ],
)  # fmt: skip
def test_invalid_inputs_are_rejected(server: Server, fields: dict[str, Any], message: str) -> None:
    with channel(server) as opened, pytest.raises(grpc.RpcError) as error:
        stub(opened).ModelInfer(infer_request(**fields), timeout=20)
    assert (error.value.code(), message in error.value.details()) == (grpc.StatusCode.INVALID_ARGUMENT, True), (
        error.value
    )


@pytest.mark.parametrize(
    ("fields", "code", "message"),
    [
        ({"model_name": "missing"}, "NOT_FOUND", "model 'missing' not found"),
        ({"model_version": "2"}, "NOT_FOUND", "model version 2 does not exist"),
        ({"outputs": [{"name": "scores"}]}, "INVALID_ARGUMENT", "no output 'scores'"),
        ({"parameters": {"priority": {"string_param": "high"}}}, "INVALID_ARGUMENT", "non-negative integers"),
        ({"parameters": {"timeout": {"int64_param": 1}}}, "DEADLINE_EXCEEDED", "deadline exceeded"),
    ],
)
def test_invalid_request_fields_are_rejected(server: Server, fields: dict[str, Any], code: str, message: str) -> None:
    with channel(server) as opened, pytest.raises(grpc.RpcError) as error:
        stub(opened).ModelInfer(text_request(**fields), timeout=20)
    assert (error.value.code().name, message in error.value.details()) == (code, True), error.value


def test_invalid_messages_and_unsupported_methods_are_rejected(server: Server, client: Any) -> None:
    with channel(server) as opened:
        for method, code in (("ModelInfer", "INVALID_ARGUMENT"), ("Nothing", "UNIMPLEMENTED")):
            with pytest.raises(grpc.RpcError) as error:
                opened.unary_unary(f"/{SERVICE}/{method}")(b"\xff\xff\xff", timeout=20)
            assert error.value.code().name == code
    assert_rejected(client.get_model_config, "UNIMPLEMENTED", "ModelConfig is not supported", "classifier")
    assert_rejected(client.get_inference_statistics, "UNIMPLEMENTED", "ModelStatistics is not supported", "classifier")
    assert_rejected(
        client.get_system_shared_memory_status, "UNIMPLEMENTED", "SystemSharedMemoryStatus is not supported"
    )


def test_silent_calls_end(classifier: Bundle) -> None:
    """Without a key they are rejected before their message arrives; health checks wait for it, but not for long."""
    pb = pytest.importorskip("grpc_health.v1.health_pb2", reason="grpcio-health-checking is not installed")
    from grpc_health.v1.health_pb2_grpc import HealthStub

    is_over = threading.Event()

    def silence(*first: Any) -> Iterator[Any]:
        yield from first
        is_over.wait()

    health, metadata = "grpc.health.v1.Health", [("authorization", "Bearer first")]
    words = ("--read-timeout", "0.5s", "--idle-timeout", "0.25s")
    with running_server(str(classifier.path), *words, HASTEN_API_KEYS="first") as guarded, channel(guarded) as opened:
        # With a key, requests are answered; an idle stream ends.
        stream = stub(opened).ModelStreamInfer(silence(text_request()), metadata=metadata, timeout=30)
        assert next(stream).infer_response.model_name == "classifier"
        expected = {
            f"{SERVICE}/ModelInfer": "UNAUTHENTICATED",
            f"{SERVICE}/ModelStreamInfer": "UNAUTHENTICATED",
            f"{SERVICE}/ModelConfig": "UNAUTHENTICATED",
            f"{SERVICE}/ModelReady": "UNAUTHENTICATED",
            "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": "UNAUTHENTICATED",
            f"{SERVICE}/ServerLive": "DEADLINE_EXCEEDED",
            f"{health}/Check": "DEADLINE_EXCEEDED",
            f"{health}/Watch": "DEADLINE_EXCEEDED",
        }
        calls = {method: opened.stream_unary(f"/{method}").future(silence(), timeout=30) for method in expected}
        assert {method: call.code().name for method, call in calls.items()} == expected
        assert HealthStub(opened).Check(pb.HealthCheckRequest(), timeout=30).status == pb.HealthCheckResponse.SERVING
        assert (
            opened.stream_unary(f"/{SERVICE}/ServerLive").future(iter([]), timeout=30).code().name == "INVALID_ARGUMENT"
        )
        with pytest.raises(grpc.RpcError) as error:
            next(stream)
        assert "no message was received within 1 s" in error.value.details()
        is_over.set()


def test_too_large_messages_are_rejected(classifier: Bundle) -> None:
    with (
        running_server(str(classifier.path), "--max-body", "64KB", "--max-client-batch-size", "4") as small,
        triton_client(small) as client,
    ):
        assert_rejected(client.infer, "RESOURCE_EXHAUSTED", "larger than max", "classifier", text_inputs(["a" * 2**17]))
        assert_rejected(
            client.infer,
            "RESOURCE_EXHAUSTED",
            "the request has 5 items; the limit is 4",
            "classifier",
            text_inputs(["a"] * 5),
        )
        assert client.infer("classifier", text_inputs(TEXTS)) is not None


@pytest.mark.parametrize(
    "method",
    [f"{SERVICE}/ModelInfer", f"{SERVICE}/ServerLive", f"{SERVICE}/ModelStreamInfer", "grpc.health.v1.Health/Check"],
)
def test_silent_calls_hold_up_no_other_call(server: Server, method: str) -> None:
    """No API key is set, so that nothing but their silence distinguishes these calls."""
    health_messages = pytest.importorskip("grpc_health.v1.health_pb2", reason="grpcio-health-checking is missing")

    with silent_calls(server, f"/{method}", 700), channel(server) as opened:
        request = health_messages.HealthCheckRequest().SerializeToString()
        check = opened.unary_unary("/grpc.health.v1.Health/Check")(request, timeout=20)
        assert health_messages.HealthCheckResponse.FromString(check).status == 1
        assert stub(opened).ServerLive(triton.service_pb2.ServerLiveRequest(), timeout=20).live
        assert stub(opened).ServerReady(triton.service_pb2.ServerReadyRequest(), timeout=20).ready
        assert stub(opened).ModelInfer(text_request(), timeout=20).model_name == "classifier"
        assert server.ask("GET", "/v2/health/ready")[0] == 200
