"""The command line: one module per command, which parses its arguments, calls the library and prints the result.

A module defines `add_arguments(parser)` and `main(args)`, which returns the exit code.
Results go to stdout, progress and errors to stderr. No heavy library is imported before a command runs.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType
from typing import NoReturn

from hasten.core.errors import AccuracyError, HastenError
from hasten.core.registry import did_you_mean
from hasten.core.version import __version__

COMMANDS = {
    "build": "build a bundle: optimize a model, verify its accuracy and benchmark it",
    "run": "run a bundle on texts",
    "map": "answer the rows of large files, with resume",
    "serve": "serve one or more bundles over HTTP and gRPC",
    "stress": "load-test a server and report latency and throughput",
    "verify": "verify the accuracy of a bundle on this machine",
    "deploy tritonserver": "write a model repository for NVIDIA's tritonserver",
    "deploy kubernetes": "write manifests that run a bundle on Kubernetes",
    "deploy kserve": "write manifests that run a bundle on KServe",
    "bench": "benchmark the variants of a bundle at all shapes",
    "report": "write the report of a bundle as a page",
    "inspect": "show the contents of a bundle: report, files, graphs and fusions",
    "doctor": "check the packages, backends and hardware of this machine",
}
_INTERRUPTED = 130


class Parser(argparse.ArgumentParser):
    """An argument parser that reports an error in one line, with a suggestion for a mistyped option."""

    def error(self, message: str) -> NoReturn:
        """Print the error and a hint, and exit with code 2."""
        typed = message.removeprefix("unrecognized arguments: ").split()
        if typed and typed[0].startswith("--"):
            flags = [flag for action in self._actions for flag in action.option_strings]
            message = f"unknown option {typed[0]}{did_you_mean(typed[0].split('=')[0], flags)}"
        hint = f"{self.prog} --help"
        if message.startswith("unrecognized arguments: -") and self._get_positional_actions():
            hint = "put -- before texts that begin with a dash"
        elif "required: model" in message:
            hint = "the model comes first: hasten build MODEL --variants …"
        print(f"error: {message}\n  hint: {hint}", file=sys.stderr)
        raise SystemExit(2)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0].startswith("-"):
        return _top_level(words)
    # Some commands have two words, such as `deploy kserve`.
    has_two_words = any(name.startswith(f"{words[0]} ") for name in COMMANDS)
    if has_two_words and (len(words) == 1 or words[1].startswith("-")):
        return _top_level(["--help"])
    length = 2 if has_two_words else 1
    name, rest = " ".join(words[:length]), words[length:]
    if name not in COMMANDS:
        print(f"error: unknown command '{name}'{did_you_mean(name, COMMANDS)}\n  hint: hasten --help", file=sys.stderr)
        return 2
    command = module_of(name)
    # Intermixed: texts may follow options.
    return execute(command.main, parser_for(name, command).parse_intermixed_args(rest))


def module_of(name: str) -> ModuleType:
    """Return the module of a command: deploy_kserve.py for `deploy kserve`."""
    return import_module(f"hasten.cli.{name.replace(' ', '_')}")


def parser_for(name: str, command: ModuleType) -> argparse.ArgumentParser:
    """Return the parser of a command, with the options that all commands have."""
    parser = Parser(prog=f"hasten {name}", description=COMMANDS[name], allow_abbrev=False)
    command.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--quiet", "-q", action="store_true", help="do not show progress")
    return parser


def _top_level(words: Sequence[str]) -> int:
    parser = Parser(
        prog="hasten",
        description="Make Hugging Face transformers fast, verify that their answers stay the same, and serve them.",
        epilog="commands:\n" + "\n".join(f"  {name:<19} {description}" for name, description in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="hasten COMMAND … (hasten COMMAND --help shows its options)",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"hasten {__version__}")
    parser.parse_args(words)
    parser.print_help()
    return 0


def execute(command: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Run a command, print its errors in one line each, and return the exit code."""
    # SIGTERM cleans up like Ctrl-C.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return command(args)
    except HastenError as error:
        return _print_error(error, args.json)
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe exited, as `head` does.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _print_error(error: HastenError, as_json: bool) -> int:
    from hasten.cli import console
    from hasten.core.report import Candidate

    if as_json:
        console.print_json(error_document(error))
    elif isinstance(error, AccuracyError) and error.candidates:
        rejected = [candidate for candidate in error.candidates if isinstance(candidate, Candidate)]
        console.print_candidates(rejected)
        console.print_notes((), rejected)
    print(f"error: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"  hint: {error.hint}", file=sys.stderr)
    return error.exit_code


def error_document(error: HastenError) -> dict[str, object]:
    """Return an error as it is printed with --json."""
    document: dict[str, object] = {
        "error": type(error).__name__,
        "message": error.message,
        "hint": error.hint,
        "exit_code": error.exit_code,
    }
    if isinstance(error, AccuracyError):
        document["candidates"] = error.candidates
    return document
