"""Model repositories on NVIDIA's own tritonserver: every task loads, answers as in process, and shares executions."""

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
import tritonserver
from engines import with_engine, with_variant
from hasten.bundle import Bundle
from hasten.cli import main
from hasten.core.errors import StageError
from hasten.core.hardware import this_machine
from hasten.core.progress import Silent
from hasten.core.tensors import pad, unpad
from hasten.core.variant import Variant
from hasten.deploy.tritonserver import Options, Repository, Runtime, write_models, write_repository
from hasten.deploy.tritonserver.check import are_alike, check
from hasten.deploy.tritonserver.client import Client
from hasten.deploy.tritonserver.program import Program, TritonServer, _backends, _free_ports, _library

pytest.importorskip("httptools", reason="--check puts load with hasten[serve]")

TOLERANCE = 1e-5
# Another version of a runtime, or another runtime, adds in another order.
ACROSS_RUNTIMES = 1e-4
CLIENTS = 32
PROGRAM = "hasten.deploy.tritonserver.program"
# The release of PyPI's tritonserver, 2.51, comes in NVIDIA's images with this ONNX Runtime.
THEIR_ONNXRUNTIME = "1.19.2"
# What fused variants ask for.
LEAST_ONNXRUNTIME = "1.21.1"
LONG = "the cat sat on the mat and a dog ran across the green field " * 12


@dataclass(frozen=True)
class Case:
    """A tiny model, how it is built, and what it is asked."""

    model: Callable[[Any], Path]
    items: Sequence[Any]
    # Rows to build with; without them the texts that all tests share.
    rows: Sequence[Mapping[str, Any]] = ()
    build: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    variant: str = "onnxruntime-fp32"


TEXTS = ["the cat sat on the mat", "rain", LONG, "Ein Übergröße-Test, 42 €"]
PAIRS = [{"text": "old books", "text_pair": "the sea"}, {"text": LONG, "text_pair": "a wonderful film"}]
QUESTIONS = [
    {"question": "where is the cat?", "context": "the cat sat on the mat and looked at the rain"},
    {"question": "what ran?", "context": LONG},
    # JSON for a list, were it not a text.
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
        lambda get: get("tiny_model")("bert", "ForMaskedLM"), [one["text"] for one in MASKED], MASKED,
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
    # Its convolutions see padding: rows of one length run together, and no other.
    "sees padding": Case(lambda get: get("tiny_classifier")("convbert"), [*TEXTS, *PAIRS]),
}  # fmt: skip


@dataclass(frozen=True)
class Deployed:
    bundles: Mapping[str, Bundle]
    repositories: Mapping[str, Repository]
    server: TritonServer


def named(case: str) -> str:
    return case.replace("-", "_").replace(" ", "_")


@pytest.fixture(scope="module")
def bundles(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bundle]:
    quick_build, folder = request.getfixturevalue("quick_build"), tmp_path_factory.mktemp("rows")
    found = {}
    for name, case in CASES.items():
        about = dict(case.build)
        if case.rows:
            about["data"] = folder / f"{named(name)}.jsonl"
            about["data"].write_text("".join(json.dumps(row) + "\n" for row in case.rows), encoding="utf-8")
        model = case.model(request.getfixturevalue)
        found[name] = quick_build(model, variants=[case.variant], batch_size=(1, 4, 16), **about)
    return found


@pytest.fixture(scope="module")
def program(pytestconfig: pytest.Config) -> Program:
    return tritonserver.find_program(pytestconfig, ["msgspec", "openvino"])


@pytest.fixture(scope="module")
def deployed(
    bundles: dict[str, Bundle], program: Program, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployed]:
    """All of them in one server."""
    place = tmp_path_factory.mktemp("deployed")
    (place / "models").mkdir()
    written = {
        name: write_models(
            bundle,
            place / "models",
            Options(
                name=named(name),
                runtime=Runtime.PYTHON,
                cache=name in CACHED,
                threads=1,
                instances=2 if name == "text-classification" else 1,
            ),
        )
        for name, bundle in bundles.items()
    }
    for name in FLAT:
        options = Options(name=f"flat_{named(name)}", runtime=Runtime.PYTHON, threads=1, is_flat=True, output="output")
        written[f"flat {name}"] = write_models(bundles[name], place / "models", options)
    words = ["--cache-config=local,size=1048576"]
    with TritonServer(program, place / "models", place, words=words, timeout_s=300) as server:
        yield Deployed(bundles, written, server)


def fields(items: Sequence[Any]) -> dict[str, np.ndarray[Any, Any]]:
    rows = [item if isinstance(item, dict) else {"text": item} for item in items]
    return {
        name.upper(): np.array(
            [[row[name] if isinstance(row[name], str) else json.dumps(row[name])] for row in rows], object
        )
        for name in rows[0]
    }


def ask(client: Client, written: Repository, items: Sequence[Any], options: Mapping[str, Any] | None = None) -> Any:
    """Of items with the same fields: the tensors of a raw model, or answers."""
    inputs = fields(items)
    if options:
        inputs["OPTIONS"] = np.array([[json.dumps(options)]] * len(items), object)
    found = client.infer(written.inference, inputs, [output.name for output in written.outputs])
    if written.is_raw:
        return found
    return [json.loads(answer) for answer in found[written.outputs[0].name].reshape(-1)]


def groups(items: Sequence[Any]) -> list[list[Any]]:
    """Items that can be asked in one request: texts with texts, pairs with pairs."""
    single = [item for item in items if not (isinstance(item, dict) and "text_pair" in item)]
    return [group for group in (single, [item for item in items if item not in single]) if group]


@pytest.mark.parametrize("name", CASES)
def test_every_task_answers_as_in_process(deployed: Deployed, name: str) -> None:
    case, written = CASES[name], deployed.repositories[name]
    with hasten.load(deployed.bundles[name].path, threads=1) as here, Client(deployed.server.url) as client:
        assert {client.index()[model][0] for model in written.names} == {"READY"}
        for items in groups(case.items):
            answer = ask(client, written, items)
            if not written.is_raw:
                assert are_alike(answer, plain(here(items)), TOLERANCE), (answer, here(items))
                continue
            encoded = here.encode(items)
            for spec in here.session.spec.signature.outputs:
                expected, found = here.outputs(encoded)[spec.name], answer[spec.name]
                if spec.is_per_token:
                    found = found[answer["attention_mask"] != 0]
                np.testing.assert_allclose(found, expected, atol=TOLERANCE)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.options])
def test_options(deployed: Deployed, name: str) -> None:
    case, written = CASES[name], deployed.repositories[name]
    with hasten.load(deployed.bundles[name].path, threads=1) as here, Client(deployed.server.url) as client:
        expected = plain(here(list(case.items), **case.options))
        assert are_alike(ask(client, written, case.items, case.options), expected, TOLERANCE)
        assert expected != plain(here(list(case.items)))


def plain(answers: Any) -> Any:
    return json.loads(json.dumps(answers, default=lambda value: value.tolist()))


@pytest.mark.parametrize("name", ["text-classification", "token-classification", "fill-mask"])
def test_clients_share_executions(deployed: Deployed, name: str) -> None:
    """An ensemble, a task on a model that is batched, and one on a model that only the task can batch."""
    case, written = CASES[name], deployed.repositories[name]
    items = [item for item in case.items if isinstance(item, str)]
    rounds = 8
    with hasten.load(deployed.bundles[name].path, threads=1) as here, Client(deployed.server.url) as client:
        expected = [plain(here(item)) for item in items]
        logits = [here.outputs(here.encode([item])) for item in items]

        def asking(number: int) -> None:
            with Client(deployed.server.url) as own:
                for turn in range(number, number + rounds):
                    place = turn % len(items)
                    answer = ask(own, written, [items[place]])
                    if written.is_raw:
                        np.testing.assert_allclose(answer["logits"], logits[place]["logits"], atol=TOLERANCE)
                    else:
                        assert are_alike(answer[0], expected[place], TOLERANCE), (answer, expected[place])

        before = {model: client.statistics(model) for model in written.names}
        with ThreadPoolExecutor(CLIENTS) as pool:
            list(pool.map(asking, range(CLIENTS)))
        after = {model: client.statistics(model) for model in written.names}
    requests = CLIENTS * rounds
    steps = [written.model, written.tokenize or written.inference]
    for model in steps:
        executions = after[model].executions - before[model].executions
        assert 0 < executions < requests, (model, executions)


@pytest.mark.parametrize("name", CASES)
def test_every_task_is_checked(deployed: Deployed, name: str) -> None:
    """As `--check` does, against the reference answers of the bundle."""
    checked = check(deployed.bundles[name], deployed.repositories[name], deployed.server.url, Silent(), seconds=0.5)
    assert checked.is_right, checked
    assert checked.load is not None
    assert checked.load.failed == 0
    # What is cached is not executed again.
    least = 0 if name in CACHED else 1
    assert least <= checked.load.executions < checked.load.requests


@pytest.mark.parametrize("name", FLAT)
def test_transformer_deploys_clients(deployed: Deployed, name: str) -> None:
    """Texts of shape [n], and one output of that name."""
    case, written = CASES[name], deployed.repositories[f"flat {name}"]
    items = groups(case.items)[0]
    inputs = {name: column.reshape(-1) for name, column in fields(items).items()}
    with hasten.load(deployed.bundles[name].path, threads=1) as here, Client(deployed.server.url) as client:
        with pytest.raises(StageError, match="no item given"):
            client.infer(written.inference, {name: column[:0] for name, column in inputs.items()}, ["output"])
        found = client.infer(written.inference, inputs, ["output"])["output"]
        if written.is_raw:
            np.testing.assert_allclose(found, here.outputs(here.encode(items))["logits"], atol=TOLERANCE)
        else:
            with pytest.raises(StageError, match="the inputs have different numbers of items"):
                client.infer(written.inference, {**inputs, "CONTEXT": inputs["CONTEXT"][:1]}, ["output"])
            assert found.shape == (len(items),)
            assert are_alike([json.loads(text) for text in found], plain(here(items)), TOLERANCE)


def test_bad_texts_are_refused_alone(deployed: Deployed) -> None:
    for name, message in (("text-classification", "text 1 is empty"), ("fill-mask", "text 1 has no mask")):
        written = deployed.repositories[name]
        good = next(item for item in CASES[name].items if isinstance(item, str))

        def asking(text: str, written: Repository = written) -> str:
            with Client(deployed.server.url) as client:
                try:
                    ask(client, written, [text])
                except StageError as error:
                    return str(error)
                return ""

        bad = "  " if name == "text-classification" else "no mask"
        with ThreadPoolExecutor(16) as pool:
            said = list(pool.map(asking, [good, bad] * 8))
        assert said[::2] == [""] * 8
        assert all(message in one and " 400 " in one for one in said[1::2]), said
    tagger = deployed.repositories["token-classification"]
    with Client(deployed.server.url) as client, pytest.raises(StageError, match="unknown option 'strategy'"):
        ask(client, tagger, ["a cat"], {"strategy": "simple"})


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        ([1, 10**6, 2], [1, 1, 1], "input_ids are from 0 to"),
        ([1, -1, 2], [1, 1, 1], "input_ids are from 0 to"),
        ([5] * 100, [1] * 100, "a row has 100 tokens, and the model takes 64"),
        ([1, 5, 2], [1, 0, 1], "ones, then zeros"),
        ([1, 5, 2], [0, 0, 0], "at least one 1"),
        ([1, 5, 2], [1, 1], "the inputs have different shapes"),
    ],
)
def test_bad_tokens_are_refused(deployed: Deployed, ids: list[int], mask: list[int], message: str) -> None:
    """OpenVINO reads whatever lies beyond the end of a table."""
    written = deployed.repositories["token-classification"]
    signature = deployed.bundles["token-classification"].manifest.signature
    given = {"input_ids": ids, "attention_mask": mask}
    inputs = {spec.name: np.array([given[spec.name]], spec.dtype) for spec in signature.inputs}
    with Client(deployed.server.url) as client, pytest.raises(StageError, match=message):
        client.infer(written.model, inputs, ["logits"])


@pytest.mark.parametrize("name", CACHED)
def test_the_cache_answers_again(deployed: Deployed, name: str) -> None:
    written, item = deployed.repositories[name], CASES[name].items[0]
    with Client(deployed.server.url) as client:
        first = ask(client, written, [item])
        # An answer is sent before it is kept, so the next may come too early.
        for _ in range(100):
            before = client.statistics(written.model)
            assert str(ask(client, written, [item])) == str(first)
            if client.statistics(written.model) == before:
                return
    pytest.fail("the model was asked each time")


def test_the_best_labels_are_told(deployed: Deployed) -> None:
    """tritonserver's classification extension, with the names of the labels."""
    triton = pytest.importorskip("tritonclient.http")
    written = deployed.repositories["text-classification"]
    client = triton.InferenceServerClient(deployed.server.url.removeprefix("http://"))
    text = triton.InferInput("TEXT", [1, 1], "BYTES")
    text.set_data_from_numpy(np.array([["the cat sat"]], object))
    wanted = triton.InferRequestedOutput("logits", class_count=1)
    best = client.infer(written.inference, [text], outputs=[wanted]).as_numpy("logits").reshape(-1)[0].decode()
    client.close()
    with hasten.load(deployed.bundles["text-classification"].path, threads=1) as here:
        assert best.split(":")[-1] == here("the cat sat")[0]["label"]


@pytest.mark.parametrize("name", ["text-classification", "question-answering"])
def test_the_examples_run(deployed: Deployed, name: str, tmp_path: Path) -> None:
    for package in ("requests", "tritonclient.http", "tritonclient.grpc"):
        pytest.importorskip(package)
    place, server = tmp_path / "repository", deployed.server
    options = Options(name=named(name), runtime=Runtime.PYTHON)
    written = write_repository(deployed.bundles[name], place, options)
    addresses = {"http": f"127.0.0.1:{server.port}", "grpc": f"127.0.0.1:{server.grpc_port}"}
    printed = {}
    for kind in ("http", "grpc", "requests"):
        command = [sys.executable, place / f"client_{kind}.py", addresses.get(kind, addresses["http"])]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        printed[kind] = json.loads(done.stdout)
    readme = (place / "README.md").read_text(encoding="utf-8")
    curl = re.search(r"```\n(curl .*?)```", readme, re.DOTALL)[1].replace("localhost:8000", addresses["http"])
    done = subprocess.run(["sh", "-c", f"{curl.strip()} --silent"], cwd=place, capture_output=True, check=True)
    (output,) = json.loads(done.stdout)["outputs"]
    (tensor,) = written.outputs
    values = output["data"]
    assert len(values) == 2 * (3 if written.is_raw else 1)
    assert printed["requests"] == {tensor.name: values}
    for kind in ("http", "grpc"):
        found = np.array(printed[kind][tensor.name]).reshape(-1).tolist()
        assert are_alike(found, values, TOLERANCE)


def own_binary(program: Program, place: Path) -> Path:
    """As somebody has one who installed it: it finds its backends and their packages by itself."""
    assert program.environment is not None
    variables = f'PATH="{program.environment}/bin:$PATH" LD_LIBRARY_PATH={_library()}'
    binary = place / "tritonserver"
    binary.write_text(
        f'#!/bin/sh\nexport {variables}\nexec {program.binary} --backend-directory={_backends(program, place)} "$@"\n'
    )
    binary.chmod(0o755)
    return binary


@pytest.mark.parametrize("is_own", [False, True], ids=["PyPI's", "one's own"])
def test_check(
    bundles: dict[str, Bundle], program: Program, tmp_path: Path, capsys: pytest.CaptureFixture[str], is_own: bool
) -> None:
    given = own_binary(program, tmp_path) if is_own else program.environment
    words = ["deploy", "tritonserver", str(bundles["text-classification"].path), "-o", str(tmp_path / "models")]
    code = main([*words, "--runtime", "python", "--threads", "1", "--check", str(given), "--json", "-q"])
    told = json.loads(capsys.readouterr().out)
    assert code == 0, told
    told = told["check"]
    assert told["not_ready"] == {}
    assert told["verdict"]["passed"]
    assert told["same_answers"] == 1.0
    load = told["load"]
    assert (load["clients"], load["failed"]) == (CLIENTS, 0)
    assert 0 < load["executions"] < load["requests"] == load["rows"]


def test_ports_that_somebody_takes_meanwhile(program: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "models").mkdir()
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken, free = other.getsockname()[1], _free_ports()[0]
        given = [(taken, free), (free, taken)]
        monkeypatch.setattr(f"{PROGRAM}._free_ports", lambda: given.pop() if given else _free_ports())
        with TritonServer(program, tmp_path / "models", tmp_path) as server, Client(server.url) as client:
            assert client.version().startswith("triton ")
        monkeypatch.setattr(f"{PROGRAM}._free_ports", lambda: (taken, free))
        with pytest.raises(StageError, match=r"(?s)does not start: .*already in use"):
            TritonServer(program, tmp_path / "models", tmp_path)


def test_check_at_an_address(deployed: Deployed, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a server that runs, and has these models."""
    name, server = "text-classification", deployed.server
    words = ["deploy", "tritonserver", str(deployed.bundles[name].path), "-o", str(tmp_path / "models")]
    words += ["--runtime", "python", "--name", named(name), "--check", f"127.0.0.1:{server.port}", "--json", "-q"]
    assert main(words) == 0
    told = json.loads(capsys.readouterr().out)["check"]
    assert told["verdict"]["passed"]
    assert told["load"]["failed"] == 0


@pytest.fixture(scope="module")
def native(bundles: dict[str, Bundle], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Repository]]:
    place = tmp_path_factory.mktemp("native")
    written = {
        name: write_models(bundle, place, Options(name=named(name), threads=1)) for name, bundle in bundles.items()
    }
    return place, written


def test_the_server_accepts_the_default_flavour_up_to_the_missing_library(
    native: tuple[Path, dict[str, Repository]], program: Program, tmp_path: Path
) -> None:
    place, written = native
    with TritonServer(program, place, tmp_path, is_lenient=True, timeout_s=300) as server, Client(server.url) as client:
        index = client.index()
    for repository in written.values():
        state, reason = index[repository.model]
        assert state == "UNAVAILABLE"
        assert "unable to find backend library for backend 'onnxruntime'" in reason, reason
        others = [name for name in repository.names if name != repository.model]
        for name in others:
            state, reason = index[name]
            # An ensemble waits for its steps; what asks the model only when it is asked does not.
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


def runtime(program: Program, version: str) -> Path:
    """An ONNX Runtime of that version, kept in a folder of its own beside the server's packages."""
    assert program.environment is not None
    folder, package = program.environment / f"onnxruntime-{version}", f"onnxruntime=={version}"
    if not folder.exists():
        python = program.environment / "bin" / "python"
        install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "--target", folder, package]
        done = subprocess.run(install, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"{package} cannot be installed: {done.stderr.strip().splitlines()[-1]}")
    return folder


@pytest.mark.parametrize(("version", "variant"), [(THEIR_ONNXRUNTIME, "graph"), (LEAST_ONNXRUNTIME, None)])
def test_graphs_run_in_the_onnxruntime_that_servers_have(
    bundles: dict[str, Bundle], program: Program, tmp_path: Path, version: str, variant: str | None
) -> None:
    """The plain graph in the one of this server's release, and fused ones from the version that we ask for."""
    folder, work, expected = runtime(program, version), [], {}
    (tmp_path / "models").mkdir()
    for name, bundle in bundles.items():
        written = write_models(bundle, tmp_path / "models", Options(name=named(name), variant=variant))
        with hasten.load(bundle.path, threads=1) as here:
            encoded, signature = here.encode(groups(CASES[name].items)[0]), here.session.spec.signature
            expected[name] = here.outputs(encoded)
        if not signature.ignores_padding:
            continue
        (tmp_path / name).mkdir()
        for one, feed in pad(encoded.batch, signature).items():
            np.save(tmp_path / name / f"{one}.npy", feed)
        place = tmp_path / "models" / written.model / "1"
        work.append((str(place), str(tmp_path / name), written.tokens, [*expected[name]]))
        expected[name] = (expected[name], encoded.batch, signature)
    done = subprocess.run(
        [program.environment / "bin" / "python", "-c", RUN],
        input=json.dumps(work),
        env={"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == version
    for _, place, _, outputs in work:
        wanted, batch, signature = expected[Path(place).name]
        found = unpad({one: np.load(f"{place}/{one}.npy") for one in outputs}, batch, signature)
        for one, value in wanted.items():
            np.testing.assert_allclose(found[one], value, atol=ACROSS_RUNTIMES, err_msg=place)


@pytest.mark.parametrize("version", [THEIR_ONNXRUNTIME, LEAST_ONNXRUNTIME])
def test_it_does_not_load_beside_an_onnxruntime_that_answers_wrongly(
    bundles: dict[str, Bundle], program: Program, tmp_path: Path, version: str
) -> None:
    """The server's backends are as in NVIDIA's images, but for the one that would load the library."""
    folder = tmp_path / "backends" / "onnxruntime"
    folder.mkdir(parents=True)
    (library,) = runtime(program, version).glob("onnxruntime/capi/libonnxruntime.so.*")
    (folder / "libonnxruntime.so").symlink_to(library)
    place = tmp_path / "models"
    place.mkdir()
    fused, plain = (
        write_models(bundles["text-classification"], place, Options(name=name, variant=variant))
        for name, variant in (("fused", None), ("plain", "graph"))
    )
    with TritonServer(program, place, tmp_path, is_lenient=True) as server, Client(server.url) as client:
        index = client.index()
    assert index[plain.tokenize or ""][0] == "READY"
    state, reason = index[fused.tokenize or ""]
    if version == LEAST_ONNXRUNTIME:
        assert state == "READY", reason
    else:
        assert state == "UNAVAILABLE"
        assert f"this server has ONNX Runtime {version}, in which the model answers wrongly" in reason


def test_the_server_accepts_an_engine_up_to_the_missing_library(
    bundles: dict[str, Bundle], program: Program, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """On a machine without a GPU, whose kind the configuration asks for."""
    bundle = with_engine(bundles["text-classification"], tmp_path)
    words = ["deploy", "tritonserver", str(bundle.path), "-o", str(tmp_path / "models")]
    assert main([*words, "--check", str(program.environment), "-q"]) == 3
    told = capsys.readouterr()
    assert (
        "transformer_tensorrt_model: Invalid argument: unable to find backend library for backend 'tensorrt'"
        in told.out
    )
    assert "transformer_tensorrt_tokenize: ready" in told.out
    assert "it has no TensorRT backend" in told.err
    assert "--runtime python" not in told.err  # which runs no engine


@pytest.mark.parametrize(
    ("words", "reason", "error"),
    [
        ([], "unable to find backend library for backend 'onnxruntime'", "it has no ONNX Runtime backend"),
        (["--runtime", "python"], "invalid or unsupported gpu id 0", "it has no GPU"),
    ],
)
@pytest.mark.skipif(bool(this_machine().gpus), reason="there is a GPU here")
def test_the_server_accepts_what_is_for_a_gpu_up_to_that(
    bundles: dict[str, Bundle],
    program: Program,
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
    assert main([*command, "--check", str(program.environment), "-q", *words]) == 3
    told = capsys.readouterr()
    assert f"models: {variant}" in told.out
    assert re.search(f"transformer_onnx_model: .*{reason}", told.out)
    assert "transformer_onnx_tokenize: ready" in told.out
    assert f"accepted as far as this server goes: {error}" in told.err


@pytest.mark.skipif(bool(this_machine().gpus), reason="there is a GPU here")
def test_the_server_has_none_of_the_gpus_that_are_asked_for(
    bundles: dict[str, Bundle], program: Program, tmp_path: Path
) -> None:
    """As its own backends are configured, on every GPU; here for the one that this server has."""
    plain = bundles["text-classification"]
    variant, graph = Variant.parse("onnxruntime-fp32@cuda"), plain.graph().path()
    bundle = with_variant(plain, tmp_path, variant, {graph.name: graph.read_bytes()})
    written = write_repository(bundle, tmp_path / "models", Options(runtime=Runtime.PYTHON))
    config = written.directory / written.model / "config.pbtxt"
    text = config.read_text()
    assert "  gpus: [0]\n" in text
    config.write_text(text.replace("  gpus: [0]\n", ""))
    (tmp_path / "place").mkdir()
    with TritonServer(program, written.directory, tmp_path / "place", is_lenient=True) as server:
        checked = check(bundle, written, server.url, Silent())
    assert "has kind KIND_GPU" in checked.not_ready[written.model]
    assert (checked.is_missing_gpu, checked.is_missing_backend) == (True, False)


def test_check_says_what_it_could_not_prove(
    bundles: dict[str, Bundle], program: Program, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["deploy", "tritonserver", str(bundles["text-classification"].path), "-o", str(tmp_path / "models")]
    assert main([*words, "--check", str(program.environment), "-q"]) == 3
    told = capsys.readouterr()
    assert "transformer_onnx_tokenize: ready" in told.out
    assert "it has no ONNX Runtime backend" in told.err
    assert (tmp_path / "models" / "README.md").exists()
