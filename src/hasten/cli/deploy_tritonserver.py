"""hasten deploy tritonserver BUNDLE: write a model repository for tritonserver."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hasten.cli.deployment import add_output_arguments
from hasten.core.options import add_options, read_options
from hasten.deploy.tritonserver_options import Options

if TYPE_CHECKING:
    from hasten.bundle import Bundle
    from hasten.deploy.tritonserver import Repository
    from hasten.deploy.tritonserver.check import Check


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    add_output_arguments(parser)
    add_options(parser, Options)
    parser.add_argument(
        "--check",
        nargs="?",
        const="",
        metavar="WHERE",
        help="verify the repository on a real tritonserver: a binary, an address or a virtual environment"
        " (default: install tritonserver from PyPI and use it)",
    )


def main(args: argparse.Namespace) -> int:
    """Run the command."""
    from hasten.bundle import open_bundle
    from hasten.cli import console
    from hasten.deploy.tritonserver import write_repository
    from hasten.deploy.tritonserver.check import is_address
    from hasten.deploy.tritonserver.client import Client
    from hasten.deploy.tritonserver.server_binary import ServerBinary

    options = read_options(Options, vars(args))
    bundle = open_bundle(args.bundle)
    # A server that cannot be reached is reported before any file is written.
    if args.check is not None and is_address(args.check):
        with Client(args.check) as client:
            client.version()
    elif args.check:
        ServerBinary.find(args.check)
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
    from hasten.core.progress import step
    from hasten.core.system.hardware import this_machine
    from hasten.core.variant import CUDA
    from hasten.deploy.tritonserver.check import check, is_address
    from hasten.deploy.tritonserver.server_binary import ServerBinary, TritonServer

    progress = console.display(args.quiet)
    if is_address(args.check):
        return check(bundle, repository, args.check, progress)
    # Packages for GPUs are not installed without a GPU; the server then reports that it has none.
    is_runnable = repository.device != CUDA or bool(this_machine().gpus)
    with step(progress, "tritonserver"):
        program = ServerBinary.find(args.check, repository.packages if is_runnable else ())
    with (
        tempfile.TemporaryDirectory(prefix="hasten-") as log_directory,
        TritonServer(program, repository.directory, Path(log_directory), is_lenient=True) as server,
    ):
        return check(bundle, repository, server.url, progress)


def _print(repository: Repository, checked: Check | None) -> None:
    from hasten.cli.console import print_line

    print_line(f"{repository.directory}: {repository.variant}")
    for name in repository.names:
        print_line(f"  {name}")
    if checked is None:
        return
    print_line(f"\n{checked.server}")
    for name in repository.names:
        reason = checked.not_ready.get(name)
        print_line(f"  {name}: {'ready' if reason is None else reason}")
    if checked.verdict is not None:
        print_line(f"  compared with the reference: {checked.verdict.reason}")
        print_line(f"  same answers: {checked.same_answers:.1%}")
    if (load := checked.load) is not None:
        print_line(
            f"  {load.clients} clients: {load.per_second:.0f} answers/s, p50 {load.p50_ms:.1f} ms, p99"
            f" {load.p99_ms:.1f} ms, {load.failed} failed; {load.rows} rows in {load.executions} executions"
        )


def _exit_code(checked: Check, repository: Repository) -> int:
    from hasten.core.errors import AccuracyError, StageError, UnsupportedError

    if checked.is_missing_backend or checked.is_missing_gpu:
        backend = f"{'TensorRT' if repository.platform else 'ONNX Runtime'} backend"
        error = f"only partly verified: this server has no {'GPU' if checked.is_missing_gpu else backend}"
        code = UnsupportedError.exit_code
    elif checked.not_ready:
        error, code = f"{', '.join(checked.not_ready)} did not load", StageError.exit_code
    elif not checked.is_accurate:
        error, code = "the answers of tritonserver differ from the reference", AccuracyError.exit_code
    elif checked.load is not None and checked.load.failed:
        error, code = f"{checked.load.failed} requests failed under load", StageError.exit_code
    else:
        return 0
    print(f"error: {error}", file=sys.stderr)
    if code == UnsupportedError.exit_code:
        # The Python backend does not run TensorRT engines.
        needs_other_server = checked.is_missing_gpu or bool(repository.platform)
        alternative = "" if needs_other_server else ", or use --runtime python"
        print(f"  hint: pass --check the path or address of a server that has one{alternative}", file=sys.stderr)
    return code
