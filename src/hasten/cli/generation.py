"""hasten run BUNDLE PROMPT … for text generation: its options and streamed output."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hasten.generation.generator import Generator

# The most common options; others are set with -O.
_FLAGS = ("max_tokens", "temperature", "seed", "stop")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of text generation."""
    group = parser.add_argument_group(
        "text generation", "further options with -O: top_k, top_p, min_p, num_beams, num_return_sequences, …"
    )
    group.add_argument("--max-tokens", type=int, metavar="N", help="generate at most N tokens")
    group.add_argument(
        "--temperature", type=float, metavar="T", help="sampling temperature; 0 always takes the most likely token"
    )
    group.add_argument("--seed", type=int, metavar="N", help="random seed: the same seed generates the same text")
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="end the text before this string; may be repeated"
    )
    group.add_argument("--chat", action="store_true", help="send each text as the user's message of a chat")


def has_options(args: argparse.Namespace) -> bool:
    """Return whether an option of text generation was passed."""
    return args.chat or any(getattr(args, name) is not None for name in _FLAGS)


def run(generator: Generator, args: argparse.Namespace, options: Mapping[str, Any], rows: Iterable[list[Any]]) -> int:
    """Stream one text as it is generated, print several one after the other, and those of a file as JSON lines."""
    from hasten.cli import console
    from hasten.core.errors import InputError

    if args.field:
        raise InputError("text generation takes a text, not --field", hint='hasten run BUNDLE "…"')
    options = {name: getattr(args, name) for name in _FLAGS if getattr(args, name) is not None} | dict(options)
    if args.input:
        for chunk in rows:
            for answer in generator([_prompt(row, args.chat) for row in chunk], **options):
                sys.stdout.write(json.dumps(answer, ensure_ascii=False) + "\n")
        return 0
    prompts = [_prompt(text, args.chat) for text in args.text]
    if args.json:
        console.print_json(generator(prompts, **options))
    elif len(prompts) == 1 and "num_return_sequences" not in options:
        deltas = generator(prompts[0], stream=True, **options)
        try:
            for delta in deltas:
                sys.stdout.write(_printable(delta))
                sys.stdout.flush()
        except KeyboardInterrupt:
            return 130  # the user has read enough
        finally:
            sys.stdout.write("\n")
    else:
        for answers in generator(prompts, return_full_text=False, **options):
            for answer in answers:
                sys.stdout.write(_printable(answer["generated_text"].strip()) + "\n\n")
    return 0


def _printable(text: str) -> str:
    """Remove control characters: a model may generate escape sequences of a terminal."""
    return "".join(letter for letter in text if letter.isprintable() or letter in "\n\t")


def _prompt(row: Any, is_chat: bool) -> object:
    """Return the prompt of a row, which may be a text, or an object with a text or a chat."""
    if isinstance(row, Mapping):
        row = next((row[name] for name in ("messages", "prompt", "text") if name in row), row)
    return [{"role": "user", "content": row}] if is_chat and isinstance(row, str) else row
