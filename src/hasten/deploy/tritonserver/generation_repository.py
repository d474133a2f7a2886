"""Write a generative model as one model of a repository that streams its text, with example clients."""

from __future__ import annotations

import shutil
from pathlib import Path

from hasten.bundle import Bundle, VariantEntry
from hasten.core.errors import UnsupportedError, translate_os_errors
from hasten.core.variant import CPU, CUDA
from hasten.deploy.tritonserver import configs
from hasten.deploy.tritonserver.clients_and_readme import fill_template, write_image
from hasten.deploy.tritonserver.model_directory import ModelWriter, Repository
from hasten.deploy.tritonserver.models.generate import EXCLUDES, OUTPUT_TEXT, SAMPLING, STREAM, TEXT, VARIANT
from hasten.deploy.tritonserver.packages import pin_versions
from hasten.deploy.tritonserver.pbtxt import Tensor, Value
from hasten.deploy.tritonserver_options import Options, Runtime

_ONNX = "onnxruntime"
# Sequences that are generated at once.
_SLOTS = 8


def choose_generator(bundle: Bundle, options: Options) -> VariantEntry:
    """Return the requested variant or, if none is, the fastest that tritonserver can run."""
    entries = [bundle.entry(options.variant)] if options.variant else bundle.manifest.variants
    chosen = next((entry for entry in entries if entry.backend == _ONNX and entry.device == CPU), None)
    if chosen is None:
        raise UnsupportedError(
            f"tritonserver cannot run {entries[0].name}: generation needs an onnxruntime variant for the CPU",
            hint="build one with hasten build --device cpu",
        )
    return chosen


def write_generator(bundle: Bundle, directory: Path, options: Options) -> Repository:
    """Write a generative model into an existing directory, with an image, example clients and a README."""
    bundle.check()
    if options.device == CUDA:
        raise UnsupportedError(
            "generative models run on the CPU in tritonserver: 'cuda' is not supported", hint="leave --device out"
        )
    artifact, name = bundle.artifact(choose_generator(bundle, options)), f"{options.name}_onnx_generate"
    # transformer-deploy's clients expect a single answer, and their own tensor names.
    is_single = options.output is not None
    inputs = (
        Tensor("TEXT" if is_single else TEXT, "BYTES", (1,)),
        *(() if is_single else (Tensor(STREAM, "BOOL", (1,), is_optional=True),)),
        Tensor(SAMPLING, "BYTES", (1,), is_optional=True),
        Tensor(EXCLUDES, "BOOL", (1,), is_optional=True),
    )
    outputs = (Tensor(options.output or OUTPUT_TEXT, "BYTES", (1,)),)
    settings: dict[str, Value] = {
        "backend": "python",
        "model_transaction_policy": {"decoupled": not is_single},
        "instance_group": configs.instances(options.instances, options.device),
    }
    writer = ModelWriter(bundle, directory, options, artifact)
    config = {
        **writer.session_config,
        "slots": _SLOTS,
        "input": inputs[0].name,
        "output": outputs[0].name,
        "tokenizer": bundle.manifest.tokenizer,
        "generation": bundle.manifest.generation,
    }
    with translate_os_errors(f"writing {directory}"):
        folder = writer.create(configs.model(name, inputs, outputs, 0, settings))
        (folder / VARIANT).mkdir()
        for file in artifact.directory.iterdir():
            shutil.copyfile(file, folder / VARIANT / file.name)
        writer.copy_tokenizer(folder)
        writer.write_code(folder, "generate", config, [f"hasten.backends.{_ONNX}"])
        packages = pin_versions(bundle, ("tokenizers", "msgspec", _ONNX))
        repository = Repository(
            directory=directory,
            runtime=Runtime.PYTHON,
            variant=artifact.variant.name,
            model=name,
            inference=name,
            inputs=inputs,
            outputs=outputs,
            packages=packages,
            device=options.device,
        )
        write_image(options, repository)
        values = {"model": name, "variant": repository.variant, "slots": _SLOTS, "packages": " ".join(packages)}
        fill_template(
            "single_answer_README.md" if is_single else "generation_README.md", directory / "README.md", values
        )
        # transformer-deploy has example clients of its own.
        clients = {"client_requests.py": "localhost:8000", "client_grpc.py": "localhost:8001"}
        for client, address in ({} if is_single else clients).items():
            fill_template(f"generation_{client}", directory / client, {**values, "file": client, "address": address})
    return repository
