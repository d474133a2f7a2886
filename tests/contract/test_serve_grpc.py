"""The v2 protocol by gRPC, asked by the real tritonclient, grpc_health and grpc_reflection."""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import hasten
from calling import (
    SERVICE,
    TEXTS,
    channel,
    connected,
    grpc,
    one_text,
    refused,
    request_of,
    served,
    stub,
    texts_in,
    triton,
)
from hasten.bundle import Bundle
from serving import Server


@pytest.fixture(scope="module")
def classifier(tiny_classifier: Any, quick_build: Any, tmp_path_factory: Any) -> Bundle:
    target = tmp_path_factory.mktemp("grpc") / "classifier"
    return quick_build(tiny_classifier("bert"), target, variants=["onnxruntime-fp32"])


@pytest.fixture(scope="module")
def server(classifier: Bundle) -> Iterator[Server]:
    with served(str(classifier.path)) as started:
        yield started


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with connected(server) as made:
        yield made


def ids_in(classifier: Bundle, texts: list[str], kind: str = "INT64") -> list[Any]:
    """As tokenizers pad them: ids, and a mask."""
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


# What it says about itself


def test_health_and_metadata(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("classifier")
    assert client.is_model_ready("classifier", "1")
    assert not client.is_model_ready("classifier", "2")
    assert not client.is_model_ready("nobody")
    about = client.get_server_metadata(as_json=True)
    assert (about["name"], about["version"]) == ("hasten", hasten.__version__)
    model = client.get_model_metadata("classifier", as_json=True)
    assert model["inputs"][0] == {"name": "text", "datatype": "BYTES", "shape": ["-1"]}
    assert {output["name"]: output["datatype"] for output in model["outputs"]} == {"logits": "FP32", "answer": "BYTES"}
    assert model["versions"] == ["1"]


def test_repository(client: Any) -> None:
    def state() -> dict[str, str]:
        return {entry.name: entry.state for entry in client.get_model_repository_index().models}

    assert state() == {"classifier": "READY"}
    client.unload_model("classifier")
    assert state() == {"classifier": "UNAVAILABLE"}
    assert client.is_server_ready()
    assert not client.is_model_ready("classifier")
    refused(client.infer, "NOT_FOUND", "there is no model 'classifier'", "classifier", texts_in(TEXTS))
    client.load_model("classifier")
    assert state() == {"classifier": "READY"}
    client.infer("classifier", texts_in(TEXTS))
    refused(client.load_model, "INVALID_ARGUMENT", "loaded as it is", "classifier", config="{}")
    refused(client.load_model, "NOT_FOUND", "none of this server's models", "nobody")


def test_standard_health(server: Server) -> None:
    pb = pytest.importorskip("grpc_health.v1.health_pb2", reason="grpcio-health-checking is not installed")
    from grpc_health.v1.health_pb2_grpc import HealthStub

    with channel(server) as opened:
        health = HealthStub(opened)
        for name in ("", SERVICE):
            assert (
                health.Check(pb.HealthCheckRequest(service=name), timeout=20).status == pb.HealthCheckResponse.SERVING
            )
        with pytest.raises(grpc.RpcError) as error:
            health.Check(pb.HealthCheckRequest(service="nobody"), timeout=20)
        assert error.value.code() is grpc.StatusCode.NOT_FOUND


def test_reflection(server: Server) -> None:
    pb = pytest.importorskip("grpc_reflection.v1alpha.reflection_pb2", reason="grpcio-reflection is not installed")
    from google.protobuf.descriptor_pool import DescriptorPool
    from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

    assert pb is not None
    with channel(server) as opened:
        database = ProtoReflectionDescriptorDatabase(opened)
        assert {SERVICE, "grpc.health.v1.Health"} <= set(database.get_services())
        found = DescriptorPool(database)
        methods = found.FindServiceByName(SERVICE).methods_by_name
        assert methods["ModelInfer"].input_type.full_name == "inference.ModelInferRequest"
        assert found.FindServiceByName("grpc.health.v1.Health").methods_by_name["Check"]


# Answers


@pytest.mark.parametrize("shape", [[2], [2, 1]])
def test_texts_are_answered_as_in_process(client: Any, classifier: Bundle, shape: list[int]) -> None:
    answer = client.infer("classifier", texts_in(TEXTS, shape), request_id="7", model_version="1")
    expected = hasten.load(classifier.path, threads=1)
    assert labels(answer) == [entry["label"] for entry in expected(TEXTS)]
    scores = [json.loads(entry)["score"] for entry in answer.as_numpy("answer")]
    assert scores == pytest.approx([entry["score"] for entry in expected(TEXTS)], abs=1e-6)
    about = answer.get_response()
    assert (about.id, about.model_name, about.model_version) == ("7", "classifier", "1")
    assert answer.as_numpy("logits").shape == (2, 3)


@pytest.mark.parametrize("kind", ["INT32", "INT64"])
def test_token_ids(client: Any, classifier: Bundle, kind: str) -> None:
    by_text = client.infer("classifier", texts_in(TEXTS)).as_numpy("logits")
    by_ids = client.infer("classifier", ids_in(classifier, TEXTS, kind))
    np.testing.assert_allclose(by_ids.as_numpy("logits"), by_text, atol=1e-5)
    assert by_ids.as_numpy("answer") is None


def test_only_the_outputs_that_are_asked_for(client: Any) -> None:
    wanted = [triton.InferRequestedOutput("logits")] * 2
    answer = client.infer("classifier", texts_in(TEXTS), outputs=wanted)
    assert [output.name for output in answer.get_response().outputs] == ["logits"]


def test_contents_that_are_typed(server: Server, classifier: Bundle) -> None:
    ids = classifier.tokenizer().encode(["one answer"]).batch.values["input_ids"].tolist()
    with channel(server) as opened:
        answers = [stub(opened).ModelInfer(one_text(outputs=[{"name": "logits"}]))]
        for kind, field in (("INT32", "int_contents"), ("UINT32", "uint_contents"), ("INT64", "int64_contents")):
            tensor = {"name": "input_ids", "datatype": kind, "shape": [1, len(ids)], "contents": {field: ids}}
            answers.append(stub(opened).ModelInfer(request_of(inputs=[tensor])))
    first, *others = [np.frombuffer(answer.raw_output_contents[0], "<f4") for answer in answers]
    for other in others:
        np.testing.assert_allclose(other, first, atol=1e-5)


def test_compressed_calls(client: Any) -> None:
    plain = client.infer("classifier", texts_in(TEXTS)).as_numpy("logits")
    for algorithm in ("gzip", "deflate"):
        answer = client.infer("classifier", texts_in(TEXTS), compression_algorithm=algorithm)
        np.testing.assert_array_equal(answer.as_numpy("logits"), plain)


def test_async_infer(client: Any) -> None:
    found: queue.Queue[Any] = queue.Queue()
    for _ in range(20):
        client.async_infer("classifier", texts_in(TEXTS), lambda result, error: found.put(error or result))
    expected = client.infer("classifier", texts_in(TEXTS)).as_numpy("logits")
    for _ in range(20):
        np.testing.assert_allclose(found.get(timeout=30).as_numpy("logits"), expected, atol=1e-5)


# Streams


def test_a_stream_is_answered_in_order_and_outlives_an_error(client: Any) -> None:
    found: queue.Queue[Any] = queue.Queue()
    client.start_stream(lambda result, error: found.put(error or result))
    count = 200
    for place in range(count):
        model = "nobody" if place == 100 else "classifier"
        client.async_stream_infer(model, texts_in(TEXTS[: 1 + place % 2]), request_id=str(place))
    answers = [found.get(timeout=60) for _ in range(count)]
    client.stop_stream()
    wrong = answers.pop(100)
    assert "there is no model 'nobody'" in str(wrong)
    names = [int(answer.get_response().id) for answer in answers]
    assert names == [place for place in range(count) if place != 100]
    for name, answer in zip(names, answers, strict=True):
        assert answer.as_numpy("logits").shape == (1 + name % 2, 3)
        assert answer.get_response().parameters["triton_final_response"].bool_param
    assert found.empty()


def test_a_message_of_a_stream_that_cannot_be_read(server: Server) -> None:
    with channel(server) as opened:
        ask = opened.stream_stream(
            f"/{SERVICE}/ModelStreamInfer",
            request_serializer=None,
            response_deserializer=triton.service_pb2.ModelStreamInferResponse.FromString,
        )
        first, second = ask(iter([b"\xff\xff", one_text().SerializeToString()]), timeout=30)
    assert "no ModelInferRequest" in first.error_message
    assert not second.error_message
    assert second.infer_response.model_name == "classifier"


# What goes wrong


def tensor_of(**about: Any) -> dict[str, Any]:
    return {"name": "text", "datatype": "BYTES", "shape": [1], **about}


@pytest.mark.parametrize(
    ("about", "what"),
    [
        ({}, "input 'text' is missing"),
        ({"inputs": [tensor_of()]}, "0 values, and its shape is [1]"),
        ({"inputs": [tensor_of(shape=[-1])], "raw_input_contents": [b""]}, "the shape [-1]"),
        ({"inputs": [tensor_of(shape=[2**40])], "raw_input_contents": [b""]}, "the shape"),
        ({"inputs": [tensor_of()], "raw_input_contents": [b"", b""]}, "1 inputs, and the contents of 2"),
        ({"inputs": [tensor_of()], "raw_input_contents": [b"\x09\0\0\0ab"]}, "in the middle of a string"),
        ({"inputs": [tensor_of()], "raw_input_contents": [b"\x02\0\0\0\xff\xff"]}, "not UTF-8"),
        ({"inputs": [tensor_of(shape=[1, 2])], "raw_input_contents": [b"\1\0\0\0a\1\0\0\0b"]}, "[n] or [n, 1]"),
        ({"inputs": [tensor_of(), tensor_of()], "raw_input_contents": [b"\1\0\0\0a"] * 2}, "there twice"),
        ({"inputs": [tensor_of(datatype="INT32")], "raw_input_contents": [b"\1\0\0\0"]}, "must be BYTES"),
        ({"inputs": [tensor_of(datatype="STRING")], "raw_input_contents": [b"\1\0\0\0a"]}, "'text' is STRING"),
        ({"inputs": [tensor_of(datatype="FP16")]}, "raw_input_contents, if at all"),
        ({"inputs": [tensor_of(contents={"bytes_contents": [b"a"]})], "raw_input_contents": [b"\1\0\0\0a"]}, "too"),
        ({"inputs": [tensor_of(name="words")], "raw_input_contents": [b"\1\0\0\0a"]}, "no input 'words'"),
        (
            {"inputs": [tensor_of(parameters={"shared_memory_region": {"string_param": "x"}})]},
            "shared_memory_region, which this server does not know",
        ),
        ({"inputs": [{"name": "input_ids", "datatype": "INT32", "shape": [1, 1]}],
          "raw_input_contents": [b"\xff\xff\xff\x7f"]}, "token id"),
        ({"inputs": [{"name": "input_ids", "datatype": "INT32", "shape": [1, 2]}],
          "raw_input_contents": [b"\1\0\0\0"]}, "4 bytes"),
        ({"inputs": [{"name": "input_ids", "datatype": "FP32", "shape": [1, 1]}],
          "raw_input_contents": [b"\1\0\0\0"]}, "must be integers"),
    ],
)  # fmt: skip
def test_bad_inputs(server: Server, about: dict[str, Any], what: str) -> None:
    with channel(server) as opened, pytest.raises(grpc.RpcError) as error:
        stub(opened).ModelInfer(request_of(**about), timeout=20)
    assert (error.value.code(), what in error.value.details()) == (grpc.StatusCode.INVALID_ARGUMENT, True), error.value


@pytest.mark.parametrize(
    ("about", "code", "what"),
    [
        ({"model_name": "nobody"}, "NOT_FOUND", "there is no model 'nobody'"),
        ({"model_version": "2"}, "NOT_FOUND", "no version 2"),
        ({"outputs": [{"name": "scores"}]}, "INVALID_ARGUMENT", "no output 'scores'"),
        ({"parameters": {"priority": {"string_param": "high"}}}, "INVALID_ARGUMENT", "whole numbers"),
        ({"parameters": {"timeout": {"int64_param": 1}}}, "DEADLINE_EXCEEDED", "time"),
    ],
)
def test_good_inputs_badly_asked(server: Server, about: dict[str, Any], code: str, what: str) -> None:
    with channel(server) as opened, pytest.raises(grpc.RpcError) as error:
        stub(opened).ModelInfer(one_text(**about), timeout=20)
    assert (error.value.code().name, what in error.value.details()) == (code, True), error.value


def test_what_is_no_message_and_methods_that_are_not_there(server: Server, client: Any) -> None:
    with channel(server) as opened:
        for method, code in (("ModelInfer", "INVALID_ARGUMENT"), ("Nothing", "UNIMPLEMENTED")):
            with pytest.raises(grpc.RpcError) as error:
                opened.unary_unary(f"/{SERVICE}/{method}")(b"\xff\xff\xff", timeout=20)
            assert error.value.code().name == code
    refused(client.get_model_config, "UNIMPLEMENTED", "this server has no ModelConfig", "classifier")
    refused(client.get_inference_statistics, "UNIMPLEMENTED", "this server has no ModelStatistics", "classifier")
    refused(client.get_system_shared_memory_status, "UNIMPLEMENTED", "this server has no SystemSharedMemoryStatus")


def test_whoever_has_no_key_holds_no_thread(classifier: Bundle) -> None:
    """Whatever is asked, it is refused before anything of it has come; health is waited for, but not for long."""
    pb = pytest.importorskip("grpc_health.v1.health_pb2", reason="grpcio-health-checking is not installed")
    from grpc_health.v1.health_pb2_grpc import HealthStub

    is_over = threading.Event()

    def silence(*first: Any) -> Iterator[Any]:
        yield from first
        is_over.wait()

    health, metadata = "grpc.health.v1.Health", [("authorization", "Bearer first")]
    words = ("--read-timeout", "0.5s", "--idle-timeout", "0.25s")
    with served(str(classifier.path), *words, HASTEN_API_KEYS="first") as guarded, channel(guarded) as opened:
        # With a key, what is asked is answered; a stream on which nothing is asked any more ends.
        stream = stub(opened).ModelStreamInfer(silence(one_text()), metadata=metadata, timeout=30)
        assert next(stream).infer_response.model_name == "classifier"
        expected = {
            f"{SERVICE}/ModelInfer": "UNAUTHENTICATED",
            f"{SERVICE}/ModelStreamInfer": "UNAUTHENTICATED",
            f"{SERVICE}/ModelConfig": "UNAUTHENTICATED",
            "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": "UNAUTHENTICATED",
            f"{SERVICE}/ServerLive": "CANCELLED",
            f"{health}/Check": "CANCELLED",
            f"{health}/Watch": "CANCELLED",
        }
        calls = {method: opened.stream_unary(f"/{method}").future(silence(), timeout=30) for method in expected}
        assert {method: call.code().name for method, call in calls.items()} == expected
        assert HealthStub(opened).Check(pb.HealthCheckRequest(), timeout=30).status == pb.HealthCheckResponse.SERVING
        assert (
            opened.stream_unary(f"/{SERVICE}/ServerLive").future(iter([]), timeout=30).code().name == "INVALID_ARGUMENT"
        )
        with pytest.raises(grpc.RpcError) as error:
            next(stream)
        assert "nothing was asked for 1 s" in error.value.details()
        is_over.set()


def test_messages_that_are_too_large(classifier: Bundle) -> None:
    with served(str(classifier.path), "--max-body", "64KB", "--max-items", "4") as small, connected(small) as client:
        refused(client.infer, "RESOURCE_EXHAUSTED", "larger than max", "classifier", texts_in(["a" * 2**17]))
        refused(client.infer, "RESOURCE_EXHAUSTED", "5 items are more than 4", "classifier", texts_in(["a"] * 5))
        assert client.infer("classifier", texts_in(TEXTS)) is not None
