"""Write an image, example clients and a README beside the models; the server ignores files there."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template

import numpy as np

from hasten.core.variant import CUDA
from hasten.deploy.tritonserver.client import LENGTH, binary_body
from hasten.deploy.tritonserver.model_directory import Repository
from hasten.deploy.tritonserver.packages import needs_compiler
from hasten.deploy.tritonserver_options import Options, Runtime
from hasten.tasks import TaskSpec

BODY = "query_body.bin"
_CACHE_BYTES = 2**26
# The values of the example requests, by field.
_EXAMPLES: dict[str, list[object]] = {
    "text": ["This film is a joy from start to end.", "The plot is thin, and the ending worse."],
    "text_pair": ["I liked it.", "I did not like it."],
    "question": ["Where do I live?", "What is my name?"],
    "context": ["My name is Ada, and I live in London."] * 2,
    "query": ["How many people live in Berlin?"] * 2,
    "documents": [["Berlin has 3.7 million inhabitants.", "New York is famous for its museums."]] * 2,
    "prompt": ["The sky turned dark, so", "He was hungry, so"],
    "choices": [["she took an umbrella.", "she ate a sandwich."], ["he slept.", "he ate a sandwich."]],
    "candidate_labels": [["cinema", "cooking", "politics"]] * 2,
}
_MIN_ONNXRUNTIME = (
    " Its ONNX Runtime must be {version} or newer: older versions compute this variant incorrectly, and the models fail"
    " to load there. For an older version, deploy with `--runtime python` or, from a bundle, `--variant graph`."
)
_ENGINE = " The engine runs on {platform} only: for another server, build the bundle there."
_FIRST_GPU = " The model runs on the first GPU that the server sees: to use several, start a server for each."
_NEEDS_COMPILER = " Its kernels need a C compiler, which the Dockerfile installs."
_MASKED = "Paris is the {mask} of France."

# The launchers of Triton kernels are compiled at run time.
_COMPILER = (
    "RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev python3-dev"
    " && rm -rf /var/lib/apt/lists/*\n"
)
_GPUS = """\
    deploy:
      resources:
        reservations:
          devices: [{driver: nvidia, count: 1, capabilities: [gpu]}]
"""


def write_clients_and_readme(spec: TaskSpec, options: Options, repository: Repository, *others: Repository) -> None:
    """Write an image of all repositories, and example clients and a README for the first."""
    texts = examples(spec, repository)
    count = len(next(iter(texts.values())))
    shape = (count,) if repository.max_rows == 0 else (count, 1)
    arrays = {name: np.array(column, object).reshape(shape) for name, column in texts.items()}
    body, length = binary_body(arrays)
    directory = repository.directory
    (directory / BODY).write_bytes(body)
    arguments = write_image(options, repository, *others)
    values: dict[str, object] = {
        "texts": json.dumps(texts, ensure_ascii=False, indent=4),
        "shape": list(shape),
        "model": repository.inference,
        "outputs": [output.name for output in repository.outputs],
    }
    for protocol, address in (("http", "localhost:8000"), ("grpc", "localhost:8001")):
        client = f"client_{protocol}.py"
        values |= {"protocol": protocol, "file": client, "address": address}
        fill_template("client_tritonclient.py", directory / client, values)
    client = "client_requests.py"
    fill_template(client, directory / client, {**values, "file": client, "address": "localhost:8000"})
    command = " ".join(["tritonserver", "--model-repository=$PWD", *arguments])
    fill_template("README.md", directory / "README.md", _readme(repository, command, length))


def write_image(options: Options, repository: Repository, *others: Repository) -> list[str]:
    """Write a Dockerfile and a Compose file, and return the additional arguments of the server."""
    directory = repository.directory
    arguments = [f"--cache-config=local,size={_CACHE_BYTES}"] if options.cache else []
    values = {
        "compiler": _COMPILER if needs_compiler(repository.packages) else "",
        "packages": shlex.join(repository.packages),
        "copies": "\n".join(f"COPY {name} /models/{name}" for entry in (repository, *others) for name in entry.names),
        "command": ", ".join(json.dumps(word) for word in ["tritonserver", "--model-repository=/models", *arguments]),
    }
    fill_template("Dockerfile", directory / "Dockerfile", values)
    gpus = _GPUS if repository.device == CUDA else ""
    fill_template("compose.yaml", directory / "compose.yaml", {"gpus": gpus})
    return arguments


def fill_template(name: str, target: Path, values: Mapping[str, object]) -> None:
    """Write a file from the template of this name in the folder `templates`."""
    text = files(__package__).joinpath("templates", f"{name}.template").read_text(encoding="utf-8")
    target.write_text(Template(text).substitute(values), encoding="utf-8")


def examples(spec: TaskSpec, repository: Repository) -> dict[str, list[str]]:
    """Return the required inputs of an example request: two items, or one if the model takes a single row."""
    columns = {}
    for text in repository.inputs:
        if not text.is_optional:
            values = _EXAMPLES[text.name.lower()]
            columns[text.name] = [value if isinstance(value, str) else json.dumps(value) for value in values]
    if spec.mask_token:
        columns["TEXT"] = [_MASKED.format(mask=spec.mask_token)] * 2
    max_rows = repository.max_rows or len(next(iter(columns.values())))
    return {name: values[:max_rows] for name, values in columns.items()}


def _readme(repository: Repository, command: str, length: int) -> dict[str, object]:
    """Return the values of the README's template."""
    is_native = repository.runtime is Runtime.NATIVE
    engine = "TensorRT" if repository.platform else "ONNX Runtime"
    requirement = ""
    if repository.least_onnxruntime:
        requirement = _MIN_ONNXRUNTIME.format(version=repository.least_onnxruntime)
    if repository.platform:
        requirement = _ENGINE.format(platform=repository.platform)
    if not is_native and repository.device == CUDA:
        requirement = _FIRST_GPU + (_NEEDS_COMPILER if needs_compiler(repository.packages) else "")
    models = {repository.model: "runs the model on token ids"}
    if repository.tokenize is not None:
        models |= {repository.tokenize: "converts texts to token ids", repository.inference: "runs both in sequence"}
    else:
        models[repository.inference] = "answers texts with the help of the model"
    meaning = ""
    if any(output.labels for output in repository.outputs):
        meaning = " These are logits, without softmax or sigmoid; `labels.txt` lists the labels."
    elif len(repository.outputs) > 1:
        meaning = " The mask distinguishes the vectors of tokens from those of padding."
    elif not repository.is_raw:
        meaning = ' Answers are JSON, one for each item; `OPTIONS` is a JSON object, such as `{"top_k": 3}`.'
    inputs = [f"`{item.name}`{' (optional)' if item.is_optional else ''}" for item in repository.inputs]
    return {
        "model": repository.inference,
        "variant": repository.variant,
        "models": "\n".join(f"| `{name}` | {purpose} |" for name, purpose in models.items()),
        "inputs": _enumerate(inputs),
        "outputs": _enumerate([f"`{item.name}`" for item in repository.outputs]),
        "meaning": meaning,
        "backends": f"its backends for {engine} and Python" if is_native else "its Python backend",
        "packages": shlex.join(repository.packages),
        "requirement": requirement,
        "command": command,
        "header": LENGTH,
        "length": length,
        "body": BODY,
    }


def _enumerate(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)
