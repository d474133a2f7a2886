"""hasten run BUNDLE TEXT …"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

# Rows read, answered and printed together: memory stays flat however long the file is.
_CHUNK = 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", type=Path)
    parser.add_argument("text", nargs="*", help="texts to answer")
    parser.add_argument("--input", metavar="FILE", help="JSON lines to answer, '-' for stdin")
    parser.add_argument("--variant", help="default: the fastest that runs here")
    parser.add_argument("--threads", type=int, metavar="N")
    parser.add_argument(
        "-O", "--option", action="append", default=[], metavar="NAME=VALUE", help="of the task: -O top_k=3"
    )


def main(args: argparse.Namespace) -> int:
    from hasten.cli import console
    from hasten.core.errors import InputError
    from hasten.predictor import load

    if bool(args.text) == bool(args.input):
        raise InputError("give texts, or a file with --input", hint='hasten run BUNDLE "some text"')
    console.display(args.quiet)
    options = dict(_option(text) for text in args.option)
    with load(args.bundle, args.variant, threads=args.threads) as predictor:
        if args.text:
            answers = predictor(args.text, **options)
            if args.json:
                console.print_json(answers)
            else:
                _print_answers(args.text, answers)
            return 0
        for rows in _chunks(args.input):
            for answer in predictor(rows, **options):
                sys.stdout.write(_one_line(answer) + "\n")
    return 0


def _option(text: str) -> tuple[str, object]:
    from hasten.core.errors import PlanError

    name, separator, value = text.partition("=")
    if not separator:
        raise PlanError(f"'{text}' is not NAME=VALUE", hint="-O top_k=3")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _chunks(source: str) -> Iterator[list[object]]:
    from hasten.measure.data import read_lines

    rows: list[object] = []
    for _, row in read_lines(source):
        rows.append(row)
        if len(rows) == _CHUNK:
            yield rows
            rows = []
    if rows:
        yield rows


def _one_line(answer: Any) -> str:
    return json.dumps(answer.tolist() if hasattr(answer, "tolist") else answer, ensure_ascii=False)


def _print_answers(texts: list[str], answers: Any) -> None:
    from rich.markup import escape

    if not isinstance(answers, list):
        _print_vectors(texts, answers)
        return
    for text, answer in zip(texts, answers, strict=True):
        entries = answer if isinstance(answer, list) else [answer]
        if isinstance(answer, dict) and "labels" in answer:
            pairs = zip(answer["labels"], answer["scores"], strict=True)
            entries = [{"label": label, "score": score} for label, score in pairs]
        shown = "  ".join(_shown(entry) for entry in entries) or "–"
        _print_line(f"{shown} [dim]{escape(text)}[/]")


def _shown(entry: Mapping[str, Any]) -> str:
    """A label and its score, after the words it stands for where it is of a part of the text."""
    from rich.markup import escape

    label = next(entry[key] for key in ("label", "entity_group", "entity") if key in entry)
    words = f"{escape(entry['word'])} " if "word" in entry else ""
    return f"{words}[bold]{escape(label)}[/] {entry['score']:.4f}"


def _print_vectors(texts: list[str], vectors: Any) -> None:
    import numpy as np
    from rich.markup import escape

    from hasten.cli import console

    if len(texts) == 1:
        start = " ".join(f"{value:.4f}" for value in vectors[0][:6])
        console.out.print(f"{vectors.shape[1]} numbers: {start} …  [dim](--json for all)[/]", highlight=False)
        return
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    for row, (text, similarities) in enumerate(zip(texts, unit @ unit.T, strict=True), 1):
        cosines = " ".join(f"{value:5.2f}" for value in similarities)
        _print_line(f"{row:>3}  {cosines}  [dim]{escape(text)}[/]")


def _print_line(line: str) -> None:
    """One answer, one line, whatever the text holds."""
    from hasten.cli import console

    console.out.print(line.replace("\n", " "), highlight=False, emoji=False, soft_wrap=True)
