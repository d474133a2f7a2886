"""hasten run BUNDLE TEXT …, or --field NAME=VALUE …"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hasten.cli import writing

# Rows read, answered and printed together: memory stays flat however long the file is.
_CHUNK = 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("bundle", type=Path)
    parser.add_argument("text", nargs="*", help="texts to answer")
    parser.add_argument(
        "--field",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="for a task that takes more than a text, all fields of one item: --field question=… --field context=…;"
        " a list is written as JSON",
    )
    parser.add_argument(
        "--input", metavar="FILE", help="rows to answer: jsonl ('-' for stdin), json, csv, tsv, parquet, …"
    )
    parser.add_argument("--columns", metavar="NAME=COLUMN,…", help="what the file calls them: text=sentence")
    parser.add_argument("--variant", help="default: the fastest that runs here")
    parser.add_argument("--strict", action="store_true", help="prove first, here, that it answers like the original")
    parser.add_argument("--threads", type=int, metavar="N")
    parser.add_argument(
        "-O", "--option", action="append", default=[], metavar="NAME=VALUE", help="of the task: -O top_k=3"
    )
    writing.add_arguments(parser)


def main(args: argparse.Namespace) -> int:
    from hasten.api import load
    from hasten.cli import console
    from hasten.core.errors import InputError
    from hasten.core.plan import parse_columns
    from hasten.generation.generator import Generator
    from hasten.measure.data import check_columns

    if [bool(args.text), bool(args.field), bool(args.input)].count(True) != 1:
        raise InputError("give texts, or --field, or a file with --input", hint='hasten run BUNDLE "some text"')
    if args.columns is not None and not args.input:
        raise InputError("--columns is about a file, and texts were given", hint="--input FILE")
    columns = parse_columns(args.columns) if args.columns is not None else {}
    console.display(args.quiet)
    options = dict(_option(text) for text in args.option)
    payload = args.text or [_item(args.field)]
    with load(args.bundle, args.variant, threads=args.threads, strict=args.strict) as predictor:
        if isinstance(predictor, Generator):
            return writing.write(predictor, args, options, _chunks(args.input, columns) if args.input else ())
        if writing.is_asked(args):
            raise InputError(
                f"the bundle holds a model for {predictor.spec.name}, which writes no text",
                hint="without --max-tokens, --temperature, --seed, --stop and --chat",
            )
        if not args.input:
            answers = predictor(payload, **options)
            if args.json:
                console.print_json(answers)
            else:
                _print_answers(payload, answers)
            return 0
        check_columns(columns, predictor.task)
        for rows in _chunks(args.input, columns):
            for answer in predictor(rows, **options):
                sys.stdout.write(_one_line(answer) + "\n")
    return 0


def _option(text: str) -> tuple[str, object]:
    name, value = _named(text, "-O top_k=3")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value


def _item(fields: list[str]) -> dict[str, object]:
    from hasten.core.errors import PlanError

    item: dict[str, object] = {}
    for field in fields:
        name, value = _named(field, '--field question="Who?"')
        if name in item:
            raise PlanError(f"the field '{name}' is given twice", hint=f"a list is JSON: --field {name}='[…, …]'")
        item[name] = _value(value)
    return item


def _value(text: str) -> object:
    """Lists and objects as JSON; all else is text, a number too."""
    if text.startswith(("[", "{")):
        try:
            return json.loads(text)
        except (ValueError, RecursionError):
            return text
    return text


def _named(text: str, example: str) -> tuple[str, str]:
    from hasten.core.errors import PlanError

    name, separator, value = text.partition("=")
    if not separator:
        raise PlanError(f"'{text}' is not NAME=VALUE", hint=example)
    return name, value


def _chunks(source: str, columns: Mapping[str, str]) -> Iterator[list[object]]:
    from hasten.measure.data import stream

    rows: list[object] = []
    for row in stream(source, columns):
        rows.append(row)
        if len(rows) == _CHUNK:
            yield rows
            rows = []
    if rows:
        yield rows


def _one_line(answer: Any) -> str:
    return json.dumps(answer.tolist() if hasattr(answer, "tolist") else answer, ensure_ascii=False)


def _print_answers(payload: list[Any], answers: Any) -> None:
    from rich.markup import escape

    texts = [" · ".join(map(str, item.values())) if isinstance(item, dict) else item for item in payload]
    if getattr(answers, "ndim", 0) == 2:
        _print_vectors(texts, answers)
        return
    for text, answer in zip(texts, answers, strict=True):
        _print_line(f"{_shown(answer)} [dim]{escape(text)}[/]")


def _shown(answer: Any) -> str:
    """An answer of any task in a few words: what was found, and its score."""
    from rich.markup import escape

    if getattr(answer, "ndim", 0):
        return _numbers(answer)
    if isinstance(answer, list):
        # A list in a list is of one of several masks.
        between = "  |  " if any(isinstance(entry, list) for entry in answer) else "  "
        return between.join(map(_shown, answer)) or "–"
    if isinstance(answer, Mapping) and "score" in answer and (name := _name(answer)) is not None:
        words = f"{escape(answer['word'])} " if "word" in answer else ""
        return f"{words}[bold]{escape(name)}[/] {answer['score']:.4f}"
    if isinstance(answer, Mapping) and {"labels", "scores"} <= answer.keys():
        pairs = zip(answer["labels"], answer["scores"], strict=True)
        return "  ".join(f"[bold]{escape(label)}[/] {score:.4f}" for label, score in pairs)
    plain = answer.tolist() if hasattr(answer, "tolist") else answer
    return f"{plain:.4f}" if isinstance(plain, float) else escape(json.dumps(plain, ensure_ascii=False))


def _name(entry: Mapping[str, Any]) -> str | None:
    """What was found: a label, a token, the answer to a question, the number of a document."""
    if "corpus_id" in entry:
        return f"#{entry['corpus_id']}"
    keys = ("label", "entity_group", "entity", "token_str", "answer")
    return next((entry[key] or "–" for key in keys if key in entry), None)


def _numbers(vectors: Any) -> str:
    tokens = f"{vectors.shape[1]} tokens × " if vectors.ndim == 3 else ""
    start = " ".join(f"{value:.4f}" for value in vectors.reshape(-1)[:6])
    return f"{tokens}{vectors.shape[-1]} numbers: {start} …  [dim](--json for all)[/]"


def _print_vectors(texts: list[str], vectors: Any) -> None:
    import numpy as np
    from rich.markup import escape

    if len(texts) == 1:
        _print_line(_numbers(vectors[0]))
        return
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    for row, (text, similarities) in enumerate(zip(texts, unit @ unit.T, strict=True), 1):
        cosines = " ".join(f"{value:5.2f}" for value in similarities)
        _print_line(f"{row:>3}  {cosines}  [dim]{escape(text)}[/]")


def _print_line(line: str) -> None:
    """One answer, one line, whatever the text holds."""
    from hasten.cli import console

    console.out.print(line.replace("\n", " "), highlight=False, emoji=False, soft_wrap=True)
