"""The contenders of the text generation benchmark: how each is started, and how its weights are made from one model."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import hasten
from hasten.bundle import Bundle
from hasten.core.system.hardware import this_machine

WORKERS = Path(__file__).parent / "generation"
TRANSFORMERS = "transformers"


@dataclass(frozen=True, slots=True)
class Contender:
    """An engine with weights of one precision, and the command of its worker."""

    name: str
    precision: str
    command: list[str]
    # The files that hold the weights.
    weights: list[Path]
    version: str


def ours(bundle: Bundle, args: argparse.Namespace) -> list[Contender]:
    """Return transformers in fp32 and in 16 bits, and the variants of the bundle."""
    weights = sorted(args.model.glob("*.safetensors"))
    half = "float16" if args.device == "cuda" else "bfloat16"
    dtypes = [half] if args.device == "cuda" or _has_bf16() else []

    def transformers(name: str, precision: str, dtype: str) -> Contender:
        command = [sys.executable, str(WORKERS / "transformers_worker.py"), str(args.model), dtype, args.device]
        return Contender(name, precision, command, weights, version(sys.executable, "transformers"))

    contenders = [transformers(TRANSFORMERS, "fp32", "float32")]
    contenders += [transformers(f"{TRANSFORMERS}, {dtype}", "16-bit", dtype) for dtype in dtypes]
    for entry in bundle.manifest.variants:
        command = [sys.executable, str(WORKERS / "hasten_worker.py"), str(args.bundle), entry.name]
        precision = {"fp32": "fp32", "fp16": "16-bit", "int8": "8-bit", "int4": "4-bit"}[
            entry.name.split("-")[1].split("@")[0]
        ]
        files = [file for file in bundle.artifact(entry).directory.rglob("*") if file.is_file()]
        contenders.append(Contender(f"hasten, {entry.name}", precision, command, files, hasten.__version__))
    return contenders


def peers(args: argparse.Namespace) -> list[Contender]:
    """Return the other runtimes whose interpreters are given, after converting the model for them."""
    contenders: list[Contender] = []
    if args.genai or args.openvino:
        model = checkpoint_for_converters(args.model, args.work / "checkpoint")
    if args.llama_cpp:
        python, worker, folder = args.llama_cpp, str(WORKERS / "llama_cpp_worker.py"), args.work / "llama.cpp"
        convert([python, worker, "convert", str(args.gguf), str(folder)], folder)
        files = [("F32", "fp32"), ("F16", "16-bit"), ("Q8_0", "8-bit")]
        paths = [(kind, precision, folder / f"{kind}.gguf") for kind, precision in files]
        for kind, precision, file in [*paths, ("Q4_1", "4-bit", args.gguf)]:
            command = [python, worker, "serve", str(file)]
            contenders.append(
                Contender(f"llama.cpp, {kind}", precision, command, [file], version(python, "llama-cpp-python"))
            )
    if args.genai:
        python, worker = args.genai, str(WORKERS / "onnxruntime_genai_worker.py")
        for kind, precision in (("fp32", "fp32"), ("int8", "8-bit"), ("int4", "4-bit")):
            folder = args.work / f"genai-{kind}"
            convert([python, worker, "convert", model, str(folder), kind], folder)
            weights = sorted(folder.glob("model.onnx*"))
            command = [python, worker, "serve", str(folder)]
            contenders.append(
                Contender(
                    f"onnxruntime-genai, {kind}", precision, command, weights, version(python, "onnxruntime-genai")
                )
            )
    if args.openvino:
        python, worker = args.openvino, str(WORKERS / "openvino_genai_worker.py")
        for kind, precision in (("fp32", "fp32"), ("fp16", "16-bit"), ("int8", "8-bit"), ("int4", "4-bit")):
            folder = args.work / f"openvino-{kind}"
            convert([python, worker, "convert", model, str(folder), kind], folder)
            # Its default arithmetic is bf16 on CPUs that support it; with fp32 weights both are measured.
            default = "bf16" if _has_bf16() else "f32"
            for arithmetic in dict.fromkeys(("f32", default) if kind == "fp32" else (default,)):
                command = [python, worker, "serve", str(folder), arithmetic]
                name = f"OpenVINO GenAI, {kind}, {arithmetic} arithmetic"
                weights = [folder / "openvino_model.bin"]
                contenders.append(Contender(name, precision, command, weights, version(python, "openvino-genai")))
    return contenders


def _has_bf16() -> bool:
    """Return whether the CPU computes in bf16."""
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(this_machine().instructions)


def checkpoint_for_converters(model: Path, folder: Path) -> str:
    """Return a copy of the model whose rotary base and tokenizer class the peers' converters find.

    onnxruntime-genai 0.18 runs with transformers 5 and does not look for the base in `rope_parameters`: it would take
    10,000 instead. optimum-intel runs with transformers 4, which expects `rope_theta`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for file in model.iterdir():
        if not (folder / file.name).exists():
            (folder / file.name).symlink_to(file.resolve())
    config = json.loads((model / "config.json").read_text())
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    base = config["rope_parameters"]["rope_theta"]
    for name, content in (
        ("config.json", config | {"rope_theta": base, "rope_embedding_base": base, "torch_dtype": config["dtype"]}),
        ("tokenizer_config.json", tokenizer | {"tokenizer_class": "PreTrainedTokenizerFast"}),
    ):
        (folder / name).unlink()
        (folder / name).write_text(json.dumps(content))
    return str(folder)


def convert(command: list[str], folder: Path) -> None:
    """Convert the model for a peer, unless its folder was finished before."""
    if not (finished := folder / "finished").exists():
        folder.mkdir(parents=True, exist_ok=True)
        subprocess.run(command, check=True)
        finished.touch()


def version(python: str, package: str) -> str:
    """Return the version of a package in an environment."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return subprocess.check_output([python, "-c", code], text=True).strip()
