"""The command line: one file per command; parse, call, print.

Results go to stdout, progress and errors to stderr. Nothing heavy is imported before a command runs.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NoReturn, Protocol

from hasten.core.errors import AccuracyError, HastenError
from hasten.core.registry import did_you_mean
from hasten.core.version import __version__

COMMANDS = {
    "build": "make a model fast, prove it, and write the bundle",
    "run": "answer texts from a bundle",
    "serve": "answer texts over HTTP and gRPC, from one or several bundles",
    "stress": "put load on a server, and tell how it bears it",
    "verify": "prove again, here, that a bundle answers like the original",
    "deploy tritonserver": "write a model repository for NVIDIA's tritonserver",
    "deploy kubernetes": "write the manifests that run a bundle on Kubernetes",
    "deploy kserve": "write the manifests that run a bundle on KServe",
    "bench": "time a bundle's variants on the full grid of shapes",
    "inspect": "show what a bundle holds, what was fused in its graph and what was not",
    "doctor": "say what works on this machine, and what does not and why",
}
_INTERRUPTED = 130


class Command(Protocol):
    def add_arguments(self, parser: argparse.ArgumentParser) -> None: ...

    def main(self, args: argparse.Namespace) -> int: ...


class Parser(argparse.ArgumentParser):
    """One line for a mistake, and the word that was probably meant."""

    def error(self, message: str) -> NoReturn:
        typed = message.removeprefix("unrecognized arguments: ").split()
        if typed and typed[0].startswith("--"):
            flags = [flag for action in self._actions for flag in action.option_strings]
            message = f"unknown option {typed[0]}{did_you_mean(typed[0].split('=')[0], flags)}"
        hint = f"{self.prog} --help"
        if message.startswith("unrecognized arguments: -") and self._get_positional_actions():
            hint = "put -- before texts that start with a dash"
        elif "required: model" in message:
            hint = "the model comes first: hasten build MODEL --variants …"
        print(f"error: {message}\n  hint: {hint}", file=sys.stderr)
        raise SystemExit(2)


def main(argv: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or words[0].startswith("-"):
        return _top_level(words)
    # Some commands are two words: what to do, and for whom.
    is_two = any(name.startswith(f"{words[0]} ") for name in COMMANDS)
    if is_two and (len(words) == 1 or words[1].startswith("-")):
        return _top_level(["--help"])
    length = 2 if is_two else 1
    name, rest = " ".join(words[:length]), words[length:]
    if name not in COMMANDS:
        print(f"error: unknown command '{name}'{did_you_mean(name, COMMANDS)}\n  hint: hasten --help", file=sys.stderr)
        return 2
    command = module_of(name)
    # Intermixed: texts may come behind options.
    return execute(command.main, parser_for(name, command).parse_intermixed_args(rest))


def module_of(name: str) -> Command:
    """The file of a command: `deploy kserve` is deploy_kserve.py."""
    command: Command = import_module(f"hasten.cli.{name.replace(' ', '_')}")
    return command


def parser_for(name: str, command: Command) -> argparse.ArgumentParser:
    parser = Parser(prog=f"hasten {name}", description=COMMANDS[name], allow_abbrev=False)
    command.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.add_argument("--quiet", "-q", action="store_true", help="no progress")
    return parser


def _top_level(words: Sequence[str]) -> int:
    parser = Parser(
        prog="hasten",
        description="Make a Hugging Face transformer fast, prove that it still answers the same, and serve it.",
        epilog="commands:\n" + "\n".join(f"  {name:<19} {what}" for name, what in COMMANDS.items()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="hasten COMMAND … (hasten COMMAND --help tells more)",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"hasten {__version__}")
    parser.parse_args(words)
    parser.print_help()
    return 0


def execute(command: Callable[[argparse.Namespace], int], args: argparse.Namespace) -> int:
    """Run it; what goes wrong becomes a clear line and its exit code."""
    # A supervisor's SIGTERM cleans up like Ctrl-C does.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        return command(args)
    except HastenError as error:
        return _explain(error, args.json)
    except KeyboardInterrupt:
        print("interrupted: nothing was written", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe left; that is its right.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _explain(error: HastenError, as_json: bool) -> int:
    from hasten.cli import console

    if as_json:
        console.print_json(error_document(error))
    elif isinstance(error, AccuracyError) and error.candidates:
        console.print_candidates(error.candidates)
        console.print_notes((), error.candidates)
    print(f"error: {error.message}", file=sys.stderr)
    if error.hint:
        print(f"  hint: {error.hint}", file=sys.stderr)
    return error.exit_code


def error_document(error: HastenError) -> dict[str, object]:
    document: dict[str, object] = {
        "error": type(error).__name__,
        "message": error.message,
        "hint": error.hint,
        "exit_code": error.exit_code,
    }
    if isinstance(error, AccuracyError):
        document["candidates"] = error.candidates
    return document
