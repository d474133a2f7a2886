"""Model repositories on NVIDIA's tritonserver: every task loads, answers like the predictor, and batches requests."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hasten
from hasten.bundle import Bundle
from hasten.cli import main
from hasten.core.errors import StageError
from hasten.core.progress import SilentProgress
from hasten.core.system.hardware import this_machine
from hasten.core.tensors import pad, unpad
from hasten.core.variant import Variant
from hasten.deploy.tritonserver import Options, Repository, Runtime, write_models, write_repository
from hasten.deploy.tritonserver.check import are_close, check
from hasten.deploy.tritonserver.client import Client
from hasten.deploy.tritonserver.server_binary import ServerBinary, TritonServer, _backends, _free_ports, _library
from support.fakes import triton_backend
from support.fakes.engine_bundle import with_engine, with_variant

pytest.importorskip("httptools", reason="--check needs hasten[serve] for its load test")

TOLERANCE = 1e-5
# Other versions of a runtime, and other runtimes, sum in another order.
ACROSS_RUNTIMES = 1e-4
CLIENTS = 32
SERVER_BINARY = "hasten.deploy.tritonserver.server_binary"
# The ONNX Runtime of NVIDIA's images with tritonserver 2.51, the release on PyPI.
SERVER_ONNXRUNTIME = "1.19.2"
# The oldest version for fused variants.
MIN_ONNXRUNTIME = "1.21.1"
LONG = "the cat sat on the mat and a dog ran across the green field " * 12


@dataclass(frozen=True)
class Case:
    """A tiny model, the options of its build, and its requests."""

    model: Callable[[Any], Path]
    items: Sequence[Any]
    # The rows to build with; empty for the texts that all tests share.
    rows: Sequence[Mapping[str, Any]] = ()
    build: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    variant: str = "onnxruntime-fp32"


TEXTS = ["the cat sat on the mat", "rain", LONG, "Ein Übergröße-Test, 42 €"]
PAIRS = [{"text": "old books", "text_pair": "the sea"}, {"text": LONG, "text_pair": "a wonderful film"}]
QUESTIONS = [
    {"question": "where is the cat?", "context": "the cat sat on the mat and looked at the rain"},
    {"question": "what ran?", "context": LONG},
    # Texts that look like JSON lists.
    {"question": "[1]", "context": "[1, 2]"},
]
CHOICES = [
    {"prompt": "the cat", "choices": ["sat on the mat", "ran across the green field", "rain"]},
    {"prompt": LONG, "choices": ["a dog", "the sea"]},
]
QUERIES = [
    {"query": "a cat", "documents": ["the cat sat on the mat", "a dog ran", "rain"]},
    {"query": "the sea", "documents": ["old books"]},
]
LABELS = [
    {"text": "the cat sat", "candidate_labels": ["rain", "a dog", "the sea"]},
    {"text": LONG, "candidate_labels": ["books", "films"]},
]
MASKED = [{"text": "the [MASK] sat"}, {"text": "a dog [MASK] after the [MASK] ball"}]
CACHED = ("sentence-similarity", "multiple-choice")
FLAT = ("text-classification", "question-answering")
ENTAILMENT = ("contradiction", "neutral", "entailment")

CASES = {
    "text-classification": Case(lambda get: get("tiny_classifier")("bert"), [*TEXTS, *PAIRS]),
    "sentence-similarity": Case(
        lambda get: get("tiny_embedder")(prompts={"query": "a query: "}, default_prompt_name="query"), TEXTS
    ),
    "feature-extraction": Case(lambda get: get("tiny_model")("roberta", "Model"), [*TEXTS, *PAIRS]),
    "token-classification": Case(
        lambda get: get("tiny_tagger")("roberta"),
        TEXTS,
        [{"text": text} for text in TEXTS],
        options={"aggregation_strategy": "simple"},
        variant="openvino-fp32",
    ),
    "question-answering": Case(
        lambda get: get("tiny_model")("bert", "ForQuestionAnswering"), QUESTIONS, QUESTIONS, options={"top_k": 3}
    ),
    "fill-mask": Case(
        lambda get: get("tiny_model")("bert", "ForMaskedLM"), [row["text"] for row in MASKED], MASKED,
        options={"top_k": 2, "targets": ["cat", "dog", "rain"]},
    ),
    "multiple-choice": Case(
        lambda get: get("tiny_model")("bert", "ForMultipleChoice"), CHOICES, CHOICES, options={"top_k": None}
    ),
    "zero-shot-classification": Case(
        lambda get: get("tiny_classifier")("bert", labels=ENTAILMENT), LABELS, LABELS,
        build={"task": "zero-shot-classification"}, options={"multi_label": True},
    ),
    "text-ranking": Case(
        lambda get: get("tiny_classifier")("bert", labels=("score",)), QUERIES, QUERIES,
        build={"task": "text-ranking"}, options={"return_documents": True},
    ),
    # Its convolutions depend on padding, so that only rows of the same length run together.
    "sees padding": Case(lambda get: get("tiny_classifier")("convbert"), [*TEXTS, *PAIRS]),
}  # fmt: skip


@dataclass(frozen=True)
class Deployed:
    bundles: Mapping[str, Bundle]
    repositories: Mapping[str, Repository]
    server: TritonServer


def model_name(case: str) -> str:
    return case.replace("-", "_").replace(" ", "_")


@pytest.fixture(scope="module")
def bundles(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bundle]:
    quick_build, folder = request.getfixturevalue("quick_build"), tmp_path_factory.mktemp("rows")
    bundles = {}
    for name, case in CASES.items():
        options = dict(case.build)
        if case.rows:
            options["data"] = folder / f"{model_name(name)}.jsonl"
            options["data"].write_text("".join(json.dumps(row) + "\n" for row in case.rows), encoding="utf-8")
        model = case.model(request.getfixturevalue)
        bundles[name] = quick_build(model, variants=[case.variant], batch_size=(1, 4, 16), **options)
    return bundles


@pytest.fixture(scope="module")
def server_binary() -> ServerBinary:
    return triton_backend.find_program(["msgspec", "openvino"])


@pytest.fixture(scope="module")
def deployed(
    bundles: dict[str, Bundle], server_binary: ServerBinary, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployed]:
    """All bundles in one server."""
    folder = tmp_path_factory.mktemp("deployed")
    (folder / "models").mkdir()
    written = {
        name: write_models(
            bundle,
            folder / "models",
            Options(
                name=model_name(name),
                runtime=Runtime.PYTHON,
                cache=name in CACHED,
                threads=1,
                instances=2 if name == "text-classification" else 1,
            ),
        )
        for name, bundle in bundles.items()
    }
    for name in FLAT:
        options = Options(
            name=f"flat_{model_name(name)}", runtime=Runtime.PYTHON, threads=1, is_flat=True, output="output"
        )
        written[f"flat {name}"] = write_models(bundles[name], folder / "models", options)
    arguments = ["--cache-config=local,size=1048576"]
    with TritonServer(server_binary, folder / "models", folder, arguments=arguments) as server:
        yield Deployed(bundles, written, server)


def fields(items: Sequence[Any]) -> dict[str, np.ndarray[Any, Any]]:
    rows = [item if isinstance(item, dict) else {"text": item} for item in items]
    return {
        name.upper(): np.array(
            [[row[name] if isinstance(row[name], str) else json.dumps(row[name])] for row in rows], object
        )
        for name in rows[0]
    }


def send(client: Client, written: Repository, items: Sequence[Any], options: Mapping[str, Any] | None = None) -> Any:
    """Send items with the same fields and return the tensors of a raw model, or the answers."""
    inputs = fields(items)
    if options:
        inputs["OPTIONS"] = np.array([[json.dumps(options)]] * len(items), object)
    outputs = client.infer(written.inference, inputs, [output.name for output in written.outputs])
    if written.is_raw:
        return outputs
    return [json.loads(answer) for answer in outputs[written.outputs[0].name].reshape(-1)]


def groups(items: Sequence[Any]) -> list[list[Any]]:
    """Group the items that fit into one request: texts with texts, pairs with pairs."""
    single = [item for item in items if not (isinstance(item, dict) and "text_pair" in item)]
    return [group for group in (single, [item for item in items if item not in single]) if group]


@pytest.mark.parametrize("name", CASES)
def test_every_task_answers_like_the_predictor(deployed: Deployed, name: str) -> None:
    case, written = CASES[name], deployed.repositories[name]
    with hasten.load(deployed.bundles[name].path, threads=1) as predictor, Client(deployed.server.url) as client:
        assert {client.index()[model][0] for model in written.names} == {"READY"}
        for items in groups(case.items):
            answer = send(client, written, items)
            if not written.is_raw:
                assert are_close(answer, to_json(predictor(items)), TOLERANCE), (answer, predictor(items))
                continue
            encoded = predictor.encode(items)
            for spec in predictor.session.spec.signature.outputs:
                expected, actual = predictor.outputs(encoded)[spec.name], answer[spec.name]
                if spec.is_per_token:
                    actual = actual[answer["attention_mask"] != 0]
                np.testing.assert_allclose(actual, expected, atol=TOLERANCE)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.options])
def test_task_options_are_applied(deployed: Deployed, name: str) -> None:
    case, written = CASES[name], deployed.repositories[name]
    with hasten.load(deployed.bundles[name].path, threads=1) as predictor, Client(deployed.server.url) as client:
        expected = to_json(predictor(list(case.items), **case.options))
        assert are_close(send(client, written, case.items, case.options), expected, TOLERANCE)
        assert expected != to_json(predictor(list(case.items)))


def to_json(answers: Any) -> Any:
    return json.loads(json.dumps(answers, default=lambda value: value.tolist()))


@pytest.mark.parametrize("name", ["text-classification", "token-classification", "fill-mask"])
def test_concurrent_requests_are_batched(deployed: Deployed, name: str) -> None:
    """An ensemble, a task whose model the server batches, and one whose model only the task can batch."""
    case, written = CASES[name], deployed.repositories[name]
    items = [item for item in case.items if isinstance(item, str)]
    rounds = 8
    with hasten.load(deployed.bundles[name].path, threads=1) as predictor, Client(deployed.server.url) as client:
        expected = [to_json(predictor(item)) for item in items]
        logits = [predictor.outputs(predictor.encode([item])) for item in items]

        def run_client(number: int) -> None:
            with Client(deployed.server.url) as client:
                for turn in range(number, number + rounds):
                    index = turn % len(items)
                    answer = send(client, written, [items[index]])
                    if written.is_raw:
                        np.testing.assert_allclose(answer["logits"], logits[index]["logits"], atol=TOLERANCE)
                    else:
                        assert are_close(answer[0], expected[index], TOLERANCE), (answer, expected[index])

        before = {model: client.statistics(model) for model in written.names}
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(run_client, range(CLIENTS)))
        after = {model: client.statistics(model) for model in written.names}
    requests = CLIENTS * rounds
    steps = [written.model, written.tokenize or written.inference]
    for model in steps:
        executions = after[model].executions - before[model].executions
        assert 0 < executions < requests, (model, executions)


@pytest.mark.parametrize("name", CASES)
def test_check_passes_for_every_task(deployed: Deployed, name: str) -> None:
    """The check compares with the reference answers of the bundle, like `--check`."""
    checked = check(
        deployed.bundles[name], deployed.repositories[name], deployed.server.url, SilentProgress(), seconds=0.5
    )
    assert checked.is_accurate, checked
    assert checked.load is not None
    assert checked.load.failed == 0
    # Cached responses are not computed again.
    min_executions = 0 if name in CACHED else 1
    assert min_executions <= checked.load.executions < checked.load.requests


@pytest.mark.parametrize("name", FLAT)
def test_flat_repository_answers_transformer_deploys_clients(deployed: Deployed, name: str) -> None:
    """Texts have the shape [n], and the only output is named "output"."""
    case, written = CASES[name], deployed.repositories[f"flat {name}"]
    items = groups(case.items)[0]
    inputs = {name: column.reshape(-1) for name, column in fields(items).items()}
    with hasten.load(deployed.bundles[name].path, threads=1) as predictor, Client(deployed.server.url) as client:
        with pytest.raises(StageError, match="the request has no items"):
            client.infer(written.inference, {name: column[:0] for name, column in inputs.items()}, ["output"])
        output = client.infer(written.inference, inputs, ["output"])["output"]
        if written.is_raw:
            np.testing.assert_allclose(output, predictor.outputs(predictor.encode(items))["logits"], atol=TOLERANCE)
        else:
            with pytest.raises(StageError, match="the inputs have different numbers of items"):
                client.infer(written.inference, {**inputs, "CONTEXT": inputs["CONTEXT"][:1]}, ["output"])
            assert output.shape == (len(items),)
            assert are_close([json.loads(text) for text in output], to_json(predictor(items)), TOLERANCE)


def test_invalid_texts_are_rejected_individually(deployed: Deployed) -> None:
    for name, message in (("text-classification", "text 1 is empty"), ("fill-mask", "text 1 has no mask")):
        written = deployed.repositories[name]
        good = next(item for item in CASES[name].items if isinstance(item, str))

        def error_of(text: str, written: Repository = written) -> str:
            with Client(deployed.server.url) as client:
                try:
                    send(client, written, [text])
                except StageError as error:
                    return str(error)
                return ""

        bad = "  " if name == "text-classification" else "no mask"
        with ThreadPoolExecutor(16) as pool:
            errors = list(pool.map(error_of, [good, bad] * 8))
        assert errors[::2] == [""] * 8
        assert all(message in text and " 400 " in text for text in errors[1::2]), errors
    tagger = deployed.repositories["token-classification"]
    with Client(deployed.server.url) as client, pytest.raises(StageError, match="unknown option 'strategy'"):
        send(client, tagger, ["a cat"], {"strategy": "simple"})


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        ([1, 10**6, 2], [1, 1, 1], "input_ids must be from 0 to"),
        ([1, -1, 2], [1, 1, 1], "input_ids must be from 0 to"),
        ([5] * 100, [1] * 100, "a row has 100 tokens, but the maximum is 64"),
        ([1, 5, 2], [1, 0, 1], "ones, then zeros"),
        ([1, 5, 2], [0, 0, 0], "at least one 1"),
        ([1, 5, 2], [1, 1], "the inputs have different shapes"),
    ],
)
def test_invalid_tokens_are_rejected(deployed: Deployed, ids: list[int], mask: list[int], message: str) -> None:
    """OpenVINO would read beyond the end of a table."""
    written = deployed.repositories["token-classification"]
    signature = deployed.bundles["token-classification"].manifest.signature
    values = {"input_ids": ids, "attention_mask": mask}
    inputs = {spec.name: np.array([values[spec.name]], spec.dtype) for spec in signature.inputs}
    with Client(deployed.server.url) as client, pytest.raises(StageError, match=message):
        client.infer(written.model, inputs, ["logits"])


@pytest.mark.parametrize("name", CACHED)
def test_repeated_request_is_answered_from_the_cache(deployed: Deployed, name: str) -> None:
    written, item = deployed.repositories[name], CASES[name].items[0]
    with Client(deployed.server.url) as client:
        first = send(client, written, [item])
        # The server caches a response after sending it, so that the next request may come too early.
        for _ in range(100):
            before = client.statistics(written.model)
            assert str(send(client, written, [item])) == str(first)
            if client.statistics(written.model) == before:
                return
    pytest.fail("the model ran for each request")


def test_classification_extension_returns_label_names(deployed: Deployed) -> None:
    """The extension is part of tritonserver; the repository supplies the labels."""
    triton = pytest.importorskip("tritonclient.http")
    written = deployed.repositories["text-classification"]
    client = triton.InferenceServerClient(deployed.server.url.removeprefix("http://"))
    text = triton.InferInput("TEXT", [1, 1], "BYTES")
    text.set_data_from_numpy(np.array([["the cat sat"]], object))
    output = triton.InferRequestedOutput("logits", class_count=1)
    best = client.infer(written.inference, [text], outputs=[output]).as_numpy("logits").reshape(-1)[0].decode()
    client.close()
    with hasten.load(deployed.bundles["text-classification"].path, threads=1) as predictor:
        assert best.split(":")[-1] == predictor("the cat sat")[0]["label"]


@pytest.mark.parametrize("name", ["text-classification", "question-answering"])
def test_example_clients_and_curl_command_run(deployed: Deployed, name: str, tmp_path: Path) -> None:
    for package in ("requests", "tritonclient.http", "tritonclient.grpc"):
        pytest.importorskip(package)
    repository, server = tmp_path / "repository", deployed.server
    options = Options(name=model_name(name), runtime=Runtime.PYTHON)
    written = write_repository(deployed.bundles[name], repository, options)
    addresses = {"http": f"127.0.0.1:{server.port}", "grpc": f"127.0.0.1:{server.grpc_port}"}
    printed = {}
    for kind in ("http", "grpc", "requests"):
        command = [sys.executable, repository / f"client_{kind}.py", addresses.get(kind, addresses["http"])]
        process = subprocess.run(command, capture_output=True, text=True, check=True)
        printed[kind] = json.loads(process.stdout)
    readme = (repository / "README.md").read_text(encoding="utf-8")
    curl = re.search(r"```\n(curl .*?)```", readme, re.DOTALL)[1].replace("localhost:8000", addresses["http"])
    process = subprocess.run(["sh", "-c", f"{curl.strip()} --silent"], cwd=repository, capture_output=True, check=True)
    (output,) = json.loads(process.stdout)["outputs"]
    (tensor,) = written.outputs
    values = output["data"]
    assert len(values) == 2 * (3 if written.is_raw else 1)
    assert printed["requests"] == {tensor.name: values}
    for kind in ("http", "grpc"):
        result = np.array(printed[kind][tensor.name]).reshape(-1).tolist()
        assert are_close(result, values, TOLERANCE)


def local_binary(server_binary: ServerBinary, folder: Path) -> Path:
    """Write a script like an installed tritonserver, which finds its backends and their packages by itself."""
    assert server_binary.environment is not None
    variables = f'PATH="{server_binary.environment}/bin:$PATH" LD_LIBRARY_PATH={_library()}'
    binary = folder / "tritonserver"
    binary.write_text(
        f"#!/bin/sh\nexport {variables}\n"
        f'exec {server_binary.binary} --backend-directory={_backends(server_binary, folder)} "$@"\n'
    )
    binary.chmod(0o755)
    return binary


@pytest.mark.parametrize("is_local", [False, True], ids=["PyPI", "local"])
def test_check_passes_with_a_server_binary(
    bundles: dict[str, Bundle],
    server_binary: ServerBinary,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    is_local: bool,
) -> None:
    location = local_binary(server_binary, tmp_path) if is_local else server_binary.environment
    words = ["deploy", "tritonserver", str(bundles["text-classification"].path), "-o", str(tmp_path / "models")]
    code = main([*words, "--runtime", "python", "--threads", "1", "--check", str(location), "--json", "-q"])
    result = json.loads(capsys.readouterr().out)
    assert code == 0, result
    result = result["check"]
    assert result["not_ready"] == {}
    assert result["verdict"]["passed"]
    assert result["same_answers"] == 1.0
    load = result["load"]
    assert (load["clients"], load["failed"]) == (CLIENTS, 0)
    assert 0 < load["executions"] < load["requests"] == load["rows"]


def test_server_is_restarted_if_a_port_is_taken_meanwhile(
    server_binary: ServerBinary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "models").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken, free = other.getsockname()[1], _free_ports()[0]
        ports = [(taken, free), (free, taken)]
        monkeypatch.setattr(f"{SERVER_BINARY}._free_ports", lambda: ports.pop() if ports else _free_ports())
        with TritonServer(server_binary, tmp_path / "models", tmp_path) as server, Client(server.url) as client:
            assert client.version().startswith("triton ")
        monkeypatch.setattr(f"{SERVER_BINARY}._free_ports", lambda: (taken, free))
        with pytest.raises(StageError, match=r"(?s)does not start: .*already in use"):
            TritonServer(server_binary, tmp_path / "models", tmp_path)


def test_check_passes_at_an_address(deployed: Deployed, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The running server has loaded these models."""
    name, server = "text-classification", deployed.server
    words = ["deploy", "tritonserver", str(deployed.bundles[name].path), "-o", str(tmp_path / "models")]
    words += ["--runtime", "python", "--name", model_name(name), "--check", f"127.0.0.1:{server.port}", "--json", "-q"]
    assert main(words) == 0
    result = json.loads(capsys.readouterr().out)["check"]
    assert result["verdict"]["passed"]
    assert result["load"]["failed"] == 0


@pytest.fixture(scope="module")
def native(bundles: dict[str, Bundle], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Repository]]:
    folder = tmp_path_factory.mktemp("native")
    written = {
        name: write_models(bundle, folder, Options(name=model_name(name), threads=1))
        for name, bundle in bundles.items()
    }
    return folder, written


def test_native_repository_lacks_only_the_onnxruntime_backend(
    native: tuple[Path, dict[str, Repository]], server_binary: ServerBinary, tmp_path: Path
) -> None:
    folder, written = native
    with (
        TritonServer(server_binary, folder, tmp_path, is_lenient=True) as server,
        Client(server.url) as client,
    ):
        index = client.index()
    for repository in written.values():
        state, reason = index[repository.model]
        assert state == "UNAVAILABLE"
        assert "unable to find backend library for backend 'onnxruntime'" in reason, reason
        others = [name for name in repository.names if name != repository.model]
        for name in others:
            state, reason = index[name]
            # An ensemble waits for its models; a Python model that calls the model per request does not.
            is_waiting = name == repository.inference and repository.tokenize is not None
            assert state == ("" if is_waiting else "READY"), (name, reason)


RUN = """
import json, sys
import numpy, onnxruntime
for folder, target, inputs, outputs in json.load(sys.stdin):
    feeds = {name: numpy.load(f"{target}/{name}.npy") for name in inputs}
    session = onnxruntime.InferenceSession(f"{folder}/model.onnx", providers=["CPUExecutionProvider"])
    for name, value in zip(outputs, session.run(outputs, feeds)):
        numpy.save(f"{target}/{name}.npy", value)
print(onnxruntime.__version__)
"""


def install_runtime(server_binary: ServerBinary, version: str) -> Path:
    """Install a version of ONNX Runtime into a separate folder of the server's environment."""
    assert server_binary.environment is not None
    folder, package = server_binary.environment / f"onnxruntime-{version}", f"onnxruntime=={version}"
    if not folder.exists():
        python = server_binary.environment / "bin" / "python"
        install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, package]
        process = subprocess.run(install, capture_output=True, text=True, check=False)
        if process.returncode:
            pytest.skip(f"{package} cannot be installed: {process.stderr.strip().splitlines()[-1]}")
    return folder


@pytest.mark.parametrize(("version", "variant"), [(SERVER_ONNXRUNTIME, "graph"), (MIN_ONNXRUNTIME, None)])
def test_graphs_run_in_the_onnxruntime_of_the_server(
    bundles: dict[str, Bundle], server_binary: ServerBinary, tmp_path: Path, version: str, variant: str | None
) -> None:
    """The unfused graph runs in this server's version, fused variants in the oldest supported version."""
    folder, work, expected = install_runtime(server_binary, version), [], {}
    (tmp_path / "models").mkdir()
    for name, bundle in bundles.items():
        written = write_models(bundle, tmp_path / "models", Options(name=model_name(name), variant=variant))
        with hasten.load(bundle.path, threads=1) as predictor:
            encoded, signature = predictor.encode(groups(CASES[name].items)[0]), predictor.session.spec.signature
            expected[name] = predictor.outputs(encoded)
        if not signature.ignores_padding:
            continue
        (tmp_path / name).mkdir()
        for tensor, feed in pad(encoded.batch, signature).items():
            np.save(tmp_path / name / f"{tensor}.npy", feed)
        model = tmp_path / "models" / written.model / "1"
        work.append((str(model), str(tmp_path / name), written.tokens, [*expected[name]]))
        expected[name] = (expected[name], encoded.batch, signature)
    process = subprocess.run(
        [server_binary.environment / "bin" / "python", "-c", RUN],
        input=json.dumps(work),
        env={"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    assert process.stdout.strip() == version
    for _, target, _, names in work:
        reference, batch, signature = expected[Path(target).name]
        outputs = unpad({name: np.load(f"{target}/{name}.npy") for name in names}, batch, signature)
        for name, value in reference.items():
            np.testing.assert_allclose(outputs[name], value, atol=ACROSS_RUNTIMES, err_msg=target)


@pytest.mark.parametrize("version", [SERVER_ONNXRUNTIME, MIN_ONNXRUNTIME])
def test_fused_model_does_not_load_with_an_old_onnxruntime(
    bundles: dict[str, Bundle], server_binary: ServerBinary, tmp_path: Path, version: str
) -> None:
    """The server's backends are those of NVIDIA's images, except the one that would load the library."""
    folder = tmp_path / "backends" / "onnxruntime"
    folder.mkdir(parents=True)
    (library,) = install_runtime(server_binary, version).glob("onnxruntime/capi/libonnxruntime.so.*")
    (folder / "libonnxruntime.so").symlink_to(library)
    models = tmp_path / "models"
    models.mkdir()
    fused, plain = (
        write_models(bundles["text-classification"], models, Options(name=name, variant=variant))
        for name, variant in (("fused", None), ("plain", "graph"))
    )
    with TritonServer(server_binary, models, tmp_path, is_lenient=True) as server, Client(server.url) as client:
        index = client.index()
    assert index[plain.tokenize or ""][0] == "READY"
    state, reason = index[fused.tokenize or ""]
    if version == MIN_ONNXRUNTIME:
        assert state == "READY", reason
    else:
        assert state == "UNAVAILABLE"
        assert f"ONNX Runtime {version} of this server computes the model incorrectly" in reason


def test_engine_repository_lacks_only_the_tensorrt_backend(
    bundles: dict[str, Bundle], server_binary: ServerBinary, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The configuration requires a GPU, which this machine does not have."""
    bundle = with_engine(bundles["text-classification"], tmp_path)
    words = ["deploy", "tritonserver", str(bundle.path), "-o", str(tmp_path / "models")]
    assert main([*words, "--check", str(server_binary.environment), "-q"]) == 3
    captured = capsys.readouterr()
    assert (
        "transformer_tensorrt_model: Invalid argument: unable to find backend library for backend 'tensorrt'"
        in captured.out
    )
    assert "transformer_tensorrt_tokenize: ready" in captured.out
    assert "this server has no TensorRT backend" in captured.err
    assert "--runtime python" not in captured.err  # it does not run engines


@pytest.mark.parametrize(
    ("words", "reason", "error"),
    [
        ([], "unable to find backend library for backend 'onnxruntime'", "this server has no ONNX Runtime backend"),
        (["--runtime", "python"], "invalid or unsupported gpu id 0", "this server has no GPU"),
    ],
)
@pytest.mark.skipif(bool(this_machine().gpus), reason="this machine has a GPU")
def test_gpu_repository_lacks_only_the_backend_or_the_gpu(
    bundles: dict[str, Bundle],
    server_binary: ServerBinary,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    reason: str,
    error: str,
) -> None:
    plain = bundles["text-classification"]
    variant, graph = Variant.parse("onnxruntime-fp32@cuda"), plain.graph().path()
    bundle = with_variant(plain, tmp_path, variant, {graph.name: graph.read_bytes()})
    command = ["deploy", "tritonserver", str(bundle.path), "-o", str(tmp_path / "models")]
    assert main([*command, "--check", str(server_binary.environment), "-q", *words]) == 3
    captured = capsys.readouterr()
    assert f"models: {variant}" in captured.out
    assert re.search(f"transformer_onnx_model: .*{reason}", captured.out)
    assert "transformer_onnx_tokenize: ready" in captured.out
    assert f"only partly verified: {error}" in captured.err


@pytest.mark.skipif(bool(this_machine().gpus), reason="this machine has a GPU")
def test_missing_gpu_is_detected_for_a_group_of_all_gpus(
    bundles: dict[str, Bundle], server_binary: ServerBinary, tmp_path: Path
) -> None:
    """The server's own backends are configured like this; here it is the Python backend."""
    plain = bundles["text-classification"]
    variant, graph = Variant.parse("onnxruntime-fp32@cuda"), plain.graph().path()
    bundle = with_variant(plain, tmp_path, variant, {graph.name: graph.read_bytes()})
    written = write_repository(bundle, tmp_path / "models", Options(runtime=Runtime.PYTHON))
    config = written.directory / written.model / "config.pbtxt"
    text = config.read_text()
    assert "  gpus: [0]\n" in text
    config.write_text(text.replace("  gpus: [0]\n", ""))
    (tmp_path / "work").mkdir()
    with TritonServer(server_binary, written.directory, tmp_path / "work", is_lenient=True) as server:
        checked = check(bundle, written, server.url, SilentProgress())
    assert "has kind KIND_GPU" in checked.not_ready[written.model]
    assert (checked.is_missing_gpu, checked.is_missing_backend) == (True, False)


def test_check_reports_a_missing_backend(
    bundles: dict[str, Bundle], server_binary: ServerBinary, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["deploy", "tritonserver", str(bundles["text-classification"].path), "-o", str(tmp_path / "models")]
    assert main([*words, "--check", str(server_binary.environment), "-q"]) == 3
    captured = capsys.readouterr()
    assert "transformer_onnx_tokenize: ready" in captured.out
    assert "this server has no ONNX Runtime backend" in captured.err
    assert (tmp_path / "models" / "README.md").exists()
