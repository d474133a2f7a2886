"""convert_model -m MODEL: transformer-deploy's command, flag for flag, on hasten's ground."""

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
    from hasten.deploy.convert import Converted, Order

# Its words for tasks; ours are understood too.
_TASKS = {"classification": "text-classification", "embedding": "sentence-similarity"}
# Its kinds of models that write, and what they do.
_WRITING = {"gpt": "text-generation", "t5": "text2text-generation"}
_FP32 = ("onnxruntime-fp32",)
_TENSORRT = ("tensorrt-fp16@cuda",)
_TENSORRT_INT8 = ("tensorrt-int8+qdq@cuda",)
# Dynamic quantization as it comes, and in the way that keeps most of the answers.
_INT8 = ("onnxruntime-int8", "onnxruntime-int8+attention+smooth+split")
_ON_GPU = ("onnxruntime-fp32@cuda", "onnxruntime-fp16@cuda")
# Of one request. transformer-deploy sets no limit, and tritonserver wants one where it puts requests together.
_LEAST_ROWS = 128


def run(argv: Sequence[str] | None = None) -> int:
    return execute(main, parser().parse_args(argv))


def parser() -> argparse.ArgumentParser:
    made = Parser(
        prog="convert_model",
        description="Optimize a transformer, time it, and write a model repository for tritonserver.",
        epilog="The command line of transformer-deploy, except that an unknown flag is an error.",
        allow_abbrev=False,
    )
    add_arguments(made)
    return made


def add_arguments(parser: argparse.ArgumentParser) -> None:
    sizes = ("MIN", "OPT", "MAX")
    parser.add_argument("-m", "--model", required=True, help="a local directory or a hub id")
    parser.add_argument("-t", "--tokenizer", help="a tokenizer to take the place of the model's own")
    parser.add_argument(
        "--task",
        default="classification",
        help="classification (the default), token-classification, question-answering, embedding, or hasten's own word",
    )
    parser.add_argument("--auth-token", help="a token of the hub, or True for the one that is stored here")
    parser.add_argument(
        "-b", "--batch-size", default=[1, 1, 1], type=int, nargs=3, metavar=sizes, help="texts at a time (1 1 1)"
    )
    parser.add_argument(
        "-s", "--seq-len", default=[16, 16, 16], type=int, nargs=3, metavar=sizes, help="tokens of a text (16 16 16)"
    )
    parser.add_argument("-q", "--quantization", action="store_true", help="in int8")
    parser.add_argument("-w", "--workspace-size", default=10000, type=int, help="MiB, for TensorRT (%(default)s)")
    parser.add_argument("-o", "--output", default=Path("triton_models"), type=Path, help="a directory (%(default)s)")
    parser.add_argument("-n", "--name", default="transformer", help="the models' name in the server (%(default)s)")
    parser.add_argument("-v", "--verbose", action="store_true", help="tell more")
    parser.add_argument("--fast", action="store_true", help="do not time PyTorch")
    parser.add_argument(
        "--backend", default=["onnx"], nargs="*", choices=("onnx", "tensorrt", "pytorch"), help="one or several (onnx)"
    )
    parser.add_argument(
        "-d", "--device", choices=("cpu", "cuda"), help="where it will run (a GPU that is here, or cpu)"
    )
    parser.add_argument("--nb-threads", default=1, type=int, help="threads of one inference (%(default)s)")
    parser.add_argument("--nb-instances", default=1, type=int, help="copies of the model in the server (%(default)s)")
    parser.add_argument("--warmup", default=10, type=int, help="batches that are compared and warm up (%(default)s)")
    parser.add_argument("--nb-measures", default=1000, type=int, help="inferences that are timed (%(default)s)")
    parser.add_argument("--seed", default=123, type=int, help="draws what is inferred (%(default)s)")
    parser.add_argument("--atol", default=0.3, type=float, help="largest difference to PyTorch (%(default)s)")
    parser.add_argument(
        "--load-external-data", action="store_true", help="taken for granted: weights above 2 GB lie beside their graph"
    )
    parser.add_argument(
        "--generative-model",
        "--generative_model",
        choices=("gpt", "t5"),
        help="of --task text-generation: gpt, or t5 with an encoder",
    )
    ours = parser.add_argument_group("what transformer-deploy has not")
    ours.add_argument("--force", action="store_true", help="replace an older deployment of ours at the output")
    ours.add_argument(
        "--runtime",
        choices=("native", "python"),
        default="native",
        help="who runs the model: the server's own ONNX Runtime (native), or its Python backend",
    )
    ours.add_argument("--data", metavar="FILE", help="rows to verify on, as hasten build takes them (a sample)")
    ours.add_argument(
        "--min-agreement", type=float, metavar="SHARE", help="of its answers int8 must keep (the task's default)"
    )
    ours.add_argument("--bench-budget", default="30s", metavar="TIME", help="for hasten's own benchmark (%(default)s)")
    ours.add_argument("--pooling", help="for embeddings: mean, cls, … (what the model says)")
    ours.add_argument("--file-name", metavar="ONNX", help="start from this graph of the model: onnx/model.onnx")
    ours.add_argument("--allow-pickle", action="store_true", help="load pickled weights, which can run any code")
    ours.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    ours.add_argument("--json", action="store_true", help="print the result as JSON")
    ours.add_argument("--quiet", action="store_true", help="no progress")


def main(args: argparse.Namespace) -> int:
    _refuse(args)
    args.device = args.device or _device(args)
    _take_token(args.auth_token)
    order = _order(args)
    import logging

    from hasten.cli import console
    from hasten.deploy.convert import convert

    progress = console.display(args.quiet)
    logging.getLogger("hasten").setLevel(logging.INFO if args.verbose else logging.WARNING)
    logging.getLogger("hasten").info("%s", order)
    converted = convert(order, args.output, force=args.force, progress=progress)
    if args.json:
        console.print_json(converted)
    else:
        _print(converted, args)
    return 0


def _refuse(args: argparse.Namespace) -> None:
    """What transformer-deploy does and hasten does not, said before any work."""
    if args.generative_model is not None and args.task not in _WRITING.values():
        raise PlanError(
            f"--generative-model {args.generative_model} writes, and --task is {args.task}",
            hint=f"--task {_WRITING['gpt']}",
        )
    if args.task in _WRITING.values() and ("tensorrt" in args.backend or args.device == "cuda"):
        raise UnsupportedError("models that write are deployed for the CPU", hint="--backend onnx, without -d cuda")
    if "tensorrt" in args.backend:
        if args.device == "cpu":
            raise PlanError("TensorRT runs on GPUs, and --device is cpu", hint="--backend onnx")
        _refuse_tensorrt(args)
    elif "onnx" not in args.backend:
        raise PlanError("PyTorch is timed in any case, and nothing else would be deployed", hint="--backend onnx")
    if args.device == "cuda" and "onnx" in args.backend:
        _refuse_on_gpu(args)
    if args.nb_threads < 1:
        raise PlanError(f"--nb-threads {args.nb_threads} is less than one")
    if args.nb_instances < 1:
        raise PlanError(f"--nb-instances {args.nb_instances} is less than one")


def _refuse_on_gpu(args: argparse.Namespace) -> None:
    if args.quantization:
        hint = "leave -d out, and it is for the CPU" if "tensorrt" in args.backend else "leave -q out, or -d cpu"
        raise PlanError("int8 of the backend onnx is for processors, and --device is cuda", hint=hint)
    support = _support(_ON_GPU[0])
    if not support.ok:
        reason = f"the backend onnx does not run on 'cuda' here: {support.reason}"
        raise UnsupportedError(reason, hint=support.hint or "-d cpu")


def _device(args: argparse.Namespace) -> str | None:
    """As transformer-deploy has it: a GPU, where there is one that runs what is asked for."""
    is_for_gpus = "onnx" in args.backend and not args.quantization and args.task not in _WRITING.values()
    return "cuda" if is_for_gpus and _support(_ON_GPU[0]).ok else None


def _refuse_tensorrt(args: argparse.Namespace) -> None:
    if args.runtime == "python":
        raise UnsupportedError("--runtime python does not run TensorRT", hint="leave --runtime or tensorrt out")
    support = _support((_TENSORRT_INT8 if args.quantization else _TENSORRT)[0])
    if not support.ok:
        hint = support.hint or "--backend onnx"
        raise UnsupportedError(f"the backend tensorrt does not run here: {support.reason}", hint=hint)


def _support(name: str) -> Support:
    from hasten.backends import BACKENDS
    from hasten.core.hardware import this_machine
    from hasten.core.variant import Variant

    variant = Variant.parse(name)
    return BACKENDS.get(variant.backend).probe(this_machine(), variant)


def _take_token(given: str | None) -> None:
    """`True` stands for the token that is stored on this machine, which is used in any case."""
    if given is not None and given.lower() not in ("true", "t"):
        os.environ["HF_TOKEN"] = given


def _order(args: argparse.Namespace) -> Order:
    from hasten.core.plan import Gate, Keep, Plan, Range, Shapes, parse_duration
    from hasten.deploy.convert import Measures, Order
    from hasten.deploy.tritonserver import Options, Runtime

    batch = Range.of("--batch-size", tuple(args.batch_size))
    sequence = Range.of("--seq-len", tuple(args.seq_len))
    # What may be refused comes first: an engine takes minutes.
    tensorrt = (*(_TENSORRT_INT8 if args.quantization else ()), *_TENSORRT) if "tensorrt" in args.backend else ()
    on_device = _ON_GPU if args.device == "cuda" else (*_FP32, *(_INT8 if args.quantization else ()))
    onnx = on_device if "onnx" in args.backend else ()
    task = _WRITING.get(args.generative_model or "", _TASKS.get(args.task, args.task))
    if task in _WRITING.values():
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
    measures = Measures(args.warmup, args.nb_measures, args.seed, args.atol, args.fast)
    # As its clients ask: texts of shape [n], any number of them, and scores by this name.
    repository = Options(
        name=args.name,
        runtime=Runtime(args.runtime),
        instances=args.nb_instances,
        device=args.device,
        max_rows=max(_LEAST_ROWS, batch.max),
        is_flat=True,
        output="output",
    )
    backends = ("tensorrt",) * bool(tensorrt) + ("onnxruntime",) * bool(onnx)
    return Order(plan, measures, repository, args.tokenizer if args.tokenizer != args.model else None, backends)


def _print(converted: Converted, args: argparse.Namespace) -> None:
    from rich.markup import escape

    from hasten.cli import console

    # Not through the console, which would wrap them: programs read these lines.
    if converted.latencies:
        print("latencies:", *converted.latencies, sep="\n")
        print(
            f"Each inference engine output is within {args.atol} tolerance compared to {converted.original} output\n",
            flush=True,
        )
    console.print_report(converted.report)
    console.out.print("\nunlike transformer-deploy:")
    for note in converted.notes:
        console.out.print(f"  {note}", highlight=False, markup=False, soft_wrap=True)
    output = escape(str(args.output))
    console.out.print(f"\n[bold]{converted.variant}[/] is in [bold]{output}[/]", highlight=False)
    console.out.print(f"  {', '.join(converted.models)}", highlight=False)
    console.out.print(f"  tritonserver --model-repository {converted.path}", highlight=False, markup=False)


if __name__ == "__main__":
    sys.exit(run())
