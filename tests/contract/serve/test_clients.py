"""`hasten serve` with existing clients: tritonclient, openai, curl, and requests of text-embeddings-inference."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hasten
from hasten.bundle import Bundle
from support.models import sentence_layouts
from support.server_process import Server

pytest.importorskip("uvloop", reason="serving needs hasten[serve]")

TEXTS = ["one answer", "ein Wort mit Ü"]
CLASSIFIER = "/v2/models/classifier/infer"


@pytest.fixture(scope="module")
def bundles(
    tiny_classifier: Any, tiny_embedder: Any, quick_build: Any, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Bundle]:
    folder = tmp_path_factory.mktemp("clients")
    sources = {
        "classifier": (tiny_classifier("bert"), {}),
        "ranker": (tiny_classifier("bert", labels=("relevant",)), {"task": "text-ranking", "data": None}),
        "embedder": (tiny_embedder(), {"data": None}),
        "sparse": (sentence_layouts.save_sparse(tmp_path_factory.mktemp("models"), prompts={"query": "what "}), {}),
        "multi-vector": (
            sentence_layouts.save_multi_vector(
                tmp_path_factory.mktemp("models"), expansion={"strategy": "fixed", "length": 12}
            ),
            {},
        ),
    }
    return {
        name: quick_build(model, folder / name, variants=["onnxruntime-fp32"], **options)
        for name, (model, options) in sources.items()
    }


@pytest.fixture(scope="module")
def server(bundles: dict[str, Bundle], workers: int) -> Iterator[Server]:
    words = ("--threads", "1", "--max-body", "1MB", "--model-control", "--workers", str(workers))
    server = Server(*(str(bundle.path) for bundle in bundles.values()), *words)
    yield server
    code, errors = server.stop()
    assert code == 0, errors
    assert "Traceback" not in errors, errors


def expected(bundle: Bundle, *payload: Any, **options: Any) -> Any:
    return hasten.load(bundle.path, threads=1)(*payload, **options)


# tritonclient


@pytest.fixture(scope="module")
def triton() -> Any:
    return pytest.importorskip("tritonclient.http", reason="tritonclient is not installed")


@pytest.fixture
def client(server: Server, triton: Any) -> Iterator[Any]:
    client = triton.InferenceServerClient(f"127.0.0.1:{server.port}", concurrency=4)
    yield client
    client.close()


def text_inputs(triton: Any, shape: list[int], *, binary: bool = True) -> list[Any]:
    tensor = triton.InferInput("text", shape, "BYTES")
    tensor.set_data_from_numpy(np.array([text.encode() for text in TEXTS], object).reshape(shape), binary_data=binary)
    return [tensor]


def labels(answer: Any) -> list[str]:
    return [json.loads(entry)["label"] for entry in answer.as_numpy("answer")]


@contextmanager
def rejected(status: int, message: str) -> Iterator[None]:
    """Assert that tritonclient raises with this status and message."""
    from tritonclient.utils import InferenceServerException

    with pytest.raises(InferenceServerException) as error:
        yield
    assert (error.value.status(), message in error.value.message()) == (str(status), True), error.value


def test_triton_health_and_metadata_are_reported(client: Any) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("classifier")
    assert client.is_model_ready("classifier", "1")
    assert not client.is_model_ready("missing")
    assert client.get_server_metadata()["name"] == "hasten"
    metadata = client.get_model_metadata("classifier")
    assert (metadata["name"], metadata["versions"]) == ("classifier", ["1"])
    assert metadata["inputs"][0] == {"name": "text", "datatype": "BYTES", "shape": [-1]}
    assert {"name": "logits", "datatype": "FP32", "shape": [-1, 3]} in metadata["outputs"]


@pytest.mark.parametrize("is_binary_in", [True, False])
@pytest.mark.parametrize("is_binary_out", [True, False])
@pytest.mark.parametrize("shape", [[2], [2, 1]])
def test_triton_texts_get_same_answers_as_in_process(
    client: Any, triton: Any, bundles: dict[str, Bundle], shape: list[int], is_binary_in: bool, is_binary_out: bool
) -> None:
    outputs = [triton.InferRequestedOutput(name, binary_data=is_binary_out) for name in ("answer", "logits")]
    answer = client.infer(
        "classifier", text_inputs(triton, shape, binary=is_binary_in), outputs=outputs, request_id="7"
    )
    assert answer.get_response()["id"] == "7"
    assert [output["name"] for output in answer.get_response()["outputs"]] == ["answer", "logits"]
    reference = expected(bundles["classifier"], TEXTS)
    if is_binary_out:
        assert labels(answer) == [entry["label"] for entry in reference]
    else:
        decoded = [json.loads(entry) for entry in answer.get_output("answer")["data"]]
        assert [entry["label"] for entry in decoded] == [entry["label"] for entry in reference]
    logits = answer.as_numpy("logits")
    assert (logits.shape, logits.dtype) == ((2, 3), np.float32)
    scores = np.exp(logits - logits.max(axis=1, keepdims=True))
    best = (scores / scores.sum(axis=1, keepdims=True)).max(axis=1)
    assert best == pytest.approx([entry["score"] for entry in reference], abs=1e-6)


def test_triton_token_ids_get_same_logits_as_texts(client: Any, triton: Any, bundles: dict[str, Bundle]) -> None:
    batch = bundles["classifier"].tokenizer().encode(TEXTS[:1]).batch
    ids = batch.values["input_ids"].reshape(1, -1)
    for kind in ("INT32", "INT64"):
        tensor = triton.InferInput("input_ids", list(ids.shape), kind)
        tensor.set_data_from_numpy(ids.astype(kind.lower()))
        by_ids = client.infer("classifier", [tensor], model_version="1").as_numpy("logits")
        by_text = client.infer("classifier", text_inputs(triton, [2])).as_numpy("logits")
        np.testing.assert_allclose(by_ids[0], by_text[0], atol=1e-5)


def test_triton_async_requests_are_answered(client: Any, triton: Any) -> None:
    requests = [client.async_infer("classifier", text_inputs(triton, [2])) for _ in range(20)]
    expected_logits = client.infer("classifier", text_inputs(triton, [2])).as_numpy("logits")
    for request in requests:
        np.testing.assert_allclose(request.get_result().as_numpy("logits"), expected_logits, atol=1e-5)


@pytest.mark.parametrize("algorithm", ["gzip", "deflate"])
def test_triton_compressed_request_is_answered(client: Any, triton: Any, algorithm: str) -> None:
    plain = client.infer("classifier", text_inputs(triton, [2])).as_numpy("logits")
    answer = client.infer(
        "classifier",
        text_inputs(triton, [2]),
        request_compression_algorithm=algorithm,
        response_compression_algorithm=algorithm,
    )
    np.testing.assert_array_equal(answer.as_numpy("logits"), plain)


def test_triton_model_can_be_unloaded_and_loaded(client: Any, triton: Any) -> None:
    def state() -> str:
        return {entry["name"]: entry["state"] for entry in client.get_model_repository_index()}["classifier"]

    assert state() == "READY"
    client.unload_model("classifier")
    assert state() == "UNAVAILABLE"
    with rejected(404, "model 'classifier' not found"):
        client.infer("classifier", text_inputs(triton, [2]))
    client.load_model("classifier")
    assert state() == "READY"
    assert client.infer("classifier", text_inputs(triton, [2])) is not None
    with rejected(400, "load parameters are not supported"):
        client.load_model("classifier", config="{}")
    with rejected(404, "not one of this server's models"):
        client.load_model("missing")


def test_triton_invalid_requests_are_rejected(client: Any, triton: Any) -> None:
    with rejected(404, "model 'no body' not found"):
        client.infer("no body", text_inputs(triton, [2]))
    with rejected(404, "model version 2 does not exist"):
        client.infer("classifier", text_inputs(triton, [2]), model_version="2")
    with rejected(400, "no output 'scores'"):
        client.infer("classifier", text_inputs(triton, [2]), outputs=[triton.InferRequestedOutput("scores")])
    with rejected(400, "classification"):
        output = triton.InferRequestedOutput("logits", class_count=2)
        client.infer("classifier", text_inputs(triton, [2]), outputs=[output])
    with rejected(400, "shared_memory_region"):
        shared = triton.InferInput("text", [2], "BYTES")
        shared.set_shared_memory("region", 64)
        client.infer("classifier", [shared])
    with rejected(404, "no route for GET /v2/models/classifier/config"):
        client.get_model_config("classifier")
    with rejected(404, "no route for GET /v2/models/classifier/stats"):
        client.get_inference_statistics("classifier")


# Compressed bodies, without a client


def infer_body(texts: list[str]) -> bytes:
    tensor = {"name": "text", "datatype": "BYTES", "shape": [len(texts)], "data": texts}
    return json.dumps({"inputs": [tensor]}).encode()


@pytest.mark.parametrize(
    ("body", "encoding", "status", "message"),
    [
        (gzip.compress(infer_body(TEXTS)), "GZIP", 200, "logits"),
        (infer_body(TEXTS), "identity", 200, "logits"),
        (infer_body(TEXTS), "gzip", 400, "not valid gzip"),
        (gzip.compress(infer_body(TEXTS))[:-9], "gzip", 400, "truncated gzip"),
        (gzip.compress(infer_body(TEXTS)) + b"more", "gzip", 400, "truncated gzip"),
        (b"", "deflate", 400, "truncated deflate"),
        (zlib.compress(bytes(2**24)), "deflate", 413, "larger than"),
        (infer_body(TEXTS), "br", 400, "supported: gzip, deflate"),
    ],
)
def test_compressed_body_is_decompressed_or_rejected(
    server: Server, body: bytes, encoding: str, status: int, message: str
) -> None:
    actual, _, content = server.ask("POST", CLASSIFIER, body, Content_Encoding=encoding)
    assert (actual, message in content.decode()) == (status, True), content


# Values that do not fit their datatype


@pytest.mark.parametrize(
    ("tensor", "message"),
    [
        ({"name": "text", "datatype": "BYTES", "shape": [2], "data": ["a", None]}, "not all of its values are strings"),
        ({"name": "text", "datatype": "BYTES", "shape": [1], "data": [5]}, "not all of its values are strings"),
        ({"name": "input_ids", "datatype": "INT64", "shape": [1, 1], "data": ["5"]}, "not all of its values are"),
        ({"name": "input_ids", "datatype": "INT64", "shape": [1, 1], "data": [1.5]}, "not all of its values are"),
        ({"name": "input_ids", "datatype": "INT64", "shape": [1, 1], "data": [True]}, "not all of its values are"),
        ({"name": "input_ids", "datatype": "INT8", "shape": [1, 1], "data": [300]}, "not valid INT8"),
        ({"name": "input_ids", "datatype": "INT64", "shape": [1, 1], "data": [10**30]}, "INT64"),
        ({"name": "text", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": True}}, "True bytes"),
    ],
)
def test_values_that_do_not_fit_their_datatype_are_rejected(
    server: Server, tensor: dict[str, Any], message: str
) -> None:
    actual, _, content = server.ask("POST", CLASSIFIER, {"inputs": [tensor]})
    assert (actual, message in json.loads(content)["error"]) == (400, True), content


@pytest.mark.parametrize("value", [2, -1, 2**40])
def test_unknown_token_types_are_rejected(server: Server, value: int) -> None:
    def tensor(name: str, data: list[int]) -> dict[str, Any]:
        return {"name": name, "datatype": "INT64", "shape": [1, 3], "data": data}

    ids = tensor("input_ids", [2, 5, 3])
    assert server.ask("POST", CLASSIFIER, {"inputs": [ids, tensor("token_type_ids", [0, 1, 1])]})[0] == 200
    actual, _, content = server.ask("POST", CLASSIFIER, {"inputs": [ids, tensor("token_type_ids", [0, 0, value])]})
    assert (actual, "a token type is not between 0 and 1" in json.loads(content)["error"]) == (400, True), content


@pytest.mark.parametrize("length", ["-1", "x", "9" * 5000, "1000000"])
def test_wrong_inference_header_length_is_rejected(server: Server, length: str) -> None:
    actual, _, content = server.ask("POST", CLASSIFIER, infer_body(TEXTS), Inference_Header_Content_Length=length)
    assert (actual, "inference-header-content-length" in json.loads(content)["error"]) == (400, True), content


@pytest.mark.parametrize("parameters", [{"timeout": 10**40}, {"timeout": -1}, {"priority": 0.5}, {"priority": "high"}])
def test_invalid_priority_and_timeout_are_rejected(server: Server, parameters: dict[str, Any]) -> None:
    body = {**json.loads(infer_body(TEXTS)), "parameters": parameters}
    actual, _, content = server.ask("POST", CLASSIFIER, body)
    assert (actual, "non-negative integers" in json.loads(content)["error"]) == (400, True), content


# OpenAI


@pytest.fixture(scope="module")
def openai() -> Any:
    return pytest.importorskip("openai", reason="openai is not installed")


@pytest.fixture
def openai_client(server: Server, openai: Any) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="any", max_retries=0) as client:
        yield client


def test_openai_embeddings_equal_in_process(openai_client: Any, bundles: dict[str, Bundle]) -> None:
    reference = expected(bundles["embedder"], TEXTS)
    # The client requests base64 by default.
    for form in ({}, {"encoding_format": "float"}):
        answer = openai_client.embeddings.create(input=TEXTS, model="embedder", **form)
        np.testing.assert_allclose([entry.embedding for entry in answer.data], reference, atol=1e-6)
        assert ([entry.index for entry in answer.data], answer.model) == ([0, 1], "embedder")
        assert answer.usage.prompt_tokens == answer.usage.total_tokens > 4
    short = openai_client.embeddings.create(input=TEXTS[0], model="embedder", dimensions=4).data[0].embedding
    np.testing.assert_allclose(short, reference[0][:4] / np.linalg.norm(reference[0][:4]), atol=1e-6)


def test_openai_models_are_listed(openai_client: Any) -> None:
    models = list(openai_client.models.list())
    assert {model.id for model in models} == {"classifier", "embedder", "multi-vector", "ranker", "sparse"}
    assert {model.object for model in models} == {"model"}


def test_openai_invalid_requests_are_rejected(openai_client: Any, openai: Any) -> None:
    with pytest.raises(openai.NotFoundError, match="model 'missing' not found") as missing:
        openai_client.embeddings.create(input=TEXTS, model="missing")
    assert (missing.value.code, missing.value.type) == ("model_not_found", "invalid_request_error")
    for changes, message in (
        ({"model": "classifier"}, "does not support embeddings"),
        ({"model": "embedder", "dimensions": 10**6}, "dimensions is 1000000"),
        ({"model": "embedder", "input": []}, "input is empty"),
    ):
        with pytest.raises(openai.BadRequestError, match=message) as error:
            openai_client.embeddings.create(**{"input": TEXTS, **changes})
        assert error.value.type == "invalid_request_error"


def test_openai_client_needs_a_known_api_key(bundles: dict[str, Bundle], openai: Any) -> None:
    guarded = Server(str(bundles["embedder"].path), "--threads", "1", HASTEN_API_KEYS="ours")
    options = {"base_url": f"http://127.0.0.1:{guarded.port}/v1", "max_retries": 0}
    with openai.OpenAI(api_key="theirs", **options) as stranger, pytest.raises(openai.AuthenticationError) as error:
        stranger.models.list()
    assert error.value.code == "invalid_api_key"
    with openai.OpenAI(api_key="ours", **options) as friend:
        assert [model.id for model in friend.models.list()] == ["embedder"]
    assert guarded.stop()[0] == 0


# text-embeddings-inference


def test_tei_embeddings_equal_in_process(server: Server, bundles: dict[str, Bundle]) -> None:
    reference = expected(bundles["embedder"], TEXTS)
    np.testing.assert_allclose(server.json("POST", "/embed", {"inputs": TEXTS}), reference, atol=1e-6)
    np.testing.assert_allclose(server.json("POST", "/embed", {"inputs": TEXTS[0]}), reference[:1], atol=1e-6)


def test_tei_sparse_embeddings_equal_in_process(server: Server, bundles: dict[str, Bundle]) -> None:
    body = {"inputs": TEXTS, "prompt_name": "query"}
    answers = server.json("POST", "/embed_sparse", body)
    for answer, reference in zip(answers, expected(bundles["sparse"], TEXTS, prompt_name="query"), strict=True):
        assert [set(term) for term in answer] == [{"index", "value"}] * len(answer)
        assert [term["index"] for term in answer] == reference["indices"].tolist()
        assert [term["value"] for term in answer] == pytest.approx(reference["values"].tolist(), abs=1e-5)
    assert len(server.json("POST", "/embed_sparse", {"inputs": TEXTS[0]})) == 1
    predicted = server.json("POST", "/predict", {"inputs": TEXTS[0], "model": "sparse"})
    assert predicted["indices"] == expected(bundles["sparse"], TEXTS[0])["indices"].tolist()


def test_tei_documents_are_ranked(server: Server) -> None:
    body = {"query": "one", "texts": [*TEXTS, "a third"], "return_text": True}
    ranks = server.json("POST", "/rerank", body)
    assert sorted(rank["index"] for rank in ranks) == [0, 1, 2]
    scores = [rank["score"] for rank in ranks]
    assert scores == sorted(scores, reverse=True)
    assert [body["texts"][rank["index"]] for rank in ranks] == [rank["text"] for rank in ranks]
    raw = server.json("POST", "/rerank", {**body, "raw_scores": True, "return_text": False})
    assert [rank["index"] for rank in raw] == [rank["index"] for rank in ranks]
    assert [1 / (1 + np.exp(-rank["score"])) for rank in raw] == pytest.approx(scores, abs=1e-6)
    assert set(raw[0]) == {"index", "score"}


def test_tei_documents_are_ranked_by_max_sim(server: Server, bundles: dict[str, Bundle]) -> None:
    body = {"query": "one", "texts": [*TEXTS, "a third"], "model": "multi-vector"}
    ranks = server.json("POST", "/rerank", body)
    reference = expected(bundles["multi-vector"], {"query": "one", "documents": body["texts"]})
    assert [rank["index"] for rank in ranks] == [entry["corpus_id"] for entry in reference]
    scores = [entry["score"] for entry in reference]
    assert [rank["score"] for rank in ranks] == pytest.approx(scores, rel=1e-5)
    parameters = {"input_type": "query"}
    request = {"inputs": [TEXTS[0]], "parameters": parameters, "model": "multi-vector"}
    vectors = server.json("POST", "/predict", request)
    np.testing.assert_allclose(vectors[0], expected(bundles["multi-vector"], TEXTS[0], **parameters), atol=1e-5)


@pytest.mark.parametrize("name", ["ranker", "embedder", "sparse", "multi-vector"])
def test_vllm_scores_equal_in_process(server: Server, bundles: dict[str, Bundle], name: str) -> None:
    pairs = [{"text": TEXTS[0], "text_pair": text} for text in (*TEXTS, "a third")]
    reference = pytest.approx(np.ravel(expected(bundles[name], pairs)).tolist(), abs=1e-4)
    body = {"model": name, "text_1": TEXTS[0], "text_2": [pair["text_pair"] for pair in pairs]}
    answer = server.json("POST", "/score", body)
    assert [entry["score"] for entry in answer["data"]] == reference
    assert [entry["index"] for entry in answer["data"]] == [0, 1, 2]
    answer = server.json("POST", "/v1/score", {**body, "text_1": [TEXTS[0]] * 3})
    assert [entry["score"] for entry in answer["data"]] == reference
    assert answer["usage"]["prompt_tokens"] > 0


def test_vllm_invalid_requests_are_rejected(server: Server) -> None:
    for changes, message in (
        ({"model": "classifier"}, "does not score pairs"),
        ({"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1 has 2 texts and text_2 3"),
        ({"text_2": []}, "text_2 0"),
        ({"text_2": ["a"] * 2000}, "the request has 2000 items"),
    ):
        status, _, answer = server.ask("POST", "/score", {"model": "ranker", "text_1": "a", "text_2": "b", **changes})
        assert status in (400, 413)
        assert message in json.loads(answer)["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "status", "kind", "message"),
    [
        ("/embed", {"inputs": "word " * 500}, 413, "Validation", "longer than"),
        ("/embed", {"inputs": ["a"] * 2000}, 413, "Validation", "the request has 2000 items"),
        ("/embed", {"inputs": []}, 400, "Empty", "empty"),
        ("/embed", {"inputs": ""}, 422, "Tokenizer", "empty"),
        ("/embed", {}, 422, "Tokenizer", "inputs"),
        ("/embed", b"{", 422, "Tokenizer", "not JSON"),
        ("/embed", {"inputs": "a", "model": "classifier"}, 424, "Backend", "does not support embeddings"),
        ("/embed", {"inputs": "a", "model": "missing"}, 404, "Validation", "model 'missing' not found"),
        ("/embed_sparse", {"inputs": "word " * 500}, 413, "Validation", "longer than"),
        ("/embed_sparse", {"inputs": "a", "model": "embedder"}, 424, "Backend", "does not support sparse embeddings"),
        ("/embed_sparse", {"inputs": "a", "prompt_name": "b"}, 422, "Tokenizer", "no prompt 'b'"),
        (
            "/rerank",
            {"query": "word " * 40, "texts": ["a"], "model": "multi-vector"},
            413,
            "Validation",
            "12 tokens of a",
        ),
        ("/rerank", {"query": "one", "texts": []}, 400, "Empty", "texts is empty"),
        ("/rerank", {"query": "one"}, 422, "Tokenizer", "texts"),
        ("/rerank", {"query": "one", "texts": ["a"] * 2000}, 413, "Validation", "the request has 2000 items"),
        ("/rerank", {"query": "one", "texts": ["word " * 500]}, 413, "Validation", "longer than"),
    ],
)
def test_tei_invalid_requests_are_rejected_before_compute(
    server: Server, path: str, body: Any, status: int, kind: str, message: str
) -> None:
    def computed() -> list[str]:
        lines = server.ask("GET", "/metrics")[2].decode().splitlines()
        return [line for line in lines if line.startswith("hasten_compute_seconds_count")]

    def computes_nothing() -> bool:
        before = computed()
        actual, _, content = server.ask("POST", path, body)
        error = json.loads(content)
        assert (actual, set(error), error["error_type"]) == (status, {"error", "error_type"}, kind), content
        assert message in error["error"]
        return computed() == before

    # A batch is counted when its responses are sent, which may happen once for an earlier test.
    assert any(computes_nothing() for _ in range(3))


def test_tei_errors_have_its_statuses_and_types() -> None:
    from hasten.core.errors import OverloadedError, StageError, UnavailableError
    from hasten.server.protocols.tei import tei_error_body, tei_status

    for error, status, kind in (
        (OverloadedError("too many", retry_after_s=1), 429, "Overloaded"),
        (StageError("the model failed"), 424, "Backend"),
        (UnavailableError("it stops"), 503, "Unhealthy"),
    ):
        assert (tei_status(error), tei_error_body(error)["error_type"]) == (status, kind)


# curl


def test_curl_requests_are_answered(server: Server, bundles: dict[str, Bundle], tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")

    def curl(*arguments: str) -> tuple[int, str]:
        command = ["curl", "--silent", "--show-error", "--max-time", "20", "--write-out", "%{stderr}%{http_code}"]
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=True)
        return int(done.stderr), done.stdout

    root = f"http://127.0.0.1:{server.port}"
    inputs = json.dumps({"inputs": TEXTS[0], "model": "classifier"})
    status, answer = curl(f"{root}/predict", "--json", inputs)
    reference = expected(bundles["classifier"], TEXTS[0])
    assert (status, json.loads(answer)[0]["label"]) == (
        200,
        reference["label"] if isinstance(reference, dict) else reference[0]["label"],
    )
    # As a form, in chunks, and with an expectation.
    assert curl(f"{root}/predict", "-d", inputs)[0] == 200
    assert curl(f"{root}/predict", "-d", inputs, "-H", "Transfer-Encoding: chunked")[0] == 200
    assert curl(f"{root}/predict", "-d", inputs, "-H", "Expect: 100-continue")[0] == 200
    assert curl("--head", f"{root}/v2/health/ready")[0] == 200
    (tmp_path / "body").write_bytes(gzip.compress(inputs.encode()))
    assert curl(f"{root}/predict", "--data-binary", f"@{tmp_path / 'body'}", "-H", "Content-Encoding: gzip")[0] == 200
    status, answer = curl(f"{root}/predict", "-d", "{")
    assert (status, "not JSON" in json.loads(answer)["error"]) == (400, True)
