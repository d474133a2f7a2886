"""hasten deploy tritonserver BUNDLE"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from hasten.bundle import Bundle
    from hasten.deploy.tritonserver import Repository
    from hasten.deploy.tritonserver.check import Check


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--output", "-o", type=Path, metavar="DIR", required=True, help="where to write")
    parser.add_argument("--force", action="store_true", help="replace an older deployment there")
    parser.add_argument("--name", "-n", default="transformer", help="of the models, in front (default: transformer)")
    parser.add_argument(
        "--runtime",
        choices=("native", "python"),
        default="native",
        help="who runs the model: the server's own ONNX Runtime or TensorRT (default), or its Python backend",
    )
    parser.add_argument("--variant", metavar="NAME", help="default: the fastest that can run there")
    parser.add_argument("--instances", type=int, default=1, metavar="N", help="of each model (default: 1)")
    parser.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="of each instance (default: as ONNX Runtime has it; in Python the cores, shared out)",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), help="default: what it was built for, or as the server decides"
    )
    parser.add_argument("--cache", action="store_true", help="let the server answer again what it has answered")
    parser.add_argument(
        "--max-delay-us", type=int, metavar="N", help="a request waits for others (default: from the benchmark)"
    )
    parser.add_argument(
        "--check",
        nargs="?",
        const="",
        metavar="WHERE",
        help="run it on a real tritonserver: a binary, an address, an environment (default: PyPI's, installed first)",
    )


def main(args: argparse.Namespace) -> int:
    from hasten.bundle import open_bundle
    from hasten.cli import console
    from hasten.deploy.tritonserver import Options, Runtime, write_repository
    from hasten.deploy.tritonserver.check import is_address
    from hasten.deploy.tritonserver.client import Client
    from hasten.deploy.tritonserver.program import Program

    options = Options(
        name=args.name,
        runtime=Runtime(args.runtime),
        variant=args.variant,
        instances=args.instances,
        threads=args.threads,
        device=args.device,
        cache=args.cache,
        max_delay_us=args.max_delay_us,
    )
    bundle = open_bundle(args.bundle)
    # A server that is not there is told before anything is written.
    if args.check is not None and is_address(args.check):
        with Client(args.check) as client:
            client.version()
    elif args.check:
        Program.find(args.check)
    repository = write_repository(bundle, args.output, options, force=args.force)
    checked = _check(bundle, repository, args) if args.check is not None else None
    if args.json:
        console.print_json({"repository": repository, "check": checked})
    else:
        _print(repository, checked)
    return _exit_code(checked, repository) if checked is not None else 0


def _check(bundle: Bundle, repository: Repository, args: argparse.Namespace) -> Check:
    import tempfile

    from hasten.cli import console
    from hasten.core.hardware import this_machine
    from hasten.core.progress import step
    from hasten.core.variant import CUDA
    from hasten.deploy.tritonserver.check import check, is_address
    from hasten.deploy.tritonserver.program import Program, TritonServer

    progress = console.display(args.quiet)
    if is_address(args.check):
        return check(bundle, repository, args.check, progress)
    # What only a GPU can use is not installed beside none: the server says that it has none.
    is_runnable = repository.device != CUDA or bool(this_machine().gpus)
    with step(progress, "tritonserver"):
        program = Program.find(args.check, repository.packages if is_runnable else ())
    with (
        tempfile.TemporaryDirectory(prefix="hasten-") as place,
        TritonServer(program, repository.directory, Path(place), is_lenient=True) as server,
    ):
        return check(bundle, repository, server.url, progress)


def _print(repository: Repository, checked: Check | None) -> None:
    from hasten.cli import console

    show = partial(console.out.print, highlight=False, markup=False, soft_wrap=True)
    show(f"{repository.directory}: {repository.variant}")
    for name in repository.names:
        show(f"  {name}")
    if checked is None:
        return
    show(f"\n{checked.server}")
    for name in repository.names:
        reason = checked.not_ready.get(name)
        show(f"  {name}: {'ready' if reason is None else reason}")
    if checked.verdict is not None:
        show(f"  against the reference: {checked.verdict.reason}")
        show(f"  texts answered alike: {checked.same_answers:.1%}")
    if (load := checked.load) is not None:
        show(
            f"  {load.clients} clients: {load.per_second:.0f} answers/s, p50 {load.p50_ms:.1f} ms, p99"
            f" {load.p99_ms:.1f} ms, {load.failed} failed; {load.rows} rows in {load.executions} executions"
        )


def _exit_code(checked: Check, repository: Repository) -> int:
    from hasten.core.errors import AccuracyError, StageError, UnsupportedError

    if checked.is_missing_backend or checked.is_missing_gpu:
        lacking = f"{'TensorRT' if repository.place else 'ONNX Runtime'} backend"
        error = f"accepted as far as this server goes: it has no {'GPU' if checked.is_missing_gpu else lacking}"
        code = UnsupportedError.exit_code
    elif checked.not_ready:
        error, code = f"{', '.join(checked.not_ready)} did not load", StageError.exit_code
    elif not checked.is_right:
        error, code = "tritonserver does not answer like the original", AccuracyError.exit_code
    elif checked.load is not None and checked.load.failed:
        error, code = f"{checked.load.failed} requests failed under load", StageError.exit_code
    else:
        return 0
    print(f"error: {error}", file=sys.stderr)
    if code == UnsupportedError.exit_code:
        is_elsewhere = checked.is_missing_gpu or bool(repository.place)  # an engine runs in no Python model
        other = "" if is_elsewhere else "; or --runtime python"
        print(f"  hint: --check takes the path or the address of one that has{other}", file=sys.stderr)
    return code
