"""convert_model -m MODEL: the command of transformer-deploy with the same flags, implemented with hasten."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from hasten.cli import Parser, execute
from hasten.core.errors import PlanError, UnsupportedError

if TYPE_CHECKING:
    from hasten.core.variant import Support
    from hasten.deploy.convert import ConversionRequest, ConversionResult

# Task names of transformer-deploy; those of hasten are accepted too.
_TASKS = {"classification": "text-classification", "embedding": "sentence-similarity"}
# Values of --generative-model and their tasks.
_GENERATION_TASKS = {"gpt": "text-generation", "t5": "text2text-generation"}
_FP32 = ("onnxruntime-fp32",)
_TENSORRT = ("tensorrt-fp16@cuda",)
_TENSORRT_INT8 = ("tensorrt-int8+qdq@cuda",)
# Plain dynamic quantization, and the most accurate form of it.
_INT8 = ("onnxruntime-int8", "onnxruntime-int8+attention+smooth+split")
_GPU_VARIANTS = ("onnxruntime-fp32@cuda", "onnxruntime-fp16@cuda")
# Rows per request. transformer-deploy sets no limit, but dynamic batching in tritonserver needs one.
_MIN_MAX_ROWS = 128


def run(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code."""
    return execute(main, parser().parse_args(argv))


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command: the flags of transformer-deploy and those of hasten."""
    result = Parser(
        prog="convert_model",
        description="Optimize a transformer, time it, and write a model repository for tritonserver.",
        epilog="The command line of transformer-deploy, except that an unknown flag is an error.",
        allow_abbrev=False,
    )
    add, sizes = result.add_argument, ("MIN", "OPT", "MAX")
    add("-m", "--model", required=True, help="local directory or hub id")
    add("-t", "--tokenizer", help="tokenizer to use instead of the model's")
    add(
        "--task",
        default="classification",
        help="classification (the default), token-classification, question-answering, embedding, or a task of hasten",
    )
    add("--auth-token", help="token of the hub, or True for the stored one")
    add("-b", "--batch-size", default=[1, 1, 1], type=int, nargs=3, metavar=sizes, help="texts per batch (1 1 1)")
    add("-s", "--seq-len", default=[16, 16, 16], type=int, nargs=3, metavar=sizes, help="tokens per text (16 16 16)")
    add("-q", "--quantization", action="store_true", help="quantize to int8")
    add("-w", "--workspace-size", default=10000, type=int, help="TensorRT workspace in MiB (%(default)s)")
    add("-o", "--output", default=Path("triton_models"), type=Path, help="output directory (%(default)s)")
    add("-n", "--name", default="transformer", help="prefix of the model names (%(default)s)")
    add("-v", "--verbose", action="store_true", help="print more log lines")
    add("--fast", action="store_true", help="skip the benchmark of PyTorch")
    add(
        "--backend", default=["onnx"], nargs="*", choices=("onnx", "tensorrt", "pytorch"), help="backends to use (onnx)"
    )
    add(
        "-d",
        "--device",
        choices=("cpu", "cuda"),
        help="device to run on (the GPU of this machine if there is one, else cpu)",
    )
    add("--nb-threads", default=1, type=int, help="threads per inference (%(default)s)")
    add("--nb-instances", default=1, type=int, help="instances of the model in the server (%(default)s)")
    add("--warmup", default=10, type=int, help="warm-up batches, which are also compared (%(default)s)")
    add("--nb-measures", default=1000, type=int, help="number of timed inferences (%(default)s)")
    add("--seed", default=123, type=int, help="random seed of the inputs (%(default)s)")
    add("--atol", default=0.3, type=float, help="maximum absolute difference from PyTorch (%(default)s)")
    add(
        "--load-external-data",
        action="store_true",
        help="ignored: weights above 2 GB are always stored beside the graph",
    )
    add(
        "--generative-model",
        "--generative_model",
        choices=("gpt", "t5"),
        help="kind of model with --task text-generation: gpt (decoder) or t5 (encoder-decoder)",
    )
    add_ours = result.add_argument_group("options that transformer-deploy does not have").add_argument
    add_ours("--force", action="store_true", help="replace a deployment of hasten in the output directory")
    add_ours(
        "--runtime",
        choices=("native", "python"),
        default="native",
        help="backend of the server: its ONNX Runtime (native), or Python",
    )
    add_ours("--data", metavar="FILE", help="rows to verify on, as for hasten build (a built-in sample)")
    add_ours(
        "--min-agreement",
        type=float,
        metavar="SHARE",
        help="minimum agreement of int8 with the reference (the task's default)",
    )
    add_ours("--bench-budget", default="20s", metavar="TIME", help="time for the benchmark of hasten (%(default)s)")
    add_ours("--pooling", help="pooling of embeddings: mean, cls, … (that of the model's configuration)")
    add_ours("--file-name", metavar="ONNX", help="ONNX graph of the model to start from, such as onnx/model.onnx")
    add_ours("--allow-pickle", action="store_true", help="allow pickled weights, which can execute arbitrary code")
    add_ours("--trust-remote-code", action="store_true", help="allow code that comes with the model to run")
    add_ours("--json", action="store_true", help="print the result as JSON")
    add_ours("--quiet", action="store_true", help="do not show progress")
    return result


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    _check(args)
    args.device = args.device or _default_device(args)
    # True stands for the stored token, which is the default.
    if args.auth_token is not None and args.auth_token.lower() not in ("true", "t"):
        os.environ["HF_TOKEN"] = args.auth_token
    request = _conversion(args)
    import logging

    from hasten.cli import console
    from hasten.deploy.convert import convert

    progress = console.display(args.quiet)
    logger = logging.getLogger("hasten")
    logger.setLevel(logging.INFO if args.verbose else logging.WARNING)
    logger.info("%s", request)
    converted = convert(request, args.output, progress, force=args.force)
    if args.json:
        console.print_json(converted)
    else:
        _print(converted, args)
    return 0


def _check(args: argparse.Namespace) -> None:
    """Raise an error for unsupported combinations of flags before any work is done."""
    if args.generative_model is not None and args.task not in _GENERATION_TASKS.values():
        raise PlanError(
            f"--generative-model {args.generative_model} does not fit --task {args.task}",
            hint=f"use --task {_GENERATION_TASKS['gpt']}",
        )
    if args.task in _GENERATION_TASKS.values() and ("tensorrt" in args.backend or args.device == "cuda"):
        raise UnsupportedError(
            "text generation is deployed for the CPU only", hint="use --backend onnx without -d cuda"
        )
    if "tensorrt" in args.backend:
        if args.device == "cpu":
            raise PlanError("TensorRT needs a GPU, and --device is cpu", hint="use --backend onnx")
        if args.runtime == "python":
            raise UnsupportedError("--runtime python does not run TensorRT", hint="omit --runtime or tensorrt")
        variant = (_TENSORRT_INT8 if args.quantization else _TENSORRT)[0]
        _require(variant, "the backend tensorrt does not run here", "use --backend onnx")
    elif "onnx" not in args.backend:
        raise PlanError(
            "PyTorch is only benchmarked, and no other backend would be deployed", hint="add --backend onnx"
        )
    if args.device == "cuda" and "onnx" in args.backend:
        if args.quantization:
            hint = "omit -d to use the CPU" if "tensorrt" in args.backend else "omit -q, or use -d cpu"
            raise PlanError("the backend onnx runs int8 on CPUs only, and --device is cuda", hint=hint)
        _require(_GPU_VARIANTS[0], "the backend onnx does not run on 'cuda' here", "use -d cpu")
    for flag, count in {"--nb-threads": args.nb_threads, "--nb-instances": args.nb_instances}.items():
        if count < 1:
            raise PlanError(f"{flag} {count} is less than one")


def _require(variant: str, problem: str, hint: str) -> None:
    support = _support(variant)
    if not support.ok:
        raise UnsupportedError(f"{problem}: {support.reason}", hint=support.hint or hint)


def _default_device(args: argparse.Namespace) -> str | None:
    """Return the default of transformer-deploy: a GPU, if there is one that runs the requested variants."""
    can_use_gpu = "onnx" in args.backend and not args.quantization and args.task not in _GENERATION_TASKS.values()
    return "cuda" if can_use_gpu and _support(_GPU_VARIANTS[0]).ok else None


def _support(name: str) -> Support:
    from hasten.backends import BACKENDS
    from hasten.core.system.hardware import this_machine
    from hasten.core.variant import Variant

    variant = Variant.parse(name)
    return BACKENDS.get(variant.backend).probe(this_machine(), variant)


def _conversion(args: argparse.Namespace) -> ConversionRequest:
    from hasten.core.plan import Gate, Keep, Plan, Range, Shapes, parse_duration
    from hasten.deploy.convert import BenchOptions, ConversionRequest
    from hasten.deploy.tritonserver import Options, Runtime

    batch = Range.of("--batch-size", tuple(args.batch_size))
    sequence = Range.of("--seq-len", tuple(args.seq_len))
    # Variants that may fail come first: building an engine takes minutes.
    tensorrt = (*(_TENSORRT_INT8 if args.quantization else ()), *_TENSORRT) if "tensorrt" in args.backend else ()
    on_device = _GPU_VARIANTS if args.device == "cuda" else (*_FP32, *(_INT8 if args.quantization else ()))
    onnx = on_device if "onnx" in args.backend else ()
    task = _GENERATION_TASKS.get(args.generative_model or "", _TASKS.get(args.task, args.task))
    if task in _GENERATION_TASKS.values():
        onnx = (*_FP32, *(_INT8[:1] if args.quantization else ()))
    plan = Plan(
        model=args.model,
        task=task,
        pooling=args.pooling,
        file_name=args.file_name,
        shapes=Shapes(batch, sequence),
        variants=(*tensorrt, *onnx),
        device=args.device,
        data=args.data,
        gate=Gate(min_agreement=args.min_agreement),
        bench_budget_s=parse_duration(args.bench_budget),
        threads=args.nb_threads,
        workspace_mib=args.workspace_size if tensorrt else None,
        keep=Keep.ALL,
        allow_pickle=args.allow_pickle,
        trust_remote_code=args.trust_remote_code,
    )
    bench = BenchOptions(args.warmup, args.nb_measures, args.seed, args.atol, args.fast)
    # The clients of transformer-deploy send texts of shape [n] and read scores under this name.
    repository = Options(
        name=args.name,
        runtime=Runtime(args.runtime),
        instances=args.nb_instances,
        device=args.device,
        max_rows=max(_MIN_MAX_ROWS, batch.max),
        is_flat=True,
        output="output",
    )
    backends = ("tensorrt",) * bool(tensorrt) + ("onnxruntime",) * bool(onnx)
    tokenizer = args.tokenizer if args.tokenizer != args.model else None
    return ConversionRequest(plan, bench, repository, tokenizer, backends)


def _print(converted: ConversionResult, args: argparse.Namespace) -> None:
    from rich.markup import escape

    from hasten.cli import console

    # Printed without rich, which would wrap lines that programs parse.
    if converted.latencies:
        print("latencies:", *converted.latencies, sep="\n")
        print(
            f"Each inference engine output is within {args.atol} tolerance compared to {converted.original} output\n",
            flush=True,
        )
    console.print_report(converted.report)
    console.out.print("\ndifferences from transformer-deploy:")
    for note in converted.notes:
        console.print_line(f"  {note}")
    output = escape(str(args.output))
    console.out.print(f"\n[bold]{converted.variant}[/] is in [bold]{output}[/]")
    console.out.print(f"  {', '.join(converted.models)}")
    console.out.print(f"  tritonserver --model-repository {converted.path}", markup=False)


if __name__ == "__main__":
    sys.exit(run())
