"""What lies beside the models: how to run them, and how to ask them. The server takes folders for models, not files."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from string import Template

import numpy as np

from hasten.core.variant import CUDA
from hasten.deploy.tritonserver.client import LENGTH, binary_body
from hasten.deploy.tritonserver.options import Options, Repository, Runtime
from hasten.deploy.tritonserver.packages import needs_compiler
from hasten.tasks import TaskSpec

BODY = "query_body.bin"
_CACHE_BYTES = 2**26
# What is asked in the examples, by the name of a field.
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
_LEAST = (
    " Its ONNX Runtime must be {version} or newer: older ones answer this variant wrongly, and the models refuse to"
    " load beside them. For those, write it with `--runtime python` or, from a bundle, `--variant graph`."
)
_PLACE = " The engine runs on {place}, and on nothing else: for another server build the bundle there."
_ON_GPU = " The model runs on the first GPU that the server sees: for others start a server for each."
_NEEDS_COMPILER = " Its kernels need a C compiler beside it, which the Dockerfile installs."
_MASKED = "Paris is the {mask} of France."

_DOCKERFILE = Template("""\
# docker build --build-arg BASE=IMAGE .
# where IMAGE is one of tritonserver with Python 3.11 or newer.
ARG BASE
FROM $${BASE}
${compiler}RUN PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install --no-cache-dir $packages
$copies
EXPOSE 8000 8001 8002
HEALTHCHECK --start-period=60s CMD \\
  ["python3", "-c", "import urllib.request as r; r.urlopen('http://localhost:8000/v2/health/ready')"]
CMD [$command]
""")
# What launches a kernel of Triton's language is compiled where it runs.
_COMPILER = (
    "RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev python3-dev"
    " && rm -rf /var/lib/apt/lists/*\n"
)
_COMPOSE = Template("""\
# BASE=IMAGE docker compose up --build
services:
  tritonserver:
    build:
      context: .
      args:
        BASE: $${BASE:?an image of tritonserver}
    ports: ["8000:8000", "8001:8001", "8002:8002"]
    # Python models hand their tensors over in shared memory.
    shm_size: 1gb
$gpus""")
_GPUS = """\
    deploy:
      resources:
        reservations:
          devices: [{driver: nvidia, count: 1, capabilities: [gpu]}]
"""
_TRITONCLIENT = Template('''\
"""Ask with NVIDIA's client: pip install "tritonclient[$protocol]" and python $file [$address]"""

import json
import sys

import numpy as np
import tritonclient.$protocol as triton

TEXTS = $texts

client = triton.InferenceServerClient(sys.argv[1] if len(sys.argv) > 1 else "$address")
inputs = []
for name, texts in TEXTS.items():
    array = np.array(texts, dtype=object).reshape($shape)
    tensor = triton.InferInput(name, array.shape, "BYTES")
    tensor.set_data_from_numpy(array)
    inputs.append(tensor)
answer = client.infer("$model", inputs)
for name in $outputs:
    # Strings come as bytes.
    print(json.dumps({name: answer.as_numpy(name).tolist()}, default=bytes.decode))
client.close()
''')
_REQUESTS = Template('''\
"""Ask with plain HTTP: pip install requests and python $file [$address]"""

import json
import sys

import requests

TEXTS = $texts

address = sys.argv[1] if len(sys.argv) > 1 else "$address"
inputs = [
    {"name": name, "datatype": "BYTES", "shape": $shape, "data": texts} for name, texts in TEXTS.items()
]
answer = requests.post(f"http://{address}/v2/models/$model/infer", json={"inputs": inputs}, timeout=60)
answer.raise_for_status()
for output in answer.json()["outputs"]:
    # All values in a row: output["shape"] says how to cut it.
    print(json.dumps({output["name"]: output["data"]}))
''')
_README = Template("""\
# $model

A model repository for NVIDIA's tritonserver, written by hasten from the variant `$variant`.

| model | what it does |
|---|---|
$models

It takes $inputs
and gives $outputs.$meaning

## Run

```
BASE=IMAGE docker compose up --build
```

IMAGE is one of tritonserver with Python 3.11 or newer and $backends.$least

A server that is there already: `python3 -m pip install $packages` for its Python, and `$command`.

## Ask

```
curl -X POST http://localhost:8000/v2/models/$model/infer \\
  -H "$header: $length" \\
  --data-binary "@$body"
```

`$body` has the texts in the protocol's binary form. The same in Python: `client_http.py` and `client_grpc.py`
(tritonclient), `client_requests.py` (requests); each takes an address.

Texts are cut to the model's limit of tokens. Requests that wait together run together: sizes and the time to wait for
them come from the bundle's benchmark, and stand in `config.pbtxt`.
""")


def write_around(spec: TaskSpec, options: Options, repository: Repository, *others: Repository) -> None:
    """How to run all of them, and how to ask the first."""
    texts = examples(spec, repository)
    count = len(next(iter(texts.values())))
    shape = (count,) if repository.max_rows == 0 else (count, 1)
    arrays = {name: np.array(column, object).reshape(shape) for name, column in texts.items()}
    body, length = binary_body(arrays)
    place = repository.directory
    (place / BODY).write_bytes(body)
    cache = write_image(options, repository, *others)
    packages = shlex.join(repository.packages)
    about = {
        "texts": json.dumps(texts, ensure_ascii=False, indent=4),
        "shape": list(shape),
        "model": repository.inference,
        "outputs": [output.name for output in repository.outputs],
    }
    for protocol, address in (("http", "localhost:8000"), ("grpc", "localhost:8001")):
        file = f"client_{protocol}.py"
        _write(place / file, _TRITONCLIENT.substitute(about, protocol=protocol, file=file, address=address))
    file = "client_requests.py"
    _write(place / file, _REQUESTS.substitute(about, file=file, address="localhost:8000"))
    command = " ".join(["tritonserver", "--model-repository=$PWD", *cache])
    _write(place / "README.md", _readme(repository, packages, command, length))


def write_image(options: Options, repository: Repository, *others: Repository) -> list[str]:
    """How to make one; what the server is to be started with is returned."""
    place = repository.directory
    cache = [f"--cache-config=local,size={_CACHE_BYTES}"] if options.cache else []
    _write(
        place / "Dockerfile",
        _DOCKERFILE.substitute(
            compiler=_COMPILER if needs_compiler(repository.packages) else "",
            packages=shlex.join(repository.packages),
            copies="\n".join(f"COPY {name} /models/{name}" for one in (repository, *others) for name in one.names),
            command=", ".join(json.dumps(word) for word in ["tritonserver", "--model-repository=/models", *cache]),
        ),
    )
    _write(place / "compose.yaml", _COMPOSE.substitute(gpus=_GPUS if repository.device == CUDA else ""))
    return cache


def examples(spec: TaskSpec, repository: Repository) -> dict[str, list[str]]:
    """Two items, with what must be given."""
    found = {}
    for text in repository.inputs:
        if not text.is_optional:
            values = _EXAMPLES[text.name.lower()]
            found[text.name] = [one if isinstance(one, str) else json.dumps(one) for one in values]
    if spec.mask_token:
        found["TEXT"] = [_MASKED.format(mask=spec.mask_token)] * 2
    # What was built for one text at a time takes one.
    most = repository.max_rows or len(next(iter(found.values())))
    return {name: values[:most] for name, values in found.items()}


def _readme(repository: Repository, packages: str, command: str, length: int) -> str:
    is_native = repository.runtime is Runtime.NATIVE
    engine = "TensorRT" if repository.place else "ONNX Runtime"
    least = _LEAST.format(version=repository.least_onnxruntime) if repository.least_onnxruntime else ""
    if repository.place:
        least = _PLACE.format(place=repository.place)
    if not is_native and repository.device == CUDA:
        least = _ON_GPU + (_NEEDS_COMPILER if needs_compiler(repository.packages) else "")
    models = {repository.model: "the model: token ids in, tensors out"}
    if repository.tokenize is not None:
        models[repository.tokenize] = "texts to token ids"
        models[repository.inference] = "both, one after the other"
    else:
        models[repository.inference] = "texts in, answers out: it asks the model"
    meaning = ""
    if any(output.labels for output in repository.outputs):
        meaning = " These are logits: neither softmax nor sigmoid is applied. `labels.txt` has their names."
    elif len(repository.outputs) > 1:
        meaning = " The mask tells the vectors of tokens from those of padding."
    elif not repository.is_raw:
        meaning = ' Answers are JSON, one for each item; options are a JSON object, as in `{"top_k": 3}`.'
    return _README.substitute(
        model=repository.inference,
        variant=repository.variant,
        models="\n".join(f"| `{name}` | {what} |" for name, what in models.items()),
        inputs=_listed([f"`{one.name}`{' (optional)' if one.is_optional else ''}" for one in repository.inputs]),
        outputs=_listed([f"`{one.name}`" for one in repository.outputs]),
        meaning=meaning,
        backends=f"its backends for {engine} and Python" if is_native else "its Python backend",
        packages=packages,
        least=least,
        command=command,
        header=LENGTH,
        length=length,
        body=BODY,
    )


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _write(file: Path, text: str) -> None:
    file.write_text(text, encoding="utf-8")
