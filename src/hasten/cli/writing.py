"""hasten run BUNDLE PROMPT …, where the model writes: its options, and the text as it comes."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hasten.generation.generator import Generator

# What is asked for most; the rest goes with -O.
_FLAGS = ("max_tokens", "temperature", "seed", "stop")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("models that write", "more with -O: top_k, top_p, min_p, beams, num_return, …")
    group.add_argument("--max-tokens", type=int, metavar="N", help="where the model writes: at most so many")
    group.add_argument(
        "--temperature", type=float, metavar="T", help="where it writes: 0 takes the likeliest word, always"
    )
    group.add_argument("--seed", type=int, metavar="N", help="where it writes: draws the same text again")
    group.add_argument(
        "--stop", action="append", metavar="TEXT", help="where it writes: a text that ends it; may be given again"
    )
    group.add_argument("--chat", action="store_true", help="where it writes: texts are questions, as in a chat")


def is_asked(args: argparse.Namespace) -> bool:
    """Whether an option is there that only models that write have."""
    return args.chat or any(getattr(args, name) is not None for name in _FLAGS)


def write(generator: Generator, args: argparse.Namespace, options: Mapping[str, Any], rows: Iterable[list[Any]]) -> int:
    """One text at a terminal comes word by word; several are printed one after the other, a file's as JSON lines."""
    from hasten.cli import console
    from hasten.core.errors import InputError

    if args.field:
        raise InputError("a model that writes goes on from a text, and has no fields", hint='hasten run BUNDLE "…"')
    asked = {name: getattr(args, name) for name in _FLAGS if getattr(args, name) is not None} | dict(options)
    if args.input:
        for chunk in rows:
            for answer in generator([_prompt(row, args.chat) for row in chunk], **asked):
                sys.stdout.write(json.dumps(answer, ensure_ascii=False) + "\n")
        return 0
    prompts = [_prompt(text, args.chat) for text in args.text]
    if args.json:
        console.print_json(generator(prompts, **asked))
    elif len(prompts) == 1 and "num_return" not in asked:
        pieces = generator(prompts[0], stream=True, **asked)
        try:
            for piece in pieces:
                sys.stdout.write(_harmless(piece))
                sys.stdout.flush()
        except KeyboardInterrupt:
            return 130  # who has read enough
        finally:
            sys.stdout.write("\n")
    else:
        for answers in generator(prompts, return_full_text=False, **asked):
            for answer in answers:
                sys.stdout.write(_harmless(answer["generated_text"].strip()) + "\n\n")
    return 0


def _harmless(text: str) -> str:
    """A model may write what a terminal takes for orders."""
    return "".join(letter for letter in text if letter.isprintable() or letter in "\n\t")


def _prompt(row: Any, is_chat: bool) -> object:
    """A row of a file may be a text, or hold one, or a chat."""
    if isinstance(row, Mapping):
        row = next((row[name] for name in ("messages", "prompt", "text") if name in row), row)
    return [{"role": "user", "content": row}] if is_chat and isinstance(row, str) else row
