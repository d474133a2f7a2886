"""A model that writes as one model of a repository, whose answers come piece by piece; and how to ask it."""

from __future__ import annotations

import shutil
from pathlib import Path
from string import Template

import msgspec

from hasten.bundle import Bundle, VariantEntry
from hasten.bundle.read import TOKENIZER
from hasten.core.errors import UnsupportedError, translate_os_errors
from hasten.core.variant import CPU, CUDA
from hasten.deploy.tritonserver import configs
from hasten.deploy.tritonserver.models.generate import EXCLUDES, SAMPLING, STREAM, TEXT, VARIANT, WRITTEN
from hasten.deploy.tritonserver.models.request import ABOUT
from hasten.deploy.tritonserver.models.request import TOKENIZER as TOKENIZER_FILE
from hasten.deploy.tritonserver.options import Options, Repository, Runtime
from hasten.deploy.tritonserver.packages import pinned
from hasten.deploy.tritonserver.pbtxt import Tensor, Value, to_text
from hasten.deploy.tritonserver.repository import MODEL_PY, VERSION
from hasten.deploy.tritonserver.shipping import ship

_ONNX = "onnxruntime"
# Texts that are written at once.
_SLOTS = 8

_REQUESTS = Template('''\
"""Ask with plain HTTP: pip install requests and python $file [$address]"""

import json
import sys

import requests

address = sys.argv[1] if len(sys.argv) > 1 else "$address"
body = {"text_input": "The sky turned dark, so", "sampling_parameters": json.dumps({"max_tokens": 32})}
answer = requests.post(f"http://{address}/v2/models/$model/generate", json=body, timeout=60)
answer.raise_for_status()
print(answer.json()["text_output"])
body["stream"] = True
with requests.post(f"http://{address}/v2/models/$model/generate_stream", json=body, timeout=60, stream=True) as answer:
    for line in answer.iter_lines():
        if line:
            print(json.loads(line.removeprefix(b"data: "))["text_output"], end="", flush=True)
print()
''')
_GRPC = Template('''\
"""Ask with NVIDIA's client: pip install "tritonclient[grpc]" and python $file [$address]"""

import json
import sys
import threading

import numpy as np
import tritonclient.grpc as triton

ended = threading.Event()


def told(result, error):
    if error is not None:
        print(error)
        ended.set()
        return
    response = result.get_response()
    if response.outputs:
        print(result.as_numpy("text_output")[0].decode(), end="", flush=True)
    if response.parameters["triton_final_response"].bool_param:
        ended.set()


def tensor(name, value, kind):
    made = triton.InferInput(name, [1], kind)
    made.set_data_from_numpy(np.array([value], dtype=object if kind == "BYTES" else bool))
    return made


inputs = [
    tensor("text_input", "The sky turned dark, so", "BYTES"),
    tensor("sampling_parameters", json.dumps({"max_tokens": 32}), "BYTES"),
    tensor("stream", True, "BOOL"),
]
with triton.InferenceServerClient(sys.argv[1] if len(sys.argv) > 1 else "$address") as client:
    client.start_stream(told)
    client.async_stream_infer("$model", inputs)
    ended.wait()
    client.stop_stream()
print()
''')
_ONCE = Template("""\
# $model

A model repository for NVIDIA's tritonserver, written by hasten from the variant `$variant`. `$model` takes `TEXT`, and,
where they are wanted, `sampling_parameters` (JSON) and `exclude_input_in_output`, and gives `output`.

A server with its Python backend, as of 24.10 or newer: `python3 -m pip install $packages` for its Python, and
`tritonserver --model-repository=$$PWD`.

```
curl -X POST http://localhost:8000/v2/models/$model/infer \\
  -d '{"inputs": [{"name": "TEXT", "datatype": "BYTES", "shape": [1], "data": ["The sky turned dark, so"]}]}'
```
""")
_README = Template("""\
# $model

A model repository for NVIDIA's tritonserver, written by hasten from the variant `$variant`.

`$model` takes `text_input`, and, where they are wanted, `sampling_parameters` (JSON: $names), `stream` and
`exclude_input_in_output`, and gives `text_output`: once, or piece by piece. Up to $slots texts are written at once.

## Run

```
BASE=IMAGE docker compose up --build
```

IMAGE is one of tritonserver with Python 3.11 or newer and its Python backend.

A server that is there already: `python3 -m pip install $packages` for its Python, and
`tritonserver --model-repository=$$PWD`.

## Ask

```
curl -X POST http://localhost:8000/v2/models/$model/generate \\
  -d '{"text_input": "The sky turned dark, so", "sampling_parameters": "{\\"max_tokens\\": 32}"}'
```

`generate_stream` with `"stream": true` gives the pieces as server-sent events. The same in Python: `client_requests.py`
(requests), `client_grpc.py` (tritonclient); each takes an address.
""")


def choose_writer(bundle: Bundle, options: Options) -> VariantEntry:
    """The variant that was asked for or, in order of speed, the first that runs there."""
    entries = [bundle.entry(options.variant)] if options.variant else bundle.manifest.variants
    entry = next((one for one in entries if one.backend == _ONNX and one.device == CPU), None)
    if entry is None:
        raise UnsupportedError(
            f"{entries[0].name} does not run there", hint="what `hasten build --device cpu` makes with onnxruntime does"
        )
    return entry


def write_writer(bundle: Bundle, directory: Path, options: Options) -> Repository:
    bundle.check()
    if options.device == CUDA:
        raise UnsupportedError("models that write run on the CPU there, not on 'cuda'", hint="leave --device out")
    entry = choose_writer(bundle, options)
    artifact, name = bundle.artifact(entry), f"{options.name}_onnx_generate"
    # transformer-deploy's clients ask for one answer, under names of their own.
    is_once = options.output is not None
    inputs = (
        Tensor("TEXT" if is_once else TEXT, "BYTES", (1,)),
        *(() if is_once else (Tensor(STREAM, "BOOL", (1,), is_optional=True),)),
        Tensor(SAMPLING, "BYTES", (1,), is_optional=True),
        Tensor(EXCLUDES, "BOOL", (1,), is_optional=True),
    )
    outputs = (Tensor(options.output or WRITTEN, "BYTES", (1,)),)
    rest: dict[str, Value] = {
        "backend": "python",
        "model_transaction_policy": {"decoupled": not is_once},
        "instance_group": configs.instances(options.instances, options.device),
    }
    about = {
        "signature": artifact.signature,
        "least_onnxruntime": "",
        "instructions": entry.instructions,
        "variant": artifact.variant.name,
        "graphs": dict(artifact.graphs),
        "instances": options.instances,
        "threads": options.threads,
        "slots": _SLOTS,
        "input": inputs[0].name,
        "output": outputs[0].name,
        "tokenizer": bundle.manifest.tokenizer,
        "generation": bundle.manifest.generation,
    }
    with translate_os_errors(f"writing {directory}"):
        folder = directory / name / VERSION
        (folder / VARIANT).mkdir(parents=True)
        message = configs.model(name, inputs, outputs, 0, rest)
        (folder.parent / "config.pbtxt").write_text(to_text(message), encoding="utf-8")
        for file in artifact.directory.iterdir():
            shutil.copyfile(file, folder / VARIANT / file.name)
        bundle.tokenizer()  # its hash is checked, and that it opens
        shutil.copyfile(bundle.path / TOKENIZER, folder / TOKENIZER_FILE)
        (folder / ABOUT).write_bytes(msgspec.json.format(msgspec.json.encode(about), indent=1))
        (folder / "model.py").write_text(MODEL_PY.format(module="generate"), encoding="utf-8")
        ship(["hasten.deploy.tritonserver.models.generate", f"hasten.backends.{_ONNX}"], folder)
    return Repository(
        directory=directory,
        runtime=Runtime.PYTHON,
        variant=entry.name,
        model=name,
        tokenize=None,
        inference=name,
        inputs=inputs,
        outputs=outputs,
        is_raw=False,
        tokens=(),
        max_rows=0,
        least_onnxruntime="",
        packages=pinned(bundle, ("tokenizers", "msgspec", _ONNX)),
        device=options.device,
    )


def write_asking(repository: Repository) -> None:
    """How to ask it, beside it; of one that answers once, its own clients know."""
    place, model = repository.directory, repository.inference
    if repository.inputs[0].name != TEXT:
        told = _ONCE.substitute(model=model, variant=repository.variant, packages=" ".join(repository.packages))
        (place / "README.md").write_text(told, encoding="utf-8")
        return
    for template, file, address in (
        (_REQUESTS, "client_requests.py", "localhost:8000"),
        (_GRPC, "client_grpc.py", "localhost:8001"),
    ):
        (place / file).write_text(template.substitute(model=model, file=file, address=address), encoding="utf-8")
    told = _README.substitute(
        model=model,
        variant=repository.variant,
        names="`max_tokens`, `temperature`, `top_k`, `top_p`, `stop`, `seed` and the like",
        slots=_SLOTS,
        packages=" ".join(repository.packages),
    )
    (place / "README.md").write_text(told, encoding="utf-8")
