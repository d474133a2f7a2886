"""Text generation over OpenAI's API, the Open Inference Protocol and Hugging Face's API, and invalid requests."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import hasten
from hasten.bundle import Bundle, BundleWriter
from hasten.bundle.read import TOKENIZER
from hasten.core.errors import AccuracyError
from hasten.generation.generator import Generator
from hasten.server.models.generative_model import GenerativeModel
from hasten.server.scheduling.core_scheduler import CoreScheduler
from hasten.server.scheduling.generation_engine import GenerationObserver
from hasten.server.settings import Settings
from support.server_process import Server

openai = pytest.importorskip("openai", reason="the test uses OpenAI's client")
pytest.importorskip("uvloop", reason="serving needs hasten[serve]")
PROMPTS = (
    "the cat sat on",
    "a dog",
    "prices rose by three percent in the second",
    "she reads old books",
    "is this",
    "the plot is dull and the acting",
    "I",
    "what a wonderful film",
)
CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "what is this?"}]


@pytest.fixture(scope="module")
def server(generator_bundle: Bundle, classifier_bundle: Bundle) -> Iterator[Server]:
    started = Server(
        str(generator_bundle.path), str(classifier_bundle.path), "--threads", "1", "--max-new-tokens", "1500"
    )
    yield started
    code, errors = started.stop()
    assert code == 0, errors
    assert "Traceback" not in errors


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{server.port}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def local_generator(generator_bundle: Bundle) -> Iterator[Generator]:
    """The same bundle, loaded in this process."""
    with hasten.load(generator_bundle.path, threads=1) as generator:
        assert isinstance(generator, Generator)
        yield generator


def text_of(local_generator: Generator, prompt: Any, **options: Any) -> str:
    (answer,) = local_generator(prompt, return_full_text=False, **options)
    text: str = answer["generated_text"]
    return text


def test_model_with_other_tokens_than_its_reference_is_not_served(generator_bundle: Bundle, tmp_path: Path) -> None:
    manifest, reference = generator_bundle.manifest, generator_bundle.reference()
    wrong = [{**row, "tokens": [5] * 32} if "tokens" in row else row for row in reference.rows]
    with BundleWriter(tmp_path / "wrong") as writer:
        writer.add_variant(generator_bundle.artifact(manifest.chosen))
        writer.add_tokenizer(generator_bundle.path / TOKENIZER)
        writer.add_reference(wrong, reference.outputs)
        writer.add_report(generator_bundle.report)
        bundle = writer.commit(manifest)
    with pytest.raises(AccuracyError, match="does not reproduce its reference answers"):
        GenerativeModel("wrong", bundle, Settings(threads=1), CoreScheduler(1), GenerationObserver())


# OpenAI


def test_completion_equals_local_generation(client: Any, local_generator: Generator) -> None:
    prompt = PROMPTS[0]
    answer = client.completions.create(model="generator", prompt=prompt, max_tokens=24)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason, choice.index) == (
        text_of(local_generator, prompt, max_tokens=24),
        "length",
        0,
    )
    prompt_tokens = len(local_generator.tokenizer.encode_whole([prompt])[0].ids)
    assert answer.usage.model_dump(include={"prompt_tokens", "completion_tokens", "total_tokens"}) == {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": 24,
        "total_tokens": prompt_tokens + 24,
    }
    assert (answer.object, answer.model) == ("text_completion", "generator")
    # OpenAI's default.
    assert client.completions.create(model="generator", prompt=prompt).usage.completion_tokens == 16


def test_completion_accepts_texts_and_token_ids(client: Any, local_generator: Generator) -> None:
    ids = [local_generator.tokenizer.encode_whole([prompt])[0].ids for prompt in PROMPTS[:2]]
    expected = [text_of(local_generator, prompt, max_tokens=8) for prompt in PROMPTS[:2]]
    for prompt in (list(PROMPTS[:2]), ids):
        answer = client.completions.create(model="generator", prompt=prompt, max_tokens=8)
        assert [choice.text for choice in answer.choices] == expected
        assert answer.usage.prompt_tokens == sum(map(len, ids))
    answer = client.completions.create(model="generator", prompt=ids[0], max_tokens=8)
    assert answer.choices[0].text == expected[0]
    echoed = client.completions.create(model="generator", prompt=PROMPTS[0], max_tokens=8, echo=True)
    assert echoed.choices[0].text == PROMPTS[0] + expected[0]


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "top_p": 0.95, "seed": 7, "n": 3}])
def test_streamed_deltas_add_up_to_the_whole_text(client: Any, options: dict[str, Any]) -> None:
    whole = client.completions.create(model="generator", prompt=PROMPTS[0], max_tokens=40, **options)
    stream = client.completions.create(
        model="generator",
        prompt=PROMPTS[0],
        max_tokens=40,
        stream=True,
        stream_options={"include_usage": True},
        **options,
    )
    *chunks, last = list(stream)
    assert (last.choices, last.usage) == ([], whole.usage)
    assert all(chunk.usage is None for chunk in chunks)
    assert len(chunks) > 10
    for choice in whole.choices:
        deltas = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == choice.index]
        assert "".join(delta.text for delta in deltas) == choice.text
        assert [delta.finish_reason for delta in deltas if delta.finish_reason] == [choice.finish_reason] == ["length"]
    assert len({chunk.id for chunk in (*chunks, last)}) == 1
    assert len({choice.text for choice in whole.choices}) == options.get("n", 1)


def test_chat_completion_equals_local_generation(client: Any, local_generator: Generator) -> None:
    expected = text_of(local_generator, CHAT, max_tokens=30)
    answer = client.chat.completions.create(model="generator", messages=CHAT, max_completion_tokens=30)
    (choice,) = answer.choices
    assert (choice.message.role, choice.message.content, choice.finish_reason) == ("assistant", expected, "length")
    newer = [{"role": "developer", "content": [{"type": "text", "text": "be brief"}]}, CHAT[1]]
    again = client.chat.completions.create(model="generator", messages=newer, max_tokens=30)
    assert (again.choices[0].message.content, again.usage) == (expected, answer.usage)
    chunks = list(client.chat.completions.create(model="generator", messages=CHAT, max_tokens=30, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert [delta.role for delta in deltas if delta.role] == ["assistant"]
    assert "".join(delta.content or "" for delta in deltas) == expected
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"
    assert {chunk.usage for chunk in chunks} == {None}


def test_chat_without_max_tokens_runs_to_the_server_limit(client: Any) -> None:
    answer = client.chat.completions.create(model="generator", messages=CHAT)
    assert (answer.usage.completion_tokens, answer.choices[0].finish_reason) == (1500, "length")


def test_stream_uses_server_sent_events(server: Server) -> None:
    body = {"model": "generator", "prompt": "a dog", "max_tokens": 4, "stream": True}
    status, headers, content = server.ask("POST", "/v1/completions", body)
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    events = content.decode().split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    for event in events[:-2]:
        assert event.startswith("data: {")
        assert set(json.loads(event[6:])) == {"id", "object", "created", "model", "choices"}


def test_stop_strings_end_the_text_and_are_excluded(client: Any, local_generator: Generator) -> None:
    text = text_of(local_generator, "a dog", max_tokens=60)
    stop = text[20:23]
    before = text[: text.index(stop)]
    for options in ({"stop": stop}, {"stop": ["never in it: ∅", stop]}):
        answer = client.completions.create(model="generator", prompt="a dog", max_tokens=60, **options)
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == (before, "stop")
        chunks = list(
            client.completions.create(model="generator", prompt="a dog", max_tokens=60, stream=True, **options)
        )
        assert "".join(chunk.choices[0].text for chunk in chunks) == before
        assert chunks[-1].choices[0].finish_reason == "stop"
    never = client.completions.create(model="generator", prompt="a dog", max_tokens=60, stop="never in it: ∅")
    assert (never.choices[0].text, never.choices[0].finish_reason) == (text, "length")


def test_concurrent_streams_equal_single_requests(server: Server, client: Any, local_generator: Generator) -> None:
    expected = [text_of(local_generator, prompt, max_tokens=120) for prompt in PROMPTS]
    assert len(set(expected)) == len(PROMPTS)
    texts: dict[int, str] = {}
    ready = threading.Barrier(len(PROMPTS))

    def ask(index: int) -> None:
        ready.wait()
        chunks = client.completions.create(model="generator", prompt=PROMPTS[index], max_tokens=120, stream=True)
        texts[index] = "".join(chunk.choices[0].text for chunk in chunks)

    before = decode_steps(server)
    threads = [threading.Thread(target=ask, args=[index]) for index in range(len(PROMPTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [texts[index] for index in range(len(PROMPTS))] == expected
    # The sequences shared their decode steps: far fewer than one after the other would take.
    assert decode_steps(server) - before < 0.6 * 120 * len(PROMPTS)


def decode_steps(server: Server) -> float:
    text = server.ask("GET", "/metrics")[2].decode()
    return next(
        float(line.split()[-1]) for line in text.splitlines() if line.startswith("hasten_decode_step_seconds_count")
    )


# Open Inference Protocol


def test_generate_and_generate_stream(server: Server, local_generator: Generator) -> None:
    expected = text_of(local_generator, "a dog", max_tokens=12)
    body = {"text_input": "a dog", "id": "7", "parameters": {"max_tokens": 12, "temperature": 0}}
    for path in ("/v2/models/generator/generate", "/v2/models/generator/versions/1/generate"):
        answer = server.json("POST", path, body)
        assert answer == {"id": "7", "model_name": "generator", "model_version": "1", "text_output": expected}
    full = {**body, "parameters": {"max_tokens": 12, "exclude_input_in_output": False, "stream": False}}
    assert server.json("POST", "/v2/models/generator/generate", full)["text_output"] == "a dog" + expected
    beside = {"text_input": "a dog", "max_tokens": 12, "temperature": 0, "exclude_input_in_output": False}
    assert server.json("POST", "/v2/models/generator/generate", beside)["text_output"] == "a dog" + expected
    status, headers, content = server.ask("POST", "/v2/models/generator/generate_stream", {**body, "id": ""})
    assert (status, headers["content-type"].split(";")[0]) == (200, "text/event-stream")
    events = [json.loads(event[6:]) for event in content.decode().split("\n\n")[:-1]]
    assert "".join(event["text_output"] for event in events) == expected
    assert len(events) > 3
    assert "generate" in server.json("GET", "/v2")["extensions"]


def test_infer_over_http_generates_text(server: Server, local_generator: Generator) -> None:
    triton_http = pytest.importorskip("tritonclient.http")
    import numpy as np

    expected = [text_of(local_generator, prompt, max_tokens=6) for prompt in PROMPTS[:2]]
    text_input = triton_http.InferInput("text_input", [2], "BYTES")
    text_input.set_data_from_numpy(np.array(PROMPTS[:2], object))
    parameters = triton_http.InferInput("sampling_parameters", [1], "BYTES")
    parameters.set_data_from_numpy(np.array(['{"max_tokens": 6}'], object))
    with triton_http.InferenceServerClient(f"127.0.0.1:{server.port}") as client:
        answer = client.infer("generator", [text_input, parameters])
    assert [text.decode() for text in answer.as_numpy("text_output").tolist()] == expected
    metadata = server.json("GET", "/v2/models/generator")
    names = [[tensor["name"] for tensor in metadata[side]] for side in ("inputs", "outputs")]
    assert names == [["text_input"], ["text_output"]]


def test_stream_over_grpc(server: Server, local_generator: Generator) -> None:
    triton_grpc = pytest.importorskip("tritonclient.grpc")
    import numpy as np

    expected = text_of(local_generator, "a dog", max_tokens=20)
    answers: list[Any] = []
    ended = threading.Event()

    def on_response(result: Any, error: Any) -> None:
        answers.append(error or result.get_response())
        if error or result.get_response().parameters["triton_final_response"].bool_param:
            ended.set()

    def make_tensor(name: str, value: Any, kind: str) -> Any:
        tensor = triton_grpc.InferInput(name, [1], kind)
        tensor.set_data_from_numpy(np.array([value], object if kind == "BYTES" else bool))
        return tensor

    with triton_grpc.InferenceServerClient(f"127.0.0.1:{server.grpc_port}") as client:
        client.start_stream(on_response)
        for streams in (True, False):
            answers.clear()
            ended.clear()
            inputs = [make_tensor("text_input", "a dog", "BYTES"), make_tensor("stream", streams, "BOOL")]
            client.async_stream_infer("generator", inputs, parameters={"max_tokens": 20})
            assert ended.wait(20)
            texts = [answer.raw_output_contents[0][4:].decode() for answer in answers]
            assert "".join(texts) == expected
            assert (len(texts) > 5) == streams
        answers.clear()
        ended.clear()
        client.async_stream_infer(
            "generator", [make_tensor("text_input", "a dog", "BYTES")], parameters={"max_tokens": 0}
        )
        assert ended.wait(20)
        assert "max_tokens is 0" in str(answers[0])
        client.stop_stream()


# Hugging Face


def test_predict_follows_the_hugging_face_api(server: Server, local_generator: Generator) -> None:
    expected = [text_of(local_generator, prompt, max_tokens=9) for prompt in PROMPTS[:2]]
    options = {"max_new_tokens": 9, "do_sample": False}
    ask = {"model": "generator", "inputs": PROMPTS[0], "parameters": options}
    assert server.json("POST", "/predict", ask) == [{"generated_text": PROMPTS[0] + expected[0]}]
    many = {"inputs": list(PROMPTS[:2]), "parameters": {**options, "return_full_text": False}}
    assert server.json("POST", "/models/generator", many) == [[{"generated_text": text}] for text in expected]
    drawn = {"do_sample": True, "seed": 3, "num_return_sequences": 2, "max_new_tokens": 9, "return_full_text": False}
    sampled = server.json("POST", "/models/generator", {"inputs": PROMPTS[0], "parameters": drawn})
    assert len({text["generated_text"] for text in sampled} - {expected[0]}) == 2
    chat = server.json("POST", "/models/generator", {"inputs": CHAT, "parameters": options})
    assert chat[0]["generated_text"][:2] == CHAT
    assert chat[0]["generated_text"][2] == {
        "role": "assistant",
        "content": text_of(local_generator, CHAT, max_tokens=9),
    }


# Invalid requests

TEXT, CHATS = "/v1/completions", "/v1/chat/completions"
LONG = "a dog " * 3000


@pytest.mark.parametrize(
    ("path", "changes", "status", "message"),
    [
        (TEXT, {"model": "missing"}, 404, "model 'missing' not found"),
        (TEXT, {"model": "classifier"}, 400, "does not generate text"),
        (TEXT, {"prompt": LONG}, 400, "the model reads up to 2048"),
        (TEXT, {"prompt": [5] * 2048}, 400, "has 2048 tokens, and the model's context of 2048"),
        (TEXT, {"prompt": [10**6]}, 400, "token id 1000000 is out of range"),
        (TEXT, {"prompt": []}, 400, "must be a text, token ids, or a list"),
        (TEXT, {"prompt": ["a", 5]}, 400, "must be a text, token ids, or a list"),
        (TEXT, {"prompt": [5], "echo": True}, 400, "echo"),
        (TEXT, {"prompt": ["a"] * 1025}, 413, "the request has 1025 items; the limit is 1024"),
        (TEXT, {"max_tokens": 0}, 400, "max_tokens is 0"),
        (TEXT, {"max_tokens": 1501}, 400, "max_tokens is 1501, and this server generates up to 1500"),
        (TEXT, {"max_tokens": 10**30}, 400, "this server generates up to 1500"),
        (TEXT, {"temperature": -1}, 400, "temperature is -1"),
        (TEXT, {"top_p": 2}, 400, "top_p is 2"),
        (TEXT, {"n": 9}, 400, "n is 9: it must be from 1 to 8"),
        (TEXT, {"n": 0}, 400, "n is 0"),
        (TEXT, {"best_of": 2}, 400, "best_of"),
        (TEXT, {"logprobs": 2}, 400, "logprobs is not supported"),
        (TEXT, {"logprobs": 0}, 400, "logprobs is not supported"),
        (TEXT, {"max_token": 5}, 400, "unknown field max_token"),
        (TEXT, {"suffix": "end"}, 400, "suffix"),
        (TEXT, {"frequency_penalty": 0.5}, 400, "frequency_penalty"),
        (TEXT, {"logit_bias": {"5": 1}}, 400, "logit_bias"),
        (TEXT, {"stop": [""]}, 400, "none of them empty"),
        (TEXT, {"seed": -1}, 400, "seed is -1"),
        (CHATS, {"messages": []}, 400, "messages is empty"),
        (CHATS, {"messages": [{"role": "wizard", "content": "hm"}]}, 400, "message 1 has the role 'wizard'"),
        (CHATS, {"messages": [{"role": "user"}]}, 400, "message 1 has no content"),
        (CHATS, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "parts other than text"),
        (CHATS, {"messages": [{"role": "tool", "content": "5"}]}, 400, "tools are not for this model"),
        (CHATS, {"messages": [{"role": "user", "content": LONG}]}, 400, "tokens, and the model's context of 2048"),
        (CHATS, {"tools": [{"type": "function"}]}, 400, "tools is not supported"),
        (CHATS, {"response_format": {"type": "json_object"}}, 400, "response_format"),
        (CHATS, {"logprobs": True}, 400, "logprobs"),
        (CHATS, {"modalities": ["text", "audio"]}, 400, "modalities is not supported"),
        (CHATS, {"tool_choice": "required"}, 400, "tool_choice is not supported"),
        (CHATS, {"guided_json": {}}, 400, "unknown field guided_json"),
    ],
)
@pytest.mark.parametrize("streams", [False, True])
def test_invalid_openai_requests_are_rejected(
    server: Server, path: str, changes: dict[str, Any], status: int, message: str, streams: bool
) -> None:
    inputs: dict[str, Any] = {"prompt": "a dog"} if path == TEXT else {"messages": CHAT}
    body = {"model": "generator", **inputs, "stream": streams, **changes}
    code, headers, content = server.ask("POST", path, json.dumps(body).encode())
    error = json.loads(content)["error"]
    assert (code, message in error["message"]) == (status, True), content
    assert headers["content-type"] == "application/json"
    assert error["code"] == ("model_not_found" if status == 404 else None)


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/v2/models/generator/generate", {"text_input": LONG}, 400, "reads up to 2048"),
        ("/v2/models/generator/generate", {"text_input": 5}, 400, "invalid request"),
        (
            "/v2/models/generator/generate",
            {"text_input": "a", "parameters": {"magic": 1}},
            400,
            "unknown option 'magic'",
        ),
        ("/v2/models/generator/generate", {"text_input": "a", "parameters": {"stream": True}}, 400, "generate_stream"),
        ("/v2/models/generator/generate", {"text_input": "a", "magic": 1}, 400, "unknown option 'magic'"),
        (
            "/v2/models/generator/generate",
            {"text_input": "a", "parameters": {"exclude_input_in_output": "no"}},
            400,
            "exclude_input_in_output is 'no': it must be true or false",
        ),
        ("/v2/models/generator/generate", {"text_input": "a", "temperature": 10**400}, 400, "temperature is 1000"),
        ("/v2/models/generator/versions/2/generate", {"text_input": "a"}, 404, "model version 2 does not exist"),
        ("/v2/models/classifier/generate", {"text_input": "a"}, 400, "does not generate text"),
        ("/v2/models/missing/generate_stream", {"text_input": "a"}, 404, "model 'missing' not found"),
        ("/v2/models/generator/infer", {"inputs": []}, 400, "'text_input' is missing"),
        ("/models/generator", {"inputs": 5}, 400, "must be a text or a chat"),
        ("/models/generator", {"inputs": []}, 400, "no prompt"),
        ("/models/generator", {"inputs": "a", "parameters": {"max_new_tokens": "many"}}, 400, "max_tokens is 'many'"),
        ("/predict", {"inputs": "a"}, 400, "more than one model fits"),
        ("/rerank", {"model": "generator", "query": "a", "texts": ["b"]}, 422, "is a text generation model"),
    ],
)
def test_invalid_requests_of_other_protocols_are_rejected(
    server: Server, path: str, body: Any, status: int, message: str
) -> None:
    code, _, content = server.ask("POST", path, body)
    assert (code, message in json.loads(content)["error"]) == (status, True), content


def test_embeddings_are_not_written(client: Any) -> None:
    with pytest.raises(openai.BadRequestError, match="is a text generation model"):
        client.embeddings.create(model="generator", input="a")
    names = {model.id for model in client.models.list()}
    assert names == {"generator", "classifier"}
